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

from megaspan.human import count_of
from megaspan.plan.facts import ModelFacts
from megaspan.plan.keep import KeepPolicy, Place
from megaspan.plan.layer import layer_bytes
from megaspan.plan.links import rank_seconds
from megaspan.plan.packed import LONG, kernel_of, packed_rates
from megaspan.plan.parts import SecondsPart as SecondsPart
from megaspan.plan.parts import Settings
from megaspan.plan.streamed import group_count, input_bytes, output_bytes, projects_ahead
from megaspan.plan.weights import link_bytes, moments

# TFLOP/s forward and backward, by tokens.
_RATES: dict[str, dict[int, tuple[float, float]]] = {
    "flash-attn-4": {32_768: (716, 661), 131_072: (662, 610), 262_144: (659, 616)},
    "cuDNN": {32_768: (659, 549), 131_072: (554, 535), 262_144: (535, 532)},
    "FlashAttention 2": {32_768: (357, 319), 131_072: (330, 325)},
}
_DENSE = 790e12
_BANDWIDTH = 4.3e12  # bytes a second of device memory
_LINK = 53e9  # bytes a second to and from the host, each way, both directions busy: measured on an H200
DISK = 2e9  # of a local NVMe disk; assumed here, measured before a run
# Norms, rotary positions, activations and residuals: the remainder of measured steps, as passes over what a layer keeps.
# Streamed layers have fused ones: steps of 32k, 65k and 131k tokens then took 3.77, 11.02 and 36.1 s (docs/log.md).
_PASSES = 24
_PASSES_STREAMED = 14
# Seconds of one more call of attention: 2 KV heads a call against 8, measured at 32,768 and 131,072 tokens.
_CALL = 0.5e-3
_TILE_COST = {8_192: 1.05, 4_096: 1.2}  # of those passes: launches weigh more in small tiles
_FORWARD_SHARE = 0.25  # of a step: attention's backward is 2.5 times its forward, and the rest is computed again


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


@dataclass(frozen=True)
class _Work:
    """What a step computes, as seconds of each kind, and where the copies beside it fall."""

    parts: tuple[SecondsPart, ...]
    copies: float
    exposed: tuple[SecondsPart, ...]


def step_seconds(facts: ModelFacts, s: Settings, device_name: str, kernel: str | None = None) -> Seconds:
    """Predict one row's forward, backward and recomputation, and the optimizer's pass.

    Args:
        facts: the model.
        s: the levers.
        device_name: the GPU as its driver names it.
        kernel: attention kernel; None takes the fastest that is installed here.
    """
    if not s.gpu or "H200" not in device_name:
        return Seconds((), f"unknown: kernel rates were measured on an H200 only, and this is {device_name or 'none'}")
    if s.compute_bytes != 2 or facts.head_dim != 128:
        return Seconds(
            (), f"unknown: rates were measured in bf16 for head size 128, not {8 * s.compute_bytes} bits and {facts.head_dim}"
        )
    chosen = kernel or ("flash-attn-4" if has_flash4() else "cuDNN")
    chosen = chosen if s.packed is None else kernel_of(chosen)
    work = _work(facts, s, chosen)
    note = f"with {chosen} attention"
    if work.copies:
        note += f"; {work.copies:.1f} s of copies to and from the host run beside it"
    return Seconds((*work.parts, *work.exposed), note)


def relative_seconds(facts: ModelFacts, s: Settings) -> float:
    """Seconds by which settings are compared, on whatever device: those of an H200."""
    work = _work(facts, s, "flash-attn-4")
    return sum(part.seconds for part in (*work.parts, *work.exposed))


def _work(facts: ModelFacts, s: Settings, kernel: str) -> _Work:
    policy, row = s.policy(facts.layers), s.ranks.row
    each, (forward, backward) = _attention(facts, s, kernel)
    of_rank = f" on each of {row} ranks" if row > 1 else ""
    attention = sum(each)
    again = [number for number, keep in enumerate(policy.layers) if keep.output is None] if s.checkpoint else []
    twice = sum(each[number] for number in again)
    tiled = s.streams and s.slots > s.layer_tile
    linear = [facts.linear_parameters(layer) for layer in range(facts.layers)]
    dense, third = sum(linear), facts.layers * facts.hidden * (facts.query_width + 2 * facts.kv_width) if tiled else 0
    products = (2 if s.checkpoint else 1) + (1 if s.adapter else 2)
    kept = [layer_bytes(facts, layer, s).kept for layer in range(facts.layers)]
    passes = (_PASSES_STREAMED if s.streams else _PASSES) * (_TILE_COST.get(s.layer_tile, 1.0) if tiled else 1.0)
    head = 3 - bool(s.adapter)
    parts = [
        SecondsPart(
            "attention forward",
            (attention + twice) / forward,
            f"({attention:.3g} FLOP{of_rank}"
            + (f" + {count_of(len(again), 'layer')} again" if again else "")
            + f") / {forward / 1e12:.0f} TFLOP/s",
        ),
        SecondsPart("attention backward", 2.5 * attention / backward, f"2.5 x {attention:.3g} / {backward / 1e12:.0f} TFLOP/s"),
        SecondsPart(
            "projections and MLP",
            2 * (products * dense + third) * s.slots / _DENSE,
            f"2 x ({products} x {dense:.3g} weights"
            + (" + q, k, v again" if third else "")
            + f") x t / {_DENSE / 1e12:.0f} TFLOP/s",
        ),
        SecondsPart(
            "output head",
            head * 2 * facts.head_parameters * s.slots / _DENSE,
            f"{head} x 2 x {facts.head_parameters:.3g} weights x t / {_DENSE / 1e12:.0f} TFLOP/s",
        ),
        SecondsPart(
            "norms, rotary, activations",
            passes * sum(kept) * s.slots / _BANDWIDTH,
            f"{passes:.3g} passes (fitted) x {sum(kept):,} B x t / {_BANDWIDTH / 1e12} TB/s",
        ),
    ]
    parts += [
        part for part in (_segments(facts, s, policy, linear, kept), _groups(facts, s), _update(facts, s)) if part.seconds
    ]
    computed = sum(part.seconds for part in parts)
    parts += rank_seconds(facts, s, parts[0].seconds, parts[1].seconds, computed, len(again) / facts.layers)
    return _Work(tuple(parts), *_copies(facts, s, policy, sum(part.seconds for part in parts)))


def _segments(facts: ModelFacts, s: Settings, policy: KeepPolicy, linear: list[int], kept: list[int]) -> SecondsPart:
    """Token-wise work of layers that run again so that a layer above gets its input; their attention is counted elsewhere."""
    layers = [layer for segment in policy.segments for layer in segment[:-1]] if s.streams else []
    products = sum(2 * linear[layer] * s.slots / _DENSE for layer in layers)
    passes = sum(_PASSES_STREAMED / 3 * kept[layer] * s.slots / _BANDWIDTH for layer in layers)
    return SecondsPart(
        "layers run again",
        products + passes,
        f"{count_of(len(layers), 'layer')}: products and a third of the passes; attention is above",
    )


def _groups(facts: ModelFacts, s: Settings) -> SecondsPart:
    """What head groups cost: smaller launches, and the input read and normed once for each."""
    extra = (group_count(facts, s) - 1) * facts.layers if s.streams else 0
    norms = 2 * extra * 3 * s.slots * facts.hidden * s.compute_bytes / _BANDWIDTH
    formula = f"{extra} more calls x {1000 * _CALL:.2g} ms forward and backward, and the input's norm for each"
    return SecondsPart("attention in head groups", 2 * extra * _CALL + norms, formula)


def _update(facts: ModelFacts, s: Settings) -> SecondsPart:
    """AdamW: everything read, most of it written; what lies on the host crosses the link, both ways at once."""
    count = (s.adapter or facts.parameters) / s.ranks.shard
    states = moments(facts, s)[0] + (4 * count if s.masters else 0)
    passes = (2 * states + 2 * count * s.compute_bytes + count * s.gradient_bytes) / _BANDWIDTH
    _, crossing = link_bytes(facts, s)
    if s.states.moments == "host" and s.states.gradients == "update":
        # A layer's parameters come one after the other, and the backward waits: for all on its way in, and for half of it on
        # its way out, the last piece of each, before the next one comes (optimizer/conveyor.py).
        formula = f"in the backward, which waits: 1.5 x {crossing / 1e9:.1f} GB over the link at 53 GB/s"
        return SecondsPart("optimizer", passes + 1.5 * crossing / _LINK, formula)
    link = crossing / _LINK
    where = f", {crossing / 1e9:.1f} GB over the link at 53 GB/s each way" if crossing else ""
    return SecondsPart("optimizer", max(passes, link), f"one pass over {states / 1e9:.1f} GB of states{where}")


def _copies(facts: ModelFacts, s: Settings, policy: KeepPolicy, computed: float) -> tuple[float, tuple[SecondsPart, ...]]:
    """Seconds of copies, and those that the computation does not hide: of the forward and of the backward by themselves."""
    if not s.checkpoint:
        return 0.0, ()
    x, out = input_bytes(facts, s), output_bytes(facts, s)

    def size(place: Place) -> int:
        inputs, outputs = policy.below[place][-1]
        return inputs * x + outputs * out

    stored = [policy.stored_again(segment) for segment in policy.segments] if policy.again == "host" else []
    again = sum(inputs * x + outputs * out for inputs, outputs in stored)
    away, gradients = size("host") + size("disk"), link_bytes(facts, s)[0]
    reads = away + again
    if s.stream_back and s.streams:
        # Tiles of x are read in each phase, and once for each head group; O twice.
        inputs = sum(policy.below[place][-1][0] for place in ("host", "disk")) + sum(pair[0] for pair in stored)
        reads = 2 * reads + inputs * x * group_count(facts, s)
    forward, backward = computed * _FORWARD_SHARE, computed * (1 - _FORWARD_SHARE)
    summed = 2 * gradients if s.rows > 1 else 0  # of the rows before: in for each addition, out before the next one's
    there, back = away / _LINK, max(reads, again + (0 if summed else gradients)) / _LINK
    wait = max(0.0, there - forward) + max(0.0, back - backward)
    exposed = [SecondsPart("waiting for the host link", wait, "copies at 53 GB/s that the computation does not hide")]
    formula = f"{summed / 1e9:.1f} GB over the link at 53 GB/s, which the backward waits for"
    exposed.append(SecondsPart("adding to the sum of gradients", summed / _LINK, formula))
    disk = size("disk") / DISK
    if disk:
        wait = max(0.0, disk - forward) + max(0.0, disk - backward)
        exposed.append(SecondsPart("waiting for the disk", wait, f"{size('disk') / 1e9:.1f} GB at an assumed 2 GB/s each way"))
    if s.stream_back and s.streams:
        exposed.append(_fetching(facts, s, policy))
    return there + back, tuple(part for part in exposed if part.seconds)


def _fetching(facts: ModelFacts, s: Settings, policy: KeepPolicy) -> SecondsPart:
    """Inputs that come in tiles while q, k, v of a head group are made of them: little work, and the row's attention waits.

    57 s for 8B at 1,048,576 tokens with one KV head a call; a rehearsal of that measured 63 s of copies that nothing hid. With
    `project_ahead` only the first group of a layer that attends again is waited for.
    """
    groups, x = group_count(facts, s), input_bytes(facts, s)
    stored = [number for segment in policy.segments for number in segment[1:]] if policy.again == "host" else []
    read = {number for number, keep in enumerate(policy.layers) if keep.input in ("host", "disk")} | set(stored)
    # Besides each layer's backward: attention again of a segment's last layer; the others' comes while their row is made.
    last = [segment[-1] for segment in policy.segments if policy.layers[segment[-1]].output is None]
    ahead = projects_ahead(facts, s)
    count = len(read.intersection(last)) + (0 if ahead else len(read))
    products = 2 * facts.hidden * (facts.query_width + 2 * facts.kv_width) * s.slots / _DENSE
    each = max(0.0, x / _LINK - (products / groups + 2 * x / _BANDWIDTH))
    of = f"the first of {groups} head groups" if ahead else f"{groups} head groups"
    formula = f"{count} layers' inputs x {of} x {x / 1e9:.1f} GB at {_LINK / 1e9:.0f} GB/s, less their products"
    return SecondsPart("fetching by tiles", count * (1 if ahead else groups) * each, formula)


def has_flash4() -> bool:
    """Whether flash-attn-4 is installed, without importing it: that would load torch."""
    spec = importlib.util.find_spec("flash_attn")
    return any((Path(place) / "cute").is_dir() for place in (spec.submodule_search_locations or ())) if spec else False


def _attention(facts: ModelFacts, s: Settings, kernel: str) -> tuple[list[float], tuple[float, float]]:
    """Operations of each layer's attention forward on a rank, and a second of forward and backward."""
    if s.packed is None:
        # A row is shared so that every rank has the mean (attention/placement.py).
        each = [_attention_flops(facts, layer, s.tokens) / s.ranks.row for layer in range(facts.layers)]
        return each, _rate(kernel, s.tokens)
    each, kernel = [s.packed.flops(facts, layer, s.ranks.sp) for layer in range(facts.layers)], kernel_of(kernel)
    per_pair = 4.0 * facts.query_width * s.slots * facts.layers
    rates = _rate(kernel, LONG), _rate(kernel, round(s.packed.typical))
    return each, packed_rates(kernel, *rates, s.packed.typical, sum(each), per_pair)


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
