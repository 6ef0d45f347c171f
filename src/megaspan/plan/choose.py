"""From wishes, model and machine to one frozen plan, every choice with its reason.

Mechanisms take a `Plan` and never decide. The planner decides here, by arithmetic on numbers that it prints: loss tile, how
many layer inputs stay on the device, whether it fits, the longest row that would, and which lever to turn next. A lever that
does nothing at this length is called that: below some length the peak lies in one layer's recomputation, and moving layer
inputs to the host frees bytes that nobody needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megaspan.human import UserError, format_bytes, format_tokens
from megaspan.plan.adapter import adapter_size
from megaspan.plan.cost import (
    Memory,
    Part,
    Settings,
    disk_parts,
    gradient_bytes,
    input_bytes,
    largest_allocation,
    loss_tile,
    memory,
    with_tokens,
)
from megaspan.plan.facts import Machine, ModelFacts, read_config
from megaspan.plan.rope_math import RopeChoice, resolve_rope
from megaspan.plan.seconds import Seconds, has_flash4, step_seconds

if TYPE_CHECKING:
    from megaspan.config import SFTConfig

_LONGEST = 1 << 27
_NOTHING = 0.01  # a lever that moves the peak by less does nothing


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
class Plan:
    """What a run will use and why.

    Attributes:
        tokens: tokens of the longest row.
        precision: weights and computation in words.
        loss_tile_tokens: tokens of logits held at once.
        checkpoint, offload: layer inputs only are kept; they wait in host memory.
        keep_on_device: layer inputs of this many last layers stay on the device.
        parts: every byte at the peak, and what waits on the host and on disk.
        device_bytes, host_bytes: peaks; device 0 without a GPU.
        device_limit, host_limit: what there is.
        fits: both peaks are within their limits.
        reasons: a sentence for each choice.
        longest_row: most tokens that would fit with these levers; 0 when nothing does.
        next_lever: what to turn first, to make it fit or to go further; None when nothing is left.
        suffices: the next lever alone makes it fit.
        levers: all of them with their gain.
        moments: bytes at each moment of the step.
        peak: name of the moment that needs most.
        largest: the largest single tensor.
        seconds: a predicted step.
        model, machine: what was planned for.
    """

    tokens: int
    precision: str
    loss_tile_tokens: int
    checkpoint: bool
    offload: bool
    keep_on_device: int
    parts: tuple[Part, ...]
    device_bytes: int
    host_bytes: int
    device_limit: int
    host_limit: int
    fits: bool
    reasons: tuple[str, ...]
    longest_row: int
    next_lever: Lever | None
    suffices: bool
    levers: tuple[Lever, ...]
    moments: tuple[tuple[str, int], ...]
    peak: str
    largest: Part
    seconds: Seconds
    model: ModelFacts
    machine: Machine

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for programs."""
        from megaspan.plan.render import plan_dict

        return plan_dict(self)

    def render(self) -> str:
        """Tables for people."""
        from megaspan.plan.render import render_plan

        return render_plan(self)


def plan_command(config: SFTConfig, machine: Machine) -> Plan:
    """The plan of a configuration, before anything is loaded. With `memory_limit` set, also for a GPU that is elsewhere.

    Raises:
        UserError: no model is named, its configuration cannot be read, or a row would run past its positions.
    """
    if config.model_name_or_path is None:
        do = "Set model_name_or_path to a hub name, a model folder or a shape such as qwen3-4b"
        raise UserError("there is no model to plan for", do=do, option="model_name_or_path")
    raw = {**read_config(config.model_name_or_path, config.model_revision), **config.config_overrides}
    rope = resolve_rope(raw, config.rope_parameters, config.max_length, config.allow_past_window)
    facts = ModelFacts.from_config(raw, config.model_name_or_path)
    if config.memory_limit and not machine.device_bytes and not config.use_cpu:
        machine = replace(machine, device_name="a GPU elsewhere (memory_limit)", device_bytes=config.memory_limit)
    return choose(config, facts, machine, rope=rope)


def choose(
    config: SFTConfig, facts: ModelFacts, machine: Machine, *, longest: int | None = None, rope: RopeChoice | None = None
) -> Plan:
    """Plan one device.

    Args:
        config: the wishes.
        facts: the model.
        machine: the device and its host.
        longest: tokens of the longest row; `max_length` when not known.
        rope: the rotary settings, for the reasons.
    """
    gpu = machine.device_bytes > 0 and not config.use_cpu
    device_limit = (config.memory_limit or machine.device_bytes) if gpu else 0
    host_limit = config.host_memory or machine.host_bytes
    wished = _settings(config, facts, longest or config.max_length, gpu)

    def fitted(s: Settings) -> tuple[Settings, Memory, bool]:
        s = _keep(facts, s, device_limit, host_limit)
        used = memory(facts, s)
        return s, used, (not gpu or used.device_bytes <= device_limit) and used.host_bytes <= host_limit

    s, used, fits = fitted(wished)
    row = _longest_row(lambda tokens: fitted(with_tokens(wished, tokens))[2])
    levers = _levers(config, facts, s)
    lever, suffices = (
        (_further(levers, used, host_limit), False) if fits else _rescue(levers, s, used, row, device_limit, host_limit)
    )
    parts = (*used.peak.parts, *used.waiting, *disk_parts(facts, s, _checkpoints(config)))
    return Plan(
        tokens=s.tokens,
        precision=s.trained,
        loss_tile_tokens=s.loss_tile,
        checkpoint=s.checkpoint,
        offload=s.offload,
        keep_on_device=s.keep_on_device,
        parts=parts,
        device_bytes=used.device_bytes,
        host_bytes=used.host_bytes,
        device_limit=device_limit,
        host_limit=host_limit,
        fits=fits,
        reasons=tuple(_reasons(config, facts, s, machine, rope)),
        longest_row=row,
        next_lever=lever,
        suffices=suffices,
        levers=levers,
        moments=tuple((moment.name, moment.bytes) for moment in used.moments),
        peak=used.peak.name,
        largest=largest_allocation(facts, s),
        seconds=step_seconds(facts, s, machine.device_name),
        model=facts,
        machine=machine,
    )


def _settings(config: SFTConfig, facts: ModelFacts, tokens: int, gpu: bool) -> Settings:
    """The wishes as levers; nothing is decided yet but the loss tile."""
    bf16 = gpu if config.bf16 is None else config.bf16
    pure = config.weights_dtype == "bfloat16"
    adapter, inputs = adapter_size(facts, config)
    return Settings(
        tokens=tokens,
        gpu=gpu,
        compute_bytes=2 if bf16 or pure else 4,
        masters=not pure and bf16 and not adapter,
        checkpoint=config.gradient_checkpointing,
        offload=config.offload,
        keep_on_device=0,
        chunked=config.loss_type != "nll",
        loss_tile=loss_tile(facts.vocab),
        adapter=adapter,
        adapter_inputs=inputs,
    )


def _keep(facts: ModelFacts, s: Settings, device_limit: int, host_limit: int) -> Settings:
    """How many of the last layer inputs stay on the device.

    They are the first that the backward wants, when no gradients exist yet: as many as the gradients will take later are free.
    Where host memory does not hold the rest, more of them stay as long as the device does.
    """
    if not (s.gpu and s.checkpoint and s.offload):
        return s

    def peak(count: int) -> int:
        return memory(facts, replace(s, keep_on_device=count)).device_bytes

    bare = peak(0)
    count = _largest(facts.layers, lambda number: peak(number) <= bare)
    room = host_limit - memory(facts, replace(s, keep_on_device=facts.layers)).host_bytes
    wanted = facts.layers - max(0, room) // input_bytes(facts, s)
    if wanted > count and peak(wanted) <= device_limit:
        count = wanted
    return replace(s, keep_on_device=count)


def _largest(top: int, holds: Callable[[int], bool]) -> int:
    """The largest number of 0 … top for which `holds`, given that it holds from 0 up to some number."""
    low, high = 0, top
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _longest_row(fits: Callable[[int], bool]) -> int:
    return _largest(_LONGEST, lambda tokens: tokens == 0 or fits(tokens))


def _checkpoints(config: SFTConfig) -> int:
    return 0 if config.save_strategy == "no" else config.save_total_limit or 1


def _peak(facts: ModelFacts, s: Settings) -> int:
    used = memory(facts, s)
    return used.device_bytes if s.gpu else used.host_bytes


def _levers(config: SFTConfig, facts: ModelFacts, s: Settings) -> tuple[Lever, ...]:
    """Every lever, with what it saves now (when on) or would save (when off)."""
    half = {"compute_bytes": 2, "masters": False}
    table: list[tuple[str, bool, dict[str, Any], dict[str, Any], str, str]] = [
        ("checkpointing", s.checkpoint, {"checkpoint": True}, {"checkpoint": False, "offload": False},
         "gradient_checkpointing: true", "every layer runs forward twice"),
        ("chunked loss", s.chunked, {"chunked": True}, {"chunked": False}, "loss_type: chunked_nll", "nothing"),
    ]  # fmt: skip
    if s.gpu:
        moving: dict[str, Any] = {"checkpoint": True, "offload": True}
        if s.keep_on_device == facts.layers:
            moving["keep_on_device"] = 0
        do = "gradient_checkpointing_kwargs: {offload: true}"
        still = {"offload": False, "keep_on_device": 0}
        table.append(("offload", s.offload, moving, still, do, "copies beside the computation"))
    pure = config.weights_dtype == "bfloat16"
    if not s.adapter:
        full = {"compute_bytes": s.compute_bytes, "masters": s.gpu}
        table.append(("bf16 weights", pure, half, full, "dtype: bfloat16", "updates are rounded to bf16"))
    off = {"adapter": 0, "adapter_inputs": 0, "masters": s.compute_bytes == 2 and not pure}
    rank = 16 * facts.layers * 2 * (facts.hidden + facts.query_width)
    lora = {"adapter": s.adapter or rank, "adapter_inputs": s.adapter_inputs or 2 * facts.hidden, "masters": False}
    table.append(("LoRA", bool(s.adapter), lora, off, "use_peft: true", "only an adapter is trained"))
    return tuple(_lever(facts, s, *row) for row in table)


def _lever(
    facts: ModelFacts, s: Settings, name: str, on: bool, turned_on: dict[str, Any], off: dict[str, Any], do: str, cost: str
) -> Lever:
    def saved(tokens: int) -> tuple[int, int]:
        here = with_tokens(s, tokens)
        with_it, without = replace(here, **turned_on), replace(here, **off)
        return _peak(facts, without) - _peak(facts, with_it), memory(facts, with_it).host_bytes - memory(
            facts, without
        ).host_bytes

    saves, host = saved(s.tokens)
    start = None
    if saves < _NOTHING * _peak(facts, s):
        nothing = _largest(_LONGEST, lambda n: n == 0 or saved(n)[0] < _NOTHING * _peak(facts, with_tokens(s, n)))
        start = nothing + 1 if s.tokens <= nothing < _LONGEST else None
        saves = max(saves, 0)
    return Lever(name, on, saves, host if s.gpu else 0, do, cost, start)


def _off(levers: tuple[Lever, ...], used: Memory, host_limit: int) -> list[Lever]:
    """Levers that are off, would save something and whose host memory is there, in order of what they cost."""
    now = used.device_bytes if used.gpu else used.host_bytes
    room = max(0, host_limit - used.host_bytes)
    return [lever for lever in levers if not lever.on and lever.saves > _NOTHING * now and lever.host <= room]


def _further(levers: tuple[Lever, ...], used: Memory, host_limit: int) -> Lever | None:
    """For a row that fits: what to turn for a longer one."""
    off = _off(levers, used, host_limit)
    return off[0] if off else None


def _rescue(
    levers: tuple[Lever, ...], s: Settings, used: Memory, row: int, device_limit: int, host_limit: int
) -> tuple[Lever | None, bool]:
    """For a row that does not fit: the least costly lever that is enough alone, else a shorter row, else what saves most."""
    missing_host = used.host_bytes - host_limit
    if s.gpu and s.offload and missing_host > 0 and used.device_bytes + missing_host <= device_limit:
        do = "gradient_checkpointing_kwargs: {offload: false}"
        return Lever("layer inputs on the device", False, 0, -missing_host, do, "GPU memory"), False
    over = used.device_bytes - device_limit if s.gpu else missing_host
    off = _off(levers, used, host_limit)
    for lever in off:
        if lever.saves >= over and (not s.gpu or missing_host <= 0):
            return lever, True
    if row:
        return Lever("a shorter row", False, max(over, missing_host), 0, f"max_length: {row}", "length"), True
    return max(off, key=lambda lever: lever.saves, default=None), False


def _reasons(config: SFTConfig, facts: ModelFacts, s: Settings, machine: Machine, rope: RopeChoice | None) -> list[str]:
    reasons = []
    if not facts.exact:
        kind = facts.model_type or "this kind"
        reasons.append(
            f"parameters of {kind} are counted like Llama's: the family is not known to the planner, expect a few percent"
        )
    if facts.experts is not None:
        reasons.append("the working set of expert layers depends on how transformers runs them; it is an estimate")
    if rope is not None:
        reasons.append(rope.reason)
    if config.memory_limit and s.gpu and config.memory_limit > machine.device_bytes:
        reasons.append(f"memory_limit is more than the {format_bytes(machine.device_bytes)} of {machine.device_name}")
    if s.chunked:
        reasons.append(
            f"loss in tiles of {format_tokens(s.loss_tile)} tokens: the most whose logits take at most 1.25 GiB, up to 2,048, "
            "where the product outweighs the pass over the head's gradient"
        )
    if s.checkpoint and s.offload and s.gpu:
        grown = format_bytes(gradient_bytes(facts, s, facts.layers))
        if s.keep_on_device == facts.layers:
            reasons.append(f"offload moves nothing: all {facts.layers} layer inputs fit where gradients ({grown}) come later")
        elif s.keep_on_device:
            reasons.append(
                f"inputs of the last {s.keep_on_device} layers stay on the device: gradients need their place only later"
            )
    if not s.gpu:
        reasons.append("no GPU: everything lies in host memory, and offload copies within it")
    if s.gpu and not has_flash4() and s.compute_bytes == 2:
        reasons.append(
            "flash-attn-4 is not installed here; with it attention is up to a fifth faster (pip install 'megaspan[flash]')"
        )
    return reasons
