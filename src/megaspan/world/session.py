"""One trainer's part of the watch: its boundaries, the signal that all ranks stop for, and what was seen of the others.

A script may train several times. Its ranks go from one trainer to the next at different moments, so what belongs to a trainer
is kept and written under a name that every rank counts alike, and a rank that has gone on has *left* the session before.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from megaspan.human import format_seconds

NOWHERE = 2**62  # a boundary that no rank reaches


@dataclass(eq=False)
class Session:
    """What one rank knows in one session.

    Attributes:
        name: goes before each of its keys on the board.
        stopped: this rank has stopped for a signal, with all others.
        signal: the signal that all stop for.
        frozen: boundaries that this rank had passed when it learnt of it; None before.
        agreed: set when every rank has said how many it had passed.
        seen: by rank, the last note of it, when it moved last, when it was written last.
        named: ranks that hold up the others, as was said last.
        began: when this rank entered.
    """

    name: str = ""
    stopped: bool = False
    signal: int | None = None
    frozen: int | None = None
    agreed: threading.Event = field(default_factory=threading.Event)
    seen: dict[int, tuple[list[Any], float, float]] = field(default_factory=dict)
    named: list[int] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _boundaries: int = 0
    _wish: int | None = None  # a signal that this rank wants to stop for
    _target: int = 0  # the boundary to stop at
    _unheard: list[int] = field(default_factory=list)  # ranks that have not said yet how many boundaries they passed

    def boundary(self, signum: int | None, patience: float) -> int | None:
        """A place where all ranks can stop together; see `Heartbeat.boundary`.

        Raises:
            RuntimeError: a signal has come, and a rank that runs does not answer for `patience` seconds where to stop for it.
        """
        with self._lock:
            self._boundaries += 1
            here = self._boundaries
            if signum is not None and self._wish is None:
                self._wish = signum
            if self.frozen is None or self.signal is None:
                return None
        # The other ranks' threads answer within two looks; a process that has died ends this one meanwhile.
        if not self.agreed.wait(patience):
            silent = ", ".join(map(str, self._unheard))
            raise RuntimeError(
                f"rank {silent} did not say within {format_seconds(patience)} where to stop for "
                f"{signal.Signals(self.signal).name}"
            )
        if here < self._target:
            return None
        self.stopped = True
        return self.signal

    def wish(self) -> int | None:
        """A signal that the other ranks have still to be told of."""
        with self._lock:
            return self._wish if self.signal is None else None

    def halt(self, signum: int, passed: Mapping[int, int | None], gone: Container[int], ranks: int) -> None:
        """Every rank stops for a signal: one boundary behind the furthest that any has passed.

        Args:
            signum: the signal.
            passed: by rank, the boundaries that it had passed when it learnt of it, or None.
            gone: ranks that have left.
            ranks: how many there are.
        """
        with self._lock:
            if self.frozen is None:
                self.signal, self.frozen = signum, self._boundaries
        silent = [rank for rank in range(ranks) if passed.get(rank) is None]
        self._unheard = [rank for rank in silent if rank not in gone]
        if not self._unheard and not self.agreed.is_set():
            # Who left without hearing of it has passed all boundaries: there is none left to stop at together.
            places = [place for place in passed.values() if place is not None]
            self._target = NOWHERE if silent else max(places) + 1
            self.agreed.set()
