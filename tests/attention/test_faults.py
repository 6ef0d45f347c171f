"""Faults of other systems that the layout of a row could have (`docs/faults.md`): lengths at which tokens or keys are lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megaspan.attention.layout import lay_out
from megaspan.attention.mask import Mask
from megaspan.attention.slices import plan_slices
from tests.attention.reference import dense
from tests.attention.rows import visible
from tests.attention.test_slices import attend

FULL, WINDOW = Mask(), Mask(window=8)
# As the reports have them: primes, a power of two and one, fewer tokens than chunks, a tail that fills no chunk, documents
# over, on and behind the edge of a shard.
ROWS: list[tuple[list[int], int]] = [
    ([1_000_003], 4), ([999_983], 8), ([32_769], 2), ([32_769], 4), ([32_769], 8), ([8423], 2), ([57_826], 8),
    ([7], 2), ([698], 4), ([698, 3, 1], 4), ([1], 2), ([2], 2), ([3], 2), ([1], 4), ([2], 4), ([3], 4),
    ([3000, 1000, 96], 2), ([2048, 2048], 2), ([1024, 3072], 2), ([100, 3800, 196], 4),
]  # fmt: skip


def pairs_of(tokens: int, mask: Mask) -> int:
    seen = min(tokens, mask.window or tokens)
    return seen * (seen + 1) // 2 + (tokens - seen) * seen


@pytest.mark.parametrize("mask", [FULL, WINDOW], ids=["full", "window"])
@pytest.mark.parametrize(("lengths", "cp"), ROWS, ids=str)
def test_no_token_and_no_key_is_lost_at_any_length(lengths, cp, mask):
    """R16, R17, R18, R19, R27: every token is in one slot, and the calls of all ranks see every pair of the mask."""
    layout = lay_out(lengths, cp)
    slots = np.concatenate([layout.token_index(rank) for rank in range(cp)])
    assert np.array_equal(np.sort(slots[slots >= 0]), np.arange(sum(lengths)))
    assert len(slots) - sum(lengths) == layout.padding <= max(cp - 1, sum(lengths) // 200)
    plans = [plan_slices(layout, mask, rank) for rank in range(cp)]
    seen = [call.visible_pairs() for plan in plans for call in plan.calls]
    assert sum(seen) == sum(pairs_of(length, mask) for length in lengths)
    queries = sum(call.queries.stop - call.queries.start for plan in plans for call in plan.calls)
    assert queries == sum(lengths)


def test_gradients_are_as_large_as_those_of_one_rank_at_64_random_lengths():
    """R15: lengths that no tile divides, one past a multiple of 64 among them, over two ranks."""
    drawn = np.random.default_rng(0).integers(33, 300, 61).tolist()
    for tokens in (65, 129, 257, *drawn):
        generator = torch.Generator().manual_seed(tokens)
        q, k, v, d_out = (torch.randn(tokens, heads, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2, 4))
        got = attend([tokens], 2, FULL, q, k, v, d_out)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out, _ = dense(*leaves, 0.5, seen=torch.from_numpy(visible([tokens], FULL)))
        want = [out.detach(), *torch.autograd.grad(out, leaves, d_out)]
        for ours, exact in zip(got, want, strict=True):
            torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-10, msg=lambda text, at=tokens: f"{at} tokens: {text}")
