"""From wishes, model and machine to one frozen plan, every choice with its reason.

Mechanisms take a `Plan` and never decide. The planner decides here, by arithmetic on numbers that it prints: loss tile, what
each layer keeps and where, where the optimizer's states lie, whether it fits, the longest row that would, and which lever to
turn next. A lever that does nothing at this length is called that: below some length the peak lies in one layer's work, and
moving layer inputs to the host frees bytes that nobody needs.
"""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaspan.config.parallel import check_heads
from megaspan.human import UserError, format_bytes, format_tokens
from megaspan.plan.adapter import adapter_size
from megaspan.plan.cost import Memory, disk_parts
from megaspan.plan.entries import check_entries, check_padding
from megaspan.plan.facts import Counts, Machine, ModelFacts, read_config
from megaspan.plan.families import FAMILIES
from megaspan.plan.fit import Limits, can_fit, fit, longest_row
from megaspan.plan.keep import KeepPolicy
from megaspan.plan.levers import Lever, further, rescue, turns
from megaspan.plan.localdisk import refuse_kind
from megaspan.plan.logits import largest_allocation, loss_tile
from megaspan.plan.packed import PackedRow
from megaspan.plan.parts import Part, Settings
from megaspan.plan.ranks import RankSizes, share_of
from megaspan.plan.reasons import keep_rows, layer_reasons, packed_reason, state_reasons, summary
from megaspan.plan.rope_math import RopeChoice, resolve_rope
from megaspan.plan.rope_native import text_config
from megaspan.plan.seconds import Seconds, has_flash4, step_seconds
from megaspan.plan.states import Faster, StatePlan, state_plans

if TYPE_CHECKING:
    from megaspan.config import SFTConfig

ONE_RANK = RankSizes()
ELSEWHERE = "a GPU elsewhere (memory_limit)"


@dataclass(frozen=True)
class Plan:
    """What a run will use and why.

    Attributes:
        tokens: tokens of the longest row.
        precision: weights and computation in words.
        loss_tile_tokens: tokens of logits held at once.
        checkpoint, offload: layer inputs only are kept; they wait in host memory.
        keep: what each layer keeps from the forward, and where.
        kept: the same as rows of a table: layers, what, bytes, why; the lowest first.
        streamed: layers run in tiles, attention forward once.
        layer_tile_tokens: tokens of token-wise work in such a layer at once; in layers that run whole, of their MLP.
        kv_heads_per_call: KV heads that are projected and attended at once; None for all.
        stream_back: what waits on the host comes back tile by tile, not whole a layer ahead.
        project_ahead: and the next head group is made of it while this one is attended.
        states: where gradients, masters and moments lie.
        summary: what was chosen and why, in one sentence.
        parts: every byte at the peak, and what waits on the host and on disk.
        device_bytes: peak of the tensors on the device, what an allocator reports; 0 without a GPU.
        device_needed: the same with the CUDA context and slack, what has to be within the limit.
        host_bytes: peak of host memory, with the process.
        host_for_layers: what the limit on host memory leaves for what layers keep; below 1 where all else takes it.
        device_limit, host_limit: what there is.
        limits_from: where these two numbers come from.
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
        sizes: ranks that share row and states. All numbers are one rank's.
        tokens_per_rank: tokens of the longest row on one rank, outside of attention.
        documents: of the longest row that do not see each other; 1 for a plain row, and where rows are not there yet.
    """

    tokens: int
    precision: str
    loss_tile_tokens: int
    checkpoint: bool
    offload: bool
    keep: KeepPolicy
    kept: tuple[tuple[str, str, int, str], ...]
    streamed: bool
    layer_tile_tokens: int
    kv_heads_per_call: int | None
    stream_back: bool
    project_ahead: bool
    states: StatePlan
    summary: str
    parts: tuple[Part, ...]
    device_bytes: int
    device_needed: int
    host_bytes: int
    host_for_layers: int
    device_limit: int
    host_limit: int
    limits_from: tuple[str, str]
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
    sizes: RankSizes = ONE_RANK
    tokens_per_rank: int = 0
    documents: int = 1

    @property
    def keep_on_device(self) -> int:
        """What this many last layers keep stays on the device."""
        return self.keep.keep_on_device

    @property
    def keep_outputs(self) -> int:
        """This many last layers keep attention's output."""
        return self.keep.keep_outputs

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for programs."""
        from megaspan.plan.render import plan_dict

        return plan_dict(self)

    def render(self) -> str:
        """Tables for people."""
        from megaspan.plan.render import render_plan

        return render_plan(self)


def plan_command(config: SFTConfig, machine: Machine, sizes: RankSizes | None = None, *, counts: Counts | None = None) -> Plan:
    """The plan of a configuration, before anything is loaded. With `memory_limit` set, also for a GPU that is elsewhere.

    Args:
        config: the wishes.
        machine: the device and its host; with `sizes` one rank's part of them.
        sizes: the mesh; None makes it of the options, as many ranks as they multiply to, on machines like this one.
        counts: what was counted on the model, where somebody has.

    Raises:
        UserError: no model is named, its configuration cannot be read, a row would run past its positions or have one token,
            ranks cannot share its heads, or the optimizer's library is missing here.
    """
    if config.model_name_or_path is None:
        do = "Set model_name_or_path to a hub name, a model folder or a shape such as qwen3-4b"
        raise UserError("there is no model to plan for", do=do, option="model_name_or_path")
    if config.max_length < 2:
        what = "a row of one token has nothing to train: each token is predicted from those before it"
        raise UserError(what, got=config.max_length, allowed="2 or more", option="max_length")
    here = machine.device_bytes > 0 or config.use_cpu or not config.memory_limit
    if config.optim == "adamw_8bit" and here and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            "optim: adamw_8bit needs bitsandbytes, which is not installed",
            do="Run pip install 'megaspan[optim8]', or set optim: adamw_torch_fused",
            option="optim",
        )
    raw = {**read_config(config.model_name_or_path, config.model_revision), **config.config_overrides}
    check_entries(text_config(raw))
    if raw.get("model_type") in FAMILIES:
        check_padding(raw)
    rope = resolve_rope(raw, config.rope_parameters, config.max_length, config.allow_past_window)
    facts = ModelFacts.from_config(raw, config.model_name_or_path)
    facts = facts if counts is None else facts.counted(counts)
    if config.memory_limit and not machine.device_bytes and not config.use_cpu:
        machine = replace(machine, device_name=ELSEWHERE, device_bytes=config.memory_limit)
    if sizes is None:
        sizes = RankSizes.of(config)
        machine = share_of(machine, sizes.total)
    return choose(config, facts, machine, rope=rope, sizes=sizes)


def choose(
    config: SFTConfig,
    facts: ModelFacts,
    machine: Machine,
    *,
    longest: int | None = None,
    rope: RopeChoice | None = None,
    sizes: RankSizes = ONE_RANK,
    disk_room: int | None = None,
    packed: PackedRow | None = None,
) -> Plan:
    """Plan one rank.

    Args:
        config: the wishes.
        facts: the model.
        machine: the device, and one rank's part of its host.
        longest: tokens of the longest row; `max_length` when not known.
        rope: the rotary settings, for the reasons.
        sizes: the mesh.
        disk_room: free bytes of the disk in `offload_folder`, the least of any rank; None looks at the one that is here.
        packed: the documents of the longest row, where rows are there and documents do not see each other.

    Raises:
        UserError: sp ranks cannot share the model's heads, or `offload_folder` is no folder.
    """
    check_heads(sizes.sp, facts.heads, facts.kv_heads, sizes.cp)
    gpu = machine.device_bytes > 0 and not config.use_cpu
    limits = Limits(
        (config.memory_limit or machine.device_bytes) if gpu else 0,
        config.host_memory // machine.host_ranks if config.host_memory else machine.host_bytes,
        (free_disk(config) if disk_room is None else disk_room) // machine.host_ranks,
    )
    wished = replace(_settings(config, facts, longest or config.max_length, gpu), ranks=sizes, packed=packed)
    wished = replace(wished, packs=packed is None and config.packing and config.packing_strategy == "bfd")
    states = allowed_states(config, wished)
    found = fit(facts, wished, limits, states)
    s, used = found.settings, found.used
    row = longest_row(facts, wished, limits, states)
    all_turns = turns(facts, s)
    cramped = _cramped(config, machine, used, limits)
    if cramped:
        lever, suffices = None, False
    elif found.fits:
        lever, suffices = further(all_turns, used, limits.host), False
    else:
        missing = used.device_needed - limits.device if gpu else used.host_bytes - limits.host

        def helps(changes: dict[str, Any]) -> bool:
            changed = replace(wished, **changes)
            there = limits
            if changed.ranks != sizes:  # more ranks of this machine share its host
                share = changed.ranks.total // sizes.total
                there = replace(limits, host=limits.host // share, disk=limits.disk // share)
            return can_fit(facts, changed, there, (changes["states"],) if "states" in changes else states)

        lever, suffices = rescue(all_turns, s, missing, row, helps)
    parts = (*used.peak.parts, *used.peak.beside, *used.waiting, *disk_parts(facts, s, _checkpoints(config)))
    return Plan(
        tokens=s.tokens,
        precision=s.trained,
        loss_tile_tokens=s.loss_tile,
        checkpoint=s.checkpoint,
        offload=s.offload,
        keep=s.policy(facts.layers) if s.checkpoint else KeepPolicy.everything(facts.layers, "device"),
        kept=tuple(keep_rows(facts, s)) if s.checkpoint else (),
        streamed=s.streamed,
        layer_tile_tokens=s.layer_tile if s.streams or s.tiled_mlp else s.tokens,
        kv_heads_per_call=s.kv_heads_per_call,
        stream_back=s.stream_back,
        project_ahead=s.project_ahead,
        states=s.states,
        summary=summary(facts, s),
        parts=parts,
        device_bytes=used.device_bytes,
        device_needed=used.device_needed,
        host_bytes=used.host_bytes,
        host_for_layers=limits.host - used.host_bytes + used.host_kept,
        device_limit=limits.device,
        host_limit=limits.host,
        limits_from=_limits_from(config, machine, gpu),
        fits=found.fits,
        reasons=(*_reasons(config, facts, s, machine, rope, used, found.faster), *cramped),
        longest_row=max(row, s.tokens) if found.fits else row,
        next_lever=lever,
        suffices=suffices,
        levers=tuple(turn.lever for turn in all_turns),
        moments=tuple((moment.name, moment.bytes) for moment in used.moments),
        peak=used.peak.name,
        largest=largest_allocation(facts, s),
        seconds=step_seconds(facts, s, machine.device_name),
        model=facts,
        machine=machine,
        sizes=sizes,
        tokens_per_rank=s.slots,
        documents=packed.documents if packed is not None else 1,
    )


def allowed_states(config: SFTConfig, s: Settings) -> tuple[StatePlan, ...]:
    """Where the model's states may lie by the options, the cheapest first."""
    asked, clips = config.offload_optimizer, config.max_grad_norm > 0
    return tuple(state_plans(gpu=s.gpu, clips=clips, rows=s.rows, adapter=bool(s.adapter), offload_optimizer=asked))


def free_disk(config: SFTConfig) -> int:
    """Free bytes of the disk that may hold what layers keep; 0 without such a folder.

    Raises:
        UserError: the folder does not exist, is none, or is on no local disk.
    """
    if config.offload_folder is None:
        return 0
    path = Path(config.offload_folder).expanduser()
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        do = "Name another" if path.exists() else "Make it first"
        raise UserError(f"offload_folder, for what layers keep, {what}", got=str(path), do=do, option="offload_folder")
    refuse_kind(path, allow_network=config.allow_slow_disk)
    return shutil.disk_usage(path).free


def _limits_from(config: SFTConfig, machine: Machine, gpu: bool) -> tuple[str, str]:
    """Where the limits of device and host come from, in words."""
    device = "memory_limit" if config.memory_limit else "the GPU"
    return device if gpu else "", "host_memory" if config.host_memory else machine.host_source or "the machine"


def _cramped(config: SFTConfig, machine: Machine, used: Memory, limits: Limits) -> list[str]:
    """A sentence for each limit that is less than a program takes with an empty model: no lever helps there."""
    names = dict(zip(("device", "host"), _limits_from(config, machine, used.gpu), strict=True))
    there = {"device": limits.device, "host": limits.host}
    return [
        f"the {part.name} alone takes {format_bytes(part.bytes)}, and {names[part.place]} says "
        f"{format_bytes(there[part.place])}: no lever changes that"
        for part in (used.peak.base, *used.waiting)
        if part.name in ("process", "CUDA context") and part.bytes >= there[part.place]
    ]


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
        chunked=config.loss_type != "nll",
        loss_tile=loss_tile(facts.vocab),
        streamed=config.gradient_checkpointing and facts.family.streamed,
        eight_bit=config.optim == "adamw_8bit",
        rows=config.per_device_train_batch_size * config.gradient_accumulation_steps,
        adapter=adapter,
        adapter_inputs=inputs,
    )


def _checkpoints(config: SFTConfig) -> int:
    return 0 if config.save_strategy == "no" else config.save_total_limit or 1


def _reasons(
    config: SFTConfig, facts: ModelFacts, s: Settings, machine: Machine, rope: RopeChoice | None, used: Memory,
    faster: Faster | None,
) -> list[str]:  # fmt: skip
    reasons = []
    if not facts.known:
        kind = facts.model_type or "this kind"
        reasons.append(
            f"{kind} is not known to the planner: parameters were counted on the model, its layers keep what Llama's do"
            if facts.exact
            else f"parameters of {kind} are an estimate, counted like Llama's: up to a quarter too many, or too few"
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
    if (told := packed_reason(facts, s)) is not None:
        reasons.append(told)
    if s.checkpoint:
        reasons += layer_reasons(facts, s, used)
    reasons += state_reasons(facts, s, faster)
    if not s.gpu:
        reasons.append("no GPU: everything lies in host memory, and offload copies within it")
    if s.gpu and machine.device_name == ELSEWHERE:
        reasons.append("what is installed there is not known; if flash-attn-4 is, attention is up to a fifth faster")
    elif s.gpu and not has_flash4() and s.compute_bytes == 2:
        reasons.append(
            "flash-attn-4 is not installed here; with it attention is up to a fifth faster (pip install 'megaspan[flash]')"
        )
    return reasons
