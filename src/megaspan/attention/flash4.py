"""FlashAttention 4 (package `flash-attn-4`, our extra `flash`): the fastest kernel on Hopper and Blackwell GPUs.

716/661 TFLOP/s forward/backward at 32,768 tokens on an H200 (32/8 heads of 128), against 659/549 for cuDNN. Measured
against fp32 on the H200: right for causal rows, suffixes, windows, soft caps, and past 2**31 elements, at head sizes 64,
96, 128, 192 and 256. Its backward is wrong at head size 80 without a word, so only these sizes are taken.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, final

import torch
from torch import Tensor

from megaspan.attention.kernel import Case, Kernel, Refusal, Scoring, half_precision

PROVEN_HEAD_SIZES = (64, 96, 128, 192, 256)


@final
class Flash4(Kernel):
    """`flash_attn.cute.interface`, dense calls, GQA unexpanded."""

    name = "FlashAttention 4"

    def installed(self) -> bool:
        """Whether the package flash-attn-4 is there and can be imported."""
        try:
            return find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None
        except ImportError:  # a broken `flash_attn` of another generation
            return False

    def refusal(self, case: Case) -> Refusal | None:
        """Hopper or Blackwell data-centre GPUs, half precision, proven head sizes, package installed."""
        if case.device != "cuda" or case.capability[0] not in (9, 10):
            return Refusal("needs a Hopper or Blackwell GPU (compute capability 9.x or 10.x)", False)
        if not half_precision(case):
            return Refusal(f"computes in bf16 or fp16, not {_name(case.dtype)}", True)
        if case.head_dim not in PROVEN_HEAD_SIZES:
            return Refusal(f"is not proven right at head size {case.head_dim} (proven: {PROVEN_HEAD_SIZES})", True)
        if not self.installed():
            return Refusal("is not installed: pip install 'megaspan[flash]'", True)
        return None

    def forward(self, q_tHD: Tensor, k_sGD: Tensor, v_sGD: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        from flash_attn.cute.interface import _flash_attn_fwd

        options = _options(scoring)
        result = _flash_attn_fwd(q_tHD[None], k_sGD[None], v_sGD[None], return_lse=True, **options)
        return result[0][0], result[1][0]

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
        from flash_attn.cute.interface import _flash_attn_bwd

        options = _options(scoring)
        if torch.are_deterministic_algorithms_enabled():
            options["deterministic"] = True
        # Contiguous gradients and log-sum-exp: a head slice of a larger tensor is neither.
        grads = _flash_attn_bwd(
            q_tHD[None], k_sGD[None], v_sGD[None], out_tHD[None], d_out_tHD[None], lse_Ht.contiguous()[None], **options
        )
        return grads[0][0], grads[1][0], grads[2][0]


def _options(scoring: Scoring) -> dict[str, Any]:
    # The kernel's window counts keys to the left of the token, ours counts the token too; a window call is not flagged causal.
    options: dict[str, Any] = {"softmax_scale": scoring.scale}
    options |= (
        {"causal": True}
        if scoring.window is None
        else {"causal": False, "window_size_left": scoring.window - 1, "window_size_right": 0}
    )
    return options | ({"softcap": scoring.softcap} if scoring.softcap else {})


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
