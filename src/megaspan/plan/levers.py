"""The levers of a plan: what each saves at this length, from where on it saves anything, and which to turn next.

A lever that saves bytes nobody needs is a cost: below some length the peak lies in one layer's recomputation or in the weights'
states, and offload, or the chunked loss of a small vocabulary, moves nothing (reported of several trainers). So every lever is
valued by the whole plan with it and without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megaspan.plan.cost import Memory, memory
from megaspan.plan.facts import ModelFacts
from megaspan.plan.keep import KeepPolicy
from megaspan.plan.parts import Settings
from megaspan.plan.search import LONGEST, largest

NOTHING = 0.01  # a lever that moves the peak by less does nothing


@dataclass(frozen=True)
class Lever:
    """One thing to turn.

    Attributes:
        name: what people call it.
        on: it is on in this plan.
        saves: bytes of the peak it saves (on the device; on the host without a GPU), against the plan with it off.
        host: bytes of host memory it costs.
        do: the line to write to turn it on.
        cost: what it costs otherwise.
        from_tokens: the shortest row at which it would save something, when it saves nothing here.
    """

    name: str
    on: bool
    saves: int
    host: int
    do: str
    cost: str
    from_tokens: int | None = None


@dataclass(frozen=True)
class Turn:
    """A lever and the changes that turning it on makes."""

    lever: Lever
    changes: dict[str, Any]


def _spared(facts: ModelFacts, s: Settings) -> str:
    """What a second forward leaves out."""
    kept = s.policy(facts.layers).outputs if s.streamed else 0
    if kept in (0, facts.layers):
        return " (without attention)" if kept else ""
    return f" (without attention in {kept} of {facts.layers} layers)"


def turns(facts: ModelFacts, s: Settings) -> tuple[Turn, ...]:
    """Every lever, with what it saves now (when on) or would save (when off), the least costly first."""
    pure = not s.masters and s.compute_bytes == 2
    again = "a second forward" + _spared(facts, s)
    everything = {"checkpoint": False, "offload": False}
    table: list[tuple[str, bool, dict[str, Any], dict[str, Any], str, str]] = [
        ("checkpointing", s.checkpoint, {"checkpoint": True}, everything, "gradient_checkpointing: true", again),
        ("chunked loss", s.chunked, {"chunked": True}, {"chunked": False}, "loss_type: chunked_nll", "nothing"),
    ]
    if s.gpu:
        moving: dict[str, Any] = {"checkpoint": True, "offload": True}
        if s.policy(facts.layers).places == {"device"}:
            moving["keep"] = None
        do = "gradient_checkpointing_kwargs: {offload: true}"
        inputs = KeepPolicy.everything(facts.layers, "device", outputs=False)
        still = {"offload": False, "keep": inputs, "stream_back": False, "project_ahead": False}
        if s.checkpoint:  # without, it is the checkpointing that is to be turned on
            table.append(("offload", s.offload, moving, still, do, "copies beside the computation"))
    if not s.adapter:
        half = {"compute_bytes": 2, "masters": False}
        full = {"compute_bytes": 2 if s.gpu else 4, "masters": s.gpu}
        table.append(("bf16 weights", pure, half, full, "dtype: bfloat16", "rounding of updates"))
        if s.gpu:
            away = {"states": replace(s.states, moments="host")}
            here = {"states": replace(s.states, moments="device")}
            on = s.states.moments == "host"
            table.append(("optimizer on the host", on, away, here, "offload_optimizer: true", "copies once a step"))
        small: dict[str, Any] = {"eight_bit": True}
        table.append(("8-bit AdamW", s.eight_bit, small, {"eight_bit": False}, "optim: adamw_8bit", "rounding of moments"))
        if s.rows == 1:
            early = {"states": replace(s.states, gradients="update")}
            late = {"states": replace(s.states, gradients="device" if s.states.gradients == "update" else s.states.gradients)}
            on = s.states.gradients == "update"
            table.append(("update in the backward", on, early, late, "max_grad_norm: 0", "the clipping of gradients"))
    if s.gpu and not (s.ranks.total == 1 and s.ranks.slots(s.tokens) < 2):
        more = s.ranks.more()
        # Twice the ranks on the same host: what layers keep is halved with the tokens, the process is there twice.
        table.append((f"{more.total} GPUs", False, {"ranks": more}, {"ranks": s.ranks}, more.flags(), "twice the GPUs"))
    rank = 16 * facts.layers * (2 * facts.hidden + facts.query_width + facts.kv_width)
    lora = {"adapter": s.adapter or rank, "adapter_inputs": s.adapter_inputs or 2 * facts.hidden}
    table.append(
        (
            "LoRA",
            bool(s.adapter),
            lora,
            {"adapter": 0, "adapter_inputs": 0},
            "use_peft: true",
            "full training (only an adapter is trained)",
        )
    )
    return tuple(_turn(facts, s, *row) for row in table)


def _turn(
    facts: ModelFacts, s: Settings, name: str, on: bool, changes: dict[str, Any], off: dict[str, Any], do: str, cost: str
) -> Turn:
    def used(tokens: int) -> tuple[Memory, Memory]:
        """With it and without it."""
        return memory(facts, replace(s, tokens=tokens, **changes)), memory(facts, replace(s, tokens=tokens, **off))

    def idle_in(with_it: Memory, without: Memory) -> bool:
        return without.peak.bytes - with_it.peak.bytes < NOTHING * (with_it if on else without).peak.bytes

    with_it, without = used(s.tokens)
    saves, host = without.peak.bytes - with_it.peak.bytes, with_it.host_bytes - without.host_bytes
    start = None
    if idle_in(with_it, without):
        nothing = largest(LONGEST, lambda tokens: tokens <= s.tokens or idle_in(*used(tokens)))
        start = nothing + 1 if s.tokens <= nothing < LONGEST else None
    return Turn(Lever(name, on, max(saves, 0), host if s.gpu else 0, do, cost, start), changes)


def further(all_turns: tuple[Turn, ...], used: Memory, host_limit: int) -> Lever | None:
    """For a row that fits: what to turn for a longer one."""
    room = max(0, host_limit - used.host_bytes)
    off = [turn.lever for turn in all_turns if not turn.lever.on and turn.lever.saves > NOTHING * used.peak.bytes]
    return next((lever for lever in off if lever.host <= room), None)


def rescue(
    all_turns: tuple[Turn, ...], s: Settings, missing: int, row: int, fits: Callable[[dict[str, Any]], bool]
) -> tuple[Lever | None, bool]:
    """For a row that does not fit: the least costly lever that is enough alone, else a shorter row, else what saves most.

    Args:
        all_turns: from `turns`.
        s: the levers as they are.
        missing: bytes that are too few where the computation is.
        row: tokens of the longest row that fits.
        fits: whether the row fits with these changes.
    """
    if s.gpu and s.offload and fits({"offload": False}):
        do = "gradient_checkpointing_kwargs: {offload: false}"
        return Lever("layer inputs on the device", False, missing, 0, do, "GPU memory"), True
    off = [turn for turn in all_turns if not turn.lever.on and turn.lever.saves > 0]
    for turn in off:
        if fits(turn.changes):
            return turn.lever, True
    if row:
        return Lever("a shorter row", False, missing, 0, f"max_length: {row}", "length"), True
    if missing <= 0:
        return None, False
    return max((turn.lever for turn in off), key=lambda lever: lever.saves, default=None), False
