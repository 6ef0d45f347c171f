"""The third place for what layers keep, after the device and the host: a file on a local disk.

Layer inputs of Qwen3-8B are 309 GB at a million tokens, attention outputs as much again; few machines have such a host. One
NVMe disk at 5 GB/s writes 309 GB in a minute and reads them in another, and a step at that length computes for half an hour: a
disk can work beside the computation, if nobody waits for it. So:

* `park` queues the write of a tensor in host memory and returns; `stored()` says when that memory is free again. `recall`
  queues the read and returns a future; asked a layer ahead, it is there in time. Reads go first: a layer waits for them.
* A tensor is cut into pieces of 16 MiB, and all threads work on one tensor. Each piece has a CRC-32 from before the write,
  compared after the read: a bit that a disk or its driver got wrong would be a wrong gradient, without a word.
* What must happen on the GPU first (the copy into the source, the copy out of the target) is waited for in `ready`, on threads
  of its own, one for each direction: in no thread that moves bytes, and not in the one that launches kernels.
* The file's place is got before the step (`reserve`): a full disk is a sentence at the start, not in the fourth hour.

Source: the shape of it is SSDTrain's (activations to NVMe, overlapped) and ZeRO-Infinity's; checksums are ours.
"""

from __future__ import annotations

import os
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megaspan.human import UserError, format_bytes
from megaspan.memory.arena import PAGE
from megaspan.memory.diskfile import FULL, DiskFile
from megaspan.memory.runs import Runs
from megaspan.memory.workers import Workers

PIECE = 16 * 2**20
_READ, _WRITE = 0, 1  # ranks of tasks
Ready = Callable[[], None]


@dataclass(frozen=True)
class DiskStats:
    """What the tier holds and has done.

    Attributes:
        file_bytes: place held on the disk.
        used, peak: bytes of it in use now, and at most so far.
        bytes_written, bytes_read: moved since the start, checked and complete.
        direct: the page cache is passed by.
    """

    file_bytes: int
    used: int
    peak: int
    bytes_written: int
    bytes_read: int
    direct: bool


class _Place:
    """A tensor's bytes in the file: `sums` of its pieces, `moves` that are queued or under way.

    `dropped`: free it after the last move. `cancelled`: and leave out what of the moves has not been done.
    """

    def __init__(self, start: int, room: int, size: int) -> None:
        self.start, self.room, self.size = start, room, size
        self.sums = [0] * -(-size // PIECE)
        self.moves: set[_Move] = set()
        self.dropped = self.cancelled = False
        self.stored: Future[None] = _future()


class Parked:
    """A tensor on the disk, or on its way there. Forgetting it is as good as `DiskTier.drop`, only later.

    Attributes:
        bytes: its size.
    """

    __slots__ = ("_orphans", "_place", "bytes")

    def __init__(self, place: _Place, orphans: deque[_Place]) -> None:
        self._place, self._orphans = place, orphans
        self.bytes = place.size

    def stored(self) -> Future[None]:
        """Done once nothing reads the source any more, its memory may be used again; raises what went wrong with the write."""
        return self._place.stored

    def __del__(self) -> None:
        # Any thread, any moment, perhaps inside the lock: the append is atomic, and the tier sweeps when it next runs.
        self._orphans.append(self._place)


class _Move:
    """One tensor's way to the disk or back: its pieces in any order, then `future`; `skipped` where not all were moved."""

    def __init__(self, place: _Place, tensor: torch.Tensor, rank: int, future: Future[None]) -> None:
        self.place, self.tensor, self.rank, self.future = place, tensor, rank, future
        self.left = max(len(place.sums), 1)
        self.error: BaseException | None = None
        self.skipped = False


class DiskTier:
    """A file on the disk of `folder`, cut like the host arena, read and written by threads of its own.

    Not for several callers at once.

    Args:
        folder: on a fast local disk; its file has no name there and goes with the process, however that ends.
        limit_bytes: most bytes of the disk, or None for what is free.
        threads: that many pieces of 16 MiB are under way at once. A thread may hold 16 MiB of its own, for tensors whose memory
            does not lie on whole pages.
        allow_network: take a network file system too.

    Raises:
        UserError: the folder is missing, not writable, in memory or on another machine.
    """

    def __init__(
        self, folder: str | Path, *, limit_bytes: int | None = None, threads: int = 4, allow_network: bool = False
    ) -> None:
        self.folder, self.limit_bytes = Path(folder).expanduser(), limit_bytes
        self._file = DiskFile(self.folder, allow_network=allow_network)
        self._runs = Runs()
        self._places: set[_Place] = set()
        self._orphans: deque[_Place] = deque()
        self._coming: set[Future[None]] = set()
        self._lock = threading.Lock()
        self._failure: UserError | None = None
        self._peak = self._written = self._read = 0
        self._movers = Workers(threads, "megaspan-disk")
        self._waiters = {rank: Workers(1, f"megaspan-disk-wait{rank}") for rank in (_READ, _WRITE)}
        workers = (*self._waiters.values(), self._movers)
        self._end = weakref.finalize(self, _end, os.getpid(), workers, self._file)

    def stats(self) -> DiskStats:
        """What the tier holds and has done."""
        with self._lock:
            used = self._runs.size - self._runs.free
            return DiskStats(self._runs.size, used, self._peak, self._written, self._read, self._file.direct)

    def reserve(self, sizes: Iterable[int]) -> None:
        """Gets place for tensors of `sizes` bytes beside those that are parked, in one run, before the step that needs it.

        Raises:
            UserError: `limit_bytes` or the disk does not allow it.
        """
        self._sweep()
        self._check()
        with self._lock:
            self._grow(sum(map(_rounded, sizes)))

    def park(self, source: torch.Tensor, ready: Ready | None = None) -> Parked:
        """Queues the write of `source`, which nobody may change or reuse until `stored()` of the result is done.

        Args:
            source: contiguous, in host memory, any shape and dtype; fastest where it lies on whole pages, as arena slots do.
            ready: called once on another thread before `source` is read; returns when its bytes are there.

        Raises:
            UserError: there is no place for it, or an earlier write failed.
        """
        source_B = _bytes(source)
        self._sweep()
        self._check()
        room = _rounded(source_B.numel())
        with self._lock:
            self._grow(room)
            start = self._runs.take(room)
            assert start is not None
            place = _Place(start, room, source_B.numel())
            self._places.add(place)
            self._peak = max(self._peak, self._runs.size - self._runs.free)
        self._expect(place.stored)
        self._start(_Move(place, source_B, _WRITE, place.stored), ready)
        return Parked(place, self._orphans)

    def recall(self, parked: Parked, into: torch.Tensor, ready: Ready | None = None) -> Future[None]:
        """Queues the read of `parked` into `into`; it stays on the disk until it is dropped.

        Args:
            parked: on the disk or still on its way there.
            into: contiguous, in host memory, as many bytes as were parked. Nobody may touch it until the future is done.
            ready: called once on another thread before `into` is written to; returns when its earlier bytes are not needed.

        Returns:
            A future that is done when every byte is there and its checksum is right; its result() raises a UserError otherwise.

        Raises:
            UserError: an earlier write failed.
        """
        place, into_B = parked._place, _bytes(into)
        self._sweep()
        self._check()
        if place.dropped:
            raise RuntimeError("what is recalled from the disk was dropped before")
        if into_B.numel() != place.size:
            raise ValueError(f"{place.size} bytes were parked, they are recalled into {into_B.numel()}")
        move = _Move(place, into_B, _READ, _future())
        self._expect(move.future)
        with self._lock:
            place.moves.add(move)  # before the write is waited for: `drop` must know of it

        def begin(stored: Future[None]) -> None:
            if error := stored.exception():
                move.error = error
            self._start(move, ready)

        place.stored.add_done_callback(begin)
        return move.future

    def drop(self, parked: Parked) -> None:
        """Frees the place. A recall that was asked for still comes; without one, a write that is queued is left out."""
        self._drop(parked._place)

    def discard(self) -> None:
        """Drops everything, recalls too, and waits until no thread touches any source or target: after an abandoned step.

        Recalls that had not come are cancelled: their futures raise CancelledError. A write that failed is forgotten: the next
        step may find room again.
        """
        with self._lock:
            places = list(self._places)
        for place in places:
            self._drop(place, cancel=True)
        wait(list(self._coming))
        self._failure = None

    def shrink(self) -> None:
        """Drops everything and gives the disk back until something is parked or reserved again."""
        self.discard()
        if not self._file.closed:
            self._file.shrink()
            self._runs = Runs()

    def close(self) -> None:
        """Drops everything, ends the threads and gives the disk back."""
        if self._end.alive:
            self.discard()
            self._end()

    def _expect(self, future: Future[None]) -> None:
        self._coming.add(future)
        future.add_done_callback(self._coming.discard)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._file.closed:
            raise RuntimeError("the disk tier is closed")

    def _grow(self, room: int) -> None:
        """Makes sure of a free run of `room` bytes."""
        if not room or self._runs.fits(room):
            return
        more = room - self._runs.tail
        if self.limit_bytes is not None and self._runs.size + more > self.limit_bytes:
            raise UserError(
                f"what layers keep needs {format_bytes(self._runs.size + more)} of offload_folder {self.folder}, which may "
                f"hold {format_bytes(self.limit_bytes)}",
                do="Raise host_memory if the machine has more, or lower max_length",
                option="offload_folder",
            )
        self._file.extend(more)
        self._runs.grow(more)

    def _start(self, move: _Move, ready: Ready | None) -> None:
        with self._lock:
            move.place.moves.add(move)
        if ready is None or move.error is not None or move.place.cancelled:
            self._cut(move)
        else:
            self._waiters[move.rank].do(partial(self._after, ready, move))

    def _after(self, ready: Ready, move: _Move) -> None:
        try:
            if not move.place.cancelled:
                ready()
        except BaseException as error:  # on a thread of ours: whoever waits for the future gets it
            move.error = error
        self._cut(move)

    def _cut(self, move: _Move) -> None:
        for number in range(move.left):
            self._movers.do(partial(self._move_piece, move, number), move.rank)

    def _move_piece(self, move: _Move, number: int) -> None:
        place = move.place
        if place.cancelled:
            move.skipped = True
        elif move.error is None and place.size:
            piece = move.tensor[number * PIECE : (number + 1) * PIECE]
            try:
                self._write(place, number, piece) if move.rank == _WRITE else self._verify(place, number, piece)
            except OSError as error:
                move.error = self._sentence(error)
                if move.rank == _WRITE:
                    self._failure = self._failure or move.error
            except BaseException as error:  # as above
                move.error = error
        with self._lock:
            move.left -= 1
            if move.left:
                return
            place.moves.discard(move)
            self._settle(place)
            if move.error is None and not move.skipped:
                self._written += place.size * (move.rank == _WRITE)
                self._read += place.size * (move.rank == _READ)
        self._finish(move)

    def _finish(self, move: _Move) -> None:
        del move.tensor
        if move.error is not None:
            move.future.set_exception(move.error)
        elif move.skipped and move.rank == _READ:
            move.future.set_exception(CancelledError())
        else:
            move.future.set_result(None)

    def _write(self, place: _Place, number: int, piece: torch.Tensor) -> None:
        place.sums[number] = _checksum(piece)
        self._file.write(piece, place.start + number * PIECE)

    def _verify(self, place: _Place, number: int, piece: torch.Tensor) -> None:
        offset = place.start + number * PIECE
        self._file.read(piece, offset)
        if (found := _checksum(piece)) != place.sums[number]:
            raise UserError(
                f"{self._file.name} gave back other bytes than were written, at byte {offset:,} (checksum {found:08x} in place "
                f"of {place.sums[number]:08x}): the disk, its driver or the machine's memory is at fault",
                do="Look at the kernel's log and the disk's own (dmesg, smartctl -a), name an offload_folder on another disk, "
                "and go on from the last checkpoint with resume_from_checkpoint: true",
                option="offload_folder",
            )

    def _sentence(self, error: OSError) -> UserError:
        full = error.errno in FULL
        what = f"the disk of offload_folder {self.folder} {'is full' if full else f'failed: {error.strerror or error}'}"
        first = "Free space on it" if full else "Name an offload_folder on another disk"
        sentence = UserError(
            f"{what}; the step was abandoned, and nothing of it was applied",
            do=f"{first} and go on from the last checkpoint with resume_from_checkpoint: true",
            option="offload_folder",
        )
        sentence.__cause__ = error
        return sentence

    def _drop(self, place: _Place, cancel: bool = False) -> None:
        with self._lock:
            place.dropped = True
            place.cancelled |= cancel or all(move.rank == _WRITE for move in place.moves)
            self._settle(place)

    def _settle(self, place: _Place) -> None:
        """Frees the place of a dropped tensor once nothing moves there."""
        if place.dropped and not place.moves and place in self._places:
            self._places.remove(place)
            self._runs.give(place.start, place.room)

    def _sweep(self) -> None:
        while self._orphans:
            self._drop(self._orphans.popleft())


def _end(owner: int, workers: tuple[Workers, ...], file: DiskFile) -> None:
    """Ends the threads, then the file. A forked process has neither the threads nor a say in the file."""
    if os.getpid() == owner:
        for group in workers:
            # At exit a thread may still wait for the GPU: it is a daemon, and cannot move anything any more.
            group.close(timeout=1)
        file.close()


def _future() -> Future[None]:
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()  # who waits for it cannot cancel it: the memory would still be in use
    return future


def _checksum(piece: torch.Tensor) -> int:
    data: Any = piece.numpy()
    return zlib.crc32(data)


def _rounded(size: int) -> int:
    return max(-(-size // PAGE), 1) * PAGE


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor in host memory, as uint8 of one axis."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"only contiguous tensors in host memory go to the disk, not {tensor.shape} on {tensor.device}")
    return tensor.detach().reshape(-1).view(torch.uint8)
