"""Host memory for layer inputs: a few large pinned blocks, cut by hand and kept from step to step.

At a million tokens of an 8B model one step parks 309 GB on the host. Three things go wrong when torch's caching host allocator
does it: every allocation is rounded up to a power of two (8.6 GB becomes 17.2), a row of another length gets new memory instead
of the old, and pinning, which runs at a few GB/s, happens in the middle of the step. Here memory is mapped once, sized by the
layer inputs of the longest row seen, touched by several threads, registered with CUDA, and cut into slots by first fit; a slot
that comes back is merged with its neighbours, so rows of any length reuse the same bytes.

What pinning costs: registering pages that were never touched leaves one kernel thread to find, zero and pin them; touching them
first, by several threads and in huge pages, leaves only the pinning to that thread. `seconds_pinning` measures all of it.

Source: cases R64 (unlimited pinning, pool memory overwritten) and R71 (variable lengths), collected from public bug reports.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from megaspan.human import UserError, format_bytes
from megaspan.memory.runs import Runs

PAGE = 4096
_TOUCH_BYTES = 64 * 2**20
_TOUCH_THREADS = 8
_LESS = "lower max_length, or set gradient_checkpointing_kwargs: {offload: false}"


def _map_pages(size: int, purpose: str) -> torch.Tensor:
    """`size` bytes of fresh private memory, uint8, not yet backed by pages; huge pages where the kernel has them."""
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"the host has no {format_bytes(size)} for {purpose} ({error})",
            do=f"Free host memory, {_LESS}",
        ) from error
    # Huge pages: a kernel without them gives ordinary ones. No copy in forked processes (data loaders): a fork would mark every
    # page as shared, and a page that is then written to moves, away from the GPU's or the disk's copy that is under way to it.
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):
                pages.madvise(getattr(mmap, advice))
    return torch.frombuffer(pages, dtype=torch.uint8)


def _touch(pages: torch.Tensor) -> None:
    """Backs every page by memory, several threads at once: launchers set OMP_NUM_THREADS to 1, so torch's own are no help."""
    threads = min(_TOUCH_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    with ThreadPoolExecutor(threads, "megaspan-touch") as pool:
        list(pool.map(torch.Tensor.zero_, pages.split(_TOUCH_BYTES)))


def _register(pages: torch.Tensor) -> None:
    """Pins `pages` for every CUDA context of the process."""
    portable = 1
    code = int(torch.cuda.cudart().cudaHostRegister(pages.data_ptr(), pages.numel(), portable))
    if code:
        raise UserError(
            f"{format_bytes(pages.numel())} of host memory could not be pinned (CUDA error {code})",
            do="Raise the locked-memory limit (`ulimit -l unlimited`; for a container `--ulimit memlock=-1`) or the memory of "
            f"the container, {_LESS}",
        )


def _unregister(pages: torch.Tensor) -> None:
    """Undoes `_register`; the memory itself goes with the last view of `pages`."""
    code = int(torch.cuda.cudart().cudaHostUnregister(pages.data_ptr()))
    if code:
        raise RuntimeError(f"cudaHostUnregister failed with CUDA error {code}")


@dataclass(frozen=True, eq=False)
class Slot:
    """A run of bytes of one block; `size` is the room it occupies, a multiple of the page size."""

    block: _Block
    start: int
    size: int

    def view(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The slot's first bytes as a tensor of `shape` and `dtype` that shares them."""
        size = math.prod(shape) * dtype.itemsize
        if size > self.size:
            raise ValueError(f"{size} bytes do not fit in a slot of {self.size}")
        return self.block.pages[self.start : self.start + size].view(dtype).view(tuple(shape))


class _Block:
    """One mapping, and which of its bytes are free."""

    def __init__(self, size: int, pinned: bool, purpose: str) -> None:
        self.size = size
        self.pages = _map_pages(size, purpose)
        self._runs = Runs(size)
        self._unpin: weakref.finalize | None = None
        if pinned:
            _touch(self.pages)
            _register(self.pages)
            # An arena that is forgotten must not leave a registration behind: the next mapping may get the same address.
            self._unpin = weakref.finalize(self, _unregister, self.pages)
            self._unpin.atexit = False

    @property
    def idle(self) -> bool:
        """No slot is out."""
        return self._runs.idle

    def fits(self, size: int) -> int:
        """How many slots of `size` bytes could be cut now."""
        return self._runs.fits(size)

    def take(self, size: int) -> Slot | None:
        """A slot of `size` bytes; None where no free run is as long."""
        start = self._runs.take(size)
        return None if start is None else Slot(self, start, size)

    def give(self, slot: Slot) -> None:
        """Takes a slot back."""
        self._runs.give(slot.start, slot.size)

    def close(self) -> None:
        if self._unpin is not None:
            self._unpin()


class HostArena:
    """Host memory that grows in few steps, never rounds up, and is reused until `close`.

    Not for several threads at once.

    Args:
        pinned: register the memory with CUDA, so that copies run beside the computation; False gives plain memory (CPU).
        limit: most bytes the arena may hold, or None.
        purpose: what it holds, for error messages (a plural).

    Attributes:
        used: bytes in slots that are out.
        peak: the most that `used` has been.
        seconds_pinning: time spent mapping, touching and pinning so far.
    """

    def __init__(self, *, pinned: bool, limit: int | None = None, purpose: str = "layer inputs") -> None:
        self.pinned, self.limit = pinned, limit
        self.purpose = purpose
        self.used = self.peak = 0
        self.seconds_pinning = 0.0
        self._blocks: list[_Block] = []

    @property
    def bytes(self) -> int:
        """Bytes held, in use or not."""
        return sum(block.size for block in self._blocks)

    def missing(self, count: int, size: int) -> int:
        """Slots of `size` bytes that `take` could not cut now, out of `count`."""
        return _missing(self._blocks, count, pages(size))

    def reserve(self, count: int, size: int) -> None:
        """Makes room for `count` slots of `size` bytes beside those that are out, in at most one allocation.

        What is missing is added. Idle blocks too small for one slot are given up first, and all idle blocks where that saves an
        eighth of the memory or keeps within the limit: rows that grow a little every step would leave a trail of odd pieces.
        No copy may be under way from or to a slot that has come back.

        Raises:
            UserError: the limit or the machine does not allow it.
        """
        size = pages(size)
        if not self.missing(count, size):
            return
        useful = [block for block in self._blocks if not block.idle or block.fits(size)]
        busy = [block for block in self._blocks if not block.idle]
        kept, total = useful, _grown(useful, count, size)
        again = _grown(busy, count, size)
        if again * 9 < total * 8 or (self.limit is not None and total > self.limit):
            kept, total = busy, again
        if self.limit is not None and total > self.limit:
            raise UserError(
                f"{self.purpose} need {format_bytes(total)} of host memory",
                found=f"a limit of {format_bytes(self.limit)}",
                do=f"Raise host_memory if the machine has more, {_LESS}",
            )
        for block in self._blocks:
            if block not in kept:
                block.close()
        self._blocks = kept
        began = time.perf_counter()
        self._blocks = [*kept, _Block(total - self.bytes, self.pinned, self.purpose)]
        self.seconds_pinning += time.perf_counter() - began

    def take(self, size: int) -> Slot:
        """A slot of at least `size` bytes (> 0), from memory held or, failing that, by growing.

        Raises:
            UserError: the arena would have to grow and cannot.
        """
        self.reserve(1, size)
        slot = next(slot for block in self._blocks if (slot := block.take(pages(size))))
        self.used += slot.size
        self.peak = max(self.peak, self.used)
        return slot

    def give(self, slot: Slot) -> None:
        """Takes a slot back; its bytes may be handed out again at once.

        Raises:
            RuntimeError: it was given back before.
        """
        slot.block.give(slot)
        if slot.block in self._blocks:  # not one that comes back after `close`
            self.used -= slot.size

    def close(self) -> None:
        """Unpins and lets go of everything. No copy may be under way."""
        for block in self._blocks:
            block.close()
        self._blocks, self.used = [], 0


def pages(size: int) -> int:
    """Bytes of the whole pages that a slot of `size` bytes (> 0) takes."""
    if size <= 0:
        raise ValueError(f"a slot needs at least one byte, got {size}")
    return -(-size // PAGE) * PAGE


def _missing(blocks: list[_Block], count: int, size: int) -> int:
    return max(0, count - sum(block.fits(size) for block in blocks))


def _grown(blocks: list[_Block], count: int, size: int) -> int:
    """Bytes held once `blocks` and one more have room for `count` slots."""
    return sum(block.size for block in blocks) + _missing(blocks, count, size) * size
