"""Seconds of a step from measured kernel rates, as a prediction whose arithmetic is printed; unknown GPUs get none.

At a million tokens 95 % of the work is attention, so its kernel's rate at that length decides. The rates below were measured
on an H200 (torch 2.11, bf16, head size 128, causal). With them plain checkpointing is predicted within 9 % of what TRL's steps
took there, from 32k to 262k tokens.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from dataclasses import dataclass
from pathlib import Path

from megaspan.plan.facts import ModelFacts
from megaspan.plan.layer import layer_bytes
from megaspan.plan.parts import Settings

# TFLOP/s forward and backward, by tokens.
_RATES: dict[str, dict[int, tuple[float, float]]] = {
    "flash-attn-4": {32_768: (716, 661), 131_072: (662, 610), 262_144: (659, 616)},
    "cuDNN": {32_768: (659, 549), 131_072: (554, 535), 262_144: (535, 532)},
    "FlashAttention 2": {32_768: (357, 319), 131_072: (330, 325)},
}
_DENSE = 790e12
_BANDWIDTH = 4.3e12  # bytes a second of device memory
_LINK = 53e9  # bytes a second to and from the host, each way
# Norms, rotary positions, activations and residuals: the remainder of measured steps, as passes over what a layer keeps.
_PASSES = 24


@dataclass(frozen=True)
class SecondsPart:
    """One summand of a step's seconds."""

    name: str
    seconds: float
    formula: str


@dataclass(frozen=True)
class Seconds:
    """A predicted step.

    Attributes:
        parts: the summands; empty when nothing is known.
        note: which kernel they hold for, or why there are none.
    """

    parts: tuple[SecondsPart, ...]
    note: str

    @property
    def total(self) -> float | None:
        """Seconds of a step, or None when unknown."""
        return sum(part.seconds for part in self.parts) if self.parts else None


def step_seconds(facts: ModelFacts, s: Settings, device_name: str, kernel: str | None = None) -> Seconds:
    """Predict one row's forward, backward and recomputation.

    Args:
        facts: the model.
        s: the levers.
        device_name: the GPU as its driver names it.
        kernel: attention kernel; None takes the fastest that is installed here.
    """
    if not s.gpu or "H200" not in device_name:
        return Seconds((), f"unknown: kernel rates were measured on an H200 only, not on {device_name or 'this device'}")
    if s.compute_bytes != 2 or facts.head_dim != 128:
        return Seconds(
            (), f"unknown: rates were measured in bf16 for head size 128, not {8 * s.compute_bytes} bits and {facts.head_dim}"
        )
    chosen = kernel or ("flash-attn-4" if has_flash4() else "cuDNN")
    forward, backward = _rate(chosen, s.tokens)
    again = facts.layers - (s.keep_outputs if s.streamed else 0) if s.checkpoint else 0
    runs = 2 if s.checkpoint else 1
    each = [_attention_flops(facts, layer, s.tokens) for layer in range(facts.layers)]
    attention, twice = sum(each), sum(each[:again])
    tiled = s.streamed and s.checkpoint and s.tokens > s.layer_tile
    third = facts.hidden * (facts.query_width + 2 * facts.kv_width) if tiled else 0
    dense = sum(facts.linear_parameters(layer) for layer in range(facts.layers))
    products = runs + (1 if s.adapter else 2)
    kept = sum(layer_bytes(facts, layer, s).kept for layer in range(facts.layers))
    head = 3 - bool(s.adapter)
    parts = [
        SecondsPart(
            "attention forward",
            (attention + twice) / forward,
            f"({attention:.3g} FLOP" + (f" + {again} layers again" if again else "") + f") / {forward / 1e12:.0f} TFLOP/s",
        ),
        SecondsPart("attention backward", 2.5 * attention / backward, f"2.5 x {attention:.3g} / {backward / 1e12:.0f} TFLOP/s"),
        SecondsPart(
            "projections and MLP",
            2 * (products * dense + facts.layers * third) * s.tokens / _DENSE,
            f"2 x ({products} x {dense:.3g} weights"
            + (" + q, k, v again" if third else "")
            + f") x t / {_DENSE / 1e12:.0f} TFLOP/s",
        ),
        SecondsPart(
            "output head",
            head * 2 * facts.head_parameters * s.tokens / _DENSE,
            f"{head} x 2 x {facts.head_parameters:.3g} weights x t / {_DENSE / 1e12:.0f} TFLOP/s",
        ),
        SecondsPart(
            "norms, rotary, activations",
            _PASSES * kept * s.tokens / _BANDWIDTH,
            f"{_PASSES} passes (fitted) x {kept:,} B x t / {_BANDWIDTH / 1e12} TB/s",
        ),
    ]
    moved = facts.layers - s.keep_on_device if s.checkpoint and s.offload else 0
    outputs = max(0, min(moved, s.keep_outputs - s.keep_on_device)) if s.streamed else 0
    link = s.tokens * s.compute_bytes * (moved * facts.hidden + outputs * facts.query_width) / _LINK
    total = sum(part.seconds for part in parts)
    note = f"with {chosen} attention; optimizer step not counted"
    if link * 2 > total:
        parts.append(
            SecondsPart("waiting for the host link", 2 * link - total, f"2 x {link:.1f} s of copies at 53 GB/s, not hidden")
        )
    elif moved:
        note += f"; {2 * link:.1f} s of copies to and from the host hide behind it"
    return Seconds(tuple(parts), note)


def has_flash4() -> bool:
    """Whether flash-attn-4 is installed, without importing it: that would load torch."""
    spec = importlib.util.find_spec("flash_attn")
    return any((Path(place) / "cute").is_dir() for place in (spec.submodule_search_locations or ())) if spec else False


def _attention_flops(facts: ModelFacts, layer: int, tokens: int) -> float:
    """Forward: two products of 2·H·D operations for each visible pair of tokens."""
    span = min(facts.span(layer) or tokens, tokens)
    return 4.0 * facts.query_width * (tokens * span - span * span / 2)


def _rate(kernel: str, tokens: int) -> tuple[float, float]:
    """Operations a second, forward and backward, between the measured lengths on a logarithmic scale."""
    points = sorted(_RATES[kernel].items())
    tokens = min(max(tokens, points[0][0]), points[-1][0])
    for (low, below), (high, above) in itertools.pairwise(points):
        if low <= tokens <= high:
            part = math.log(tokens / low) / math.log(high / low)
            return tuple(1e12 * (a + part * (b - a)) for a, b in zip(below, above, strict=True))  # type: ignore[return-value]
    raise AssertionError(kernel)
