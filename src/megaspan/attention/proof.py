"""A kernel's proof on this machine: its output and gradients on a short row against the tiled kernel in fp32.

Kernels come from packages that change every week and run on GPUs nobody tried them on; a wrong backward shows in no loss
curve for a long while. The proof costs milliseconds and a compilation that the first step would pay anyway, because it is
of the layer's own kind: FlashAttention 4 is compiled anew for each number of query heads a KV head. Its error is a measured
value for the run header. Variable lengths are other code than rows alone, and above 256 segments other code again in
FlashAttention 4, so a case with segments is tried with few and with many.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from megaspan.attention.choose import KERNELS, KernelChoice, choose_for
from megaspan.attention.kernel import Case, Kernel, Refusal, Scoring
from megaspan.attention.segments import Segments
from megaspan.attention.tiled import TiledMath

# Relative error of bf16 kernels is 2-3e-3 where they are right (measured on the H200) and near 1 where they are wrong.
TOLERANCE = 2e-2
_TOKENS = 384
_WINDOW = 100
# (queries, keys) of segments, 384 queries in all: documents of one token and of a few tiles, and suffixes whose first keys lie
# before the window of every query; then more segments than any kernel looks through one by one.
_FEW = ((150, 150), (1, 1), (64, 300), (1, 130), (40, 40), (127, 128), (1, 1))
_MANY = (*((1, 1 + number % 3) for number in range(290)), (94, 210))


def prove(kernel: Kernel, case: Case, device: torch.device) -> float:
    """The largest relative error of output, dq, dk and dv on 384 queries against fp32.

    Args:
        kernel: what to try.
        case: its head size, dtype, window, soft cap and query heads of a KV head are used, and whether it has segments; a
            window is shortened to 100 so that it hides something. Two KV heads, and two query heads for each by default.
        device: where to run.
    """
    if case.plain:
        return _error(kernel, case, device, None)
    kinds = (_FEW, _MANY) if case.causal else (_FEW,)
    made = (Segments.of([t for t, _ in kind], [s for _, s in kind], device, case.causal) for kind in kinds)
    return max(_error(kernel, case, device, segments) for segments in made)


def _error(kernel: Kernel, case: Case, device: torch.device, segments: Segments | None) -> float:
    draw = torch.Generator("cpu").manual_seed(0)
    scoring = Scoring(case.head_dim**-0.5, _WINDOW if case.window else None, case.softcap)
    keys, heads = _TOKENS if segments is None else segments.keys, 2 * (case.share or 2)
    q, k, v, d_out = (
        torch.randn(*shape, case.head_dim, generator=draw).to(device, case.dtype)
        for shape in ((_TOKENS, heads), (keys, 2), (keys, 2), (_TOKENS, heads))
    )

    def run(kernel: Kernel, dtype: torch.dtype) -> tuple[Tensor, ...]:
        q_, k_, v_ = (x.to(dtype) for x in (q, k, v))
        out, lse = kernel.forward(q_, k_, v_, scoring, segments)
        return (out, *kernel.backward(d_out.to(dtype), q_, k_, v_, out, lse, scoring, segments))

    wanted = run(TiledMath(), torch.float32)
    return max(_distance(got, want) for got, want in zip(run(kernel, case.dtype), wanted, strict=True))


def choose_proven(
    case: Case, sinks: bool, device: torch.device, kernels: tuple[Kernel, ...] = KERNELS
) -> tuple[KernelChoice, tuple[Kernel, ...]]:
    """`choose_for`, with every candidate tried on `device` first; one that computes wrong values is passed over, loudly.

    Returns:
        The choice, with the measured error in its reason; and the candidates, in which a wrong one refuses everything.
    """
    while True:
        choice = choose_for(case, sinks, kernels)
        error = prove(choice.kernel, case, device)
        if error <= TOLERANCE:
            return replace(choice, reason=f"{choice.reason}; measured error against fp32 {error:.1e}"), kernels
        if isinstance(choice.kernel, TiledMath):
            raise RuntimeError(f"matrix products on {device} are off by {error:.1e} in {case.dtype}: broken hardware or torch")
        reason = f"computed wrong values on this machine (relative error {error:.1e})"
        wrong = _Wrong if case.plain else _WrongInSegments
        kernels = tuple(wrong(kernel, reason) if kernel is choice.kernel else kernel for kernel in kernels)


@final
class SegmentProof:
    """The proof of one kind of layer on segments, for models whose rows are not packed as a rule: run when a packed row comes.

    Args:
        case: of the layer, plain.
        sinks: whether it has them.
        device: where to try.
        kernels: the candidates, proven for the plain case.
    """

    def __init__(self, case: Case, sinks: bool, device: torch.device, kernels: tuple[Kernel, ...]) -> None:
        self._case, self._sinks, self._device, self._kernels = case, sinks, device, kernels
        self._proven: dict[int, Kernel] | None = None

    def choose(self, share: int | None) -> tuple[KernelChoice, tuple[Kernel, ...]]:
        """`choose_proven` for a row of several documents.

        Args:
            share: query heads of a KV head in one call.
        """
        case = replace(self._case, segments=2, share=share)
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            choice, proven = choose_proven(case, self._sinks, self._device, self._kernels)
        self._proven = {id(given): kernel for given, kernel in zip(self._kernels, proven, strict=True)}
        return choice, proven

    def applied_to(self, kernels: tuple[Kernel, ...], share: int | None) -> tuple[Kernel, ...]:
        """The kernels of a layer, those that are wrong on segments refusing them. The first call tries them."""
        if self._proven is None:
            self.choose(share)
        proven = self._proven or {}
        return tuple(proven.get(id(kernel), kernel) for kernel in kernels)


class _Wrong(Kernel):
    """A kernel that failed its proof: it refuses everything."""

    def __init__(self, kernel: Kernel, reason: str) -> None:
        self.name, self._refusal = kernel.name, Refusal(reason, True)

    def refusal(self, case: Case) -> Refusal | None:
        return self._refusal

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise AssertionError(self._refusal.reason)

    def backward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        raise AssertionError(self._refusal.reason)


class _WrongInSegments(Kernel):
    """A kernel that failed its proof on segments: it refuses those."""

    def __init__(self, kernel: Kernel, reason: str) -> None:
        self.name, self.max_elements = kernel.name, kernel.max_elements
        self._kernel, self._refusal = kernel, Refusal(reason, True)

    def installed(self) -> bool:
        return self._kernel.installed()

    def limit(self, segments: Segments | None) -> int | None:
        return self._kernel.limit(segments)

    def refusal(self, case: Case) -> Refusal | None:
        return self._kernel.refusal(case) if case.plain else self._refusal

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._kernel.forward(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        return self._kernel.backward(*args, **kwargs)


def _distance(got: Tensor, want: Tensor) -> float:
    distance = ((got.float() - want.float()).norm() / want.float().norm()).item()
    return distance if distance == distance else float("inf")
