"""From wishes, model and machine to one frozen plan, every choice with its reason.

Mechanisms take a `Plan` and never decide. The planner decides here, by arithmetic on numbers that it prints: loss tile, how
many layer inputs stay on the device, whether it fits, the longest row that would, and which lever to turn next. A lever that
does nothing at this length is called that: below some length the peak lies in one layer's recomputation, and moving layer
inputs to the host frees bytes that nobody needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megaspan.human import UserError, format_bytes, format_tokens
from megaspan.plan.adapter import adapter_size
from megaspan.plan.cost import disk_parts, gradient_part, largest_allocation, loss_tile, memory
from megaspan.plan.facts import Machine, ModelFacts, read_config
from megaspan.plan.fit import Limits, can_fit, fit
from megaspan.plan.levers import Lever, further, rescue, turns
from megaspan.plan.parts import Part, Settings
from megaspan.plan.rope_math import RopeChoice, resolve_rope
from megaspan.plan.search import longest_row
from megaspan.plan.seconds import Seconds, has_flash4, step_seconds

if TYPE_CHECKING:
    from megaspan.config import SFTConfig


@dataclass(frozen=True)
class Plan:
    """What a run will use and why.

    Attributes:
        tokens: tokens of the longest row.
        precision: weights and computation in words.
        loss_tile_tokens: tokens of logits held at once.
        checkpoint, offload: layer inputs only are kept; they wait in host memory.
        keep_on_device: what this many last layers keep stays on the device.
        streamed: layers run in tiles, attention forward once.
        layer_tile_tokens: tokens of token-wise work in such a layer at once.
        kv_heads_per_call: KV heads in one call of its attention's backward; None for all.
        keep_outputs: last layers whose attention output is kept; the others run attention forward again.
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
    streamed: bool
    layer_tile_tokens: int
    kv_heads_per_call: int | None
    keep_outputs: int
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
    limits = Limits((config.memory_limit or machine.device_bytes) if gpu else 0, config.host_memory or machine.host_bytes)
    wished = _settings(config, facts, longest or config.max_length, gpu)
    s, used = fit(facts, wished, limits)
    fits = limits.hold(used)
    row = longest_row(lambda tokens: can_fit(facts, replace(wished, tokens=tokens), limits))
    all_turns = turns(facts, s)
    if fits:
        lever, suffices = further(all_turns, used, limits.host), False
    else:
        missing = used.device_bytes - limits.device if gpu else used.host_bytes - limits.host
        lever, suffices = rescue(all_turns, s, missing, row, lambda changes: can_fit(facts, replace(wished, **changes), limits))
    parts = (*used.peak.parts, *used.waiting, *disk_parts(facts, s, _checkpoints(config)))
    return Plan(
        tokens=s.tokens,
        precision=s.trained,
        loss_tile_tokens=s.loss_tile,
        checkpoint=s.checkpoint,
        offload=s.offload,
        keep_on_device=s.keep_on_device,
        streamed=s.streamed,
        layer_tile_tokens=s.layer_tile,
        kv_heads_per_call=s.kv_heads_per_call,
        keep_outputs=s.keep_outputs,
        parts=parts,
        device_bytes=used.device_bytes,
        host_bytes=used.host_bytes,
        device_limit=limits.device,
        host_limit=limits.host,
        fits=fits,
        reasons=tuple(_reasons(config, facts, s, machine, rope)),
        longest_row=row,
        next_lever=lever,
        suffices=suffices,
        levers=tuple(turn.lever for turn in all_turns),
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
        masters=not pure and bf16,
        checkpoint=config.gradient_checkpointing,
        offload=config.offload,
        keep_on_device=0,
        chunked=config.loss_type != "nll",
        loss_tile=loss_tile(facts.vocab),
        streamed=config.gradient_checkpointing and facts.family.streamed,
        adapter=adapter,
        adapter_inputs=inputs,
    )


def _checkpoints(config: SFTConfig) -> int:
    return 0 if config.save_strategy == "no" else config.save_total_limit or 1


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
    if s.checkpoint:
        reasons += _layer_reasons(facts, s)
    if not s.gpu:
        reasons.append("no GPU: everything lies in host memory, and offload copies within it")
    if s.gpu and not has_flash4() and s.compute_bytes == 2:
        reasons.append(
            "flash-attn-4 is not installed here; with it attention is up to a fifth faster (pip install 'megaspan[flash]')"
        )
    return reasons


def _layer_reasons(facts: ModelFacts, s: Settings) -> list[str]:
    reasons, layers = [], facts.layers
    if not s.streamed:
        reasons.append("layers of this family are checkpointed whole: the streamed layer is not proven for them")
    elif s.layer_tile < s.tokens:
        reasons.append(f"layers run in tiles of {format_tokens(s.layer_tile)} tokens, attention over the whole row")
    if s.streamed and s.kv_heads_per_call:
        reasons.append(
            f"attention's backward takes {s.kv_heads_per_call} of {facts.kv_heads} KV heads a call: its sums are smaller"
        )
    if s.streamed and s.keep_outputs < layers:
        kept = f"only the last {s.keep_outputs} layers keep" if s.keep_outputs else "no layer keeps"
        reasons.append(f"{kept} attention's output, for want of room; where it is not kept, attention runs forward twice")
    if s.offload and s.gpu:
        grown = format_bytes(gradient_part(facts, s, layers).bytes)
        if s.keep_on_device == layers:
            reasons.append(f"offload moves nothing: what all {layers} layers keep fits where gradients ({grown}) come later")
        elif s.keep_on_device and memory(facts, s).device_bytes > memory(facts, replace(s, keep_on_device=0)).device_bytes:
            all_away = format_bytes(memory(facts, replace(s, keep_on_device=0)).host_bytes)
            reasons.append(
                f"what the last {s.keep_on_device} layers keep stays on the device for want of host memory: "
                f"all of it away would take {all_away} of host memory (host_memory says what there is)"
            )
        elif s.keep_on_device:
            reasons.append(
                f"what the last {s.keep_on_device} layers keep stays on the device: gradients need its place only later"
            )
    return reasons
