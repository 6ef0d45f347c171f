"""Which parts of one long range of bytes are free: the bookkeeping of a block of host memory, and of the file on the disk.

A step at a million tokens takes and gives back some seventy pieces of 0.5 to 9 GB. Rows of another length need pieces of
another size, so free neighbours are merged at once and a piece is cut from the first run that holds it: when everything has
come back, one run is left, whatever the sizes were. The list has as many entries as there are gaps, a handful.
"""

from __future__ import annotations

import bisect


class Runs:
    """The free runs of `size` bytes, in order of address. Not for several threads at once.

    Attributes:
        size: bytes of the whole range, free or taken.
    """

    def __init__(self, size: int = 0) -> None:
        self.size = size
        self._free = [(0, size)] if size else []

    @property
    def idle(self) -> bool:
        """Nothing is taken."""
        return self.free == self.size

    @property
    def free(self) -> int:
        """Bytes that are not taken, in however many runs."""
        return sum(run for _, run in self._free)

    @property
    def tail(self) -> int:
        """Free bytes at the very end, which `grow` would continue."""
        start, run = self._free[-1] if self._free else (0, 0)
        return run if start + run == self.size else 0

    def fits(self, size: int) -> int:
        """How many pieces of `size` bytes could be cut now."""
        return sum(run // size for _, run in self._free)

    def take(self, size: int) -> int | None:
        """Where the first free run of at least `size` bytes begins, cut to size; None where there is none."""
        for number, (start, run) in enumerate(self._free):
            if run >= size:
                self._free[number : number + 1] = [(start + size, run - size)] if run > size else []
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Takes a piece back and merges it with its free neighbours.

        Raises:
            RuntimeError: part of it is free already. Bytes that are handed out twice are overwritten without a word.
        """
        end = start + size
        number = bisect.bisect(self._free, (start, 0))
        before = sum(self._free[number - 1]) if number else 0
        after = self._free[number][0] if number < len(self._free) else self.size
        if before > start or end > after:
            raise RuntimeError(f"bytes {start:,} to {end:,} were given back twice")
        if number < len(self._free) and after == end:
            end += self._free.pop(number)[1]
        if number and before == start:
            number -= 1
            start = self._free.pop(number)[0]
        self._free.insert(number, (start, end - start))

    def grow(self, more: int) -> None:
        """Adds `more` free bytes at the end."""
        self.size += more
        self.give(self.size - more, more)
