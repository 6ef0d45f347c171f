"""torch's flash attention for the CPU: the twin of the GPU kernels that tests, the demo and small runs use.

It returns its log-sum-exp and takes GQA unexpanded, like them; about 72 GFLOP/s forward in fp32 on two cores, where the
tiled kernel of `tiled.py` does a third. It knows no window, soft cap or suffix (rectangles align at the top left), so whole
rows only.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from megaspan.attention.kernel import Case, Kernel, Refusal, Scoring


@final
class CPUFlash(Kernel):
    """`aten._scaled_dot_product_flash_attention_for_cpu`, whole causal rows."""

    name = "CPU flash"

    def refusal(self, case: Case) -> Refusal | None:
        """Whole causal rows on the CPU, without window or soft cap."""
        if case.device != "cpu":
            return Refusal("runs on the CPU only", False)
        if case.window is not None or case.softcap is not None:
            return Refusal("has no sliding windows and no soft cap", True)
        if not case.square:
            return Refusal("aligns a suffix of queries with the first keys", True)
        return None

    def forward(self, q_tHD: Tensor, k_sGD: Tensor, v_sGD: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        q, k, v = (x.transpose(0, 1)[None] for x in (q_tHD, k_sGD, v_sGD))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scoring.scale)
        return out[0].transpose(0, 1), lse[0]

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
        d_out, q, k, v, out = (x.transpose(0, 1)[None] for x in (d_out_tHD, q_tHD, k_sGD, v_sGD, out_tHD))
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out, q, k, v, out, lse_Ht[None], 0.0, True, scale=scoring.scale
        )
        dq, dk, dv = (grad[0].transpose(0, 1) for grad in grads)
        return dq, dk, dv
