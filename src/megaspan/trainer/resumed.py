"""A run that continues: what must be as it was, what may be another, and what is said of it.

A run of a million tokens a row is days of work, and its weights are wanted for one more epoch when it is done. Rows are found
by (seed, step), random states and counters lie in the checkpoint, and the schedule is a function of a step's number and of the
length, so a run that is given more steps goes on as the run that had them from the start, as far as its learning rates were
the same. As in transformers' Trainer, the schedule is made for the new length; where that moves the rate, the header says so.

Options are of four kinds:

* of the run: model, rows, their order, rows a step. Another value is another run, and is refused.
* of the length: `num_train_epochs` and `max_steps`. They may be others, one line says which.
* of the update: learning rate, schedule, decay, clipping. They may be others, a line for each says so.
* all others (logging, evaluation, saving, memory, devices) move no number of the result, and may be others without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaspan import store
from megaspan.config import SFTConfig
from megaspan.config.defaults import as_yaml
from megaspan.report import Line
from megaspan.trainer.schedule import Schedule

OF_THE_RUN = (
    "model_name_or_path", "model_revision", "model_init_kwargs", "dtype", "bf16", "use_peft", "lora_r", "lora_alpha",
    "lora_dropout", "lora_target_modules", "lora_modules_to_save", "use_rslora", "dataset_name", "dataset_config", "datasets",
    "dataset_train_split", "dataset_text_field", "dataset_streaming", "max_length", "packing", "packing_strategy", "max_rows",
    "overlong", "eos_token", "pad_to_multiple_of", "shuffle_dataset", "train_sampling_strategy", "seed", "data_seed",
    "per_device_train_batch_size", "gradient_accumulation_steps", "dp_replicate_size", "dp_shard_size",
)  # fmt: skip
OF_THE_UPDATE = (
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "weight_decay", "adam_beta1",
    "adam_beta2", "adam_epsilon", "max_grad_norm",
)  # fmt: skip
# Those that no rows can be the same without: the name of every store of rows is made of them.
_OF_THE_ROWS = ("max_length", "packing", "packing_strategy", "overlong", "max_rows", "shuffle_dataset")
_LENGTH = "total_steps"


def run_options(args: SFTConfig) -> dict[str, Any]:
    """The options of the run, for the sentence that refuses a resume with others."""
    options = {name: getattr(args, name) for name in OF_THE_RUN}
    return {name: value for name, value in options.items() if name != "model_name_or_path" or value is not None}


def update_options(args: SFTConfig) -> dict[str, Any]:
    """The options of the update, which a checkpoint keeps."""
    return {name: getattr(args, name) for name in OF_THE_UPDATE}


def order_of(args: SFTConfig) -> int | str:
    """The seed of the rows' order, or "sequential"."""
    return "sequential" if args.train_sampling_strategy != "random" else args.seed if args.data_seed is None else args.data_seed


def rows_per_step(args: SFTConfig, ranks_with_rows: int) -> int:
    """Rows of all ranks in one step."""
    return args.per_device_train_batch_size * args.gradient_accumulation_steps * ranks_with_rows


def check_resume(args: SFTConfig, ranks_with_rows: int, *, own_adapter: bool) -> None:
    """Refuses what `resume_from_checkpoint` cannot continue, by the options alone: other rows take minutes to be made.

    What only rows and weights tell is compared when the checkpoint is loaded.

    Args:
        args: the options of this start.
        ranks_with_rows: ranks, or groups of them, that have rows of their own.
        own_adapter: the adapter is peft's own configuration, not made of options.

    Raises:
        UserError: there is no such checkpoint, or it is of a run with other rows, order or adapter.
    """
    checkpoint = store.checkpoint_of(args.output_dir, args.resume_from_checkpoint)
    if checkpoint is None:
        return
    known: dict[str, Any] = {"rows_per_step": rows_per_step(args, ranks_with_rows), "order": order_of(args)}
    if not own_adapter:
        known["adapter"] = None
        if args.use_peft:
            names = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "use_rslora": "use_rslora"}
            known["adapter"] = {name: getattr(args, option) for name, option in names.items()}
    saved = store.read_identity(checkpoint)
    differences = store.differing({name: saved[name] for name in known if name in saved}, known)
    resolved = args.resolved()
    rows = {name: resolved[name] for name in _OF_THE_ROWS if name in resolved}
    others = store.changed_options(checkpoint.parent, rows)
    if not differences and not others:
        return
    how = None
    windows, rest = divmod(saved.get("rows_per_step", 0), args.per_device_train_batch_size * ranks_with_rows)
    if not others and not rest and windows and all(each.startswith("rows_per_step ") for each in differences):
        how = f"Write gradient_accumulation_steps: {windows}, which makes it {saved['rows_per_step']} rows a step again"
    raise store.another_run(checkpoint, differences, run_options(args), how)


@dataclass(frozen=True)
class Resumed:
    """What a resumed run was so far.

    Attributes:
        checkpoint: what it continues from.
        step: steps that are done.
        total_steps: the length that it had; None in a checkpoint that does not tell.
        learning_rate: of the next step, as the run had it; None in a checkpoint that does not tell.
        options: those of the update.
    """

    checkpoint: Path
    step: int
    total_steps: int | None
    learning_rate: float | None
    options: Mapping[str, Any]

    @classmethod
    def of(cls, checkpoint: Path, progress: Mapping[str, Any]) -> Resumed:
        """By the checkpoint's own words; `progress` is what it gave back."""
        length = store.read_identity(checkpoint).get(_LENGTH)
        return cls(checkpoint, progress["step"], length, progress.get("learning_rate"), progress["options"])

    def lines(self, args: SFTConfig, schedule: Schedule, learning_rate: float) -> list[Line]:
        """The header's lines: the checkpoint, and everything that is another from here on.

        Args:
            args: the options of this start.
            schedule: its steps.
            learning_rate: of the next step, by this start.
        """
        lines = [Line("resumed", self.checkpoint.name, str(self.checkpoint))]
        for name, now in update_options(args).items():
            before = self.options.get(name)
            if before != now:
                lines.append(Line("resumed", f"{name}: {as_yaml(now)}", f"the run had {as_yaml(before)} so far", loud=True))
        if self.total_steps not in (None, schedule.total_steps):
            told, moved = f"the run was to have {self.total_steps}", False
            if self.learning_rate is not None:
                moved = self.learning_rate != learning_rate
                rate = f"the learning rate of step {self.step + 1} is {learning_rate:.4g}"
                told += f"; {rate}, and was to be {self.learning_rate:.4g}" if moved else f"; {rate} either way"
            lines.append(Line("resumed", f"{schedule.total_steps} steps", told, loud=moved))
        return lines

    def nothing_left(self, args: SFTConfig, schedule: Schedule) -> str | None:
        """The sentence for a run that has done all of its steps; None while there are some."""
        if self.step < schedule.total_steps:
            return None
        option: str
        had: float
        if args.max_steps > 0:
            option, had, more = "max_steps", args.max_steps, self.step + max(1, args.max_steps)
        else:
            option, had, more = "num_train_epochs", args.num_train_epochs, self.step // schedule.steps_per_epoch + 1
        where = "ends the run there" if self.step == schedule.total_steps else f"ends it after {schedule.total_steps}"
        return (
            f"nothing is left to train: {self.checkpoint} has done {self.step} steps, and {option}: {as_yaml(had)} {where}. To "
            f"train on, resume with a larger one, such as --{option} {more} --resume_from_checkpoint true"
        )


def but_length(identity: Mapping[str, Any], checkpoint: Path) -> dict[str, Any]:
    """An identity with the length that the checkpoint's run had, which may be another now."""
    saved = store.read_identity(checkpoint)
    return {**identity, **({_LENGTH: saved[_LENGTH]} if _LENGTH in saved else {})}
