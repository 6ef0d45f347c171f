"""A disk whose moves happen when somebody waits for them, or at a moment that a random generator picks.

Until then a write has not looked at its source and a read has not touched its target: whoever uses either too early is found
out, which threads that are done in a microsecond would never do.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from typing import Any

import torch

from megaspan.memory.disk import DiskTier


class Late(Future):
    """Done when it is asked for, or perhaps when somebody looks whether it is."""

    def __init__(self, work: Callable[[], None], disk: LateDisk) -> None:
        super().__init__()
        self.work, self.disk = work, disk

    def run(self) -> None:
        if not super().done():
            try:
                self.work()
                self.set_result(None)
            except BaseException as error:
                self.set_exception(error)

    def done(self) -> bool:
        if self.disk.random.random() < self.disk.chance:
            self.run()
        return super().done()

    def result(self, timeout: float | None = None) -> Any:
        self.run()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.run()
        return super().exception(timeout)


class LateParked:
    def __init__(self, disk: LateDisk, source: torch.Tensor, ready: Callable[[], None] | None) -> None:
        self.disk, self.bytes, self.dropped, self.cancelled = disk, source.nbytes, False, False
        self.data: torch.Tensor | None = None
        self.reads: list[Late] = []

        def write() -> None:
            if self.cancelled or (self.dropped and not self.reads):
                return
            if disk.failure:
                raise disk.failure
            if ready is not None:
                ready()
            self.data = source.clone()
            disk.written += self.bytes

        self.write = Late(write, disk)

    def stored(self) -> Late:
        return self.write


class LateDisk:
    """Stands in for `DiskTier`. `chance`: that a move happens when somebody looks."""

    def __init__(self, seed: int = 0, chance: float = 0.3) -> None:
        self.random, self.chance = random.Random(seed), chance
        self.living: list[LateParked] = []
        self.moves: list[Late] = []
        self.failure: Exception | None = None
        self.written = self.read = self.reads = self.reserved = 0

    def reserve(self, sizes: Iterable[int]) -> None:
        self.reserved = max(self.reserved, sum(sizes))

    def park(self, source: torch.Tensor, ready: Callable[[], None] | None = None) -> LateParked:
        parked = LateParked(self, source, ready)
        self.living.append(parked)
        self.moves.append(parked.write)
        return parked

    def recall(self, parked: LateParked, into: torch.Tensor, ready: Callable[[], None] | None = None) -> Late:
        assert not parked.dropped

        def read() -> None:
            if parked.cancelled:
                raise CancelledError
            parked.write.result()
            if ready is not None:
                ready()
            assert parked.data is not None
            into.copy_(parked.data)
            self.read += parked.bytes

        self.reads += 1
        parked.reads.append(Late(read, self))
        self.moves.append(parked.reads[-1])
        return parked.reads[-1]

    def stir(self) -> None:
        """Some moves happen now."""
        self.moves = [move for move in self.moves if not move.done()]

    def drop(self, parked: LateParked) -> None:
        parked.dropped = True
        if parked in self.living:
            self.living.remove(parked)

    def discard(self) -> None:
        for parked in list(self.living):
            parked.cancelled = True
            self.drop(parked)
        for move in self.moves:
            move.run()
        self.failure = None

    def close(self) -> None:
        self.discard()


def empties(tier: DiskTier, seconds: float = 20.0) -> bool:
    """Whether nothing is left on the disk, soon: a place whose write waits in line is freed by the thread that comes to it."""
    limit = time.monotonic() + seconds
    while tier.stats().used and time.monotonic() < limit:
        time.sleep(0.005)
    return not tier.stats().used
