"""A board in the launcher's store, on which ranks write short texts for each other.

torch's launchers keep a TCPStore that every rank can reach from its first moment on, before a process group exists and when one
is stuck. Notes there are no collectives: nobody waits for a rank that does not write.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from megaspan.human import format_seconds
from megaspan.world.launched import Launch


class Board:
    """A connection of its own to the store of a launch; for one thread.

    Args:
        started: the launch; its `meeting` says where the store is.
        wait: seconds to try for, since the rank that serves the store may be later than this one.

    Raises:
        RuntimeError: the store cannot be reached, or is gone in a later call (torch's DistNetworkError is such an error).
    """

    def __init__(self, started: Launch, wait: float = 600.0) -> None:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        assert started.meeting is not None
        host, port = started.meeting
        try:
            store = TCPStore(
                host,
                port,
                is_master=started.serves,
                timeout=timedelta(seconds=wait),
                wait_for_workers=False,
                multi_tenant=True,  # the process group of this rank may serve the same port
            )
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {started.rank} did not reach the store of its launcher at {host}:{port} within {format_seconds(wait)}"
            ) from error
        self._store = PrefixStore(f"megaspan/{started.attempt}", store)

    def write(self, key: str, value: Any) -> None:
        """Writes a value (anything that JSON knows) over what was there."""
        self._store.set(key, json.dumps(value))

    def first(self, key: str, value: Any) -> Any:
        """Writes a value unless there is one; returns what is there then."""
        text = json.dumps(value)
        return json.loads(self._store.compare_set(key, "", text))

    def count(self, key: str) -> int:
        """Adds one to a number that began at 0, and returns it."""
        return int(self._store.add(key, 1))

    def read(self, keys: Iterable[str]) -> dict[str, Any]:
        """The values of those keys that have one."""
        wanted = list(keys)
        if not self._store.check(wanted):  # one question when all are there, as they are but for the first seconds
            wanted = [key for key in wanted if self._store.check([key])]
        if not wanted:
            return {}
        return {key: json.loads(text) for key, text in zip(wanted, self._store.multi_get(wanted), strict=True)}
