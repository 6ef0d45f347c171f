"""Bisection over whole numbers."""

from __future__ import annotations

from collections.abc import Callable

LONGEST = 1 << 27  # tokens; no plan looks further


def largest(top: int, holds: Callable[[int], bool]) -> int:
    """The largest number of 0 … top for which `holds`, given that it holds from 0 up to some number."""
    if holds(top):
        return top
    low, high = 0, top - 1 if top else 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
