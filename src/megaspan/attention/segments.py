"""Segments: many attentions side by side in one kernel call, each over its own queries and keys.

A packed row of 1,048,576 tokens may hold 10,000 documents, and 10,000 launches a layer and head group would take longer than
their arithmetic. Kernels of variable length take all of them in one call, given where each one's queries and keys begin (what
flash-attn calls `cu_seqlens`). The same call serves the pieces of cut documents on many GPUs (`slices.py`), where a segment has
more keys than queries. The numbers lie on the host, where loops and checks read them without waiting for the device, and on
the device, where kernels read them; both are made once a row and used in every layer.

Kernels sum gradients in fp32 in tiles, and each segment begins a tile of its own: a row of documents of 128 tokens takes up to
twice the sums of a row of one document, 9 % of all that a step of the 4B shape holds. A backward may therefore run part by part
(`Segments.parts`), each with no more sums than such a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megaspan.attention.mask import Mask

Lengths = Sequence[int] | npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Segments:
    """Query ranges and their key ranges; each covers its tensor from end to end, in the same order.

    Attributes:
        query_lengths: queries of each segment.
        key_lengths: keys of each segment.
        causal: the queries are the last tokens of their keys and see what is not after them; else they see all their keys.
        query_starts: first query of each segment and the end, [segments + 1] int32 on the device of the tensors.
        key_starts: first key of each segment and the end, likewise.
        longest: queries and keys of the longest segments of the row that these are a part of; None where they are all.
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    causal: bool
    query_starts: Tensor
    key_starts: Tensor
    longest: tuple[int, int] | None = None
    _parts: dict[tuple[int, int], tuple[SegmentsPart, ...]] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(queries: Lengths, keys: Lengths, device: torch.device | str, causal: bool = True) -> Segments:
        """Segments with these numbers of queries and keys.

        Args:
            queries: queries of each segment.
            keys: keys of each segment.
            device: where q, k and v lie. The copy waits for the device: make segments once a row, not in a layer.
            causal: the queries are the last tokens of their keys.

        Raises:
            ValueError: a segment without queries or keys, or with a query that sees no key; more tokens than 32 bits count.
        """
        t, s = (tuple(int(length) for length in lengths) for lengths in (queries, keys))
        if not t or len(t) != len(s):
            raise ValueError(f"{len(t)} ranges of queries, {len(s)} of keys: there must be as many of both, and one at least")
        if min(t) < 1 or min(s) < 1:
            raise ValueError("a segment has at least one query and one key")
        if causal and any(many > few for many, few in zip(t, s, strict=True)):
            raise ValueError("a causal segment with more queries than keys: its first queries would see no key")
        if max(sum(t), sum(s)) >= 2**31:
            raise ValueError(f"{max(sum(t), sum(s)):,} tokens in one call: kernels count them in 32 bits")
        rows, columns = (torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device) for lengths in (t, s))
        return Segments(t, s, causal, rows, columns)

    @staticmethod
    def documents(lengths: Lengths, device: torch.device | str) -> Segments:
        """The documents of a packed row, each causal in itself. See `of`."""
        return Segments.of(lengths, lengths, device)

    def __len__(self) -> int:
        return len(self.query_lengths)

    @cached_property
    def queries(self) -> int:
        """Queries of all segments."""
        return sum(self.query_lengths)

    @cached_property
    def keys(self) -> int:
        """Keys of all segments."""
        return sum(self.key_lengths)

    @cached_property
    def most_queries(self) -> int:
        """Queries of the segment that has most of them: `max_seqlen_q`. Of a part the row's: one kernel is compiled for all."""
        return max(self.query_lengths) if self.longest is None else self.longest[0]

    @cached_property
    def most_keys(self) -> int:
        """Keys of the segment that has most of them: `max_seqlen_k`."""
        return max(self.key_lengths) if self.longest is None else self.longest[1]

    @property
    def plain(self) -> bool:
        """Whether a call without segments does: there is one, and it is causal."""
        return self.causal and len(self) == 1

    def ranges(self) -> Iterator[tuple[slice, slice]]:
        """Queries and keys of each segment, in the tensors."""
        starts = (pairwise(accumulate(lengths, initial=0)) for lengths in (self.query_lengths, self.key_lengths))
        return ((slice(*t), slice(*s)) for t, s in zip(*starts, strict=True))

    def parts(self, padding: int, most: int) -> tuple[SegmentsPart, ...]:
        """Runs of these segments, for calls of their own; one for all of them where that is no more than `most`.

        Made once, on the device: nothing waits for it.

        Args:
            padding: tokens that a kernel adds to each segment.
            most: tokens of a part with these. A segment that alone has more is a part by itself.
        """
        if (padding, most) not in self._parts:
            self._parts[padding, most] = tuple(self._cut(padding, most))
        return self._parts[padding, most]

    def _cut(self, padding: int, most: int) -> Iterator[SegmentsPart]:
        sizes = [max(pair) + padding for pair in zip(self.query_lengths, self.key_lengths, strict=True)]
        if sum(sizes) <= most:
            yield SegmentsPart(self, slice(0, self.queries), slice(0, self.keys))
            return
        # As few as can be, and about equal: a short last part would leave most of the device idle.
        even = min(most, sum(sizes) // -(-sum(sizes) // most) + max(sizes))
        queries, keys = ([0, *accumulate(lengths)] for lengths in (self.query_lengths, self.key_lengths))
        first = size = 0
        for stop, following in enumerate([*sizes[1:], even + 1], 1):
            size += sizes[stop - 1]
            if size + following <= even:
                continue
            rows, columns = (x[first : stop + 1] - x[first] for x in (self.query_starts, self.key_starts))
            t, s = self.query_lengths[first:stop], self.key_lengths[first:stop]
            part = Segments(t, s, self.causal, rows, columns, (self.most_queries, self.most_keys))
            yield SegmentsPart(part, slice(queries[first], queries[stop]), slice(keys[first], keys[stop]))
            first, size = stop, 0

    def visible_pairs(self, window: int | None = None) -> int:
        """Pairs of a query and a key that it sees, exact: what a call's arithmetic is proportional to."""
        t, s = np.array(self.query_lengths, np.int64), np.array(self.key_lengths, np.int64)
        return int(Mask(window).visible_pairs(s - t, s).sum() if self.causal else (t * s).sum())


class SegmentsPart(NamedTuple):
    """Neighbouring segments of a call, for a call of their own.

    Attributes:
        segments: with starts from 0.
        queries: where their queries are in the whole call.
        keys: and their keys.
    """

    segments: Segments
    queries: slice
    keys: slice
