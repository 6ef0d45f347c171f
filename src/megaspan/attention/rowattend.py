"""Attention of a packed or shared row as one differentiable function, for layers that are not streamed.

All heads at once: what is brought from other ranks is there for all KV heads of a layer together, 4 GB of Qwen3-8B at 1,048,576
tokens, where the streamed layer has one head group's (`layers/stream.py`). Checkpointing runs it a second time in the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megaspan.attention.context import ContextPlan, RowContext
from megaspan.attention.kernel import Kernel, Scoring
from megaspan.attention.mask import Mask


def attend_row(
    q_tHD: Tensor,
    k_tGD: Tensor,
    v_tGD: Tensor,
    sink_H: Tensor | None,
    scoring: Scoring,
    kernels: tuple[Kernel, ...],
    row: RowContext,
) -> Tensor:
    """Attention of this rank's tokens of a row, differentiable in q, k, v and the sinks. All ranks of the row call it.

    Args:
        q_tHD: queries of this rank's slots, all heads.
        k_tGD: keys.
        v_tGD: values.
        sink_H: one sink logit per query head, None for none. Its gradient is this rank's part of it, as that of every other
            parameter: the sum over ranks is the gradient.
        scoring: with the window that makes the row's mask.
        kernels: what may compute it, fastest first.
        row: how the row lies.

    Returns:
        [t, H, D] in q's dtype, 0 in padding slots.
    """
    return _AttendRow.apply(q_tHD, k_tGD, v_tGD, sink_H, row.plan(Mask(scoring.window or None)), scoring, kernels)


class _AttendRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, plan: ContextPlan, *options: Any) -> Tensor:
        ctx.plan, ctx.options = plan, options
        on_its_way, lse = plan.attend(plan.start(q, k, v), options[0], sink, options[1])
        out = on_its_way.land()
        ctx.save_for_backward(q, k, v, out, lse, sink)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, lse, sink = ctx.saved_tensors
        plan, (scoring, kernels) = ctx.plan, ctx.options
        going = plan.attend_backward(plan.start(q, k, v, out, grads[0]), lse, scoring, sink, kernels)
        d_sink = None if sink is None else going.d_sink_H.to(sink.dtype)
        return (*going.land(), d_sink, None, None, None)
