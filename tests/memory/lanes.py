"""Streams that run as late as their waits allow: what an asynchronous copy engine may do, played on the CPU.

The stream that computes runs at once (torch's CPU operations do), whichever it is; a copy queued on another one runs when
somebody's wait demands it, or at a moment that a random generator picks. Until then its destination holds NaN, and a copy whose
source or destination has been let go of by then is an error: on a GPU that memory may be somebody else's.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class Event:
    """`position` operations of `stream` come before it."""

    stream: Stream
    position: int

    def synchronize(self) -> None:
        if self.stream.name != "compute":
            self.stream.run_to(self.position)


@dataclass
class Stream:
    lanes: Lanes
    name: str
    queue: deque[tuple[str, object]] = field(default_factory=deque)
    done: int = 0
    queued: int = 0
    waited_for_compute: int = -1

    def record_event(self) -> Event:
        if self.name == "compute":
            self.lanes.clock += 1
            return Event(self, self.lanes.clock)
        return Event(self, self.queued)

    def wait_event(self, event: Event) -> None:
        if event.stream.name == "compute":
            self.waited_for_compute = max(self.waited_for_compute, event.position)
        elif self is self.lanes.current:
            event.stream.run_to(event.position)
        else:
            self.waited_for_compute = max(self.waited_for_compute, event.stream.waited_for_compute)
            self.push("wait", event)

    def push(self, kind: str, what: object) -> None:
        self.queue.append((kind, what))
        self.queued += 1

    def run_to(self, position: int) -> None:
        while self.done < position:
            kind, what = self.queue.popleft()
            if kind == "wait":
                assert isinstance(what, Event)
                what.stream.run_to(what.position)
            else:
                assert callable(what)
                what()
            self.done += 1


class Lanes:
    """Stands in for torch.cuda; `copy` stands in for the queued copy."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.compute = self.current = Stream(self, "compute")
        self.sides: list[Stream] = []
        self.clock = 0

    def Stream(self) -> Stream:
        self.sides.append(Stream(self, f"side {len(self.sides)}"))
        return self.sides[-1]

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def synchronize(self, device: torch.device) -> None:
        for side in self.sides:
            side.run_to(side.queued)

    def assert_idle(self) -> None:
        assert all(side.done == side.queued for side in self.sides), "memory is given up while copies may use it"

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        stream = self.current
        assert stream.name != "compute", "a copy on the computing stream does not overlap"
        # Source (or a fresh buffer) was last touched on the computing stream, and a wait for it must have come after that.
        assert stream.waited_for_compute == self.clock, "the copy may run before the computation that it follows"
        to_device = destination.storage_offset() == 0 and destination.untyped_storage().nbytes() == destination.nbytes
        if to_device:
            destination.fill_(torch.nan)
        # A view of the arena is made for the copy alone, so the arena's memory is what must live.
        ends = [weakref.ref(destination) if to_device else destination, source if to_device else weakref.ref(source)]

        def run() -> None:
            target, origin = (end() if isinstance(end, weakref.ref) else end for end in ends)
            assert target is not None, "the buffer was let go of before the copy into it ran"
            assert origin is not None, "the source was let go of before the copy from it ran"
            target.copy_(origin)

        stream.push("copy", run)

    def stir(self) -> None:
        """Lets a random side stream run a random number of its operations."""
        for side in self.sides:
            side.run_to(self.random.randint(side.done, side.queued))
