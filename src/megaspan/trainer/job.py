"""What a run is made of: rows, a model with its levers, a plan, a device; and what can be said about them.

Everything is made in the order in which it can fail cheaply: the options first, then the text (prepared before any process
group or weight exists, case R82), then the plan, then the weights. The header is written from what is there when all is made:
the live rotary module, the kernel that will run, the arena that was pinned, not from what was asked for (probe P4).
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.trainer_utils import enable_full_determinism

from megaspan import store, world
from megaspan.config import SFTConfig
from megaspan.config.defaults import as_yaml, differing_defaults
from megaspan.data import Rows, prepare_rows
from megaspan.human import UserError, format_bytes, format_seconds, format_tokens
from megaspan.model import (
    Levers,
    LoadedModel,
    adopt_model,
    check_token_ids,
    levers,
    load_model,
    load_tokenizer,
    prepare,
    wrap_lora,
)
from megaspan.optimizer import check_optim
from megaspan.plan import ModelFacts, Plan, choose, plan_command
from megaspan.report import Line, check_trackers, flops_formula, model_flops
from megaspan.trainer.schedule import Schedule


@dataclass
class Job:
    """One run's parts. Made by `set_up`, used by the trainer."""

    args: SFTConfig
    loaded: LoadedModel
    rows: Rows
    eval_rows: Rows | None
    plan: Plan
    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def model(self) -> Any:
        """The prepared model (a peft model under LoRA)."""
        return self.loaded.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The model's tokenizer; None with pre-tokenised rows and a bare shape."""
        return self.loaded.tokenizer

    @property
    def levers(self) -> Levers:
        """What `prepare` put on the model."""
        placed = levers(self.model)
        assert placed is not None
        return placed

    @property
    def frozen(self) -> bool:
        """Most weights get no gradient (LoRA)."""
        return hasattr(self.model, "peft_config")

    @property
    def facts(self) -> ModelFacts:
        """Layers, widths and parameters of the model."""
        return self.loaded.facts

    def watch_layers(self, on_layer: Callable[[str, int], None] | None) -> None:
        """Calls `on_layer("forward" | "backward", index)` at every layer boundary from now on; None stops it."""
        self.levers.on_layer = on_layer

    def discard_step(self) -> None:
        """Lets go of what an abandoned step left on the host and on disk."""
        self.levers.discard()

    def prepare_eval(self, dataset: Any) -> Rows:
        """Held-out rows of another dataset, by the options of the run."""
        return _checked(prepare_rows(self.args, self.tokenizer, split="test", dataset=dataset, report=_say), self.loaded)

    def synchronize(self) -> None:
        """Waits for the device, so that seconds are those of finished work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def reset_peaks(self) -> None:
        """Starts the memory peak of a step."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def device_memory(self) -> tuple[int, int]:
        """Bytes of live tensors on the device, now and at most since `reset_peaks`; zeros on a CPU."""
        if self.device.type != "cuda":
            return 0, 0
        return torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_allocated(self.device)

    def speed(self, row_lengths: Sequence[int], seconds: float) -> dict[str, float]:
        """Tokens and model TFLOP per second over rows of `row_lengths` tokens that took `seconds`, and the peaks of memory."""
        flops = model_flops(self.facts, row_lengths, frozen=self.frozen)
        return {
            "step_seconds": seconds,
            "tokens_per_second": sum(row_lengths) / seconds,
            "model_tflops": flops / seconds / 1e12,
            "peak_device_bytes": float(self.device_memory()[1]),
            "peak_host_bytes": float(world.peak_host_bytes()),
        }

    def judge_first_loss(self, loss: float, rows: Sequence[int]) -> str | None:
        """A sentence when the first loss exceeds the unigram entropy of its rows, the sign of wrong positions (case R52)."""
        lengths = self.rows.lengths[list(rows)]
        entropies = [self.rows.unigram_entropy(row) for row in rows]
        unigram = float((lengths * entropies).sum() / lengths.sum())
        if not loss > unigram:
            return None
        cause = "as random weights do" if self.loaded.random_weights else "so look at rope_parameters and at the tokenizer"
        return (
            f"the first loss, {loss:.3f}, is above the unigram entropy of its rows, {unigram:.3f}: "
            f"the model predicts worse than word counts would, {cause}"
        )

    def identity(self, schedule: Schedule) -> dict[str, Any]:
        """What must be the same for a resumed run to be exact."""
        return {
            "model": self.loaded.commit,
            "data": self.rows.fingerprint,
            "rows_per_step": schedule.rows_per_step,
            "total_steps": schedule.total_steps,
            "order": schedule.seed if schedule.shuffled else "sequential",
            "positions": [str(entry) for entry in self.loaded.rope_readback.entries],
            "weights": str(self.saved_dtype()).removeprefix("torch."),
            "adapter": self._adapter(),
        }

    def _adapter(self) -> dict[str, Any] | None:
        """What an adapter's shapes do not say."""
        if not self.frozen:
            return None
        config = self.model.peft_config[self.model.active_adapter]
        return {name: getattr(config, name) for name in ("r", "lora_alpha", "lora_dropout", "use_rslora")}

    def write_run_facts(self, schedule: Schedule, resumed: Path | None) -> None:
        """Writes what the run is made of into its folder: options, versions, hashes, seeds."""
        store.write_run_facts(
            self.args.output_dir,
            config=self.args.resolved() | {"model_name_or_path": self.loaded.name},
            facts={
                "model": {"name": self.loaded.name, "commit": self.loaded.commit, "origin": self.loaded.origin},
                "data": {"fingerprint": self.rows.fingerprint, "ledger": self.rows.ledger.to_dict()},
                "identity": self.identity(schedule),
                "seed": self.args.seed,
                "resumed_from": resumed and str(resumed),
                "seconds": self.seconds,
                "machine": dataclasses.asdict(self.plan.machine),
            },
        )

    def saved_dtype(self) -> torch.dtype:
        """The type that weights are saved in: the one they are multiplied in (masters stay in checkpoints)."""
        return next(self.model.parameters()).dtype

    def header(
        self,
        schedule: Schedule,
        precision: Line,
        rehearsal: store.Rehearsal,
        resumed: Path | None,
        changed: Mapping[str, tuple[Any, Any]],
    ) -> list[Line]:
        """What will really run, line by line, each with its reason; `changed`: options (before, now) of a resume."""
        facts, longest = self.facts, int(self.rows.lengths.max())
        rotary, *others = self.loaded.rope_readback.entries
        lines = [
            Line("model", self.loaded.name, f"{facts.parameters:,} parameters, {facts.layers} layers; {self.loaded.origin}"),
            Line("rows", f"{len(self.rows)}", f"longest {format_tokens(longest)} tokens, all on this device"),
            Line(
                "steps",
                f"{schedule.total_steps}",
                f"rows a step: {schedule.rows_per_step}; steps an epoch: {schedule.steps_per_epoch}",
            ),
            precision,
            Line("positions", str(rotary), self.loaded.rope.reason),
            *[Line("positions", str(entry)) for entry in others],
            *[Line(label, value, reason) for label, value, reason in self.levers.read_back()],
            *[Line("attention", choice.loud, loud=True) for choice in self.kernels if choice.loud],
            self._memory_line(),
            Line("saving", str(rehearsal), _kept(self.args)),
            Line("model FLOP", flops_formula(facts, frozen=self.frozen)),
            Line("prepared in", ", ".join(f"{name} {format_seconds(value)}" for name, value in self.seconds.items())),
        ]
        if self.device.type == "cuda":
            allocator = world.allocator()
            lines.append(Line("allocator", f"expandable segments {'on' if allocator.expandable else 'OFF'}", allocator.reason))
        if self.args.full_determinism:
            cost = "attention takes twice the time: on an H200 357 and 319 TFLOP/s, where FlashAttention 4 has 716 and 661"
            lines.append(Line("determinism", "full", cost if self.device.type == "cuda" else "costs nothing on a CPU"))
        if self.args.loss_type == "nll":
            lines.append(Line("loss", "nll", "the plain loss with all logits; newer TRL means the chunked one by this name"))
        if resumed:
            lines.append(Line("resumed", resumed.name, str(resumed)))
        for name, (before, now) in changed.items():
            lines.append(Line("resumed", f"{name}: {as_yaml(now)}", f"the run had {as_yaml(before)} so far", loud=True))
        return lines + [Line("unlike TRL", text) for text in differing_defaults(self.args)]

    @property
    def kernels(self) -> Sequence[Any]:
        """The attention kernels of the model's kinds of layers."""
        return (self.levers.kernel, *self.levers.kernel.also)

    def _memory_line(self) -> Line:
        plan = self.plan
        host = f"host {format_bytes(plan.host_bytes)} of {format_bytes(plan.host_limit)}"
        if plan.device_limit:
            device = f"{plan.machine.device_name}: {format_bytes(plan.device_bytes)} of {format_bytes(plan.device_limit)}"
        else:
            device = "no GPU"
        if plan.fits:
            return Line(
                "planned memory", device, f"{host}; the longest row that fits is {format_tokens(plan.longest_row)} tokens"
            )
        lever = f"; next lever: {plan.next_lever.do}" if plan.next_lever else ""
        return Line("planned memory", device, f"{host}; DOES NOT FIT by the plan{lever}", loud=True)


def set_up(
    model: str | Path | PreTrainedModel | None,
    args: SFTConfig,
    train_dataset: Any,
    eval_dataset: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    peft_config: Any,
) -> Job:
    """Makes the parts of a run, cheapest failure first.

    Raises:
        UserError: the options, the data, the model or the memory do not allow the run.
    """
    if isinstance(model, str | Path):
        args = args.replace(model_name_or_path=str(model))
    elif model is not None and not isinstance(model, PreTrainedModel):
        raise UserError(
            "SFTTrainer's model is neither a name nor a transformers model",
            got=type(model).__name__,
            do="Pass the transformers model itself; for LoRA the base model, and the LoraConfig as peft_config",
        )
    given = model if isinstance(model, PreTrainedModel) else None
    if given is None and args.model_name_or_path is None:
        raise UserError(
            "there is no model", do="Set model_name_or_path to a hub name, a model folder or a shape such as qwen3-4b"
        )
    check_trackers(args.report_to)
    check_optim(args)
    world.set_allocator()
    device = world.device(args.use_cpu)
    if device.type == "cuda" and args.memory_limit:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.memory_limit / total), device)
    if args.full_determinism:
        enable_full_determinism(args.seed)
    else:
        set_seed(args.seed)

    seconds: dict[str, float] = {}
    machine = world.agree(world.machine())
    with _timed(seconds, "tokenise"):
        if given is None:
            plan_command(args, machine)  # refuses positions and models that cannot be, before the text is read
            tokenizer = tokenizer or load_tokenizer(args)
        rows = prepare_rows(args, tokenizer, split="train", dataset=train_dataset, report=_say)
        eval_rows = None
        if eval_dataset is not None or args.eval_strategy != "no":
            eval_rows = prepare_rows(args, tokenizer, split="test", dataset=eval_dataset, report=_say)
    with _timed(seconds, "load"):
        loaded = load_model(args, device) if given is None else adopt_model(given, args, device)
        loaded = replace(loaded, tokenizer=tokenizer)
        for found in (rows, eval_rows):
            if found is not None:
                _checked(found, loaded)
        if peft_config is not None or args.use_peft:
            loaded = wrap_lora(loaded, args, peft_config)
    with _timed(seconds, "levers"):
        plan = choose(args, loaded.facts, machine, longest=int(rows.lengths.max()))
        world.same_everywhere("the plan", _digest(plan))
        prepare(loaded.model, args, plan)
    placed = levers(loaded.model)
    assert placed is not None
    if placed.disk is not None and placed.disk.speed is not None:
        seconds["disk speed"] = placed.disk.seconds
        seconds["levers"] -= placed.disk.seconds
    with _timed(seconds, "pin"):
        placed.reserve(loaded.model, int(rows.lengths.max()))
    return Job(args, loaded, rows, eval_rows, plan, device, seconds)


def _digest(plan: Plan) -> str:
    """Of all that decides in which order a rank calls the others."""
    decided = (plan.keep, plan.streamed, plan.kv_heads_per_call, plan.layer_tile_tokens, plan.stream_back)
    return hashlib.sha256(repr((*decided, plan.loss_tile_tokens, plan.states)).encode()).hexdigest()


def _checked(rows: Rows, loaded: LoadedModel) -> Rows:
    check_token_ids(rows.max_id, loaded.facts.vocab)
    return rows


def update_options(args: SFTConfig) -> dict[str, Any]:
    """The options that shape an update and may be changed at a resume: said then, since the run is another from there on."""
    return {name: getattr(args, name) for name in _OF_THE_UPDATE}


_OF_THE_UPDATE = (
    "learning_rate",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "warmup_ratio",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
)


def _kept(args: SFTConfig) -> str:
    """Which checkpoints will lie on the disk, and which of them nobody can count before the first step."""
    if args.save_strategy == "no":
        return "no checkpoint but at a signal"
    if args.save_total_limit is not None:
        return f"save_total_limit: {args.save_total_limit} keeps the newest"
    timed = f"; those of save_minutes: {args.save_minutes:g} are not in what is needed" if args.save_minutes else ""
    return f"every checkpoint is kept (save_total_limit: null){timed}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
