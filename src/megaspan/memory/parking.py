"""Tensors that wait on the disk, and the few slots of host memory through which they go there and come back.

A layer's input of 8.6 GB leaves the device for a slot of pinned memory, and the slot for the disk; in the backward it comes
back the same way. Two layers' slots are enough, 35 GB at a million tokens of an 8B model where the host place would take 618:
while one layer's is read, the next one's is under way. They never become more. When none is free, whoever needs one waits for
the oldest write, which is how a forward keeps to the pace of the disk.

What was written stays in its slot until another tensor needs the slot. So the last layers of a forward, which the backward
wants first, are not read from the disk at all. Slots that are looked at, in this order: one that nobody is in, the one that
lies there longest, and, for a tensor that is needed at once, one whose tensor was called for: that can be read again.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from megaspan.memory.arena import Slot
from megaspan.memory.disk import DiskTier, Parked


class _Berth:
    """A slot and who is in it: `moving` is the disk's last move, `used` the event of the last copy to or from the device."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.tenant: weakref.ref[Away] | None = None
        self.moving: Future[None] | None = None
        self.reading = False
        self.used: Any = None

    @property
    def ready(self) -> Callable[[], None] | None:
        """Waits, on a thread of the disk's, until the device is done with the slot."""
        return None if self.used is None else self.used.synchronize

    def bytes(self, count: int) -> torch.Tensor:
        return self.slot.view((count,), torch.uint8)


class Away:
    """A tensor that waits on the disk: in a slot, on the disk or in both. Forgetting it gives both back.

    Attributes:
        bytes: its size.
    """

    __slots__ = ("__weakref__", "_berth", "_called", "_number", "_parked", "bytes")

    def __init__(self, size: int, number: int) -> None:
        self.bytes, self._number = size, number
        self._called = False
        self._berth: _Berth | None = None
        self._parked: Parked | None = None

    @property
    def slot(self) -> Slot:
        """Where its bytes are in host memory, after `enter` or `bring`."""
        assert self._berth is not None
        return self._berth.slot

    @property
    def used(self) -> Any:
        """The event of the last copy between that slot and the device; a copy into it must wait for it."""
        assert self._berth is not None
        return self._berth.used

    def copying(self, event: Any) -> None:
        """A copy from the slot was queued; `event` comes after it."""
        assert self._berth is not None
        self._berth.used = event


class Parking:
    """Slots in front of a disk.

    Not for several threads at once, like the tier.

    Args:
        tier: the disk.
        most: slots that there may be, at least one.
        take: gives a slot of that many bytes that no copy uses any more.
        give: takes it back.

    Attributes:
        seconds_waiting: time that callers waited for the disk so far.
    """

    def __init__(self, tier: DiskTier, most: int, take: Callable[[int], Slot], give: Callable[[Slot], None]) -> None:
        self.tier, self.most = tier, most
        self._take, self._give = take, give
        self._berths: list[_Berth] = []  # those that were given to a tensor last come last
        self._entered = 0
        self.seconds_waiting = 0.0

    @property
    def host_bytes(self) -> int:
        """Host memory in slots."""
        return sum(berth.slot.size for berth in self._berths)

    def missing(self, size: int) -> int:
        """Slots of that many bytes that are still to be made."""
        return self.most - sum(berth.slot.size >= size for berth in self._berths)

    def reserve(self, size: int) -> None:
        """Makes all slots, for tensors of up to `size` bytes, before the step that needs them."""
        for berth in [berth for berth in self._berths if berth.slot.size < size and self._worth(berth, True) is not None]:
            self._evict(berth)
            self._scrap(berth)
        while len(self._berths) < self.most:
            self._berths.append(_Berth(self._take(size)))

    def enter(self, size: int) -> Away:
        """A tensor of `size` bytes comes: a slot for it, after a wait where all are being written."""
        self._entered += 1
        away = Away(size, self._entered)
        self._settle(away, self._room(size))
        return away

    def write(self, away: Away, copied: Any) -> None:
        """Queues the way to the disk; the bytes are in the slot at the event `copied`.

        Raises:
            UserError: there is no place on the disk, or an earlier write failed.
        """
        berth = away._berth
        assert berth is not None
        berth.used = copied
        away._parked = self.tier.park(berth.bytes(away.bytes), berth.ready)
        berth.moving, berth.reading = away._parked.stored(), False

    def call(self, away: Away) -> None:
        """Starts the way back into a slot, if one is there that nobody needs sooner.

        Raises:
            UserError: an earlier write failed.
        """
        away._called = True
        if away._berth is None and (berth := self._vacant(away.bytes, at_once=False)) is not None:
            self._read(away, berth)

    def bring(self, away: Away) -> None:
        """Returns when the bytes are in a slot.

        Raises:
            UserError: the disk failed, or gave back other bytes.
        """
        away._called = True
        if away._berth is None:
            self._read(away, self._room(away.bytes))
        berth = away._berth
        assert berth is not None
        if berth.reading and berth.moving is not None:
            self._wait(berth.moving)
            berth.moving.result()

    def let_go(self, away: Away) -> None:
        """The tensor is not needed any more; a write that has not begun is left out."""
        if away._parked is not None:
            self.tier.drop(away._parked)
        if away._berth is not None:
            away._berth.tenant, away._berth = None, None

    def close(self) -> None:
        """Waits until no thread touches a slot. What is inside must have been let go of."""
        for berth in self._berths:
            if berth.moving is not None:
                berth.moving.exception()
        self._berths = []

    def _room(self, size: int) -> _Berth:
        """A slot, whatever it takes."""
        while True:
            moving = [berth.moving for berth in self._berths if berth.moving is not None and not berth.moving.done()]
            if (berth := self._vacant(size, at_once=True)) is not None:
                return berth
            if not moving:  # looked at first, since moves end at any time
                raise RuntimeError("every slot holds a tensor that never went to the disk: its step must be discarded first")
            self._wait(moving[0])

    def _vacant(self, size: int, *, at_once: bool) -> _Berth | None:
        """A slot that can be had now, emptied; a new one rather than one in which something lies."""
        worth = {berth: found for berth in self._berths if (found := self._worth(berth, at_once)) is not None}
        berth = min(worth, key=lambda berth: worth[berth], default=None)
        if (berth is None or worth[berth] > (0, 0)) and len(self._berths) < self.most:
            self._berths.append(berth := _Berth(self._take(size)))
        elif berth is not None:
            self._evict(berth)
            if berth.slot.size < size:
                self._scrap(berth)
                self._berths.append(berth := _Berth(self._take(size)))
        return berth

    def _worth(self, berth: _Berth, at_once: bool) -> tuple[int, int] | None:
        """What is lost with what lies in a slot, nothing is least; None where it cannot be had."""
        if berth.moving is not None and not berth.moving.done():
            return None
        away = None if berth.tenant is None else berth.tenant()
        if away is None:
            return 0, 0
        if berth.moving is not None:
            berth.moving.result()  # a write that failed: its bytes are nowhere else
        if away._parked is None or (away._called and not at_once):
            return None
        return 1 + away._called, away._number

    def _evict(self, berth: _Berth) -> None:
        away = None if berth.tenant is None else berth.tenant()
        if away is not None:
            away._berth = None
        berth.tenant = berth.moving = None

    def _scrap(self, berth: _Berth) -> None:
        self._berths.remove(berth)
        self._give(berth.slot)

    def _settle(self, away: Away, berth: _Berth) -> None:
        away._berth, berth.tenant = berth, weakref.ref(away)
        self._berths.remove(berth)
        self._berths.append(berth)

    def _read(self, away: Away, berth: _Berth) -> None:
        assert away._parked is not None
        berth.moving, berth.reading = self.tier.recall(away._parked, berth.bytes(away.bytes), berth.ready), True
        self._settle(away, berth)

    def _wait(self, moving: Future[None]) -> None:
        began = time.perf_counter()
        moving.exception()
        self.seconds_waiting += time.perf_counter() - began
