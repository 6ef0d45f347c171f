"""Attention as its definition says, with a dense mask: the reference of these tests, for short rows only."""

from __future__ import annotations

import torch
from torch import Tensor


def visible(queries: int, keys: int, window: int | None) -> Tensor:
    """Which keys each query sees, [queries, keys]: the queries are the last tokens, a window counts the token itself."""
    seen = torch.zeros(queries, keys, dtype=torch.bool)
    for row in range(queries):
        position = row + keys - queries
        first = max(0, position - window + 1) if window else 0
        seen[row, first : position + 1] = True
    return seen


def visible_in_segments(segments: list[tuple[int, int]], causal: bool, window: int | None) -> Tensor:
    """The same for (queries, keys) of segments that lie side by side."""
    blocks = [visible(t, s, window) if causal else torch.ones(t, s, dtype=torch.bool) for t, s in segments]
    seen = torch.block_diag(*(block.double() for block in blocks)).bool()
    assert seen.any(1).all(), "a query without a visible key"
    return seen


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [t, H, D] and log-sum-exp [H, t]; `seen` [t, s] says which keys each query sees, a causal suffix by default."""
    share = q.shape[1] // k.shape[1]
    scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(share, 1)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(q.shape[0], k.shape[0], window) if seen is None else seen
    scores = scores.masked_fill(~seen, float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink[:, None, None].expand(-1, q.shape[0], 1)], -1)
    weights = torch.softmax(scores, -1)[..., : k.shape[0]]
    return torch.einsum("hts,shd->thd", weights, v.repeat_interleave(share, 1)), torch.logsumexp(scores, -1)


def draw(t: int, s: int, heads: int, groups: int, size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Random q, k, v and d_out."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((t, heads), (s, groups), (s, groups), (t, heads))
    return [torch.randn(n, h, size, generator=generator, dtype=torch.float64).to(dtype) for n, h in shapes]


def distance(got: Tensor, want: Tensor) -> float:
    """Relative L2 distance."""
    return float((got.double() - want.double()).norm() / want.double().norm())
