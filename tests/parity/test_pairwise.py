"""The table of pairs holds every pair."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from tests.parity.pairwise import cross, name_of, pairwise


@given(sizes=st.lists(st.integers(1, 5), min_size=2, max_size=5), seed=st.integers(0, 100))
def test_every_pair_is_there_and_nothing_else(sizes: list[int], seed: int) -> None:
    factors = {f"f{index}": range(size) for index, size in enumerate(sizes)}
    table = pairwise(factors, seed)
    for a, b in itertools.combinations(factors, 2):
        assert {(case[a], case[b]) for case in table} == set(itertools.product(factors[a], factors[b]))
    assert all(case.keys() == factors.keys() for case in table)
    largest = math.prod(sorted(sizes)[-2:])
    assert largest <= len(table) <= min(math.prod(sizes), 2 * largest + 4)
    assert table == pairwise(factors, seed)


def test_cases_that_are_begun_come_first_and_count_as_any_other() -> None:
    factors = {"a": (1, 2, 3), "b": (True, False), "c": (1, 2)}
    begun = [{"a": 1, "b": True}, {"a": 9}]
    table = pairwise(factors, begun=begun)
    assert [case | wish for case, wish in zip(table, begun, strict=False)] == table[:2]
    assert all(case.keys() == factors.keys() for case in table)
    for a, b in itertools.combinations(factors, 2):
        assert {(case[a], case[b]) for case in table} >= set(itertools.product(factors[a], factors[b]))
    assert len(pairwise(factors, begun=[{"a": 9}] * 20)) >= 20


def test_the_cross_is_every_case_once() -> None:
    cases = cross({"a": (1, 2, 3), "b": (True, False)})
    assert len({name_of(case) for case in cases}) == 6
    assert name_of(cases[0]) == "a=1-b=True"
