"""The kernel calls of one rank for one kind of layer: at most three, however many documents a row has.

A row of 10,000 documents must not become 10,000 launches a layer and head group. Kernels of variable length take many
segments in one call (`cu_seqlens`), if the queries of the segments are neighbours and so are their keys. Queries are
neighbours by the order of a shard. Whole documents are squares on local keys: one call, nothing copied, and it needs nobody,
so it comes first and hides the exchange. The front and back chunks of cut documents each read a prefix (or a window, or a
chunk) of their document: one call each, since both read the same keys. Their keys are copied side by side out of the pool by
one index: what bringing gathered shards into the order of the row costs anyway (0.5 GB a head group of Qwen3-8B at 1,048,576
tokens, beside 140 TFLOP of attention on each of 8 ranks). In a full causal layer a front's keys are the beginning of its
back's, and are there once: with one cut document as a view, with more they are copied out of the backs' when those have been
read, so that they are never beside the sums of a backward.

Every segment's queries are the last tokens of its keys (bottom-right causal) and see at least themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megaspan.attention.exchange import Exchange, Pool
from megaspan.attention.layout import TokenLayout
from megaspan.attention.mask import Mask
from megaspan.attention.placement import BACK, FRONT, WHOLE
from megaspan.attention.runs import Ints, Runs, before


@dataclass(frozen=True, eq=False)
class Call:
    """One kernel call of causal attention with variable lengths; a plain call when there is one segment.

    Attributes:
        queries: local slots of the queries, all segments side by side; outputs have the same place.
        local: keys are the rank's own shard and `keys` its slots; else `keys` points into the copied keys.
        keys: where the keys are, all segments side by side.
        among: which of the copied keys they are, where they do not lie side by side; `keys` is their whole number then.
        query_lengths: queries of each segment, the last tokens of its keys.
        key_lengths: keys of each segment.
        window: keys a query sees including itself, None for all of its segment.
    """

    queries: slice
    local: bool
    keys: slice
    query_lengths: Ints
    key_lengths: Ints
    window: int | None
    among: Runs | None = None

    def visible_pairs(self) -> int:
        """Pairs of a query and a key it sees, exact: what the call's arithmetic is proportional to."""
        return int(Mask(window=self.window).visible_pairs(self.key_lengths - self.query_lengths, self.key_lengths).sum())


@dataclass(frozen=True, eq=False)
class Slices:
    """All that one rank does in the attention of one kind of layer.

    Attributes:
        calls: at most three, calls on local keys first; they cover each of the rank's tokens once as a query.
        keys: slots of the pool, in the order in which they are copied to become the keys of the calls that are not local.
        exchange: how the pool is filled.
    """

    calls: tuple[Call, ...]
    keys: Runs
    exchange: Exchange


def plan_slices(layout: TokenLayout, mask: Mask, rank: int) -> Slices:
    """The calls of a rank in layers with this mask, the copies that they need and the exchange before them."""
    pool = Pool(layout, mask, rank)
    parts = {part: _segments(layout, mask, rank, part) for part in (WHOLE, FRONT, BACK)}
    calls, copied, offset = {}, [], 0
    back = parts[BACK]
    for part in (WHOLE, BACK, FRONT):
        segments = parts[part]
        if not len(segments.first_key):
            continue
        keys = int((segments.stop - segments.first_key).sum())
        start, among = offset, None
        if part == WHOLE:
            start = segments.queries.start
        elif part == FRONT and (inside := _inside(segments, back)).any():
            others = ~inside
            copied.append(pool.runs(segments.first_key[others], segments.stop[others]))
            among = _among(segments, back, inside, offset)
            start, among = (0, among) if among.single is None else (among.single.start, None)
        else:
            copied.append(pool.runs(segments.first_key, segments.stop))
            offset += keys
        calls[part] = _call(segments, mask, part == WHOLE, slice(start, start + keys), among)
    empty = np.zeros(0, np.int64)
    keys_of_calls = Runs(
        np.concatenate([empty, *(runs.starts for runs in copied)]), np.concatenate([empty, *(runs.lengths for runs in copied)])
    )
    return Slices(tuple(calls[part] for part in sorted(calls, reverse=True)), keys_of_calls.merged(), pool.exchange)


class _Segments(NamedTuple):
    """One part of a rank's shard, cut into segments; tokens of the row."""

    queries: slice  # slots
    start: Ints
    stop: Ints
    first_key: Ints


def _segments(layout: TokenLayout, mask: Mask, rank: int, part: int) -> _Segments:
    mine = layout.of_rank(rank)
    of_part = layout.pieces.part[mine] == part
    pieces, slots = layout.pieces[mine][of_part], layout.slots[mine][of_part]
    first_slot = int(slots[0]) if len(slots) else 0
    queries = slice(first_slot, first_slot + int((pieces.stop - pieces.start).sum()))
    segments = mask.segments(pieces.start, pieces.stop)
    opens = layout.opens[pieces.document][segments.piece]
    return _Segments(queries, opens + segments.start, opens + segments.stop, opens + segments.first_key)


def _inside(front: _Segments, back: _Segments) -> np.ndarray:
    """Which segments of the front call have all their keys among those of one segment of the back call, bool [segments]."""
    if not len(back.first_key):
        return np.zeros(len(front.first_key), bool)
    place = _host(front, back)
    return (place >= 0) & (front.stop <= back.stop[place])


def _host(front: _Segments, back: _Segments) -> Ints:
    """For each front segment the last back segment that begins no later: both are in the order of the row."""
    return np.searchsorted(back.first_key, front.first_key, side="right") - 1


def _among(front: _Segments, back: _Segments, inside: np.ndarray, offset: int) -> Runs:
    """Where the front call's keys are among the copied ones: in the backs', or behind all of them (from `offset`)."""
    lengths, starts = front.stop - front.first_key, np.zeros_like(front.stop)
    place = _host(front, back)[inside]
    starts[inside] = before(back.stop - back.first_key)[place] + front.first_key[inside] - back.first_key[place]
    starts[~inside] = offset + before(lengths[~inside])
    return Runs(starts, lengths).merged()


def _call(segments: _Segments, mask: Mask, local: bool, keys: slice, among: Runs | None) -> Call:
    key_lengths = segments.stop - segments.first_key
    # A kernel with a window is slower than one without, and where no segment is longer the two are the same.
    window = None if mask.window is None or int(key_lengths.max()) <= mask.window else mask.window
    return Call(segments.queries, local, keys, segments.stop - segments.start, key_lengths, window, among)
