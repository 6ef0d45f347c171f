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

What neither device nor host can hold goes through a slot of host memory to the disk (`parking.py`). `recall` starts its way
back into one, two layers ahead, and from there on it is as if it had waited on the host.

No call here makes the host wait for the device, except when the arena grows; for the disk one may wait. On the CPU the same
code runs with torch.cpu's empty streams, so the tests cover it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megaspan.memory.arena import Slot
from megaspan.memory.disk import DiskTier
from megaspan.memory.link import Link
from megaspan.memory.parking import Parking
from megaspan.memory.saved import Orphan, SavedInput
from megaspan.plan.keep import Place

STAGED_LAYERS = 2  # inputs in host memory on their way to the disk and back: one is read while the next one comes


def _copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Queues a copy on the current stream; both are contiguous and of one dtype, so no staging buffer is made."""
    destination.copy_(source, non_blocking=True)


def _mark(stream: Any) -> Any:
    """An event that another thread can wait for without keeping a processor busy."""
    return stream.record_event(*([torch.cuda.Event(blocking=True)] if isinstance(stream, torch.cuda.Stream) else []))


@dataclass(frozen=True)
class OffloadStats:
    """What the offload holds and has done, read from the live object.

    Attributes:
        host_bytes: host memory held (pinned on a GPU).
        host_bytes_peak: most of it in use at once.
        bytes_to_host, bytes_to_device: copied since the start.
        seconds_pinning: time spent getting the memory, no part of any step's computation.
        late: inputs whose copy back had not been started a layer ahead.
        seconds_waiting: time that the computation's own thread waited for the disk.
    """

    host_bytes: int = 0
    host_bytes_peak: int = 0
    bytes_to_host: int = 0
    bytes_to_device: int = 0
    seconds_pinning: float = 0.0
    late: int = 0
    seconds_waiting: float = 0.0


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
        disk: where inputs of the place "disk" wait.
        staged: inputs that are in host memory at once on their way to the disk and back.
        backend: the module with streams and events; torch.cuda or torch.cpu, for tests another.
        link: streams and host memory that are shared with other stores, which whoever made it closes; in place of `limit` and
            `backend`.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        limit: int | None = None,
        in_flight: int | None = 2,
        disk: DiskTier | None = None,
        staged: int = STAGED_LAYERS,
        backend: Any = None,
        link: Link | None = None,
    ) -> None:
        self._shares = link is not None
        self._link = link or Link(device, limit=limit, backend=backend)
        self.arena = self._link.arena
        self._device, self._backend = self._link.device, self._link.backend
        self._in_flight_limit = in_flight
        self._in_flight: deque[_InFlight] = deque()
        self._orphans: deque[Orphan] = deque()
        self._saved: weakref.WeakSet[SavedInput] = weakref.WeakSet()
        self._last: weakref.ref[SavedInput] | None = None
        self._parking = None if disk is None else Parking(disk, staged, self._take_idle, self.arena.give)
        self._expected = 1
        self._bytes_to_host = self._bytes_to_device = self._late = 0

    def start_row(self, count: int) -> None:
        """A forward begins, of which `count` inputs will be moved: room is made for all of them at the first, in one piece."""
        self._last, self._expected = None, max(count, 1)

    def reserve(self, count: int, size: int, on_disk: int = 0) -> None:
        """Gets host memory for `count` inputs of `size` bytes, before the step that needs it.

        Args:
            count: inputs that wait on the host at once.
            size: bytes of one.
            on_disk: inputs that wait on the disk; what they take of it is reserved there.
        """
        if on_disk and size:
            count += self._disk.missing(size)
        self._link.make_room(count, size)
        if on_disk and size:
            self._disk.reserve(size)

    def pack(self, hidden: torch.Tensor, place: Place = "host") -> SavedInput:
        """Saves a layer's input.

        Args:
            hidden: any shape and dtype; it may be used and freed as usual, but not be written to before its backward.
            place: where it waits.

        Raises:
            UserError: there is no host memory or no disk for it.
        """
        source = hidden.detach()  # the bytes without their graph
        if source.device != self._device:
            raise RuntimeError(f"layer inputs are on {self._device}, got one on {source.device}")
        self._sweep()
        keep = place == "device"
        saved = SavedInput(source if keep or source.is_contiguous() else source.contiguous(), self._orphans)
        saved.previous, self._last = self._last, weakref.ref(saved)
        self._saved.add(saved)
        if keep or not source.numel():
            allowed = max(len(self._in_flight) - 1, 0)
        else:
            self._send(saved, on_disk=place == "disk")
            allowed = self._in_flight_limit if self._in_flight_limit is not None else len(self._in_flight)
        if self._in_flight_limit is not None:
            self.land(allowed)
        return saved

    def unpack(self, saved: SavedInput) -> torch.Tensor:
        """The input on the device, ready for the current stream; the one before it starts its way there, and one more its own.

        Raises:
            RuntimeError: it was given out before (a second backward), dropped by `discard`, or overwritten.
        """
        tensor = self.peek(saved)
        self._spend(saved)
        previous = saved.previous() if saved.previous is not None else None
        if previous is not None and not previous.spent:
            self._fetch(previous)
            before = previous.previous() if previous.previous is not None else None
            if before is not None:
                self.recall(before)
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
            self._link.stream.wait_event(saved.fetched)
        saved.check_unchanged()
        assert saved.tensor is not None
        return saved.tensor

    def prefetch(self, saved: SavedInput) -> None:
        """Starts the copy back to the device; nothing happens where it has started."""
        if not saved.spent:
            self._fetch(saved)

    def recall(self, saved: SavedInput) -> None:
        """Starts the way from the disk to the host, where there is room; what waits elsewhere stays there."""
        if saved.away is not None and saved.tensor is None:
            self._disk.call(saved.away)

    def copy_of(self, saved: SavedInput, coming: list[Any] | None = None) -> torch.Tensor:
        """The whole tensor on the device for one use; on the host it stays where it is.

        The current stream waits for it. With `coming` it does not: the event of its arrival is added there, and nobody may let
        go of the tensor before a stream that reads it has been made to wait.
        """
        saved.check_there()
        if saved.tensor is not None:
            return self.peek(saved)
        tensor, arrived = self._read(saved, slice(None))
        if coming is None:
            self._link.stream.wait_event(arrived)
        else:
            coming.append(arrived)
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
        coming = [self._read(saved, cuts[0])]
        try:
            for following in (*cuts[1:], None):
                if following is not None:
                    coming.append(self._read(saved, following))
                self._link.stream.wait_event(coming[0][1])
                yield coming.pop(0)[0]  # held by nobody here: whoever lets go of it before asking has two tiles at a time
        finally:
            for _, arrived in coming:  # whoever reads has failed: what is on its way may not outlive its memory
                self._link.stream.wait_event(arrived)

    def release(self, saved: SavedInput) -> None:
        """Lets go of a tensor that is not needed any more; nothing happens where that was done."""
        if saved.fetched is not None and not saved.spent:
            self._link.stream.wait_event(saved.fetched)
        self._spend(saved)

    def discard(self) -> None:
        """Lets go of every input still saved: after a step that was abandoned, whose graph may live on in a traceback."""
        for saved in list(self._saved):
            self.release(saved)
        self._last = None
        self._sweep()
        self.land()

    def close(self) -> None:
        """Discards, waits for the device and frees the host memory, unless others share it."""
        self.discard()
        self._backend.synchronize(self._device)
        if self._parking is not None:
            self._parking.close()
        if not self._shares:
            self._link.close()

    def stats(self) -> OffloadStats:
        """Bytes held and moved so far; shared host memory is whoever's who made the link."""
        return OffloadStats(
            host_bytes=0 if self._shares else self.arena.bytes,
            host_bytes_peak=0 if self._shares else self.arena.peak,
            bytes_to_host=self._bytes_to_host,
            bytes_to_device=self._bytes_to_device,
            seconds_pinning=0.0 if self._shares else self.arena.seconds_pinning,
            late=self._late,
            seconds_waiting=0.0 if self._parking is None else self._parking.seconds_waiting,
        )

    @property
    def staged_bytes(self) -> int:
        """Host memory through which inputs go to the disk; always held."""
        return 0 if self._parking is None else self._parking.host_bytes

    @property
    def _disk(self) -> Parking:
        if self._parking is None:
            raise RuntimeError("a layer is to keep something on disk, but there is none")
        return self._parking

    def _take_idle(self, size: int) -> Slot:
        """A slot that no queued copy uses."""
        self.reserve(1, size)
        self._backend.synchronize(self._device)
        return self.arena.take(size)

    def _send(self, saved: SavedInput, on_disk: bool) -> None:
        """Queues the copy to the host, and from there to the disk."""
        source = saved.tensor
        assert source is not None
        if on_disk:
            saved.away = self._disk.enter(source.nbytes)
            slot, busy = saved.away.slot, saved.away.used
        else:
            self.reserve(self._expected, source.nbytes)
            self._expected = 1
            slot = saved.slot = self.arena.take(source.nbytes)
            busy = self._link.last_out  # the slot's former owner may still be on its way to the device
        stream = self._link.stream
        self._link.to_host.wait_event(stream.record_event())
        if busy is not None:
            self._link.to_host.wait_event(busy)
        with self._backend.stream(self._link.to_host):
            _copy(slot.view(saved.shape, saved.dtype), source)
            saved.copied = _mark(self._link.to_host)
        self._in_flight.append(_InFlight(source, stream, saved.copied, weakref.ref(saved)))
        self._bytes_to_host += source.nbytes
        if saved.away is not None:
            self._disk.write(saved.away, saved.copied)

    def _fetch(self, saved: SavedInput) -> None:
        """Sees to it that the input is on the device or on its way."""
        saved.wanted = True
        if saved.tensor is not None:
            return
        source = self._on_host(saved)
        saved.tensor = self._to_device_from(saved, source)
        saved.fetched = self._link.last_out
        saved.version = None  # nobody else has the buffer
        self._give_back(saved)

    def _read(self, saved: SavedInput, tokens: slice) -> tuple[torch.Tensor, Any]:
        """Queues a copy of some tokens from the host, which keeps them; the tensor and the event of its arrival."""
        tensor = self._to_device_from(saved, self._on_host(saved)[:, tokens])
        return tensor, self._link.last_out

    def _on_host(self, saved: SavedInput) -> torch.Tensor:
        """Its bytes in host memory, after a wait if they are on disk."""
        if saved.away is not None:
            self._disk.bring(saved.away)
        slot = saved.slot if saved.away is None else saved.away.slot
        assert slot is not None
        return slot.view(saved.shape, saved.dtype)

    def _to_device_from(self, saved: SavedInput, source: torch.Tensor) -> torch.Tensor:
        """Queues a copy of `source`, a part of what `saved` has on the host; `last_out` is the event of its arrival."""
        tensor = torch.empty(source.shape, dtype=saved.dtype, device=self._device)
        # Whatever used the buffer's bytes before was queued on this stream.
        self._link.to_device.wait_event(self._link.stream.record_event())
        self._link.to_device.wait_event(saved.copied)  # matters where another stream computes now
        with self._backend.stream(self._link.to_device):
            _copy(tensor, source)
            self._link.last_out = _mark(self._link.to_device)
        if saved.away is not None:
            saved.away.copying(self._link.last_out)
        self._bytes_to_device += tensor.nbytes
        return tensor

    def _give_back(self, saved: SavedInput) -> None:
        """Gives up its place on the host or the disk."""
        if saved.slot is not None:
            self.arena.give(saved.slot)
        if saved.away is not None:
            self._disk.let_go(saved.away)
        saved.slot = saved.away = None

    def _spend(self, saved: SavedInput) -> None:
        """Lets go of all that `saved` holds; the current stream has waited for its copy to the device."""
        self._give_back(saved)
        saved.spent, saved.tensor, saved.fetched = True, None, None

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
                self._link.stream.wait_event(fetched)
