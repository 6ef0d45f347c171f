"""Which kernel runs, and why: the first in order of speed that is proven for the case.

A silent fall-back costs a factor of two (FlashAttention 4 662 TFLOP/s, FlashAttention 2 330, at 131,072 tokens on an H200),
and published step times were wrong because of one; so the choice carries its reason for the run header, and one loud line
whenever this machine could run something faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megaspan.attention.cpu import CPUFlash
from megaspan.attention.cudnn import CuDNN
from megaspan.attention.flash2 import Flash2
from megaspan.attention.flash4 import Flash4
from megaspan.attention.kernel import Case, Kernel, Refusal
from megaspan.attention.tiled import TiledMath

# Fastest first; the last one takes everything.
KERNELS: tuple[Kernel, ...] = (Flash4(), CuDNN(), Flash2(), CPUFlash(), TiledMath())


@dataclass(frozen=True)
class KernelChoice:
    """A kernel, why it was taken, and what the user should hear about it.

    Attributes:
        kernel: what runs.
        reason: half a sentence for the run header.
        loud: a line to print in any case, because this machine could run something faster; None when it could not.
        also: the choices for the model's other kinds of layers (windows), when there are any.
        several: it is for several documents, or a rank's parts of a row, in one call.
    """

    kernel: Kernel
    reason: str
    loud: str | None = None
    also: tuple[KernelChoice, ...] = ()
    several: bool = False

    @property
    def name(self) -> str:
        """The kernel's name for headers."""
        return self.kernel.name


def choose_kernel(
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    tokens: int = 2**20,
    *,
    queries: int | None = None,
    segments: int = 1,
    kernels: tuple[Kernel, ...] = KERNELS,
) -> KernelChoice:
    """The fastest kernel proven for this case on this machine.

    Args:
        device: where the tensors lie.
        dtype: of q, k, v.
        head_dim: head size.
        window: keys a query sees including itself; None, 0 and anything from `tokens` on mean all.
        softcap: soft cap on the scores, None or 0 for none.
        sinks: whether the layer has attention sinks. Every kernel takes them: they only rescale its output (`sinks.py`).
        tokens: keys.
        queries: query tokens, the suffix of the keys; all of them by default.
        segments: documents of a row, 2 for some; 1 for a row that is one document.
        kernels: candidates, fastest first.
    """
    case = case_of(device, dtype, head_dim, window, softcap, queries or tokens, tokens, segments)
    return choose_for(case, sinks, kernels)


def case_of(
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    window: int | None,
    softcap: float | None,
    queries: int,
    keys: int,
    segments: int = 1,
    causal: bool = True,
    share: int | None = None,
) -> Case:
    """A case in its normal form: a window that hides nothing and a soft cap of 0 are None."""
    device = torch.device(device)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    window = window if window and window < keys else None
    deterministic = torch.are_deterministic_algorithms_enabled()
    kind = window, softcap or None, deterministic, segments, causal, share
    return Case(device.type, capability, dtype, head_dim, queries, keys, *kind)


def choose_for(case: Case, sinks: bool = False, kernels: tuple[Kernel, ...] = KERNELS) -> KernelChoice:
    """`choose_kernel` for a case that is already known."""
    refused: list[tuple[Kernel, Refusal]] = []
    for kernel in kernels:
        refusal = kernel.refusal(case)
        if refusal is None:
            return KernelChoice(kernel, _reason(case, sinks, refused), _loud(kernel, refused), several=not case.plain)
        refused.append((kernel, refusal))
    raise AssertionError("the last kernel takes every case")


def _reason(case: Case, sinks: bool, refused: list[tuple[Kernel, Refusal]]) -> str:
    wants = [f"head size {case.head_dim}", str(case.dtype).removeprefix("torch.")]
    wants += [f"window {case.window:,}"] if case.window else []
    wants += [f"soft cap {case.softcap:g}"] if case.softcap else []
    wants += ["sinks"] if sinks else []
    wants += [] if case.plain else ["variable lengths"]
    passed_over = [f"{kernel.name} {refusal.reason}" for kernel, refusal in refused if refusal.machine_could]
    return f"fastest proven for {', '.join(wants)} on {case.device}" + "".join(f"; {text}" for text in passed_over)


def _loud(kernel: Kernel, refused: list[tuple[Kernel, Refusal]]) -> str | None:
    faster = [f"{other.name} {refusal.reason}" for other, refusal in refused if refusal.machine_could]
    if not faster:
        return None
    return f"SLOWER ATTENTION THAN THIS MACHINE COULD RUN: {kernel.name} runs, because {'; '.join(faster)}."
