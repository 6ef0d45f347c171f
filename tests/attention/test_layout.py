"""Which token lies where: every row and rank count, exact counts, balance, and the speed of a million tokens."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.attention.layout import TokenLayout, document_lengths, lay_out
from megaspan.attention.mask import Mask
from megaspan.attention.placement import BACK, FRONT, WHOLE, contiguous
from megaspan.attention.work import Work
from tests.attention.rows import documents, masks, packings, visible

MILLION = 2**20
FULL = Mask()
GEMMA = Work({Mask(): 5, Mask(window=1024): 29})
QUICK = settings(deadline=None, max_examples=150)


def ramp(layout: TokenLayout, rank: int) -> list[int]:
    return layout.token_index(rank).tolist()


def test_one_document_gives_rank_r_the_chunks_r_and_2cp_minus_1_minus_r():
    layout = lay_out([16], 2)
    assert ramp(layout, 0) == [0, 1, 2, 3, 12, 13, 14, 15]
    assert ramp(layout, 1) == [4, 5, 6, 7, 8, 9, 10, 11]
    for cp in (2, 4, 8):
        layout, chunk = lay_out([MILLION], cp), MILLION // (2 * cp)
        for rank in range(cp):
            first, last = rank * chunk, (2 * cp - 1 - rank) * chunk
            runs = [(first, 2 * chunk)] if rank == cp - 1 else [(first, chunk), (last, chunk)]
            assert list(layout.token_runs(rank)) == runs


@QUICK
@given(documents(), st.integers(1, 8), st.integers(1, 4), masks())
def test_every_token_lies_in_exactly_one_slot(lengths, cp, sp, mask):
    layout = lay_out(lengths, cp, sp_size=sp, work=Work({mask: 1, FULL: 2}, 3))
    slots = np.concatenate([layout.token_index(rank) for rank in range(cp)])
    assert len(slots) == cp * layout.shard_tokens
    assert sorted(slots[slots >= 0].tolist()) == list(range(sum(lengths)))
    assert layout.padding == int((slots < 0).sum()) == len(slots) - sum(lengths)
    assert layout.shard_tokens % sp == 0
    assert layout.shard_tokens < max(layout.shard_lengths) + sp
    for rank in range(cp):  # padding is at the end
        index = layout.token_index(rank)
        assert (index[: layout.shard_lengths[rank]] >= 0).all()
        assert (index[layout.shard_lengths[rank] :] == -1).all()


@QUICK
@given(documents(), st.integers(1, 8))
def test_rows_come_back_from_their_shards(lengths, cp):
    layout = lay_out(lengths, cp)
    row = np.arange(2 * layout.tokens).reshape(-1, 2) + 7
    shards = [layout.shard(row, rank, fill=-100) for rank in range(cp)]
    assert (layout.unshard(shards) == row).all()
    positions = np.concatenate([np.arange(length) for length in lengths])
    for rank in range(cp):
        index = layout.token_index(rank)
        assert (shards[rank] == np.where(index[:, None] >= 0, row[index], -100)).all()
        assert (layout.positions(rank) == np.where(index >= 0, positions[index], 0)).all()
        assert (index >= 0).sum() == layout.shard_lengths[rank]
    assert (document_lengths(positions) == lengths).all()


def test_torch_takes_the_index():
    layout = lay_out([5, 9, 1], 3)
    row = torch.arange(15) * 10
    index = torch.from_numpy(layout.token_index(1))
    assert (row[index.clamp(min=0)].numpy()[: layout.shard_lengths[1]] == layout.shard(row.numpy(), 1)[index >= 0]).all()


@QUICK
@given(documents(), st.integers(1, 8), masks())
def test_visible_pairs_are_those_of_the_mask(lengths, cp, mask):
    layout, seen = lay_out(lengths, cp), visible(lengths, mask)
    wanted = tuple(int(seen[index[index >= 0]].sum()) for index in map(layout.token_index, range(cp)))
    assert layout.visible_pairs(mask) == wanted
    assert sum(wanted) == seen.sum()


def test_visible_pairs_of_known_masks():
    assert sum(lay_out([64], 4).visible_pairs(Mask(window=8))) == 484
    assert sum(lay_out([64], 4).visible_pairs(FULL)) == 2080
    assert sum(lay_out([64], 4).visible_pairs(Mask(chunk=16))) == 4 * 136
    assert sum(lay_out([32, 32], 4).visible_pairs(FULL)) == 2 * 528
    assert sum(lay_out([MILLION], 8).visible_pairs(FULL)) == MILLION * (MILLION + 1) // 2


@pytest.mark.parametrize(
    ("tokens", "cp", "padding"),
    [(1_000_003, 4, 1), (999_983, 8, 1), (7, 2, 1), (698, 4, 2), (32_769, 8, 7), (3, 4, 1), (1, 8, 7)],
)
def test_any_length_is_split_with_less_than_a_token_a_rank_of_padding(tokens, cp, padding):
    layout = lay_out([tokens], cp)
    assert layout.padding == padding
    assert max(layout.shard_lengths) - min(layout.shard_lengths) <= 1


def test_a_row_shorter_than_the_ranks_leaves_empty_shards():
    layout = lay_out([1, 1], 8)
    assert sum(layout.shard_lengths) == 2
    assert layout.shard_tokens == 1
    assert [layout.shard(np.array([5, 6]), rank, fill=-100).tolist() for rank in range(8)].count([-100]) == 6


def test_sp_ranks_hold_equal_runs_of_a_shard():
    layout = lay_out([10], 2, sp_size=3)
    assert layout.shard_lengths == (5, 5)
    assert layout.shard_tokens == 6
    assert [layout.part(rank) for rank in range(3)] == [slice(0, 2), slice(2, 4), slice(4, 6)]


def test_short_documents_stay_whole_and_long_ones_are_cut():
    layout = lay_out([100_000, *[1000] * 64], 8)
    long = layout.pieces.document == 0
    assert (layout.pieces.part[~long] == WHOLE).all()
    assert set(layout.pieces.part[long].tolist()) == {FRONT, BACK}
    assert layout.shared_slots == 12_500
    assert layout.shard_lengths == (20_500,) * 8


def test_what_other_ranks_want_lies_first():
    layout = lay_out([5000, 40, 3000, *range(1, 70)], 4)
    for rank in range(4):
        pieces = layout.pieces[layout.of_rank(rank)]
        cut = int((pieces.stop - pieces.start)[pieces.part != WHOLE].sum())
        assert cut <= layout.shared_slots < layout.shard_lengths[rank]
        documents = np.repeat(pieces.document, pieces.stop - pieces.start)
        assert set(documents[:cut].tolist()) == {0, 2}
        assert not {0, 2} & set(documents[cut:].tolist())


@pytest.mark.parametrize("work", [Work(), Work({Mask(window=4096): 1}), GEMMA], ids=["full", "window", "mix"])
def test_random_packings_are_balanced_and_never_worse_than_equal_runs(work):
    worst, worst_of_runs = 1.0, 1.0
    for lengths, cp in packings(40):
        layout, runs = lay_out(lengths, cp, work=work), contiguous(np.array(lengths), cp).balance(work, cp)
        worst, worst_of_runs = min(worst, layout.balance(work)), min(worst_of_runs, runs)
        assert layout.balance(work) >= min(runs, 0.995), lengths
        assert layout.padding <= 0.006 * layout.tokens + cp
    assert worst >= (0.98 if work is GEMMA else 0.99)
    assert worst_of_runs < 0.75  # the packings are no easy ones


def test_pairs_themselves_are_balanced_in_full_layers():
    for lengths, cp in packings(40):
        pairs = lay_out(lengths, cp).visible_pairs(FULL)
        assert sum(pairs) >= 0.99 * cp * max(pairs), lengths


def test_ranks_take_turns_with_tokens_that_are_left_over():
    assert lay_out([101, 103, 107], 8).shard_lengths == (39,) * 7 + (38,)
    assert lay_out([5001, 4003, 3001], 8).padding == 3


def test_balanced_work_with_unequal_tokens_is_not_taken():
    layout = lay_out([24, 17, 8, 26, 2, 16], 2, work=Work(token_pairs=0))  # 24 + 17 + 8 against 26 + 2 + 16 are equal work
    assert sorted(layout.shard_lengths) == [46, 47]


def test_a_kind_of_layer_alone_is_tried_too():
    """Eight ranks' chunks of 2,048 are even in both kinds of Llama 4's layers, but not when balanced for their sum."""
    work = Work({FULL: 12, Mask(chunk=8192): 36})
    assert lay_out([32_768], 8, work=work).balance(work) > 0.999


def test_equal_runs_are_taken_where_they_are_better():
    work = Work({Mask(chunk=13): 1}, 50)
    runs = contiguous(np.array([28, 20]), 3).balance(work, 3)
    assert lay_out([28, 20], 3, work=work).balance(work) == runs > 0.9


@QUICK
@given(documents(), st.integers(1, 8), masks())
def test_short_rows_are_never_worse_than_equal_runs(lengths, cp, mask):
    work = Work({mask: 3, FULL: 1}, 20)
    runs = contiguous(np.array(lengths), cp)
    assert lay_out(lengths, cp, work=work).balance(work) >= min(runs.balance(work, cp), 0.995)


@QUICK
@given(documents(), st.integers(1, 8))
def test_equal_runs_are_a_layout_too(lengths, cp):
    runs = contiguous(np.array(lengths), cp).sorted()
    layout = TokenLayout(np.array(lengths), cp, 1, runs)
    assert max(layout.shard_lengths) - min(layout.shard_lengths) <= 1
    assert [token for rank in range(cp) for token in sorted(ramp(layout, rank)) if token >= 0] == list(range(sum(lengths)))


@pytest.mark.parametrize("cp", [1, 2, 8])
def test_a_million_tokens_in_ten_thousand_documents_take_no_time(cp):
    draw = np.random.default_rng(0).lognormal(0, 1.5, 10_000)
    lengths = np.maximum(1, draw / draw.sum() * MILLION).astype(int)

    def seconds() -> float:
        start = time.process_time()
        lay_out(lengths, cp, work=GEMMA)
        return time.process_time() - start

    assert min(seconds() for _ in range(3)) < 0.2


def test_a_layout_holds_no_array_as_long_as_the_row():
    layout = lay_out([MILLION - 100, 100], 8)
    assert len(layout.pieces) <= 17
    assert max(len(layout.token_runs(rank)) for rank in range(8)) <= 3


@pytest.mark.parametrize(("lengths", "cp", "sp"), [([], 2, 1), ([3, 0], 2, 1), ([3], 0, 1), ([3], 1, 0), ([2**27, 1], 2, 1)])
def test_what_is_no_row_is_refused(lengths, cp, sp):
    with pytest.raises(ValueError, match=r"row|cp_size"):
        lay_out(lengths, cp, sp_size=sp)


def test_a_shard_is_cut_from_the_whole_row_only():
    with pytest.raises(ValueError, match="3 elements for a row of 4"):
        lay_out([4], 2).shard(np.zeros(3), 0)


def test_documents_begin_where_positions_do_not_count_on():
    assert document_lengths(np.array([5, 6, 7, 0, 0, 1, 9])).tolist() == [3, 1, 2, 1]
    assert document_lengths(np.arange(9)).tolist() == [9]
