"""Runs: many ranges of tokens or slots held as two arrays, so that nothing is ever as long as the row.

A row of 1,048,576 tokens in 10,000 documents over 8 ranks is some ten thousand runs (160 KB); an index of every token is 8 MB
and costs milliseconds to make, so it is made once, by whoever copies with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Runs:
    """Ranges in a fixed order; laid end to end they are what a copy of them looks like.

    Attributes:
        starts: first element of each range.
        lengths: elements of each range.
    """

    starts: Ints
    lengths: Ints

    @property
    def total(self) -> int:
        """Elements of all ranges together."""
        return int(self.lengths.sum())

    @property
    def single(self) -> slice | None:
        """The one range that all of them are, end to end: a view does, nothing is copied. None when they are scattered."""
        if not len(self.starts):
            return slice(0, 0)
        ends = self.starts + self.lengths
        return slice(int(self.starts[0]), int(ends[-1])) if bool((ends[:-1] == self.starts[1:]).all()) else None

    def index(self) -> Ints:
        """Every element, [total]: the index of a copy, for `index_select` and, on the way back, `index_add_`."""
        owner, step = spread(self.lengths)
        return self.starts[owner] + step

    def merged(self) -> Runs:
        """The same elements in the same order, neighbours joined and empty ranges dropped."""
        some = self.lengths > 0
        starts, ends = self.starts[some], (self.starts + self.lengths)[some]
        first = np.ones(len(starts), bool)
        first[1:] = ends[:-1] != starts[1:]
        last = np.ones(len(starts), bool)
        last[:-1] = first[1:]
        return Runs(starts[first], ends[last] - starts[first])

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(start, length) of each range."""
        return iter(zip(self.starts.tolist(), self.lengths.tolist(), strict=True))


def spread(counts: Ints) -> tuple[Ints, Ints]:
    """For `counts[i]` elements belonging to each i: the i of every element, and its number among its own (0, 1, ...)."""
    owner = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    return owner, np.arange(len(owner), dtype=np.int64) - before(counts)[owner]


def before(counts: Ints) -> Ints:
    """Sum of all earlier counts, for each: where each begins when they are laid end to end."""
    return np.cumsum(counts, dtype=np.int64) - counts
