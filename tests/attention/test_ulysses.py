"""Which heads an sp rank works on, and which degrees there are."""

from __future__ import annotations

import pytest

from megaspan.attention.ulysses import HeadSplit
from megaspan.config.parallel import legal_sp
from megaspan.human import UserError


@pytest.mark.parametrize(
    ("heads", "kv_heads", "legal"),
    [
        (8, 2, (1, 2, 4, 8)), (28, 4, (1, 2, 4, 28)), (12, 12, (1, 2, 3, 4, 6, 12)), (32, 8, (1, 2, 4, 8, 16, 32)),
        (40, 8, (1, 2, 4, 8, 40)), (9, 3, (1, 3, 9)), (7, 1, (1, 7)),
    ],
)  # fmt: skip
def test_legal_sizes(heads, kv_heads, legal):
    assert legal_sp(heads, kv_heads) == legal


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (28, 4), (12, 12), (32, 8), (40, 8), (9, 3), (7, 1)])
def test_every_query_head_is_worked_on_once_with_its_kv_head(heads, kv_heads):
    for sp in legal_sp(heads, kv_heads):
        split, done = HeadSplit(heads, kv_heads, sp), []
        for rank in range(sp):
            for round in range(split.rounds):
                query_heads = split.query_heads(rank, round)
                assert len(query_heads) == heads // sp // split.rounds
                assert {head // (heads // kv_heads) for head in query_heads} == {split.kv_head(rank, round)}
                done += query_heads
        assert sorted(done) == list(range(heads))
        assert split.rounds * sp == kv_heads * split.replicas


def test_kv_heads_are_shared_when_ranks_are_more():
    split = HeadSplit(8, 2, 4)
    assert (split.rounds, split.replicas) == (1, 2)
    assert [split.kv_head(rank, 0) for rank in range(4)] == [0, 0, 1, 1]
    assert [split.sharers(rank) for rank in range(4)] == [range(0, 2), range(0, 2), range(2, 4), range(2, 4)]
    assert [HeadSplit(8, 4, 2).kv_head(1, round) for round in range(2)] == [2, 3]
    assert HeadSplit(8, 4, 2).sharers(1) == range(1, 2)


@pytest.mark.parametrize(("heads", "kv_heads", "sp"), [(28, 4, 8), (40, 8, 16), (12, 12, 8), (28, 4, 7), (8, 2, 0)])
def test_other_sizes_are_refused_with_the_legal_ones_and_the_alternative(heads, kv_heads, sp):
    with pytest.raises(UserError) as error:
        HeadSplit(heads, kv_heads, sp)
    assert f"allowed: {', '.join(map(str, legal_sp(heads, kv_heads)))}" in str(error.value)
    assert "cp_size" in str(error.value)


def test_two_models_in_one_process_do_not_mix():
    first, second = HeadSplit(12, 12, 4), HeadSplit(8, 2, 4)
    assert [len(first.query_heads(rank, 0)) * first.rounds for rank in range(4)] == [3] * 4
    assert [len(second.query_heads(rank, 0)) for rank in range(4)] == [2] * 4
