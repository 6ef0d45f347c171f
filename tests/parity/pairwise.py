"""Tables of cases in which every pair of settings meets at least once.

Six settings of two to six values have hundreds of combinations; most faults of such a cross need two of them at once, and a
table of all pairs has two dozen rows. Greedy: each new row takes, setting by setting, the value that covers most open pairs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def cross(factors: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Every combination."""
    return [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]


def pairwise(
    factors: Mapping[str, Sequence[Any]],
    seed: int = 0,
    possible: Callable[[Case], bool] = lambda case: True,
    begun: Sequence[Case] = (),
) -> list[Case]:
    """Combinations that hold every pair of values of every two settings; the same ones for the same seed.

    Args:
        factors: the values of each setting.
        seed: of the order in which pairs are taken up.
        possible: whether a case, or a part of one, can be. What it refuses of a pair is left out; every other pair must have a
            case.
        begun: cases of which some settings are wished for, values that `factors` lacks among them; the first of the table.
    """
    generator = random.Random(seed)
    names = list(factors)
    open_pairs = {
        frozenset([(a, x), (b, y)]) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]
    }
    open_pairs = {pair for pair in open_pairs if possible(dict(pair))}
    table: list[Case] = []
    while open_pairs or len(table) < len(begun):
        if len(table) < len(begun):
            case = dict(begun[len(table)])
        else:
            case = dict(generator.choice(sorted(map(sorted, open_pairs), key=repr)))
        for name in sorted((name for name in names if name not in case), key=lambda name: -len(factors[name])):
            values = [value for value in factors[name] if possible(case | {name: value})]
            generator.shuffle(values)
            case[name] = max(values, key=lambda value: sum(_pair(name, value, item) in open_pairs for item in case.items()))
        open_pairs -= {frozenset(pair) for pair in itertools.combinations(case.items(), 2)}
        table.append({name: case[name] for name in names})
    return table


def _pair(name: str, value: Any, item: tuple[str, Any]) -> frozenset[tuple[str, Any]]:
    return frozenset([(name, value), item])


def name_of(case: Case) -> str:
    """A readable test id."""
    return "-".join(f"{name}={value}" if isinstance(value, bool | int) else str(value) for name, value in case.items())
