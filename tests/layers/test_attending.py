"""What hides the exchange between ranks: the order in which head groups are begun, attended and given, without any rank.

Loss and gradients are the same in any order, so no comparison of numbers would notice. Of a cp step of the 4B shape at 131,072
tokens 0.4 % is communication that nothing hides; with each group begun when it is attended it would be all of it.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaspan.layers.attending import attended, one_ahead

GROUPS = 3
CP = SimpleNamespace(exchanges=True, ranks=SimpleNamespace(sp=None))
SP = SimpleNamespace(exchanges=False, ranks=SimpleNamespace(sp=object()))
BOTH = SimpleNamespace(exchanges=True, ranks=SimpleNamespace(sp=object()))
WHOLE_DOCUMENTS = SimpleNamespace(exchanges=False, ranks=SimpleNamespace(sp=None))  # cp, and every rank has its own
NAMES = {"cp": CP, "sp": SP, "cp and sp": BOTH, "whole documents": WHOLE_DOCUMENTS, "one rank": None}


class Group:
    """A head group as `Attending` is one: it notes what becomes of it."""

    def __init__(self, number: int, said: list[str]) -> None:
        self.number, self.said = number, said
        said.append(f"begin {number}")

    def arrive(self) -> None:
        self.said.append(f"arrive {self.number}")

    def forward(self) -> tuple[Any, torch.Tensor]:
        self.said.append(f"attend {self.number}")
        number, said = self.number, self.said

        def land() -> torch.Tensor:
            said.append(f"land {number}")
            return torch.tensor(number)

        return SimpleNamespace(land=land), torch.tensor(10 * number)


class Begun:
    """Begins groups; how many of them live when the next one is begun is kept in `beside`."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.beside: list[int] = []
        self._alive: weakref.WeakSet[Group] = weakref.WeakSet()

    def __call__(self, number: int) -> Any:
        self.beside.append(len(self._alive))
        group = Group(number, self.said)
        self._alive.add(group)
        return group


AHEAD = ["begin 0", "begin 1", "attend 0", "begin 2", "attend 1", "attend 2"]
IN_TURN = ["begin 0", "attend 0", "begin 1", "attend 1", "begin 2", "attend 2"]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("cp", AHEAD), ("sp", AHEAD), ("cp and sp", AHEAD), ("whole documents", IN_TURN), ("one rank", IN_TURN)],
)
def test_a_group_is_begun_before_the_one_before_it_is_attended_where_something_travels(name: str, wanted: list[str]) -> None:
    begin = Begun()
    for number, now in one_ahead(GROUPS, begin, NAMES[name]):
        assert now.number == number  # type: ignore[attr-defined]
        now.forward()
        del now
    assert begin.said == wanted


# An output that goes to its tokens' ranks is read when the next group has been attended; one that is here, at once.
LATE = ["attend 0", "attend 1", "land 0", "given 0", "attend 2", "land 1", "given 1", "land 2", "given 2"]
AT_ONCE = ["attend 0", "land 0", "given 0", "attend 1", "land 1", "given 1", "attend 2", "land 2", "given 2"]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("cp", AT_ONCE), ("sp", LATE), ("cp and sp", LATE), ("whole documents", AT_ONCE), ("one rank", AT_ONCE)],
)
def test_an_output_of_sp_is_given_one_group_late_and_any_other_at_once(name: str, wanted: list[str]) -> None:
    begin = Begun()
    ready = begin.said.append
    for number, (out, lse) in enumerate(attended(GROUPS, begin, NAMES[name], lambda number: ready(f"ready {number}"))):
        assert (int(out), int(lse)) == (number, 10 * number)
        begin.said.append(f"given {number}")
    assert [each for each in begin.said if not each.startswith(("begin", "ready"))] == wanted
    for number in range(GROUPS):  # called between the two
        assert begin.said.index(f"ready {number}") == begin.said.index(f"attend {number}") - 1


def test_with_ahead_a_group_is_begun_before_on_one_rank_too() -> None:
    begin = Begun()
    for _, now in one_ahead(GROUPS, begin, None, True):
        now.forward()
    assert begin.said == AHEAD
    begin = Begun()
    list(attended(GROUPS, begin, None, lambda number: None, True))
    assert [each for each in begin.said if not each.startswith("land")] == AHEAD


@pytest.mark.parametrize("fails_at", range(GROUPS))
def test_what_is_being_made_is_waited_for_where_somebody_fails(fails_at: int) -> None:
    """Its memory goes when the iteration does; the last group has none after it."""
    begin = Begun()
    with pytest.raises(ZeroDivisionError):
        _fails(one_ahead(GROUPS, begin, None, True), fails_at)
    assert [each for each in begin.said if each.startswith("arrive")] == ["arrive 0", "arrive 1", "arrive 2"][fails_at:][:2]


@pytest.mark.parametrize("fails_at", range(1, GROUPS))
def test_a_group_that_is_being_made_is_waited_for_where_the_next_one_cannot_be_begun(fails_at: int) -> None:
    """Out of memory is found there: of the first group the output would still be on its way into memory that is free."""
    begin = Begun()

    def begins(number: int) -> Any:
        if number == fails_at:
            raise ZeroDivisionError
        return begin(number)

    with pytest.raises(ZeroDivisionError):
        for _ in one_ahead(GROUPS, begins, None, True):
            pass
    assert begin.said[-1] == f"arrive {fails_at - 1}"


def _fails(groups: Any, at: int) -> None:
    for number, _ in groups:
        if number == at:
            raise ZeroDivisionError


@pytest.mark.parametrize("name", NAMES)
def test_a_group_is_let_go_of_before_the_next_one_is_asked_for(name: str) -> None:
    """Two groups at most where one is begun ahead, one elsewhere: of Qwen3-8B at 1,048,576 tokens 0.5 GB each."""
    most = 1 if NAMES[name] is not None and NAMES[name] is not WHOLE_DOCUMENTS else 0
    begin = Begun()
    for _, now in one_ahead(4, begin, NAMES[name]):
        now.forward()
        del now
    assert begin.beside == [min(number, most) for number in range(4)]
    begin = Begun()
    for out, lse in attended(4, begin, NAMES[name], lambda _: None):
        del out, lse
    assert begin.beside == [min(number, most) for number in range(4)]
