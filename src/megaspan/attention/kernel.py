"""What every attention kernel looks like from outside: one signature, one declaration of what it can do.

At a million tokens attention is 96 % of a step's arithmetic, so which kernel runs decides the step time (FlashAttention 4
does 716 TFLOP/s on an H200 where FlashAttention 2 does 357), and a kernel that is silently wrong at one head size
(FlashAttention 4's backward at 80) spoils the run. A kernel therefore says for each case why it refuses, and `choose.py`
takes the first that does not.

Layout everywhere in this package: `q_tHD` [tokens, query heads, head size], `k_sGD`/`v_sGD` [keys, KV heads, head size],
the queries being the last `t` of the `s` tokens; `lse_Ht` [query heads, tokens] is the natural logarithm of the softmax
denominator, in fp32 (fp64 for fp64 inputs). A window of W means W keys including the token itself (transformers'
`sliding_window`). With `Segments`, q, k and v hold many attentions side by side; without, they are one causal attention.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from megaspan.attention.segments import Segments


@dataclass(frozen=True)
class Case:
    """One kind of attention call, as far as kernels differ about it.

    Attributes:
        device: "cuda" or "cpu".
        capability: compute capability of the CUDA device, (0, 0) elsewhere.
        dtype: of q, k and v.
        head_dim: head size D.
        queries: query tokens t.
        keys: key tokens s >= t; the queries are their suffix.
        window: keys a query sees including itself, None for all.
        softcap: scores become `softcap * tanh(score / softcap)`, None for plain scores.
        deterministic: bit-equal repetition is asked for (`full_determinism`).
        segments: attentions side by side in one call; 1 for an ordinary call, 2 or more where variable lengths are wanted.
        causal: whether a query sees only what is not after it. False is for calls with segments.
        share: query heads of one KV head, None where it is not known: kernels have code of their own for one.
    """

    device: str
    capability: tuple[int, int]
    dtype: torch.dtype
    head_dim: int
    queries: int
    keys: int
    window: int | None = None
    softcap: float | None = None
    deterministic: bool = False
    segments: int = 1
    causal: bool = True
    share: int | None = None

    @property
    def square(self) -> bool:
        """Whether every key has its query: whole rows or documents, no prefix that was seen before."""
        return self.queries == self.keys

    @property
    def plain(self) -> bool:
        """Whether a kernel without variable lengths will do: one causal attention."""
        return self.segments == 1 and self.causal


@dataclass(frozen=True)
class Scoring:
    """How scores are made and which are seen.

    Attributes:
        scale: factor on the products of queries and keys.
        window: keys a query sees including itself, None for all earlier ones.
        softcap: scores become `softcap * tanh(score / softcap)`, None for plain scores.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


class Refusal(NamedTuple):
    """Why a kernel does not take a case.

    Attributes:
        reason: half a sentence for the run header.
        machine_could: this machine could run the kernel, so whoever pays for the machine wants to know (a loud line).
    """

    reason: str
    machine_could: bool


# What a backward is given: d_out, q, k, v, out and the log-sum-exp.
Given: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class Kernel(ABC):
    """Causal attention that returns its log-sum-exp, and its backward from the kept output and log-sum-exp.

    Calls with one causal segment arrive without segments (`attend.py`).
    """

    name: str
    # Elements of the largest tensor this kernel has been proven with in one call; larger calls are split by heads.
    max_elements: int | None = None

    def installed(self) -> bool:
        """Whether the code that the kernel runs is on this machine."""
        return True

    def limit(self, segments: Segments | None) -> int | None:
        """Elements of the largest tensor of one call, None for any number."""
        return self.max_elements

    def segment_padding(self, device: torch.device) -> int:
        """Tokens that a segment of variable length may add to the sums that a backward holds, 0 for none."""
        return 0

    @abstractmethod
    def refusal(self, case: Case) -> Refusal | None:
        """None when the kernel is proven for the case, else why not."""

    @abstractmethod
    def forward(
        self, q_tHD: Tensor, k_sGD: Tensor, v_sGD: Tensor, scoring: Scoring, segments: Segments | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output [t, H, D] in q's dtype and log-sum-exp [H, t]."""

    @abstractmethod
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
        """Gradients of q, k and v in their shapes and dtypes, from the kept output and log-sum-exp.

        Only `exp(score - lse)` and `sum(d_out * out)` enter, so an `out` rescaled together with its `lse` (sinks, merged parts)
        gives exact gradients.
        """

    def backward_into(
        self, into: tuple[Tensor, Tensor, Tensor], given: Given, scoring: Scoring, segments: Segments | None = None
    ) -> None:
        """`backward`, written into tensors that are there: contiguous slices of the gradients of more tokens."""
        for place, gradient in zip(into, self.backward(*given, scoring, segments), strict=True):
            place.copy_(gradient)


def half_precision(case: Case) -> bool:
    """Whether the case's dtype is one of the two that GPU kernels multiply in."""
    return case.dtype in (torch.bfloat16, torch.float16)
