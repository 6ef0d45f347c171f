"""cuDNN's attention through torch: what `sdpa` takes on an H200, the fastest kernel that needs no package.

659/549 TFLOP/s at 32,768 tokens, 554/535 at 131,072 (32/8 heads of 128). It aligns causal rectangles at the top left, where
a suffix of queries needs the bottom right, and gives NaN gradients for some lengths that are no multiple of 128: so whole
rows only, padded here. Padding at the end is exact: under a causal mask no real query sees a padded key, and a padded query
has a zero incoming gradient, so it adds nothing to the gradients of keys and values.
"""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from megaspan.attention.kernel import Case, Kernel, Refusal, Scoring, half_precision
from megaspan.attention.segments import Segments

_MULTIPLE = 128


@final
class CuDNN(Kernel):
    """`aten._scaled_dot_product_cudnn_attention`, whole causal rows, GQA unexpanded."""

    name = "cuDNN"
    max_elements = 2**31 - 1

    def refusal(self, case: Case) -> Refusal | None:
        """Whole causal rows without window or soft cap, half precision, head sizes that are multiples of 8 up to 256."""
        if case.device != "cuda" or case.capability < (8, 0) or not torch.backends.cudnn.is_available():
            return Refusal("needs an NVIDIA GPU of compute capability 8.0 or newer with cuDNN", False)
        if not half_precision(case):
            return Refusal(f"computes in bf16 or fp16, not {str(case.dtype).removeprefix('torch.')}", True)
        if case.head_dim % 8 or case.head_dim > 256:
            return Refusal(f"is not proven right at head size {case.head_dim}", True)
        if case.window is not None or case.softcap is not None:
            return Refusal("has no sliding windows and no soft cap", True)
        if not case.plain:
            return Refusal("takes one causal row a call", True)
        if not case.square:
            return Refusal("aligns a suffix of queries with the first keys", True)
        if case.deterministic:
            return Refusal("does not promise bit-equal gradients", True)
        return None

    def forward(
        self, q_tHD: Tensor, k_sGD: Tensor, v_sGD: Tensor, scoring: Scoring, segments: Segments | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        assert segments is None
        tokens, heads, _ = q_tHD.shape
        q, k, v = (_pad(x) for x in (q_tHD, k_sGD, v_sGD))
        result = torch.ops.aten._scaled_dot_product_cudnn_attention(
            _to_kernel(q), _to_kernel(k), _to_kernel(v), None, True, 0.0, True, False, scale=scoring.scale
        )
        return result[0][0].transpose(0, 1)[:tokens], result[1].reshape(heads, -1)[:, :tokens]

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
        assert segments is None
        tokens = q_tHD.shape[0]
        d_out, q, k, v, out = (_to_kernel(_pad(x)) for x in (d_out_tHD, q_tHD, k_sGD, v_sGD, out_tHD))
        length = q.shape[2]
        # A padded query is a zero vector whose scores are all 0: any finite log-sum-exp keeps its softmax finite.
        lse = F.pad(lse_Ht, (0, length - tokens)).contiguous()[None, :, :, None]
        unused_seed = torch.zeros((), dtype=torch.int64, device=q.device)  # no dropout, nothing is drawn from it
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            d_out, q, k, v, out, lse, unused_seed, unused_seed, None, None, None, length, length, 0.0, True, scale=scoring.scale
        )
        dq, dk, dv = (grad[0].transpose(0, 1)[:tokens] for grad in grads)
        return dq, dk, dv


def _pad(x_tHD: Tensor) -> Tensor:
    short = -x_tHD.shape[0] % _MULTIPLE
    return F.pad(x_tHD, (0, 0, 0, 0, 0, short)) if short else x_tHD


def _to_kernel(x_tHD: Tensor) -> Tensor:
    return x_tHD.transpose(0, 1)[None]
