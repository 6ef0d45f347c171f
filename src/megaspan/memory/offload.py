"""What layers keep, waiting on the host between forward and backward, copied beside the computation.

Checkpointing keeps one tensor per layer, its input: layers × tokens × hidden × 2 bytes, 39 GB at 131,072 tokens of an 8B model
and 309 GB at a million. On the device that is the whole memory; on the host it costs two copies over a link of 50 GB/s, a few
percent of the time the layer computes, *if* nobody waits for them. So:

* Forward: a side stream waits for an event of the computing stream, copies the input into the arena and records an event. The
  source is kept alive until the computing stream has been made to wait for that event, two layers later, so at most `in_flight`
  of them exist.
* Backward: when layer i asks for its input, the copy of layer i-1's starts on another side stream; it has a whole layer's time.
  The buffer comes from the caching allocator on the computing stream, and the copy waits for an event of that stream recorded
  after the allocation. So whatever used those bytes before is done, and autograd may hold on to the buffer as long as it likes:
  its life is decided by references, not by a guess about when a layer's backward is over. The allocator hands the same two
  blocks out again and again. (A fixed ring must guess, and pool memory overwritten while still read is case R64: silent
  corruption from the second step on.)
* Host memory comes back to the arena as soon as the copy from it is queued; every later copy into the arena waits for the last
  one out of it, on the device, not on the host.

A row too long to come back whole is read tile by tile (`tiles`): the next tile's copy runs while this one is worked on, so that
two tiles are on the device, 0.27 GB instead of 8.6 GB of an 8B layer's input at a million tokens.

No call here makes the host wait for the device, except when the arena grows. On the CPU the same code runs with torch.cpu's
empty streams, so the tests cover it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from megaspan.memory.arena import HostArena, Slot

# What an input still held when its graph went: a slot, or a buffer and the event of the copy into it.
_Orphan: TypeAlias = tuple[Slot | None, torch.Tensor | None, Any]


def _copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Queues a copy on the current stream; both are contiguous and of one dtype, so no staging buffer is made."""
    destination.copy_(source, non_blocking=True)


@dataclass(frozen=True)
class OffloadStats:
    """What the offload holds and has done, read from the live object.

    Attributes:
        host_bytes: host memory held (pinned on a GPU).
        host_bytes_peak: most of it in use at once.
        bytes_to_host, bytes_to_device: copied since the start.
        seconds_pinning: time spent getting the memory, no part of any step's computation.
        late: inputs whose copy back had not been started a layer ahead.
    """

    host_bytes: int = 0
    host_bytes_peak: int = 0
    bytes_to_host: int = 0
    bytes_to_device: int = 0
    seconds_pinning: float = 0.0
    late: int = 0


class SavedInput:
    """Stands for a layer's input in the autograd graph: `tensor` on the device (filled once `fetched` has happened), or `slot`.

    `wanted` says that the backward is about to use `tensor`.
    """

    __slots__ = (
        "__weakref__", "copied", "dtype", "fetched", "orphans", "previous", "shape", "slot", "spent", "tensor", "version",
        "wanted",
    )  # fmt: skip

    def __init__(self, source: torch.Tensor, orphans: deque[_Orphan]) -> None:
        self.shape, self.dtype = source.shape, source.dtype
        self.version: int | None = source._version
        self.tensor: torch.Tensor | None = source
        self.slot: Slot | None = None
        self.copied: Any = None
        self.fetched: Any = None
        self.previous: weakref.ref[SavedInput] | None = None
        self.wanted = self.spent = False
        self.orphans = orphans

    def __del__(self) -> None:
        # Any thread, any moment: the deque's append is atomic, and the owner sweeps it when it next runs.
        if self.slot is not None or self.fetched is not None:
            self.orphans.append((self.slot, None if self.fetched is None else self.tensor, self.fetched))

    def check_there(self) -> None:
        """Raises RuntimeError where it was let go of."""
        if self.spent:
            raise RuntimeError(
                "The layer inputs of this forward are gone: its step was abandoned, or this is a second backward through it. "
                "Run the forward again, or set gradient_checkpointing_kwargs={'offload': False} and retain_graph=True."
            )

    def check_unchanged(self) -> None:
        """Raises RuntimeError where the model's own tensor is no longer what was saved."""
        if self.tensor is not None and self.version is not None and self.tensor._version != self.version:
            raise RuntimeError(
                "The input of a checkpointed layer was overwritten in place before its backward; "
                "the model does `hidden_states += ...` (or the like) on it. Gradients would be wrong."
            )


@dataclass(frozen=True)
class _InFlight:
    """A source whose copy to the host may still be running."""

    source: torch.Tensor
    stream: Any
    copied: Any
    saved: weakref.ref[SavedInput]


class LayerInputs:
    """Moves layer inputs to the host and back; `pack` and `unpack` are for `torch.autograd.graph.saved_tensors_hooks`.

    Rows may overlap (several forwards before their backwards, in any order), differ in length, and be dropped without a
    backward. One backward per forward. One device. Not for several threads at once (autograd's own thread alternates with the
    caller's).

    Args:
        device: where the inputs live; on a CPU the copies go to plain memory.
        limit: most bytes of host memory, or None.
        in_flight: sources that may be alive on the device while they are copied to the host; None leaves it to `land`.
        backend: the module with streams and events; torch.cuda or torch.cpu, for tests another.
    """

    def __init__(
        self, device: torch.device, *, limit: int | None = None, in_flight: int | None = 2, backend: Any = None
    ) -> None:
        on_gpu = device.type == "cuda"
        self.arena = HostArena(pinned=on_gpu, limit=limit)
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu and device.index is None else device
        self._in_flight_limit = in_flight
        self._backend = backend or torch.get_device_module(device)
        options = {"device": self._device} if on_gpu else {}
        self._to_host, self._to_device = self._backend.Stream(**options), self._backend.Stream(**options)
        self._in_flight: deque[_InFlight] = deque()
        self._orphans: deque[_Orphan] = deque()
        self._saved: weakref.WeakSet[SavedInput] = weakref.WeakSet()
        self._last: weakref.ref[SavedInput] | None = None
        self._last_fetch: Any = None
        self._expected = 1
        self._bytes_to_host = self._bytes_to_device = self._late = 0

    def start_row(self, count: int) -> None:
        """A forward begins, of which `count` inputs will be moved: room is made for all of them at the first, in one piece."""
        self._last, self._expected = None, max(count, 1)

    def reserve(self, count: int, size: int) -> None:
        """Gets host memory for `count` inputs of `size` bytes, before the step that needs it."""
        if self.arena.missing(count, size):
            # Growing may give up idle blocks, and a copy that is queued may still read or write them.
            self._backend.synchronize(self._device)
            self.arena.reserve(count, size)

    def pack(self, hidden: torch.Tensor, *, keep: bool = False) -> SavedInput:
        """Saves a layer's input, to the host unless `keep`.

        Args:
            hidden: any shape and dtype; it may be used and freed as usual, but not be written to before its backward.
            keep: leave it on the device.

        Raises:
            UserError: there is no host memory for it.
        """
        source = hidden.detach()  # the bytes without their graph
        if source.device != self._device:
            raise RuntimeError(f"layer inputs are on {self._device}, got one on {source.device}")
        self._sweep()
        saved = SavedInput(source if keep or source.is_contiguous() else source.contiguous(), self._orphans)
        saved.previous, self._last = self._last, weakref.ref(saved)
        self._saved.add(saved)
        if keep or not source.numel():
            allowed = max(len(self._in_flight) - 1, 0)
        else:
            self._send(saved)
            allowed = self._in_flight_limit if self._in_flight_limit is not None else len(self._in_flight)
        if self._in_flight_limit is not None:
            self.land(allowed)
        return saved

    def unpack(self, saved: SavedInput) -> torch.Tensor:
        """The input on the device, ready for the current stream; the copy of the one before it starts.

        Raises:
            RuntimeError: it was given out before (a second backward), dropped by `discard`, or overwritten.
        """
        tensor = self.peek(saved)
        self._spend(saved)
        previous = saved.previous() if saved.previous is not None else None
        if previous is not None and not previous.spent:
            self._fetch(previous)
        self.land()
        return tensor

    def peek(self, saved: SavedInput) -> torch.Tensor:
        """The whole tensor on the device, where it stays, ready for the current stream.

        Raises:
            RuntimeError: as `unpack`.
        """
        saved.check_there()
        self._sweep()
        self._late += saved.tensor is None
        self._fetch(saved)
        if saved.fetched is not None:
            self._stream().wait_event(saved.fetched)
        saved.check_unchanged()
        assert saved.tensor is not None
        return saved.tensor

    def prefetch(self, saved: SavedInput) -> None:
        """Starts the copy back to the device; nothing happens where it has started."""
        if not saved.spent:
            self._fetch(saved)

    def copy_of(self, saved: SavedInput) -> torch.Tensor:
        """The whole tensor on the device for one use; on the host it stays where it is."""
        saved.check_there()
        if saved.tensor is not None:
            return self.peek(saved)
        tensor, arrived = self._read(saved, slice(None))
        self._stream().wait_event(arrived)
        return tensor

    def tiles(self, saved: SavedInput, cuts: Sequence[slice]) -> Iterator[torch.Tensor]:
        """Slices of the second dimension, each ready for the current stream, the next one on its way.

        Args:
            saved: of shape [1, T, ...].
            cuts: slices of T, of step one; any, in any order.
        """
        saved.check_there()
        if saved.tensor is not None:
            whole = self.peek(saved)
            for cut in cuts:
                yield whole[:, cut]
            return
        ahead = self._read(saved, cuts[0])
        for following in (*cuts[1:], None):
            tensor, arrived = ahead
            if following is not None:
                ahead = self._read(saved, following)
            self._stream().wait_event(arrived)
            yield tensor

    def release(self, saved: SavedInput) -> None:
        """Lets go of a tensor that is not needed any more; nothing happens where that was done."""
        if saved.fetched is not None and not saved.spent:
            self._stream().wait_event(saved.fetched)
        self._spend(saved)

    def discard(self) -> None:
        """Lets go of every input still saved: after a step that was abandoned, whose graph may live on in a traceback."""
        for saved in list(self._saved):
            self.release(saved)
        self._last = None
        self._sweep()
        self.land()

    def close(self) -> None:
        """Discards, waits for the device and frees the host memory."""
        self.discard()
        self._backend.synchronize(self._device)
        self.arena.close()

    def stats(self) -> OffloadStats:
        """Bytes held and moved so far."""
        return OffloadStats(
            host_bytes=self.arena.bytes,
            host_bytes_peak=self.arena.peak,
            bytes_to_host=self._bytes_to_host,
            bytes_to_device=self._bytes_to_device,
            seconds_pinning=self.arena.seconds_pinning,
            late=self._late,
        )

    def _stream(self) -> Any:
        """The stream that computes."""
        return self._backend.current_stream(self._device)

    def _send(self, saved: SavedInput) -> None:
        """Queues the copy to the host."""
        source = saved.tensor
        assert source is not None
        self.reserve(self._expected, source.nbytes)
        self._expected = 1
        saved.slot = self.arena.take(source.nbytes)
        stream = self._stream()
        self._to_host.wait_event(stream.record_event())
        if self._last_fetch is not None:
            # The slot's former owner may still be on its way to the device.
            self._to_host.wait_event(self._last_fetch)
        with self._backend.stream(self._to_host):
            _copy(saved.slot.view(saved.shape, saved.dtype), source)
            saved.copied = self._to_host.record_event()
        self._in_flight.append(_InFlight(source, stream, saved.copied, weakref.ref(saved)))
        self._bytes_to_host += source.nbytes

    def _fetch(self, saved: SavedInput) -> None:
        """Sees to it that the input is on the device or on its way."""
        saved.wanted = True
        if saved.tensor is not None:
            return
        assert saved.slot is not None
        saved.tensor = torch.empty(saved.shape, dtype=saved.dtype, device=self._device)
        saved.version = None  # nobody else has the buffer
        # Whatever used the buffer's bytes before was queued on this stream.
        self._to_device.wait_event(self._stream().record_event())
        self._to_device.wait_event(saved.copied)  # matters where another stream computes now
        with self._backend.stream(self._to_device):
            _copy(saved.tensor, saved.slot.view(saved.shape, saved.dtype))
            saved.fetched = self._last_fetch = self._to_device.record_event()
        self.arena.give(saved.slot)
        saved.slot = None
        self._bytes_to_device += saved.tensor.nbytes

    def _read(self, saved: SavedInput, tokens: slice) -> tuple[torch.Tensor, Any]:
        """Queues a copy of some tokens from the host, which keeps them; the tensor and the event of its arrival."""
        assert saved.slot is not None
        source = saved.slot.view(saved.shape, saved.dtype)[:, tokens]
        tensor = torch.empty(source.shape, dtype=saved.dtype, device=self._device)
        self._to_device.wait_event(self._stream().record_event())
        self._to_device.wait_event(saved.copied)
        with self._backend.stream(self._to_device):
            _copy(tensor, source)
            self._last_fetch = self._to_device.record_event()
        self._bytes_to_device += tensor.nbytes
        return tensor, self._last_fetch

    def _spend(self, saved: SavedInput) -> None:
        """Lets go of all that `saved` holds; the current stream has waited for its copy to the device."""
        if saved.slot is not None:
            self.arena.give(saved.slot)
        saved.spent, saved.tensor, saved.slot, saved.fetched = True, None, None, None

    def land(self, allowed: int = 0) -> None:
        """Lets go of the oldest sources, until `allowed` are left, once their stream waits for their copy."""
        while len(self._in_flight) > allowed:
            flight = self._in_flight.popleft()
            flight.stream.wait_event(flight.copied)
            saved = flight.saved()
            if saved is not None and not saved.wanted:
                saved.check_unchanged()
                saved.tensor = None

    def _sweep(self) -> None:
        """Takes back what inputs held whose graph is gone."""
        while self._orphans:
            slot, _, fetched = self._orphans.popleft()
            if slot is not None:
                self.arena.give(slot)
            if fetched is not None:
                # The buffer goes back to the allocator with this tuple; nothing may be written to it after that.
                self._stream().wait_event(fetched)
