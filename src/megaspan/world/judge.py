"""Which rank holds up the others: pure judgement over what each was last seen at.

All ranks pass the same beats in the same order, and a rank that is ahead soon waits in a collective for the one behind. So a
hang is when nobody moves, and the rank to blame is the one that is behind. At equal places it is the ranks that are not inside
a collective; when all are, all are named. While any rank moves, nobody is blamed: what one rank has written of the other may
be half a second old.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megaspan.human import format_seconds


@dataclass(frozen=True)
class Seen:
    """What is known of a rank.

    Attributes:
        count: beats that it has passed.
        phase: the last of them, in words.
        patience: seconds that this phase is expected to last; None is any time.
        silent: seconds since it passed a beat.
        absent: seconds since its watching thread wrote something; grows only when the process or its machine stands still.
        where: the line of code that its main thread is at, where that is known.
        waits: whether that line is inside a collective.
    """

    count: int
    phase: str
    patience: float | None
    silent: float
    absent: float = 0.0
    where: str = ""
    waits: bool = False


def culprits(seen: Mapping[int, Seen], least: float, factor: float) -> list[int]:
    """The ranks that the others wait for, or none while everybody may still be at work.

    Args:
        seen: what is known of each rank that has not ended.
        least: seconds of stillness that say nothing.
        factor: how many times longer than expected a phase may last.
    """
    if not seen:
        return []
    if gone := [rank for rank, each in seen.items() if each.absent > least]:
        return gone
    behind = min(each.count for each in seen.values())
    last = {rank: each for rank, each in seen.items() if each.count == behind}
    still = min(each.silent for each in seen.values())
    if any(each.patience is None or still <= max(least, factor * each.patience) for each in last.values()):
        return []
    return [rank for rank, each in last.items() if not each.waits] or list(last)


def sentence(ranks: list[int], seen: Mapping[int, Seen], gone: Iterable[int] = ()) -> str:
    """Names those ranks, what each is in and for how long, and the ranks that have ended while others have not."""
    told = [_told(rank, seen[rank]) for rank in ranks[:4]] + ["…"] * (len(ranks) > 4)
    waiting = len(seen) - len(ranks)
    others = (
        "; the others wait"
        if waiting > 1
        else "; the other rank waits"
        if waiting
        else ""
        if len(ranks) == 1
        else "; nobody moves"
    )
    ended = ", ".join(map(str, sorted(gone)))
    return "; ".join(told) + others + (f"; rank {ended} has ended already" if ended else "")


def _told(rank: int, seen: Seen) -> str:
    if seen.absent > seen.silent / 2 and seen.absent > 5:
        return f"rank {rank} answers no more since {format_seconds(seen.absent)}, last in {seen.phase!r}"
    at = f" at {seen.where}" if seen.where else ""
    inside = " inside a collective" if seen.waits else ""
    return f"rank {rank} has been in {seen.phase!r} for {format_seconds(seen.silent)}{inside}{at}"
