"""`set_up`: everything of a run, made in the order in which it can fail cheaply.

The options first (with them a checkpoint that cannot be continued, a schedule that takes no such arguments, data that is not
there), then the text (prepared before any process group or weight exists, case R82: one rank tokenises while the
others wait for it, not in a collective with a timeout), then the plan, then the weights, straight into each rank's shards.

Ranks that differ in what decides their collectives wait for each other for ever, so options, rows, a model that came as an
object and the plan are compared over all ranks before the first step.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.trainer_utils import enable_full_determinism

from megaspan import store, world
from megaspan.config import SFTConfig
from megaspan.data import Rows, join
from megaspan.human import UserError, format_bytes
from megaspan.layers.checkpoint import checkpointed_layers
from megaspan.model import (
    Levers,
    LoadedModel,
    check_token_ids,
    check_vocabulary,
    levers,
    load_model,
    load_tokenizer,
    prepare,
    unwrap,
    wrap_lora,
)
from megaspan.model.kinds import refuse_shared_rows
from megaspan.model.load import check_adopted
from megaspan.model.lora import check_peft
from megaspan.model.shard import shard, shards
from megaspan.model.sharded import load_sharded
from megaspan.model.taken import check_files
from megaspan.optimizer import check_optim
from megaspan.plan import ModelFacts, Plan, RankSizes, choose, free_disk, plan_command
from megaspan.plan.ranks import heads_of
from megaspan.report import check_run_name, check_trackers
from megaspan.trainer.early import check_schedule, open_all, try_adapter
from megaspan.trainer.given import adopt, check_given, compared
from megaspan.trainer.job import Job, say
from megaspan.trainer.resumed import check_resume
from megaspan.trainer.share import Share

_LOOKED_AT = 8  # rows, the longest ones, by which the memory for a row's part is measured


def set_up(
    model: str | Path | PreTrainedModel | None,
    args: SFTConfig,
    train_dataset: Any,
    eval_dataset: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    peft_config: Any,
    rows_folder: Path | None = None,
) -> Job:
    """Makes the parts of a run, cheapest failure first. Of several ranks all call it, with the same arguments.

    `rows_folder` keeps the prepared rows; None keeps them where every run looks for them.

    Raises:
        UserError: the options, the launch, the data, the model or the memory do not allow the run.
    """
    ranks = world.join(args)
    sizes = RankSizes(*ranks.mesh.sizes)
    args, given = _wished(model, _as_launched(args, ranks))
    if given is not None:
        check_given(given, args)
    check_trackers(args.report_to)
    check_optim(args)
    check_schedule(args)
    if ranks.speaks:  # and writes
        store.check_place(args.output_dir)
    if args.use_peft or peft_config is not None:
        check_peft(peft_config)
    check_resume(args, ranks.mesh.size("data"), own_adapter=peft_config is not None)
    if args.resume_from_checkpoint:
        check_run_name(args.report_to, Path(args.output_dir), args.run_name)
    world.set_allocator()
    device = ranks.device
    if device.type == "cuda":
        world.keep_kernels()
    if args.memory_limit and device.type != "cuda":
        raise UserError(
            "memory_limit is for a GPU, and there is none here",
            got=format_bytes(args.memory_limit),
            do="Remove it to train on the CPU, or plan for a machine elsewhere with megaspan plan",
        )
    if args.memory_limit:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.memory_limit / total), device)
    if args.full_determinism:
        enable_full_determinism(args.seed)
    else:
        set_seed(args.seed)

    seconds: dict[str, float] = {}
    with _timed(seconds, "tokenise"):
        if given is None:
            # Refuses positions, models and heads that cannot be, before the text is read; heads with what was typed here.
            if (heads := heads_of(args)) is not None:
                ranks.mesh.check_heads(*heads)
            planned = plan_command(args, world.machine(), sizes).model
            vocab = planned.vocab
            check_files(args)
            if args.use_peft or peft_config is not None:
                try_adapter(args, peft_config)
            if tokenizer is None:
                tokenizer = load_tokenizer(args)
                if planned.known:  # others may have more rows than they tell
                    check_vocabulary(tokenizer, vocab)
        else:
            check_adopted(given, args)
            facts = ModelFacts.from_config(given.config.to_dict())
            ranks.mesh.check_heads(facts.heads, facts.kv_heads)
            vocab = facts.vocab
        rows, eval_rows = ranks.in_turn(
            "tokenise", lambda: _rows(args, ranks, tokenizer, train_dataset, eval_dataset, rows_folder)
        )
        for found in (rows, eval_rows):
            if found is not None:
                check_token_ids(found.max_id, vocab)
    with _timed(seconds, "load"):
        axes = ranks.connect()
        world.same_everywhere("the configuration", _hash(args.resolved()))
        world.same_everywhere("the data", _hash([rows.fingerprint, eval_rows and eval_rows.fingerprint]))
        machine = world.agree(world.machine())
        loaded = _loaded(args, given, ranks, axes, peft_config)
        loaded = replace(loaded, tokenizer=tokenizer)
        for found in (rows, eval_rows):
            if found is not None:
                check_token_ids(found.max_id, loaded.facts.vocab)
    with _timed(seconds, "levers"):
        # A single rank runs the rows of a micro-batch one after the other.
        together = min(args.per_device_train_batch_size, len(rows)) if axes is not None else 1
        longest = int(np.sort(rows.lengths)[-together:].sum())
        disk_room = -int(world.largest([-float(free_disk(args))])[0])  # of ranks elsewhere, and of another moment
        packed = None
        if together > 1 or rows.packed:
            packed = Share.of(loaded.model, device, ranks.mesh, axes, together).packed(rows, loaded.facts)
        plan = choose(args, loaded.facts, machine, longest=longest, sizes=sizes, disk_room=disk_room, packed=packed)
        world.same_everywhere("the plan", _digest(plan))
        prepare(loaded.model, args, plan)
        placed = levers(loaded.model)
        assert placed is not None
        world.same_everywhere("which layers stream", _streamed(placed))
    if placed.disk is not None and placed.disk.speed is not None:
        seconds["disk speed"] = placed.disk.seconds
        seconds["levers"] -= placed.disk.seconds
    share = Share.of(loaded.model, device, ranks.mesh, axes, together)
    if share.shares_rows or together > 1 or any(found.packed for found in (rows, eval_rows) if found is not None):
        refuse_shared_rows(loaded.model)
    with _timed(seconds, "pin"):
        placed.reserve(loaded.model, _most_slots(share, rows))
    return Job(args, loaded, rows, eval_rows, plan, ranks, share, seconds)


def _as_launched(args: SFTConfig, ranks: world.Ranks) -> SFTConfig:
    """The options with what a launch file has set: sizes, use_cpu where that leaves a GPU alone, bf16 on a GPU."""
    mesh = ranks.mesh
    found: dict[str, Any] = {"dp_replicate_size": mesh.dp_replicate, "cp_size": mesh.cp, "sp_size": mesh.sp}
    if world.launch_precision() == "bf16" and ranks.device.type == "cuda":
        found["bf16"] = True
    if ranks.device.type == "cpu" and world.gpus():
        found["use_cpu"] = True
    changed = {option: size for option, size in found.items() if getattr(args, option) != size}
    return args.replace(**changed) if changed else args


def _wished(model: Any, args: SFTConfig) -> tuple[SFTConfig, PreTrainedModel | None]:
    """The options with the model's name in them, or the model itself."""
    if isinstance(model, str | Path):
        args = args.replace(model_name_or_path=str(model))
    elif model is not None and not isinstance(model, PreTrainedModel):
        raise UserError(
            "SFTTrainer's model is neither a name nor a transformers model",
            found=type(model).__name__,
            do="Pass the transformers model itself; for LoRA the base model, and the LoraConfig as peft_config",
        )
    given = model if isinstance(model, PreTrainedModel) else None
    if given is None and args.model_name_or_path is None:
        raise UserError(
            "there is no model", do="Set model_name_or_path to a hub name, a model folder or a shape such as qwen3-4b"
        )
    return args, given


def _rows(
    args: SFTConfig, ranks: world.Ranks, tokenizer: Any, train_dataset: Any, eval_dataset: Any, folder: Path | None
) -> tuple[Rows, Rows | None]:
    def report(text: str) -> None:
        say(ranks, text)

    rows, *held_out = [
        each.rows(cache_folder=folder, report=report) for each in open_all(args, tokenizer, train_dataset, eval_dataset)
    ]
    return rows, held_out[0] if held_out else None


def _loaded(
    args: SFTConfig, given: PreTrainedModel | None, ranks: world.Ranks, axes: world.DeviceAxes | None, peft_config: Any
) -> LoadedModel:
    """The model with its adapter; of several ranks each holds its shards."""
    if axes is not None and given is None:
        loaded = load_sharded(args, ranks.device, axes.fsdp, peft_config)
    else:
        loaded = load_model(args, ranks.device) if given is None else adopt(given, args, ranks, axes)
        if peft_config is not None or args.use_peft:
            loaded = wrap_lora(loaded, args, peft_config)
        if axes is not None:
            # Each rank keeps a part of what it was given: parts of different models would make a model of their own.
            world.same_everywhere("the model", compared(loaded.model))
        if axes is not None and shards(loaded.model) is None:
            compute = next(parameter.dtype for parameter in loaded.model.parameters() if parameter.is_floating_point())
            shard(loaded.model, axes.fsdp, masters=args.weights_dtype != "bfloat16", compute=compute)
    world.refuse_wrapped(sorted({_layer_class(layer) for layer in checkpointed_layers(unwrap(loaded.model))}))
    return loaded


def _layer_class(layer: torch.nn.Module) -> str:
    """The class of a layer by its own name: FSDP2 makes another of it."""
    return next(kind.__name__ for kind in type(layer).__mro__ if not issubclass(kind, FSDPModule))


def _most_slots(share: Share, rows: Rows) -> int:
    """The most tokens that this rank holds of one of the longest rows, or of all rows where there are few."""
    longest = sorted(range(len(rows)), key=lambda number: -int(rows.lengths[number]))
    if share.together > 1:
        return share.slots([join([rows[number] for number in longest[: share.together]])])
    return share.slots(rows[number] for number in longest[:_LOOKED_AT])


def _digest(plan: Plan) -> str:
    """Of all that decides in which order a rank calls the others."""
    decided = (plan.keep, plan.streamed, plan.kv_heads_per_call, plan.layer_tile_tokens, plan.stream_back)
    return _hash((*decided, plan.loss_tile_tokens, plan.states))


def _streamed(placed: Levers) -> str:
    """Which layers stream, as each rank has proven by itself: their heads and keys travel in another order than others'."""
    streams = [reason is None for reason in getattr(placed.checkpointing, "reasons", ())]
    return f"{sum(streams)} of {len(streams)} {_hash(streams)}"


def _hash(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


class _timed:
    """Adds the seconds of a `with` block to a table."""

    def __init__(self, table: dict[str, float], name: str) -> None:
        self.table, self.name = table, name

    def __enter__(self) -> None:
        self.begun = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.table[self.name] = self.table.get(self.name, 0.0) + time.monotonic() - self.begun
