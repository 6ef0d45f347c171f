"""`set_up`: everything of a run, made in the order in which it can fail cheaply.

The options first (with them a checkpoint that cannot be continued, a schedule that takes no such arguments, data that is not
there), then the text (prepared before any process group or weight exists, case R82: one rank tokenises while the
others wait for it, not in a collective with a timeout), then the plan, then the weights, straight into each rank's shards.

Ranks that differ in what decides their collectives wait for each other for ever, so options, rows, a model that came as an
object and the plan are compared over all ranks before the first step.
"""

from __future__ import annotations

import copy
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

from megaspan import world
from megaspan.config import SFTConfig
from megaspan.data import Rows, join
from megaspan.data.prepare import open_data
from megaspan.human import UserError, format_bytes
from megaspan.layers.checkpoint import checkpointed_layers
from megaspan.model import (
    Levers,
    LoadedModel,
    check_token_ids,
    levers,
    load_model,
    load_tokenizer,
    prepare,
    unwrap,
    wrap_lora,
)
from megaspan.model.fill import skeleton
from megaspan.model.kinds import refuse_shared_rows
from megaspan.model.load import check_adopted
from megaspan.model.lora import check_peft
from megaspan.model.shard import shard, shards
from megaspan.model.sharded import load_sharded
from megaspan.model.source import apply_overrides, find_source, read_config
from megaspan.model.taken import check_files
from megaspan.optimizer import check_optim
from megaspan.optimizer.schedule import LearningRate
from megaspan.plan import Plan, RankSizes, choose, free_disk, plan_command
from megaspan.plan.ranks import heads_of
from megaspan.report import check_trackers
from megaspan.trainer.given import adopt, check_given, compared
from megaspan.trainer.job import Job, say
from megaspan.trainer.resumed import check_resume
from megaspan.trainer.share import Share

_SOME_STEPS = 1000  # of a run whose length only its rows tell
_HELD_OUT = ("validation", "valid", "val", "dev", "eval", "test")
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
    _check_schedule(args)
    if args.use_peft or peft_config is not None:
        check_peft(peft_config)
    check_resume(args, ranks.mesh.size("data"), own_adapter=peft_config is not None)
    world.set_allocator()
    world.keep_kernels()
    device = ranks.device
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
            vocab = plan_command(args, world.machine(), sizes).model.vocab
            check_files(args)
            if args.use_peft or peft_config is not None:
                _try_adapter(args, peft_config)
            tokenizer = tokenizer or load_tokenizer(args)
        else:
            vocab = None
            check_adopted(given, args)
        rows, eval_rows = ranks.in_turn(
            "tokenise", lambda: _rows(args, ranks, tokenizer, train_dataset, eval_dataset, rows_folder)
        )
        for found in (rows, eval_rows):
            if found is not None and vocab is not None:
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
        plan = choose(args, loaded.facts, machine, longest=longest, sizes=sizes, disk_room=disk_room)
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

    data = [open_data(args, tokenizer, "train", train_dataset)]
    if eval_dataset is not None or args.eval_strategy != "no":
        if eval_dataset is None and args.dataset_name is None and args.datasets is None:
            raise UserError(
                f"eval_strategy: {args.eval_strategy} needs held-out data, and the training data came from Python",
                do="Pass eval_dataset=…, or set eval_strategy: no",
                option="eval_strategy",
            )
        try:
            data.append(open_data(args, tokenizer, "test", eval_dataset))
        except UserError as error:
            raise _with_split(error, args) if eval_dataset is None and error.do is None else error from error
    rows, *held_out = [each.rows(cache_folder=folder, report=report) for each in data]
    return rows, held_out[0] if held_out else None


def _with_split(error: UserError, args: SFTConfig) -> UserError:
    """An error about the held-out split that says what to write: the one that is there under another name, or no evaluation."""
    there = next((name for name in _HELD_OUT if name in (error.allowed or "").split(", ")), None)
    named = f"dataset_test_split: {there}, or " if there else ""
    return UserError(
        f"eval_strategy: {args.eval_strategy}, and {error.what}", allowed=error.allowed, do=f"Write {named}eval_strategy: no"
    )


def _try_adapter(args: SFTConfig, peft_config: Any) -> None:
    """Puts the adapter on the model without its weights: modules that it names and that are not there are found in a second."""
    model_config = read_config(find_source(args), trust_remote_code=args.trust_remote_code)
    apply_overrides(model_config, args.config_overrides)
    bare = skeleton(model_config, torch.float32, trust_remote_code=args.trust_remote_code)
    wrap_lora(bare, args, copy.deepcopy(peft_config))  # peft writes into what it is given


def _check_schedule(args: SFTConfig) -> None:
    """Asks the schedule for its first rate and its last: what it does not take is known without one row."""
    steps = args.max_steps if args.max_steps > 0 else _SOME_STEPS
    try:
        rates = LearningRate(args, steps)
        for step in (0, steps // 2, steps - 1):
            rates.at(step)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UserError(
            f"lr_scheduler_type {args.lr_scheduler_type} has no rate with learning_rate: {args.learning_rate:g}: {error}",
            got=args.lr_scheduler_kwargs,
            do="Correct lr_scheduler_kwargs, or write a learning_rate above 0",
        ) from error


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


_REFUSED = {
    "data_collator": "rows are made by megaspan: give the text, or token ids, as train_dataset",
    "compute_loss_func": "the loss is taken tile by tile and never sees all logits; choose loss_type",
    "compute_metrics": "it needs all predictions at once, which do not fit; token accuracy and entropy are logged",
    "optimizers": "the fp32 masters live in megaspan's own optimizer; choose optim, learning_rate and lr_scheduler_type",
    "optimizer_cls_and_kwargs": "the fp32 masters live in megaspan's own optimizer; choose optim and learning_rate",
    "preprocess_logits_for_metrics": "the logits of a row are never all there",
    "quantization_config": "quantised base weights are not proven exact here; load the model in bf16",
    "formatting_func": "map the dataset to a text column before: dataset.map(lambda row: {'text': ...})",
}


def refuse_parameters(**given: Any) -> None:
    """Refuses, by name, the parameters of TRL's trainer that have no meaning here."""
    for name, value in given.items():
        if value is not None:
            raise UserError(f"SFTTrainer's {name} is not supported: {_REFUSED[name]}", do=f"Leave {name} out")


class _timed:
    """Adds the seconds of a `with` block to a table."""

    def __init__(self, table: dict[str, float], name: str) -> None:
        self.table, self.name = table, name

    def __enter__(self) -> None:
        self.begun = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.table[self.name] = self.table.get(self.name, 0.0) + time.monotonic() - self.begun
