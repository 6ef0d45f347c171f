"""P1 over several ranks for layers whose second half is their own code: loss and every gradient as plain transformers has them.

Two ranks, on which the weights are sharded too: a layer's own forward runs on a rank's tokens, and the attention that it is
answered with has been exchanged. The cases go the way of `test_ranks.py`.
"""

from __future__ import annotations

import pytest

from tests.gloo import run_ranks
from tests.parity.cases import FACTORS, FOUR, TWO, dealt
from tests.parity.own import FAMILIES
from tests.parity.pairwise import cross
from tests.parity.ranks import check

SECONDS = 300
OTHERS = {name: values for name, values in FACTORS.items() if name != "family"}
# Each family where tokens are shared and where heads are, all else by luck: rows, labels, paths, adapters.
SHARED = dealt(cross({"family": tuple(FAMILIES), "mesh": TWO[1:]}), OTHERS, seed=285)


@pytest.mark.timeout(900)
def test_two_ranks() -> None:
    run_ranks(2, [(check, (SHARED,))], seconds=SECONDS)


def test_the_cases_hold_every_kind_of_row_and_layer() -> None:
    for name, values in OTHERS.items():
        assert {case[name] for case in SHARED} == set(values), name


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("path", FACTORS["path"])
@pytest.mark.parametrize("world", [2, 4])
def test_every_family_on_every_kind_of_row_and_layer(world: int, path: str) -> None:
    crossed = cross({"path": (path,), "family": tuple(FAMILIES), "rows": FACTORS["rows"]})
    meshes = TWO if world == 2 else FOUR
    others = {"mesh": meshes} | {name: values for name, values in FACTORS.items() if name not in crossed[0]}
    run_ranks(world, [(check, (dealt(crossed, others),))], seconds=SECONDS, limit=7000)
