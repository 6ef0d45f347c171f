"""torch's flash attention for the CPU: the twin of the GPU kernels that tests, the demo and small runs use.

It returns its log-sum-exp and takes GQA unexpanded, like them; about 72 GFLOP/s forward in fp32 on two cores, where the
tiled kernel of `tiled.py` does a third. It knows no window, soft cap or suffix (rectangles align at the top left), so whole
rows and documents only; and no variable lengths, so it is called for each segment: 512 times for 8 tokens each is still faster
than the tiled kernel.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from megaspan.attention.kernel import Case, Kernel, Refusal, Scoring
from megaspan.attention.segments import Segments


@final
class CPUFlash(Kernel):
    """`aten._scaled_dot_product_flash_attention_for_cpu`, whole causal rows or documents, and full rectangles."""

    name = "CPU flash"

    def refusal(self, case: Case) -> Refusal | None:
        """Whole causal rows or documents, or full rectangles, on the CPU, without window or soft cap."""
        if case.device != "cpu":
            return Refusal("runs on the CPU only", False)
        if case.window is not None or case.softcap is not None:
            return Refusal("has no sliding windows and no soft cap", True)
        if case.causal and not case.square:
            return Refusal("aligns a suffix of queries with the first keys", True)
        return None

    def forward(
        self, q_tHD: Tensor, k_sGD: Tensor, v_sGD: Tensor, scoring: Scoring, segments: Segments | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        if segments is None:
            return self._forward(q_tHD, k_sGD, v_sGD, scoring, True)
        parts = [self._forward(q_tHD[t], k_sGD[s], v_sGD[s], scoring, segments.causal) for t, s in segments.ranges()]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 1)

    def _forward(self, q_tHD: Tensor, k_sGD: Tensor, v_sGD: Tensor, scoring: Scoring, causal: bool) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(0, 1)[None] for x in (q_tHD, k_sGD, v_sGD))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scoring.scale)
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
        segments: Segments | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        if segments is None:
            return self._backward(d_out_tHD, q_tHD, k_sGD, v_sGD, out_tHD, lse_Ht, scoring, True)
        dq, dk, dv = (torch.empty_like(x) for x in (q_tHD, k_sGD, v_sGD))
        for t, s in segments.ranges():
            dq[t], dk[s], dv[s] = self._backward(
                d_out_tHD[t], q_tHD[t], k_sGD[s], v_sGD[s], out_tHD[t], lse_Ht[:, t], scoring, segments.causal
            )
        return dq, dk, dv

    def _backward(
        self,
        d_out_tHD: Tensor,
        q_tHD: Tensor,
        k_sGD: Tensor,
        v_sGD: Tensor,
        out_tHD: Tensor,
        lse_Ht: Tensor,
        scoring: Scoring,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        d_out, q, k, v, out = (x.transpose(0, 1)[None] for x in (d_out_tHD, q_tHD, k_sGD, v_sGD, out_tHD))
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out, q, k, v, out, lse_Ht[None], 0.0, causal, scale=scoring.scale
        )
        dq, dk, dv = (grad[0].transpose(0, 1) for grad in grads)
        return dq, dk, dv
