"""Ranks as threads of one process, each with a heartbeat of its own, meeting at one store."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from megaspan.world import Heartbeat, Launch, Limits

FAST = Limits(period=0.05, name=0.5, end=1.2, left=0.3)


class Ended(list):
    """Exit codes in place of the end of a process, by rank."""

    def __init__(self, size: int) -> None:
        super().__init__([None] * size)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launches(size: int, by: str = "torchrun") -> list[Launch]:
    port = free_port()
    return [Launch(by, rank, size, rank, size, ("127.0.0.1", port), serves=rank == 0) for rank in range(size)]


def environ(launch: Launch) -> dict[str, str]:
    """What a launcher would have set for it."""
    assert launch.meeting is not None
    return {
        "RANK": str(launch.rank), "WORLD_SIZE": str(launch.world_size), "LOCAL_RANK": str(launch.local_rank),
        "MASTER_ADDR": launch.meeting[0], "MASTER_PORT": str(launch.meeting[1]),
        "ROLE_NAME": "megaspan" if launch.by == "megaspan train" else "default",
    }  # fmt: skip


def meet(size: int, limits: Limits = FAST, late: int = 0) -> tuple[list[Heartbeat], Ended, list[Launch]]:
    """The hearts of the ranks but the `late` last ones, which have not started yet."""
    ended, started = Ended(size), launches(size)
    hearts = []
    for launch in started[: size - late]:

        def end(code: int, rank: int = launch.rank) -> None:
            if ended[rank] is None:
                ended[rank] = code
            hearts[rank]._closed.set()

        hearts.append(Heartbeat(launch, limits, end))
    return hearts, ended, started


def part(hearts: list[Heartbeat]) -> None:
    """Ends the watch of all, without waiting for each other."""
    for heart in hearts:
        heart._closed.set()
    for heart in hearts:
        heart._thread.join(5)


def until(what: Callable[[], bool], seconds: float = 10.0) -> None:
    limit = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < limit, "it does not come"
        time.sleep(0.01)
