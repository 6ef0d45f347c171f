"""Kernel calls of all ranks against the mask by definition, and one training step of attention through them."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megaspan.attention.kernel import Scoring
from megaspan.attention.layout import TokenLayout, lay_out
from megaspan.attention.mask import Mask
from megaspan.attention.placement import contiguous
from megaspan.attention.slices import Call, Slices, plan_slices
from megaspan.attention.tiled import TiledMath
from megaspan.attention.work import Work
from tests.attention.rows import documents, masks, packings, pools, visible

FULL = Mask()
MILLION = 2**20


def plans_of(layout: TokenLayout, mask: Mask) -> list[Slices]:
    return [plan_slices(layout, mask, rank) for rank in range(layout.cp_size)]


def segments(call: Call):
    """(queries, keys) of each segment, as ranges inside the call."""
    queries, keys = (np.cumsum([0, *lengths]) for lengths in (call.query_lengths, call.key_lengths))
    assert queries[-1] == call.queries.stop - call.queries.start
    assert keys[-1] == call.keys.stop - call.keys.start
    for n in range(len(call.query_lengths)):
        yield range(queries[n], queries[n + 1]), range(keys[n], keys[n + 1])


def check_against(layout: TokenLayout, mask: Mask) -> None:
    lengths, plans = layout.lengths.tolist(), plans_of(layout, mask)
    tokens = [layout.token_index(rank) for rank in range(layout.cp_size)]
    found = np.zeros((layout.tokens, layout.tokens), int)
    for rank, (plan, pool) in enumerate(zip(plans, pools(layout, plans, tokens), strict=True)):
        assert len(plan.calls) <= 3
        assert len(pool) == plan.exchange.pool_tokens
        copied, pairs = pool[plan.keys.index()], 0
        if plan.keys.single is not None:
            assert (pool[plan.keys.single] == copied).all()
        for call in plan.calls:
            before = found.sum()
            query_tokens = tokens[rank][call.queries]
            held = tokens[rank] if call.local else copied if call.among is None else copied[call.among.index()]
            assert call.among is None or call is plan.calls[-1]
            key_tokens = held[call.keys]
            assert (query_tokens >= 0).all()  # no padding
            assert (key_tokens >= 0).all()
            for queries, keys in segments(call):
                assert len(keys) >= len(queries) > 0
                for n, query in enumerate(query_tokens[queries.start : queries.stop]):
                    last = len(keys) - len(queries) + n
                    first = max(0, last - call.window + 1) if call.window else 0
                    assert key_tokens[keys.start + last] == query  # a query sees itself last
                    np.add.at(found[query], key_tokens[keys.start + first : keys.start + last + 1], 1)
            assert call.visible_pairs() == found.sum() - before
            pairs += call.visible_pairs()
        assert pairs == layout.visible_pairs(mask)[rank]
    assert (found == visible(lengths, mask)).all()  # every visible pair once, no other


@settings(deadline=None, max_examples=300)
@given(documents(), st.integers(1, 8), masks())
@example([64], 4, Mask(window=8))
@example([7], 2, FULL)
@example([70, 3, 1], 4, FULL)  # a tail that fills no chunk
@example([30, 10, 1], 2, FULL)  # a document over the edge of equal runs
@example([20, 20], 2, FULL)  # one that ends on it
@example([40, 1, 1, 1, 1, 20], 4, Mask(window=3))
@example([64], 8, Mask(window=40))  # a halo over several chunks and ranks
@example([64], 4, Mask(chunk=8))  # chunks that end with the pieces
@example([64, 5], 4, Mask(chunk=24))
@example([1], 8, FULL)
def test_calls_cover_every_visible_pair_once(lengths, cp, mask):
    check_against(lay_out(lengths, cp, work=Work({mask: 1}, 0)), mask)


@settings(deadline=None, max_examples=100)
@given(documents(), st.integers(1, 8), masks(), st.booleans())
def test_so_do_those_of_other_layouts(lengths, cp, mask, turned):
    """Layouts made for another mask; equal runs, where documents lie on, over and exactly at the edges of shards."""
    if turned:
        check_against(lay_out(lengths, cp), mask)
    else:
        check_against(TokenLayout(np.array(lengths), cp, 1, contiguous(np.array(lengths), cp).sorted()), mask)


def attend(lengths: list[int], cp: int, mask: Mask, q, k, v, d_out) -> list[torch.Tensor]:
    """Output and gradients of a row by the executor's recipe (the docstring of layout.py), all ranks in one process."""
    layout, kernel, scoring = lay_out(lengths, cp, work=Work({mask: 1}, 0)), TiledMath(), Scoring(q.shape[-1] ** -0.5)
    plans = plans_of(layout, mask)
    out, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    local = [[torch.from_numpy(layout.shard(x.numpy(), rank, 9.0)) for x in (q, k, v, d_out)] for rank in range(cp)]
    k_pools, v_pools = (pools(layout, plans, [shards[n].numpy() for shards in local]) for n in (1, 2))
    for rank, plan in enumerate(plans):
        (q_, k_, v_, d_), index = local[rank], torch.from_numpy(plan.keys.index())
        row = torch.from_numpy(layout.token_index(rank))
        k_pool, v_pool = torch.from_numpy(k_pools[rank]), torch.from_numpy(v_pools[rank])
        where = torch.from_numpy(pools(layout, plans, [layout.token_index(r) for r in range(cp)])[rank])
        keys, values = k_pool[index], v_pool[index]
        d_keys, d_values = torch.zeros_like(keys), torch.zeros_like(values)
        for call in plan.calls:
            to_k, to_v = (k_, v_) if call.local else (keys, values)
            for queries, ks in segments(call):
                mine = slice(call.queries.start + queries.start, call.queries.start + queries.stop)
                theirs = slice(call.keys.start + ks.start, call.keys.start + ks.stop)
                theirs = theirs if call.among is None else torch.from_numpy(call.among.index()[theirs])
                how = Scoring(scoring.scale, call.window)
                o, lse = kernel.forward(q_[mine], to_k[theirs], to_v[theirs], how)
                grads = kernel.backward(d_[mine], q_[mine], to_k[theirs], to_v[theirs], o, lse, how)
                out[row[mine]], dq[row[mine]] = o, grads[0]
                if call.local:
                    dk[row[theirs]] += grads[1]
                    dv[row[theirs]] += grads[2]
                else:
                    d_keys[theirs] += grads[1]
                    d_values[theirs] += grads[2]
        for total, part in ((dk, d_keys), (dv, d_values)):  # the pool comes home: by the token that each slot holds
            pool = torch.zeros(plan.exchange.pool_tokens, *part.shape[1:], dtype=part.dtype).index_add_(0, index, part)
            assert (pool[where < 0] == 0).all()
            total.index_add_(0, where.clamp(min=0), pool)
    return [out, dq, dk, dv]


@pytest.mark.parametrize("mask", [FULL, Mask(window=8), Mask(chunk=16)], ids=["full", "window", "chunk"])
@pytest.mark.parametrize(
    ("lengths", "cp"),
    [([64], 4), ([17], 8), ([3], 4), ([40, 1, 23], 3), ([30, 9, 9, 9, 1, 1, 1], 2), ([8] * 9, 4), ([50, 7], 1)],
)
def test_attention_and_its_gradients_through_the_calls(lengths, cp, mask):
    draw, tokens = torch.Generator().manual_seed(0), sum(lengths)
    q, k, v, d_out = (torch.randn(tokens, heads, 4, generator=draw, dtype=torch.float64) for heads in (4, 2, 2, 4))
    got = attend(lengths, cp, mask, q, k, v, d_out)
    for x in (q, k, v):
        x.requires_grad_()
    scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(2, 1)) / 2
    weights = scores.masked_fill(~torch.from_numpy(visible(lengths, mask)), float("-inf")).softmax(-1)
    out = torch.einsum("hts,shd->thd", weights, v.repeat_interleave(2, 1))
    out.backward(d_out)
    for ours, exact in zip(got, (out.detach(), q.grad, k.grad, v.grad), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-11)


def test_calls_do_not_grow_with_documents():
    lengths = [60_000, 50_000, *[700] * 3000, *range(1, 500)]
    layout = lay_out(lengths, 8)
    for mask in (FULL, Mask(window=1024), Mask(chunk=8192)):
        for rank in (0, 7):
            plan = plan_slices(layout, mask, rank)
            assert 1 <= len(plan.calls) <= 3
            assert plan.calls[0].local  # what needs nobody comes first
            assert sum(len(call.query_lengths) for call in plan.calls) > 400


def test_one_document_copies_its_keys_once_and_in_few_runs():
    layout = lay_out([MILLION], 8)
    for rank in range(8):
        plan = plan_slices(layout, FULL, rank)
        assert all(len(call.query_lengths) == 1 for call in plan.calls)
        assert plan.keys.total == max(call.keys.stop for call in plan.calls) <= MILLION
        assert len(plan.keys) <= 16
    assert [call.keys.start for call in plan_slices(layout, FULL, 0).calls] == [0, 0]  # the front's keys begin the back's


@pytest.mark.parametrize("cp", [2, 4])
def test_no_key_of_cut_documents_is_copied_twice(cp):
    layout = lay_out([40_000, 30_000, 20_000, 17], cp)
    for rank in range(cp):
        plan = plan_slices(layout, FULL, rank)
        index = plan.keys.index()
        assert len(index) == len(np.unique(index)) <= layout.tokens
        assert plan.calls[-1].among is not None


def test_one_rank_copies_nothing():
    for mask in (FULL, Mask(window=8), Mask(chunk=8)):
        plan = plan_slices(lay_out([100, 3, 50], 1), mask, 0)
        (call,) = plan.calls
        assert call.local
        assert plan.keys.total == 0
        assert plan.exchange.silent


def test_a_window_that_hides_nothing_is_no_window():
    lengths = [100, 50, 30, 20]
    assert {call.window for rank in range(2) for call in plan_slices(lay_out(lengths, 2), Mask(window=100), rank).calls} == {
        None
    }
    assert 99 in {call.window for rank in range(2) for call in plan_slices(lay_out(lengths, 2), Mask(window=99), rank).calls}


def test_an_empty_shard_has_no_calls_and_the_same_exchange():
    layout = lay_out([2], 4)
    plans = plans_of(layout, FULL)
    assert [len(plan.calls) for plan in plans] == [1, 1, 0, 0]
    assert len({(plan.exchange.gathered, plan.exchange.needed) for plan in plans}) == 1


def test_window_and_chunk_exclude_each_other_and_hold_a_token():
    with pytest.raises(ValueError, match="not both"):
        Mask(window=2, chunk=2)
    for size in ({"window": 0}, {"chunk": -1}):
        with pytest.raises(ValueError, match="at least one token"):
            Mask(**size)


def test_a_million_tokens_in_ten_thousand_documents_take_no_time():
    draw = np.random.default_rng(0).lognormal(0, 1.5, 10_000)
    lengths = np.maximum(1, draw / draw.sum() * MILLION).astype(int)

    def seconds() -> float:
        start = time.process_time()
        layout = lay_out(lengths, 8)
        for mask in (FULL, Mask(window=1024)):
            plan_slices(layout, mask, 3)
        return time.process_time() - start

    assert min(seconds() for _ in range(3)) < 0.2


def test_calls_of_typical_packings_have_the_pairs_of_their_layout():
    for lengths, cp in packings(12):
        layout = lay_out(lengths, cp)
        for mask in (FULL, Mask(window=4096), Mask(chunk=8192)):
            plan = plan_slices(layout, mask, cp - 1)
            assert sum(call.visible_pairs() for call in plan.calls) == layout.visible_pairs(mask)[cp - 1]
