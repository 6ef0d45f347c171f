"""Exact causal attention with its output and log-sum-exp kept: forward, backward, and the differentiable function.

Keeping `out` and `lse` (8.6 GB and 0.13 GB a layer at 1,048,576 tokens of 32 heads of 128, movable to the host) is what
lets a training step run attention forward once instead of twice: at a million tokens a quarter of the whole step. A call
whose tensors are larger than the kernel has been proven with is split by heads. Documents of a packed row, and the pieces of
documents that a rank of many holds, are segments of one call; of short ones a backward takes a few calls, since each segment
adds up to a tile to the kernel's sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megaspan.attention.choose import KERNELS, case_of, choose_for
from megaspan.attention.kernel import Kernel, Scoring
from megaspan.attention.segments import Segments, SegmentsPart
from megaspan.attention.sinks import apply_sinks, sink_gradient
from megaspan.human import UserError

PADDING_ELEMENTS = 2**24
"""That segments may add to a backward's sums in fp32: 64 MiB, and no more than a thirty-second. Calls with more are cut."""


def attend(
    q_tHD: Tensor,
    k_sGD: Tensor,
    v_sGD: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sink_H: Tensor | None = None,
    segments: Segments | None = None,
    kernel: Kernel | None = None,
) -> Tensor:
    """Causal attention, differentiable in q, k, v and the sinks.

    Args:
        q_tHD: queries [t, H, D], the last t of the s tokens.
        k_sGD: keys [s, G, D]; G divides H, head h uses KV head h // (H / G).
        v_sGD: values [s, G, D].
        scale: factor on the scores.
        window: keys a query sees including itself; None or 0 for all.
        softcap: scores become `softcap * tanh(score / softcap)`; None or 0 for none.
        sink_H: one sink logit per query head.
        segments: attentions side by side in q, k and v, `Segments.documents(lengths, device)` for a packed row; None for one.
        kernel: what computes it; None chooses the fastest proven one.

    Returns:
        [t, H, D] in q's dtype.

    Raises:
        UserError: shapes that are no causal attention.
    """
    kernel, scoring = settle(q_tHD, k_sGD, v_sGD, Scoring(scale, window, softcap), kernel, segments=segments)
    return attend_with(kernel, q_tHD, k_sGD, v_sGD, sink_H, scoring, segments)


def attend_with(
    kernel: Kernel,
    q_tHD: Tensor,
    k_sGD: Tensor,
    v_sGD: Tensor,
    sink_H: Tensor | None,
    scoring: Scoring,
    segments: Segments | None = None,
) -> Tensor:
    """`attend` with what `settle` settled."""
    return _Attend.apply(q_tHD, k_sGD, v_sGD, sink_H, scoring, kernel, segments)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *options: Any) -> Tensor:
        ctx.scoring, ctx.kernel, ctx.segments = options
        out, lse = forward_with(ctx.kernel, q, k, v, sink, ctx.scoring, ctx.segments)
        ctx.save_for_backward(q, k, v, out, lse, sink)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, lse, sink = ctx.saved_tensors
        return (*backward_with(ctx.kernel, grads[0], q, k, v, out, lse, sink, ctx.scoring, ctx.segments), None, None, None)


def attend_forward(
    q_tHD: Tensor,
    k_sGD: Tensor,
    v_sGD: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sink_H: Tensor | None = None,
    segments: Segments | None = None,
    kernel: Kernel | None = None,
) -> tuple[Tensor, Tensor]:
    """`attend` without autograd: the output [t, H, D] and its log-sum-exp [H, t], sinks included."""
    kernel, scoring = settle(q_tHD, k_sGD, v_sGD, Scoring(scale, window, softcap), kernel, segments=segments)
    return forward_with(kernel, q_tHD, k_sGD, v_sGD, sink_H, scoring, segments)


def attend_backward(
    d_out_tHD: Tensor,
    q_tHD: Tensor,
    k_sGD: Tensor,
    v_sGD: Tensor,
    out_tHD: Tensor,
    lse_Ht: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sink_H: Tensor | None = None,
    segments: Segments | None = None,
    kernel: Kernel | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and the sinks (None without sinks) from what `attend_forward` returned."""
    kernel, scoring = settle(q_tHD, k_sGD, v_sGD, Scoring(scale, window, softcap), kernel, segments=segments)
    return backward_with(kernel, d_out_tHD, q_tHD, k_sGD, v_sGD, out_tHD, lse_Ht, sink_H, scoring, segments)


def forward_with(
    kernel: Kernel,
    q_tHD: Tensor,
    k_sGD: Tensor,
    v_sGD: Tensor,
    sink_H: Tensor | None,
    scoring: Scoring,
    segments: Segments | None = None,
) -> tuple[Tensor, Tensor]:
    """`attend_forward` with what `settle` settled."""
    segments = _needed(segments)
    splits = _splits(kernel, q_tHD, k_sGD, segments)
    if len(splits) == 1:
        out, lse = kernel.forward(q_tHD, k_sGD, v_sGD, scoring, segments)
    else:
        parts = [
            (heads, kernel.forward(q_tHD[:, heads], k_sGD[:, groups], v_sGD[:, groups], scoring, segments))
            for heads, groups in splits
        ]
        out, lse = q_tHD.new_empty(*q_tHD.shape[:2], v_sGD.shape[2]), torch.cat([part[1] for _, part in parts])
        for heads, part in parts:
            out[:, heads] = part[0]
    return (out, lse) if sink_H is None else apply_sinks(out, lse, sink_H)


def backward_with(
    kernel: Kernel,
    d_out_tHD: Tensor,
    q_tHD: Tensor,
    k_sGD: Tensor,
    v_sGD: Tensor,
    out_tHD: Tensor,
    lse_Ht: Tensor,
    sink_H: Tensor | None,
    scoring: Scoring,
    segments: Segments | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`attend_backward` with what `settle` settled."""
    d_sink = None if sink_H is None else sink_gradient(d_out_tHD, out_tHD, lse_Ht, sink_H)
    segments = _needed(segments)
    given = d_out_tHD, q_tHD, k_sGD, v_sGD, out_tHD, lse_Ht
    parts = () if segments is None else _parts(kernel, q_tHD, k_sGD, segments)
    if len(parts) < 2:
        return (*_backward(kernel, *given, scoring, segments), d_sink)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q_tHD, k_sGD, v_sGD))
    for part, t, s in parts:
        row = d_out_tHD[t], q_tHD[t], k_sGD[s], v_sGD[s], out_tHD[t], lse_Ht[:, t]
        into = dq[t], dk[s], dv[s]
        if len(_splits(kernel, row[1], row[2], part)) == 1:
            kernel.backward_into(into, row, scoring, part)
            continue
        for place, gradient in zip(into, _backward(kernel, *row, scoring, part), strict=True):
            place.copy_(gradient)
    return dq, dk, dv, d_sink


def _backward(
    kernel: Kernel,
    d_out_tHD: Tensor,
    q_tHD: Tensor,
    k_sGD: Tensor,
    v_sGD: Tensor,
    out_tHD: Tensor,
    lse_Ht: Tensor,
    scoring: Scoring,
    segments: Segments | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of one call, or of as many as the kernel's largest tensors ask for."""
    splits = _splits(kernel, q_tHD, k_sGD, segments)
    if len(splits) == 1:
        return kernel.backward(d_out_tHD, q_tHD, k_sGD, v_sGD, out_tHD, lse_Ht, scoring, segments)
    dq = torch.empty_like(q_tHD)
    # Query heads of one KV head in several calls: their key gradients are summed in fp32, not in bf16.
    shared = len({groups.start for _, groups in splits}) < len(splits)
    dk, dv = (torch.zeros_like(x, dtype=lse_Ht.dtype if shared else x.dtype) for x in (k_sGD, v_sGD))
    for heads, groups in splits:
        q, d_out, out = q_tHD[:, heads], d_out_tHD[:, heads], out_tHD[:, heads]
        dq[:, heads], dk_part, dv_part = kernel.backward(
            d_out, q, k_sGD[:, groups], v_sGD[:, groups], out, lse_Ht[heads], scoring, segments
        )
        dk[:, groups] += dk_part
        dv[:, groups] += dv_part
    return dq, dk.to(k_sGD.dtype), dv.to(v_sGD.dtype)


def head_splits(
    queries: int, keys: int, heads: int, groups: int, head_dim: int, max_elements: int | None
) -> Iterator[tuple[slice, slice]]:
    """Slices of query heads with their slice of KV heads, such that no tensor of a call exceeds `max_elements`.

    Whole KV groups while one fits, else a divisor of the group's query heads against its one KV head.
    """
    share = heads // groups
    limit = heads if max_elements is None else max_elements // (max(queries, keys) * head_dim)
    if limit >= share:
        step = min(limit // share, groups)
        for first in range(0, groups, step):
            last = min(first + step, groups)
            yield slice(first * share, last * share), slice(first, last)
        return
    if limit < 1:
        raise UserError(
            "one head of this row is larger than the attention kernel is proven for",
            found=f"{keys:,} tokens x head size {head_dim}", allowed=f"up to {max_elements:,} elements a head",
            do="Shorten max_length or split the row over GPUs",
        )  # fmt: skip
    step = max(part for part in range(1, limit + 1) if share % part == 0)
    for first in range(0, heads, step):
        yield slice(first, first + step), slice(first // share, first // share + 1)


def _needed(segments: Segments | None) -> Segments | None:
    """None where one causal attention is all there is: every kernel takes that, and proven longest."""
    return None if segments is None or segments.plain else segments


def _parts(kernel: Kernel, q: Tensor, k: Tensor, segments: Segments) -> tuple[SegmentsPart, ...]:
    """Calls of a backward, each with hardly larger sums than one segment of all these tokens has."""
    padding, tokens = kernel.segment_padding(q.device), max(q.shape[0], k.shape[0])
    if not padding:
        return ()
    spare = min(tokens // 32, PADDING_ELEMENTS // ((q.shape[1] + 2 * k.shape[1]) * q.shape[2]))
    return segments.parts(padding, tokens + spare)


def _splits(kernel: Kernel, q: Tensor, k: Tensor, segments: Segments | None) -> list[tuple[slice, slice]]:
    return list(head_splits(q.shape[0], k.shape[0], q.shape[1], k.shape[1], q.shape[2], kernel.limit(segments)))


def settle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scoring: Scoring,
    kernel: Kernel | None = None,
    kernels: tuple[Kernel, ...] = KERNELS,
    segments: Segments | None = None,
) -> tuple[Kernel, Scoring]:
    """Checks the shapes, brings window and soft cap to normal form, and chooses among `kernels` when no kernel is given.

    Raises:
        UserError: no causal grouped-query attention, segments of other tensors, or a kernel that refuses the case.
    """
    if not (q.ndim == k.ndim == v.ndim == 3) or k.shape != v.shape or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        raise UserError(
            "these shapes are no grouped-query attention",
            found=f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}",
            allowed="[t, H, D], [s, G, D], [s, G, D] with G dividing H and one head size",
        )
    t, s = q.shape[0], k.shape[0]
    if segments is not None:
        _check_segments(segments, q, k, scoring)
    elif t > s or t == 0:
        raise UserError("the queries must be the last tokens of the keys", found=f"{t} queries, {s} keys")
    if not (q.dtype == k.dtype == v.dtype):
        raise UserError("q, k and v must have one dtype", found=f"{q.dtype}, {k.dtype}, {v.dtype}")
    longest, count, causal = (s, 1, True) if segments is None else (segments.most_keys, len(segments), segments.causal)
    window = scoring.window if scoring.window and scoring.window < longest else None
    case = case_of(q.device, q.dtype, q.shape[2], window, scoring.softcap, t, s, count, causal)
    if kernel is not None and (refusal := kernel.refusal(case)) is not None:
        raise UserError(f"{kernel.name} {refusal.reason}", do="Leave the choice of the kernel open")
    return kernel or choose_for(case, kernels=kernels).kernel, Scoring(scoring.scale, case.window, case.softcap)


def _check_segments(segments: Segments, q: Tensor, k: Tensor, scoring: Scoring) -> None:
    found, wanted = (q.shape[0], k.shape[0]), (segments.queries, segments.keys)
    if found != wanted:
        raise UserError(
            "these segments are those of another row",
            found=f"{wanted[0]:,} queries and {wanted[1]:,} keys in the segments, {found[0]:,} and {found[1]:,} in q and k",
        )
    if segments.query_starts.device != q.device:
        raise UserError("segments must be where q is", found=f"{segments.query_starts.device}, q on {q.device}")
    if scoring.window and not segments.causal:
        raise UserError("a window belongs to causal attention", found=f"window {scoring.window} on segments that see all keys")
