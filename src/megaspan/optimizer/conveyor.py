"""Pieces of host tensors that come to the device, are worked on, and go back, each copy beside the work on another piece.

Masters and moments of 8B parameters are 98 GB: over a link of 50 GB/s two seconds each way, and they cannot be on the device at
once. So tensors are cut into pieces of `PIECE` elements; while one is worked on, the next is on its way in and the last on its
way out. At most three pieces are on the device: 0.75 GiB with fp32 masters and their gradients.

Streams and memory follow the same rules as in `memory/offload.py`: a buffer is allocated on the computing stream, a copy waits
for an event of that stream recorded after the allocation, and the buffer is let go of once the computing stream waits for the
copy out of it. Every copy in waits for the last copy out, so what is read was written. On the CPU the same code runs with
torch.cpu's empty streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# 64 MiB of fp32: long enough for the full rate of the link, a multiple of every block of 8-bit moments.
PIECE = 16 * 2**20
# Gradients that may be on their way to the host before the computation waits for them: a layer's.
_ON_THE_WAY = 2**30


def pieces(count: int) -> list[slice]:
    """Slices of a flat tensor of `count` elements, none longer than `PIECE`."""
    return [slice(start, min(start + PIECE, count)) for start in range(0, count, PIECE)]


def _copy(destination: Tensor, source: Tensor) -> None:
    """Queues a copy on the current stream; both are contiguous and of one type, so no staging buffer is made."""
    destination.copy_(source, non_blocking=True)


@dataclass(frozen=True)
class Task:
    """Work on one piece.

    Attributes:
        fetch: slices of host tensors that are wanted on the device.
        work: called with their copies, in that order, on the computing stream.
        back: how many of them, from the first, are written back.
    """

    fetch: Sequence[Tensor]
    work: Callable[..., None]
    back: int = 0


class Conveyor:
    """Copies between host and device on streams of its own. Not for several threads at once.

    Args:
        device: where the work is done.
        backend: the module with streams and events; torch.cuda or torch.cpu, for tests another.
    """

    def __init__(self, device: torch.device, *, backend: Any = None) -> None:
        on_gpu = device.type == "cuda"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu and device.index is None else device
        self._backend = backend or torch.get_device_module(device)
        options = {"device": self._device} if on_gpu else {}
        self._to_host, self._to_device = self._backend.Stream(**options), self._backend.Stream(**options)
        # Sources on the device, the stream they belong to, and the event of the copy out of them.
        self._flights: deque[tuple[list[Tensor], Any, Any]] = deque()
        self._last_out: Any = None

    def run(self, tasks: Iterable[Task]) -> None:
        """Does all tasks in order; a task is asked for, and its copies start, before the work on the one before it."""
        waiting = None
        for task in tasks:
            coming = (task, *self._fetch(task))
            if waiting is not None:
                self._do(*waiting)
            waiting = coming
        if waiting is not None:
            self._do(*waiting)

    def send(self, source: Tensor, destination: Tensor) -> None:
        """Copies a device tensor to the host beside what is computed next; `source` may be dropped at once."""
        self._out([(source, destination)])
        self._land(_ON_THE_WAY)

    def land(self) -> None:
        """Makes the computing stream wait for every copy to the host, and lets go of their sources."""
        self._land(0)

    def wait(self) -> None:
        """Makes the host wait: host tensors may be read and written by anybody after this."""
        self.land()
        if self._last_out is not None:
            self._backend.synchronize(self._device)

    def _stream(self) -> Any:
        """The stream that computes."""
        return self._backend.current_stream(self._device)

    def _fetch(self, task: Task) -> tuple[list[Tensor], Any]:
        """Starts a task's copies to the device."""
        buffers = [torch.empty(part.shape, dtype=part.dtype, device=self._device) for part in task.fetch]
        # Whatever used the buffers' bytes before was queued on this stream.
        self._to_device.wait_event(self._stream().record_event())
        if self._last_out is not None:
            self._to_device.wait_event(self._last_out)
        with self._backend.stream(self._to_device):
            for buffer, part in zip(buffers, task.fetch, strict=True):
                _copy(buffer, part)
            return buffers, self._to_device.record_event()

    def _do(self, task: Task, buffers: list[Tensor], fetched: Any) -> None:
        self._stream().wait_event(fetched)
        task.work(*buffers)
        if task.back:
            self._out(list(zip(buffers, task.fetch, strict=True))[: task.back])
            self._land(sum(part.nbytes for part in buffers[: task.back]))

    def _out(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        stream = self._stream()
        self._to_host.wait_event(stream.record_event())
        with self._backend.stream(self._to_host):
            for source, destination in pairs:
                _copy(destination, source)
            self._last_out = self._to_host.record_event()
        self._flights.append(([source for source, _ in pairs], stream, self._last_out))

    def _land(self, allowed: int) -> None:
        """Lets go of the oldest sources, until `allowed` bytes are left, once their stream waits for the copy out of them."""
        left = sum(source.nbytes for sources, _, _ in self._flights for source in sources)
        while left > allowed:
            sources, stream, copied = self._flights.popleft()
            stream.wait_event(copied)
            left -= sum(source.nbytes for source in sources)
