"""FlashAttention 2 as torch carries it: the kernel that needs no package and knows windows and suffixes.

357/319 TFLOP/s on an H200, half of FlashAttention 4. Measured against fp32 there: right for causal rows, bottom-right suffixes,
windows, variable lengths, every head size up to 256. Its backward expands KV heads to query heads (twice 2.15 GB at 131,072
tokens of 32 heads of 128) and addresses with 32 bits in some versions, so calls past 2**31 elements are split by head groups.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from megaspan.attention.kernel import Case, Kernel, Refusal, Scoring, half_precision
from megaspan.attention.segments import Segments

# Segments are the second dimension of the kernel's grid.
_MOST_SEGMENTS = 2**16 - 1


@final
class Flash2(Kernel):
    """`aten._flash_attention_forward/_backward` in their packed form: segments, or the whole row as one."""

    name = "FlashAttention 2"
    max_elements = 2**31 - 1

    def segment_padding(self, device: torch.device) -> int:
        """A tile of queries."""
        return 128

    def refusal(self, case: Case) -> Refusal | None:
        """No soft cap; half precision; head sizes that are multiples of 8 up to 256; as many segments as a grid has rows."""
        if case.device != "cuda" or case.capability < (8, 0):
            return Refusal("needs an NVIDIA GPU of compute capability 8.0 or newer", False)
        if not half_precision(case):
            return Refusal(f"computes in bf16 or fp16, not {str(case.dtype).removeprefix('torch.')}", True)
        if case.head_dim % 8 or case.head_dim > 256:
            return Refusal(f"is not proven right at head size {case.head_dim}", True)
        if case.softcap is not None:
            return Refusal("has no soft cap in torch", True)
        if case.segments > _MOST_SEGMENTS:
            return Refusal(f"takes {_MOST_SEGMENTS:,} segments a call, not {case.segments:,}", True)
        return None

    def forward(
        self, q_tHD: Tensor, k_sGD: Tensor, v_sGD: Tensor, scoring: Scoring, segments: Segments | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        causal = segments is None or segments.causal
        result = torch.ops.aten._flash_attention_forward(
            q_tHD, k_sGD, v_sGD, *_lengths(q_tHD, k_sGD, segments), 0.0, causal, False,
            scale=scoring.scale, **_window(scoring.window),
        )  # fmt: skip
        return result[0], result[1]

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
        lengths, causal = _lengths(q_tHD, k_sGD, segments), segments is None or segments.causal
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q_tHD.device)
        unused = torch.zeros((), dtype=torch.uint64, device=q_tHD.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            d_out_tHD.contiguous(), q_tHD, k_sGD, v_sGD, out_tHD, lse_Ht.contiguous(), *lengths, 0.0, causal,
            no_dropout, unused, scale=scoring.scale, **_window(scoring.window),
        )  # fmt: skip
        return dq, dk, dv


def _lengths(q_tHD: Tensor, k_sGD: Tensor, segments: Segments | None) -> tuple[Tensor, Tensor, int, int]:
    if segments is not None:
        return segments.query_starts, segments.key_starts, segments.most_queries, segments.most_keys
    t, s = q_tHD.shape[0], k_sGD.shape[0]
    # [0, n] made on the device: a copy from the host would wait for the stream.
    starts_t, starts_s = (torch.arange(0, n + 1, n, dtype=torch.int32, device=q_tHD.device) for n in (t, s))
    return starts_t, starts_s, t, s


def _window(window: int | None) -> dict[str, Any]:
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
