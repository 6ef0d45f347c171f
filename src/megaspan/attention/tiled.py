"""Attention written out in tiles of plain matrix products: the oracle of all other kernels, and the last resort.

It knows every kind of slice (suffix, window, soft cap), computes in fp32 whatever the inputs (fp64 for fp64), and holds one
tile of scores at a time: a whole score matrix of one head would be 4 TiB at 1,048,576 tokens. Online softmax after Milakov
and Gimelshein (2018), backward after Dao et al. (FlashAttention, 2022).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from megaspan.attention.kernel import Case, Kernel, Refusal, Scoring


@final
@dataclass(frozen=True)
class TiledMath(Kernel):
    """Tiled attention in fp32 or fp64.

    Attributes:
        key_tile: keys a tile.
        tile_elements: scores of all heads in one tile; the number of queries a tile follows from it.
    """

    key_tile: int = 512
    tile_elements: int = 2**22

    name = "tiled matrix products"

    def refusal(self, case: Case) -> Refusal | None:
        """Takes everything."""
        return None

    def forward(self, q_tHD: Tensor, k_sGD: Tensor, v_sGD: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        t, heads, _ = q_tHD.shape
        groups, dtype = k_sGD.shape[1], _work_dtype(q_tHD)
        out_tHD = q_tHD.new_empty(t, heads, v_sGD.shape[2])
        lse_Ht = q_tHD.new_empty(heads, t, dtype=dtype)
        for rows in self._query_tiles(t, heads):
            q = _by_group(q_tHD[rows], groups, dtype)
            shape = (groups, q.shape[1], 1)
            # The running maximum starts at the lowest finite number: a row whose first tile is all masked stays free of NaN.
            top = q.new_full(shape, torch.finfo(dtype).min)
            total, mixed = q.new_zeros(shape), q.new_zeros(groups, q.shape[1], v_sGD.shape[2])
            for keys in self._key_tiles(rows, t, k_sGD.shape[0], scoring.window):
                scores = _scores(q, k_sGD, rows, keys, t, heads // groups, scoring)
                new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
                weights = scores.sub_(new_top).exp_()
                shrink = torch.exp(top - new_top)
                total = total * shrink + weights.sum(-1, keepdim=True)
                mixed = mixed * shrink + weights @ v_sGD[keys].to(dtype).transpose(0, 1)
                top = new_top
            out_tHD[rows] = _by_token(mixed / total, heads).to(out_tHD.dtype)
            lse_Ht[:, rows] = (top + total.log()).reshape(heads, -1)
        return out_tHD, lse_Ht

    def backward(
        self,
        d_out_tHD: Tensor,
        q_tHD: Tensor,
        k_sGD: Tensor,
        v_sGD: Tensor,
        out_tHD: Tensor,
        lse_Ht: Tensor,
        scoring: Scoring,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        t, heads, _ = q_tHD.shape
        groups, dtype = k_sGD.shape[1], _work_dtype(q_tHD)
        dq_tHD = torch.empty_like(q_tHD)
        dk_GsD, dv_GsD = (x.new_zeros(groups, x.shape[0], x.shape[2], dtype=dtype) for x in (k_sGD, v_sGD))
        for rows in self._query_tiles(t, heads):
            q, d_out = (_by_group(x[rows], groups, dtype) for x in (q_tHD, d_out_tHD))
            delta = (d_out * _by_group(out_tHD[rows], groups, dtype)).sum(-1, keepdim=True)
            lse = lse_Ht[:, rows].to(dtype).reshape(groups, -1, 1)
            dq = torch.zeros_like(q)
            for keys in self._key_tiles(rows, t, k_sGD.shape[0], scoring.window):
                scores = _scores(q, k_sGD, rows, keys, t, heads // groups, scoring)
                weights = torch.exp(scores - lse)
                dv_GsD[:, keys] += weights.transpose(1, 2) @ d_out
                d_scores = weights * (d_out @ v_sGD[keys].to(dtype).permute(1, 2, 0) - delta)
                if scoring.softcap is not None:  # d tanh; masked scores are -inf, their weight is 0 already
                    d_scores = d_scores * (1 - (scores.masked_fill(weights == 0, 0.0) / scoring.softcap).square())
                dq += d_scores @ k_sGD[keys].to(dtype).transpose(0, 1)
                dk_GsD[:, keys] += d_scores.transpose(1, 2) @ q
            dq_tHD[rows] = _by_token(dq * scoring.scale, heads).to(dq_tHD.dtype)
        dk_sGD, dv_sGD = (dk_GsD * scoring.scale).transpose(0, 1), dv_GsD.transpose(0, 1)
        return dq_tHD, dk_sGD.to(k_sGD.dtype), dv_sGD.to(v_sGD.dtype)

    def _query_tiles(self, t: int, heads: int) -> Iterator[slice]:
        size = max(16, self.tile_elements // (heads * self.key_tile))
        return (slice(start, min(start + size, t)) for start in range(0, t, size))

    def _key_tiles(self, rows: slice, t: int, s: int, window: int | None) -> Iterator[slice]:
        """Tiles of the keys that at least one query of `rows` sees."""
        first = 0 if window is None else max(0, rows.start + s - t - window + 1)
        last = rows.stop + s - t
        return (slice(start, min(start + self.key_tile, last)) for start in range(first, last, self.key_tile))


def _work_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _scores(q: Tensor, k_sGD: Tensor, rows: slice, keys: slice, t: int, share: int, scoring: Scoring) -> Tensor:
    """Scores of one tile [groups, share * queries, keys], -inf where a query does not see a key."""
    scores = (q @ k_sGD[keys].to(q.dtype).permute(1, 2, 0)).mul_(scoring.scale)
    if scoring.softcap is not None:
        scores = scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    position = torch.arange(rows.start, rows.stop, device=q.device)[:, None] + (k_sGD.shape[0] - t)
    key = torch.arange(keys.start, keys.stop, device=q.device)
    hidden = key > position
    if scoring.window is not None:
        hidden |= key <= position - scoring.window
    return scores.masked_fill_(hidden.repeat(share, 1), float("-inf"))


def _by_group(x_tHD: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """[t, H, D] to [groups, heads of the group * t, D]: the query heads of a group share its keys in one product."""
    t, heads, size = x_tHD.shape
    return x_tHD.to(dtype).transpose(0, 1).reshape(groups, heads // groups * t, size)


def _by_token(x: Tensor, heads: int) -> Tensor:
    """The inverse of `_by_group`."""
    return x.reshape(heads, -1, x.shape[-1]).transpose(0, 1)
