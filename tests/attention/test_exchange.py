"""Who sends what to whom: halos, the gather, and one decision on all ranks."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.attention.exchange import Pool
from megaspan.attention.layout import lay_out
from megaspan.attention.mask import Mask
from megaspan.attention.runs import Runs, before, spread
from megaspan.attention.work import Work
from tests.attention.rows import documents, masks, visible

MILLION = 2**20
FULL = Mask()


def exchanges(layout, mask):
    return [Pool(layout, mask, rank).exchange for rank in range(layout.cp_size)]


@settings(deadline=None, max_examples=200)
@given(documents(), st.integers(1, 8), masks())
def test_a_rank_needs_the_keys_that_its_queries_see_and_others_hold(lengths, cp, mask):
    layout, seen = lay_out(lengths, cp, work=Work({mask: 1}, 0)), visible(lengths, mask)
    plans = exchanges(layout, mask)
    for rank, plan in enumerate(plans):
        mine = layout.token_index(rank)
        mine = mine[mine >= 0]
        # A call reads its keys from the first to the last: in a window all that its first query sees and what follows.
        wanted = set(np.flatnonzero(seen[mine].any(0)).tolist()) - set(mine.tolist())
        assert plan.needed[rank] == len(wanted)
        assert plan.needed == plans[0].needed
        assert plan.gathered == plans[0].gathered
        assert plan.silent == plans[0].silent
        for other, there in enumerate(plans):
            assert plan.send_tokens[other] == there.receive_tokens[rank]
        if not plan.gathered:
            assert sum(plan.receive_tokens) == len(wanted)
            assert plan.receive_tokens[rank] == 0


def test_a_window_fetches_its_halo_and_no_more():
    layout = lay_out([MILLION], 8, work=Work({FULL: 6, Mask(window=1024): 30}))
    for rank, plan in enumerate(exchanges(layout, Mask(window=1024))):
        assert plan.gathered == 0
        assert sum(plan.receive_tokens) == (
            1023 if rank in (0, 7) else 2 * 1023
        )  # the row's start and the last rank's one piece


def test_a_halo_may_span_several_ranks():
    layout = lay_out([800], 4)  # chunks of 100
    plan = exchanges(layout, Mask(window=151))[2]  # pieces 200-300 and 500-600, needs 50-200 and 350-500
    assert plan.receive_tokens == (50, 100, 0, 150)


def test_all_is_gathered_where_a_window_needs_most_of_it():
    layout = lay_out([800], 4)
    assert [plan.gathered for plan in exchanges(layout, Mask(window=151))] == [0] * 4
    assert [plan.gathered for plan in exchanges(layout, Mask(window=600))] == [200] * 4
    assert [plan.gathered for plan in exchanges(layout, FULL)] == [200] * 4


def test_only_cut_documents_are_gathered():
    layout = lay_out([100_000, *[1000] * 64], 8)
    (gathered,) = {plan.gathered for plan in exchanges(layout, FULL)}
    assert gathered == 12_500 < layout.shard_tokens == 20_500


def test_whole_documents_need_no_word():
    for mask in (FULL, Mask(window=5)):
        assert all(plan.silent for plan in exchanges(lay_out([64] * 32, 4), mask))
    assert not any(plan.silent for plan in exchanges(lay_out([64] * 31, 4), FULL))


def test_runs():
    runs = Runs(np.array([3, 5, 9, 9]), np.array([2, 1, 0, 2]))
    assert runs.total == 5
    assert runs.index().tolist() == [3, 4, 5, 9, 10]
    assert list(runs.merged()) == [(3, 3), (9, 2)]
    assert runs.single is None
    assert Runs(np.array([3, 5]), np.array([2, 1])).single == slice(3, 6)
    nothing = Runs(np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert (nothing.single, nothing.total, len(nothing.merged())) == (slice(0, 0), 0, 0)
    assert [x.tolist() for x in spread(np.array([2, 0, 1]))] == [[0, 0, 2], [0, 1, 0]]
    assert before(np.array([2, 0, 1])).tolist() == [0, 2, 2]
