"""Attention written out in tiles of plain matrix products: the oracle of all other kernels, and the last resort.

It knows every kind of slice (segments, suffix, window, soft cap), computes in fp32 whatever the inputs (fp64 for fp64), and
holds one tile of scores at a time: a whole score matrix of one head would be 4 TiB at 1,048,576 tokens. What a query sees is
one range of keys in every kind, so two bounds a query are all there is of a mask. Online softmax after Milakov and Gimelshein
(2018), backward after Dao et al. (FlashAttention, 2022).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from megaspan.attention.kernel import Case, Kernel, Refusal, Scoring
from megaspan.attention.segments import Segments


class _Tile(NamedTuple):
    """Queries that are worked on together, and the keys that they see. Short segments share a tile."""

    rows: slice
    first: int  # keys that any of the queries sees
    last: int
    all_from: int  # keys that each of them sees
    all_to: int


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

    def forward(
        self, q_tHD: Tensor, k_sGD: Tensor, v_sGD: Tensor, scoring: Scoring, segments: Segments | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        t, heads, _ = q_tHD.shape
        groups, dtype = k_sGD.shape[1], _work_dtype(q_tHD)
        out_tHD = q_tHD.new_empty(t, heads, v_sGD.shape[2])
        lse_Ht = q_tHD.new_empty(heads, t, dtype=dtype)
        bounds_2t = _bounds(q_tHD, k_sGD, scoring.window, segments)
        for tile in self._tiles(q_tHD, k_sGD, scoring.window, segments):
            rows = tile.rows
            q = _by_group(q_tHD[rows], groups, dtype)
            shape = (groups, q.shape[1], 1)
            # The running maximum starts at the lowest finite number: a row whose first tile is all masked stays free of NaN.
            top = q.new_full(shape, torch.finfo(dtype).min)
            total, mixed = q.new_zeros(shape), q.new_zeros(groups, q.shape[1], v_sGD.shape[2])
            for keys in self._key_tiles(tile):
                scores = _scores(q, k_sGD, tile, keys, bounds_2t, scoring)
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
        segments: Segments | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        heads, groups, dtype = q_tHD.shape[1], k_sGD.shape[1], _work_dtype(q_tHD)
        dq_tHD = torch.empty_like(q_tHD)
        dk_GsD, dv_GsD = (x.new_zeros(groups, x.shape[0], x.shape[2], dtype=dtype) for x in (k_sGD, v_sGD))
        bounds_2t = _bounds(q_tHD, k_sGD, scoring.window, segments)
        for tile in self._tiles(q_tHD, k_sGD, scoring.window, segments):
            rows = tile.rows
            q, d_out = (_by_group(x[rows], groups, dtype) for x in (q_tHD, d_out_tHD))
            delta = (d_out * _by_group(out_tHD[rows], groups, dtype)).sum(-1, keepdim=True)
            lse = lse_Ht[:, rows].to(dtype).reshape(groups, -1, 1)
            dq = torch.zeros_like(q)
            for keys in self._key_tiles(tile):
                scores = _scores(q, k_sGD, tile, keys, bounds_2t, scoring)
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

    def _tiles(self, q_tHD: Tensor, k_sGD: Tensor, window: int | None, segments: Segments | None) -> Iterator[_Tile]:
        """Tiles of queries: a part of one segment, or several segments whose keys are no more than one tile of keys."""
        size = max(16, self.tile_elements // (q_tHD.shape[1] * self.key_tile))
        whole = [(slice(0, q_tHD.shape[0]), slice(0, k_sGD.shape[0]))]
        short: _Tile | None = None
        for rows, keys in whole if segments is None else segments.ranges():
            if short is not None and rows.stop - short.rows.start <= size and keys.stop - short.first <= self.key_tile:
                short = _Tile(slice(short.rows.start, rows.stop), short.first, keys.stop, 0, 0)
                continue
            if short is not None:
                yield short
                short = None
            if segments is not None and rows.stop - rows.start <= size and keys.stop - keys.start <= self.key_tile:
                short = _Tile(rows, keys.start, keys.stop, 0, 0)
                continue
            for start in range(rows.start, rows.stop, size):
                stop = min(start + size, rows.stop)
                # One past the last key of the first and of the last query.
                first_to, last_to = keys.stop - (rows.stop - start - 1), keys.stop - (rows.stop - stop)
                if segments is not None and not segments.causal:
                    first_to = last_to = keys.stop
                opens, all_from = (keys.start if window is None else max(keys.start, to - window) for to in (first_to, last_to))
                yield _Tile(slice(start, stop), opens, last_to, all_from, first_to)
        if short is not None:
            yield short

    def _key_tiles(self, tile: _Tile) -> Iterator[slice]:
        return (slice(start, min(start + self.key_tile, tile.last)) for start in range(tile.first, tile.last, self.key_tile))


def _work_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _bounds(q_tHD: Tensor, k_sGD: Tensor, window: int | None, segments: Segments | None) -> Tensor:
    """For each query the first key that it sees and one past the last, [2, t]."""
    t, s, device = q_tHD.shape[0], k_sGD.shape[0], q_tHD.device
    query = torch.arange(t, device=device)
    if segments is None:
        stop, opens = query + (s - t + 1), torch.zeros_like(query)
    else:
        rows, keys = segments.query_starts.long(), segments.key_starts.long()
        owner = torch.repeat_interleave(torch.arange(len(segments), device=device), rows.diff(), output_size=t)
        opens, stop = keys[owner], keys[owner + 1]
        if segments.causal:
            stop = stop - (rows[owner + 1] - 1 - query)
    return torch.stack([opens if window is None else torch.maximum(opens, stop - window), stop])


def _scores(q: Tensor, k_sGD: Tensor, tile: _Tile, keys: slice, bounds_2t: Tensor, scoring: Scoring) -> Tensor:
    """Scores of one tile [groups, share * queries, keys], -inf where a query does not see a key."""
    scores = (q @ k_sGD[keys].to(q.dtype).permute(1, 2, 0)).mul_(scoring.scale)
    if scoring.softcap is not None:
        scores = scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    if tile.all_from <= keys.start and keys.stop <= tile.all_to:
        return scores
    first, stop = bounds_2t[:, tile.rows, None]
    key = torch.arange(keys.start, keys.stop, device=q.device)
    hidden = (key < first) | (key >= stop)
    return scores.masked_fill_(hidden.repeat(q.shape[1] // len(hidden), 1), float("-inf"))


def _by_group(x_tHD: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """[t, H, D] to [groups, heads of the group * t, D]: the query heads of a group share its keys in one product."""
    t, heads, size = x_tHD.shape
    return x_tHD.to(dtype).transpose(0, 1).reshape(groups, heads // groups * t, size)


def _by_token(x: Tensor, heads: int) -> Tensor:
    """The inverse of `_by_group`."""
    return x.reshape(heads, -1, x.shape[-1]).transpose(0, 1)
