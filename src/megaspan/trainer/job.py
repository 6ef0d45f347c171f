"""What a run is made of: rows, a model with its levers, a plan, this rank's place; and what can be said about them.

The header is written from what is there when all is made: the live rotary module, the kernel that will run, the arena that was
pinned, not from what was asked for (probe P4). Rank 0 writes it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from megaspan import store, world
from megaspan.attention.choose import KernelChoice
from megaspan.config import SFTConfig
from megaspan.config.defaults import differing_defaults
from megaspan.data import Rows, prepare_rows
from megaspan.human import fitted, format_bytes, format_seconds, format_tokens, terminal_width
from megaspan.layers.shards import compute_dtype
from megaspan.model import Levers, LoadedModel, check_token_ids, levers
from megaspan.model.kinds import refuse_shared_rows
from megaspan.model.shard import reset
from megaspan.plan import ModelFacts, Plan
from megaspan.report import Line, flops_formula, heaviest_layer, model_flops
from megaspan.trainer.patience import Patience
from megaspan.trainer.resumed import order_of, rows_per_step
from megaspan.trainer.schedule import Schedule
from megaspan.trainer.share import Share

# What was done, by the names that run.json has for its seconds.
_DONE = {
    "tokenise": "rows",
    "load": "weights",
    "levers": "plan and trials of the layers",
    "pin": "host memory",
}
_SEVERAL = "several documents, or a rank's parts of a row, in one call"


@dataclass
class Job:
    """One run's parts. Made by `set_up`, used by the trainer."""

    args: SFTConfig
    loaded: LoadedModel
    rows: Rows
    eval_rows: Rows | None
    plan: Plan
    ranks: world.Ranks
    share: Share
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
    def device(self) -> torch.device:
        """What this rank computes on."""
        return self.ranks.device

    @property
    def rows_per_step(self) -> int:
        """Rows of all ranks in one step."""
        return rows_per_step(self.args, self.ranks.mesh.size("data"))

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
        """Lets go of what an abandoned step left on the host, on disk, and gathered of other ranks' weights."""
        self.levers.discard()
        reset(self.model)

    def prepare_eval(self, dataset: Any) -> Rows:
        """Held-out rows of another dataset, by the options of the run; the same ones on every rank.

        Raises:
            UserError: the data cannot be read, ranks were given different data (case R84), or it is packed and the model cannot
                have that (R94).
        """
        rows = prepare_rows(self.args, self.tokenizer, split="test", dataset=dataset, report=self.say)
        world.same_everywhere("the held-out data", rows.fingerprint)
        check_token_ids(rows.max_id, self.facts.vocab)
        if rows.packed:
            refuse_shared_rows(self.model)
        return rows

    def say(self, text: str) -> None:
        """Prints a line, on the rank that speaks."""
        say(self.ranks, text)

    @cached_property
    def patience(self) -> Patience:
        """How long a rank may be in a phase before the others wonder."""
        flops = self._flops(self.plan.tokens) / self.ranks.mesh.size("row")
        heaviest = heaviest_layer(self.facts, self.plan.tokens)
        return Patience(flops, heaviest, self.device.type, self.plan.seconds.total or 0.0)

    def _flops(self, lengths: int | Sequence[int]) -> float:
        """Forward and backward of stretches that attend to themselves."""
        return model_flops(self.facts, lengths, frozen=self.frozen)

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

    def learn(self, row_lengths: Sequence[int], seconds: float) -> None:
        """A step with these stretches, in the rows of all ranks, took so long: what the next one may take."""
        self.patience.learn(self._flops(row_lengths) / self.ranks.mesh.ranks, seconds)

    def speed(self, row_lengths: Sequence[int], steps: Sequence[float]) -> dict[str, float]:
        """Mean seconds of a step, tokens a second of all ranks, model TFLOP a second of each, and the fullest one's memory.

        All ranks call it.

        Args:
            row_lengths: tokens of each stretch that attends to itself, in the rows of all ranks.
            steps: seconds of each step that took them.
        """
        flops = self._flops(row_lengths)
        device, host = world.largest([self.device_memory()[1], world.peak_host_bytes()])
        seconds = sum(steps)
        return {
            "step_seconds": seconds / len(steps),
            "tokens_per_second": sum(row_lengths) / seconds,
            "model_tflops": flops / seconds / 1e12 / self.ranks.mesh.ranks,
            "peak_device_bytes": float(device),
            "peak_host_bytes": float(host),
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
        """What must be the same for a resumed run to be exact; its length alone may be another."""
        return {
            "model": self.loaded.commit,
            "data": self.rows.fingerprint,
            "rows_per_step": schedule.rows_per_step,
            "total_steps": schedule.total_steps,
            "order": order_of(self.args),
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
        """Writes what the run is made of into its folder: options, versions, hashes, seeds. On the rank that speaks."""
        if not self.ranks.speaks:
            return
        store.write_run_facts(
            self.args.output_dir,
            config=self.args.resolved() | {"model_name_or_path": self.loaded.name},
            facts={
                "run_name": self.args.run_name,
                "model": {"name": self.loaded.name, "commit": self.loaded.commit, "origin": self.loaded.origin},
                "data": {"fingerprint": self.rows.fingerprint, "ledger": self.rows.ledger.to_dict()},
                "identity": self.identity(schedule),
                "seed": self.args.seed,
                "resumed_from": resumed and str(resumed),
                "seconds": self.seconds,
                "machine": dataclasses.asdict(self.plan.machine),
                "ranks": str(self.ranks.mesh),
            },
        )

    def saved_dtype(self) -> torch.dtype:
        """The type that weights are saved in: the one they are multiplied in (masters stay in checkpoints)."""
        return compute_dtype(next(self.model.parameters()))

    def header(
        self,
        schedule: Schedule,
        precision: Line,
        rehearsal: store.Rehearsal,
        resumed: Sequence[Line],
    ) -> list[Line]:
        """What will really run, line by line, each with its reason; `resumed`: the lines of a run that continues."""
        facts, longest = self.facts, int(self.rows.lengths.max())
        named = [] if self.args.run_name is None else [Line("run", self.args.run_name, self.args.output_dir)]
        lines = [
            *named,
            Line("model", self.loaded.name, f"{facts.parameters:,} parameters, {facts.layers} layers; {self.loaded.origin}"),
            *self._adapter_lines(),
            *self._rank_lines(),
            Line("rows", f"{len(self.rows)}", f"longest {format_tokens(longest)} tokens, {self._spread()}"),
            Line(
                "steps",
                f"{schedule.total_steps}",
                f"rows a step: {schedule.rows_per_step}{self._product()}; steps an epoch: {schedule.steps_per_epoch}",
            ),
            precision,
            *launch_lines(self.saved_dtype()),
            *self._position_lines(),
            *attention_lines(self.kernels),
            *[Line(label, value, reason) for label, value, reason in self.levers.read_back() if label != "attention"],
            self._memory_line(),
            Line("saving", str(rehearsal), _kept(self.args)),
            Line("model FLOP", flops_formula(facts, frozen=self.frozen), self._of_each_rank()),
            Line(
                "prepared in",
                ", ".join(f"{_DONE.get(name, name)} {format_seconds(took)}" for name, took in self.seconds.items()),
            ),
        ]
        if self.device.type == "cuda":
            allocator = world.allocator()
            lines.append(Line("allocator", f"expandable segments {'on' if allocator.expandable else 'OFF'}", allocator.reason))
        if self.args.full_determinism:
            cost = "attention takes twice the time: on an H200 357 and 319 TFLOP/s, where FlashAttention 4 has 716 and 661"
            lines.append(Line("determinism", "full", cost if self.device.type == "cuda" else "costs nothing on a CPU"))
        if self.args.loss_type == "nll":
            lines.append(Line("loss", "nll", "the plain loss with all logits; newer TRL means the chunked one by this name"))
        lines += resumed
        return lines + [Line("unlike TRL", text) for text in differing_defaults(self.args)]

    @property
    def kernels(self) -> Sequence[KernelChoice]:
        """The attention kernels of the model's kinds of layers."""
        return (self.levers.kernel, *self.levers.kernel.also)

    def _adapter_lines(self) -> list[Line]:
        if not self.frozen:
            return []
        config = self.model.peft_config[self.model.active_adapter]
        trained = sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)
        targets = [config.target_modules] if isinstance(config.target_modules, str) else sorted(config.target_modules or ())
        # peft writes `all-linear` out, a name for each module of each layer.
        counts = Counter(name.rpartition(".")[2] for name in targets)
        targets = [f"{name} × {count}" for name, count in counts.items()] if len(counts) < len(targets) else targets
        value = f"LoRA, r {config.r}, alpha {config.lora_alpha:g}, dropout {config.lora_dropout:g}"
        return [Line("adapter", value, f"{trained:,} parameters train; on {', '.join(targets)}")]

    def _rank_lines(self) -> list[Line]:
        mesh = self.ranks.mesh
        if mesh.ranks == 1:
            return []
        told = [f"{mesh.dp_replicate} copies of the model"] * (mesh.dp_replicate > 1)
        told += [f"weights and AdamW's states cut over {mesh.size('shard')} ranks"] * (mesh.size("shard") > 1)
        groups = "ranks" if mesh.size("row") == 1 else "groups of ranks"
        told += [f"{mesh.size('data')} {groups} with a row each"] * (mesh.size("data") > 1)
        told += [f"a row's tokens cut over {mesh.cp} ranks"] * (mesh.cp > 1)
        told += [f"a row's heads shared by {mesh.sp} ranks"] * (mesh.sp > 1)
        return [Line("ranks", str(mesh), ", ".join(told))]

    def _product(self) -> str:
        """What the rows of a step are the product of. Ranks with rows of their own make a step larger, and steps fewer."""
        groups, mesh = self.ranks.mesh.size("data"), self.ranks.mesh
        if groups == 1 and self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps == 1:
            return ""
        device = "GPU" if self.device.type == "cuda" else "process"
        if mesh.size("row") > 1:
            who = f"{groups} group{'s' if groups > 1 else ''} of {mesh.size('row')} {device}{'s' if device == 'GPU' else 'es'}"
        else:
            who = f"{groups} {device}" + ("" if groups == 1 else "s" if device == "GPU" else "es")
        batch, windows = self.args.per_device_train_batch_size, self.args.gradient_accumulation_steps
        return f" = {who} × {batch} (per_device_train_batch_size) × {windows} (gradient_accumulation_steps)"

    def _spread(self) -> str:
        """Which part of a row a rank has: of the longest one, as the layout of its tokens says (case R93)."""
        if self.ranks.mesh.ranks == 1:
            return "all on this device"
        shared, together = self.ranks.mesh.size("row"), self.share.together
        packed = f"; {together} at a time, as one packed row" if together > 1 else ""
        place = "each on one rank"
        if shared > 1:
            longest = self.rows[int(self.rows.lengths.argmax())]
            place = f"{format_tokens(self.share.slots([longest]))} on each of its {shared} ranks"
        return place + packed

    def _of_each_rank(self) -> str:
        return f"model_tflops is of each of {self.ranks.mesh.ranks} ranks" if self.ranks.mesh.ranks > 1 else ""

    def _position_lines(self) -> list[Line]:
        """The rotary tables of the live model; some families (Granite 4, GPT-BigCode) have none."""
        reason = self.loaded.rope.reason
        tables = [str(entry) for entry in self.loaded.rope_readback.entries] or ["no rotary table"]
        return [Line("positions", table, "" if number else reason) for number, table in enumerate(tables)]

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


def attention_lines(choices: Sequence[KernelChoice]) -> list[Line]:
    """Which kernel runs when: one line for each kind of layer, two where calls of several documents or parts take another one.

    Args:
        choices: those of each kind of layer, then those of the same kinds for several documents or parts in one call.
    """
    alone, several = ([choice for choice in choices if choice.several == many] for many in (False, True))
    lines = []
    for number, choice in enumerate(alone):
        other = several[number] if number < len(several) else None
        if other is None:
            lines.append(Line("attention", choice.name, choice.reason))
        elif (other.name, other.reason.replace(", variable lengths", "")) == (choice.name, choice.reason):
            lines.append(Line("attention", choice.name, f"{choice.reason}; also for {_SEVERAL}"))
        else:
            lines.append(Line("attention", choice.name, f"for one document in a call: {choice.reason}"))
            lines.append(Line("attention", other.name, f"for {_SEVERAL}: {other.reason}"))
    return lines + [Line("attention", choice.loud, loud=True) for choice in choices if choice.loud]


def _kept(args: SFTConfig) -> str:
    """Which checkpoints will lie on the disk, and which of them nobody can count before the first step."""
    if args.save_strategy == "no":
        return "a checkpoint only when a signal stops the run"
    if args.save_total_limit is not None:
        return f"save_total_limit: {args.save_total_limit} keeps the newest"
    timed = f"; those of save_minutes: {args.save_minutes:g} are not in what is needed" if args.save_minutes else ""
    return f"every checkpoint is kept (save_total_limit: null){timed}"


def launch_lines(dtype: torch.dtype) -> list[Line]:
    """What became of the precision that accelerate's launch file asks for; `dtype` is what products are in."""
    asked = world.launch_precision()
    if asked is None:
        return []
    live = str(dtype).removeprefix("torch.")
    why = "the file says no, or nothing, which accelerate passes on alike: megaspan's options decide"
    if asked == "bf16":
        why = "as the file says" if live == "bfloat16" else "not on a CPU; bf16: true in the options asks for it there too"
    value = f"mixed_precision: {asked}, and products are in {live}"
    return [Line("launch file", value, why, loud=asked == "bf16" and live != "bfloat16")]


def say(ranks: world.Ranks, text: str) -> None:
    """Prints a line on stderr, on the rank that speaks."""
    if ranks.speaks:
        print(fitted(text, terminal_width(sys.stderr)), file=sys.stderr, flush=True)
