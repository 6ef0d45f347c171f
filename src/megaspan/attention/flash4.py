"""FlashAttention 4 (package `flash-attn-4`, our extra `flash`): the fastest kernel on Hopper and Blackwell GPUs.

716/661 TFLOP/s forward/backward at 32,768 tokens on an H200 (32/8 heads of 128), against 659/549 for cuDNN. Measured
against fp32 on the H200: right for causal rows, suffixes, windows, soft caps, and past 2**31 elements, at head sizes 64,
96, 128, 192 and 256; for documents of variable lengths at 128, with one-token documents and windows. Its backward is wrong at
head size 80 without a word, so only these sizes are taken.

Of variable lengths we read in `interface.py` of 4.0.0b36: the log-sum-exp is [heads, all queries]; causal ranges and windows
align at the end of each segment's keys; each segment begins a tile of its own in the backward's fp32 sums (64 queries, 128 keys
at head size 128 on Hopper: 8 % more of them at 1,048,576 tokens in 1,000 documents; `attend.py` cuts calls with more). More
than 256 segments run code of their own, and so does one query head a KV head: `proof.py` tries both.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, final

import torch
from torch import Tensor
from typing_extensions import override

from megaspan.attention.kernel import Case, Given, Kernel, Refusal, Scoring, half_precision
from megaspan.attention.segments import Segments

PROVEN_HEAD_SIZES = (64, 96, 128, 192, 256)
# In a fixed order the backward keeps a counter for each segment and tile of the longest one: 64 KiB a head at a million tokens.
_MOST_SEGMENTS_IN_ORDER = 1024


@final
class Flash4(Kernel):
    """`flash_attn.cute.interface`, GQA unexpanded; a row alone goes as a batch of one, segments as variable lengths."""

    name = "FlashAttention 4"

    def installed(self) -> bool:
        """Whether the package flash-attn-4 is there and can be imported."""
        try:
            return find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None
        except ImportError:  # a broken `flash_attn` of another generation
            return False

    def limit(self, segments: Segments | None) -> int | None:
        """Rows alone are proven past 2**31 elements; in variable lengths offsets of segments are counted in other code."""
        return self.max_elements if segments is None else 2**31 - 1

    def segment_padding(self, device: torch.device) -> int:
        """A tile of keys; of queries it is half of that. Two thread blocks share one on Blackwell."""
        return 256 if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10 else 128

    def refusal(self, case: Case) -> Refusal | None:
        """Hopper or Blackwell data-centre GPUs, half precision, proven head sizes, package installed."""
        if case.device != "cuda" or case.capability[0] not in (9, 10):
            return Refusal("needs a Hopper or Blackwell GPU (compute capability 9.x or 10.x)", False)
        if not half_precision(case):
            return Refusal(f"computes in bf16 or fp16, not {_name(case.dtype)}", True)
        if case.head_dim not in PROVEN_HEAD_SIZES:
            return Refusal(f"is not proven right at head size {case.head_dim} (proven: {PROVEN_HEAD_SIZES})", True)
        if case.deterministic and case.segments > _MOST_SEGMENTS_IN_ORDER:
            return Refusal(f"takes {_MOST_SEGMENTS_IN_ORDER:,} segments in a fixed order, not {case.segments:,}", True)
        if not self.installed():
            return Refusal("is not installed: pip install 'megaspan[flash]'", True)
        return None

    def forward(
        self, q_tHD: Tensor, k_sGD: Tensor, v_sGD: Tensor, scoring: Scoring, segments: Segments | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        from flash_attn.cute.interface import _flash_attn_fwd

        options = _options(scoring, segments)
        if segments is not None:
            result = _flash_attn_fwd(q_tHD, k_sGD, v_sGD, return_lse=True, **options)
            return result[0], result[1]
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
        segments: Segments | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        return self._backward((d_out_tHD, q_tHD, k_sGD, v_sGD, out_tHD, lse_Ht), scoring, segments)

    @override
    def backward_into(
        self, into: tuple[Tensor, Tensor, Tensor], given: Given, scoring: Scoring, segments: Segments | None = None
    ) -> None:
        """See `Kernel.backward_into`: the kernel writes there itself."""
        self._backward(given, scoring, segments, into)

    def _backward(
        self,
        given: Given,
        scoring: Scoring,
        segments: Segments | None,
        into: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flash_attn.cute.interface import _flash_attn_bwd

        options = _options(scoring, segments)
        if torch.are_deterministic_algorithms_enabled():
            options["deterministic"] = True
        d_out, q, k, v, out, lse = given
        # Contiguous gradients and log-sum-exp: a head slice of a larger tensor is neither.
        row = q, k, v, out, d_out, lse.contiguous()
        if segments is not None:
            options |= {} if into is None else dict(zip(("dq", "dk", "dv"), into, strict=True))
            dq, dk, dv = _flash_attn_bwd(*row, **options)[:3]
            return dq, dk, dv
        options |= {} if into is None else dict(zip(("dq", "dk", "dv"), (x[None] for x in into), strict=True))
        dq, dk, dv = (x[0] for x in _flash_attn_bwd(*(x[None] for x in row), **options)[:3])
        return dq, dk, dv


def _options(scoring: Scoring, segments: Segments | None) -> dict[str, Any]:
    # The kernel's window counts keys to the left of the token, ours counts the token too; a window call is not flagged causal.
    options: dict[str, Any] = {"softmax_scale": scoring.scale}
    options |= (
        {"causal": segments is None or segments.causal}
        if scoring.window is None
        else {"causal": False, "window_size_left": scoring.window - 1, "window_size_right": 0}
    )
    options |= {"softcap": scoring.softcap} if scoring.softcap else {}
    if segments is not None:
        options |= {
            "cu_seqlens_q": segments.query_starts, "max_seqlen_q": segments.most_queries,
            "cu_seqlens_k": segments.key_starts, "max_seqlen_k": segments.most_keys,
        }  # fmt: skip
    return options


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
