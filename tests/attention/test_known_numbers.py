"""Numbers that can be worked out by hand: visible pairs of toy rows on every mesh, and rows of millions of tokens without a
tensor.

A row of 64 tokens has 2,080 pairs of a query and a key it sees, and 484 in a window of 8 (R34: 540 is off by one). Of rows of a
million tokens and more, primes included, every token lies on one of eight ranks, once, and all ranks have the same work within
one in a hundred (R16, R27).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from megaspan.attention.layout import TokenLayout, lay_out
from megaspan.attention.mask import Mask
from megaspan.attention.slices import Call, plan_slices
from megaspan.attention.work import Work

FULL, WINDOW = Mask(), Mask(window=8)
MESHES = [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (2, 2), (1, 4), (7, 1), (8, 1), (4, 2), (2, 4), (1, 8)]
# Documents, pairs of causal layers, and of layers with a window of 8.
TOYS = [
    ((64,), 2080, 484),
    ((32, 32), 2 * 528, 2 * 228),
    ((40, 24), 820 + 300, 292 + 164),
    ((7, 57), 28 + 1653, 28 + 428),
    ((60, 1, 1, 1, 1), 1830 + 4, 452 + 4),
    ((8,) * 8, 8 * 36, 8 * 36),
    ((1,) * 64, 64, 64),
    ((16, 16, 16, 16), 4 * 136, 4 * 100),
    ((1, 20, 1, 22, 20), 1 + 210 + 1 + 253 + 210, 1 + 132 + 1 + 148 + 132),
]


def counted(call: Call) -> int:
    """Pairs of a call, one query after the other: the last of a segment's queries is the last of its keys."""
    pairs = 0
    for queries, keys in zip(call.query_lengths.tolist(), call.key_lengths.tolist(), strict=True):
        for number in range(queries):
            seen = keys - queries + number + 1
            pairs += seen if call.window is None else min(seen, call.window)
    return pairs


@pytest.mark.parametrize(("documents", "causal", "window"), TOYS, ids=lambda value: str(value))
@pytest.mark.parametrize(("cp", "sp"), MESHES, ids=[f"cp {cp} sp {sp}" for cp, sp in MESHES])
def test_slices_of_all_ranks_show_the_pairs_of_the_mask(documents, causal, window, cp, sp):
    # Balanced for full layers, and for a model's layers of both kinds, for all of which a row is laid out once.
    for work in (None, Work({FULL: 1, WINDOW: 5}, 3)):
        layout = lay_out(documents, cp, sp_size=sp, work=work)
        for mask, wanted in ((FULL, causal), (WINDOW, window)):
            calls = [call for rank in range(cp) for call in plan_slices(layout, mask, rank).calls]
            assert sum(counted(call) for call in calls) == wanted
            assert sum(call.visible_pairs() for call in calls) == wanted


MILLIONS = [
    1_000_000,
    999_983,
    1_000_003,
    2**20,
    2**20 + 1,
    1_048_583,
    2_097_143,
    3_000_017,
    2**22,
    4_194_301,
    4_194_319,
]
RANKS = [(8, 1), (4, 2), (2, 4), (1, 8)]
# A model of windows and full layers in turn, of which a token's linear layers cost 9,000 pairs.
MIXED = Work({Mask(): 12, Mask(window=4096): 12}, 9000)


def packings_of(tokens: int) -> Iterator[list[int]]:
    """Documents that fill a row of so many tokens: books and scraps, many short ones, one long one, equal ones."""
    draw = np.random.default_rng(tokens)
    for shares in (
        draw.lognormal(0, 2, 300),
        draw.pareto(1.2, 5000) + 0.05,
        np.concatenate([[5000.0], draw.uniform(0.05, 1, 5000)]),
        np.ones(64),
    ):
        lengths = np.maximum(1, shares / shares.sum() * tokens).astype(int)
        lengths[np.argmax(lengths)] += tokens - lengths.sum()
        yield [*lengths.tolist()]
    yield [tokens - 1000, *[1] * 1000]
    yield [tokens // 2, tokens - tokens // 2]


def each_token_once(layout: TokenLayout) -> None:
    runs = [layout.token_runs(rank) for rank in range(layout.cp_size)]
    starts, lengths = (np.concatenate([getattr(each, name) for each in runs]) for name in ("starts", "lengths"))
    order = np.argsort(starts)
    ends = starts[order] + lengths[order]
    assert starts[order][0] == 0
    assert (starts[order][1:] == ends[:-1]).all()
    assert ends[-1] == layout.tokens
    assert tuple(int(each.lengths.sum()) for each in runs) == layout.shard_lengths


def even(amounts: tuple[int, ...]) -> float:
    """Mean over largest."""
    return sum(amounts) / len(amounts) / max(amounts)


@pytest.mark.parametrize(("cp", "sp"), RANKS, ids=[f"cp {cp} sp {sp}" for cp, sp in RANKS])
@pytest.mark.parametrize("tokens", MILLIONS)
def test_millions_of_tokens_lie_on_eight_ranks_once_and_evenly(tokens, cp, sp):
    layout = lay_out([tokens], cp, sp_size=sp)
    each_token_once(layout)
    assert layout.padding < cp * sp + cp
    assert layout.shard_tokens % sp == 0
    assert max(layout.shard_lengths) - min(layout.shard_lengths) <= 1
    pairs = layout.visible_pairs(FULL)
    assert sum(pairs) == tokens * (tokens + 1) // 2
    assert even(pairs) > 0.9999
    assert sum(call.visible_pairs() for rank in range(cp) for call in plan_slices(layout, FULL, rank).calls) == sum(pairs)


@pytest.mark.parametrize(("cp", "sp"), RANKS[:3], ids=[f"cp {cp} sp {sp}" for cp, sp in RANKS[:3]])
@pytest.mark.parametrize("tokens", [1_000_003, 4_194_301])
def test_so_do_packed_documents(tokens, cp, sp):
    for lengths in packings_of(tokens):
        for work in (Work(), MIXED):
            layout = lay_out(lengths, cp, sp_size=sp, work=work)
            assert layout.tokens == tokens
            each_token_once(layout)
            assert layout.balance(work) >= 0.99
            assert even(layout.shard_lengths) >= 0.99
            assert layout.padding <= 0.01 * tokens
        for mask in MIXED.layers:
            wanted = sum(int(mask.visible_pairs(np.array([0]), np.array([length]))[0]) for length in lengths)
            calls = [call for rank in range(cp) for call in plan_slices(layout, mask, rank).calls]
            assert sum(call.visible_pairs() for call in calls) == wanted == sum(layout.visible_pairs(mask))
