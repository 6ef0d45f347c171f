"""Which keys a token sees, as arithmetic: causal inside its document, at most a window or a chunk of it.

A mask of 1,048,576 tokens squared is 1 TiB of booleans; here it is one function, the first key that a position sees, and sums
over it. All else (segments for kernels, what a rank fetches, how many products a rank computes) follows from that function.
Windows count the token itself, as transformers' `sliding_window` does. Chunks (Llama 4's `attention_chunk_size`) are counted
from the start of the document, so that a packed document trains as it would alone; plain transformers counts them from the
start of the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megaspan.attention.runs import Ints, spread


class Segments(NamedTuple):
    """Query ranges, each with the keys its kernel call reads: `first_key` up to the last query. Positions in the document.

    Attributes:
        piece: which of the given pieces each segment is a part of.
        start: first query.
        stop: end of the queries, and of the keys.
        first_key: first key.
    """

    piece: Ints
    start: Ints
    stop: Ints
    first_key: Ints


@dataclass(frozen=True)
class Mask:
    """One kind of attention layer.

    Attributes:
        window: keys a token sees including itself, None for all earlier ones.
        chunk: tokens of a chunk; a token sees its own chunk up to itself. None for no chunks.
    """

    window: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.chunk is not None:
            raise ValueError("a layer has a window or chunks, not both")
        for size in (self.window, self.chunk):
            if size is not None and size < 1:
                raise ValueError(f"a window or chunk holds at least one token, not {size}")

    def first_key(self, position: Ints) -> Ints:
        """The first key that the token at each position sees; never falls as positions rise."""
        if self.window is not None:
            return np.maximum(position - (self.window - 1), 0)
        if self.chunk is not None:
            return position - position % self.chunk
        return np.zeros_like(position)

    def visible_pairs(self, start: Ints, stop: Ints) -> Ints:
        """Pairs of a query in `start` to `stop` and a key it sees, exact."""
        return self._pairs_before(stop) - self._pairs_before(start)

    def _pairs_before(self, tokens: Ints) -> Ints:
        if self.window is not None:
            short = np.minimum(tokens, self.window)
            return _triangle(short) + (tokens - short) * self.window
        if self.chunk is not None:
            chunks, rest = np.divmod(tokens, self.chunk)
            return chunks * (self.chunk * (self.chunk + 1) // 2) + _triangle(rest)
        return _triangle(tokens)

    def segments(self, start: Ints, stop: Ints) -> Segments:
        """Query ranges cut so that each is the causal suffix of one range of keys (with the window, if there is one).

        Args:
            start: first position of each piece, in its document.
            stop: its end; no piece is empty.
        """
        if self.chunk is None:
            return Segments(np.arange(len(start), dtype=np.int64), start, stop, self.first_key(start))
        first = start // self.chunk
        piece, step = spread((stop - 1) // self.chunk - first + 1)
        first_key = (first[piece] + step) * self.chunk
        return Segments(piece, np.maximum(start[piece], first_key), np.minimum(stop[piece], first_key + self.chunk), first_key)


def _triangle(n: Ints) -> Ints:
    return n * (n + 1) // 2
