"""What options say about each other: the ones without effect beside the others, and the ones that contradict.

An option that changes nothing is a wish that was misunderstood: on a run of hours it is an error, not a surprise at the end.
The rules are data, so that one list refuses an inert option in a user's file and leaves it out of the resolved file of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megaspan.human import UserError

if TYPE_CHECKING:
    from megaspan.config.schema import SFTConfig

LARGEST_SEED = 2**32 - 1
LORA_OPTIONS = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_modules_to_save", "use_rslora")
SCHEDULE_ARGUMENTS = {
    "linear": (), "cosine": ("num_cycles",), "cosine_with_restarts": ("num_cycles",), "polynomial": ("lr_end", "power"),
    "constant": (), "constant_with_warmup": (), "inverse_sqrt": ("timescale",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate", "warmup_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles"),
}  # fmt: skip


@dataclass(frozen=True)
class Inert:
    """`option` has no effect while `idle(config)` holds; `because` ends the sentence, `do` says what to type."""

    option: str
    others: tuple[str, ...]
    idle: Callable[[SFTConfig], bool]
    because: str
    do: str


def _wraps(config: SFTConfig) -> bool:
    """Whether documents are joined, and continue in the next row."""
    return config.packing and config.packing_strategy == "wrapped"


ONE = "Remove one of the two"
UNSET = "Remove it, or set max_steps: -1, which leaves the length to the epochs"
STEPS_ONLY = (("eval_steps", "eval_strategy"), ("logging_steps", "logging_strategy"), ("save_steps", "save_strategy"))

INERT: tuple[Inert, ...] = (
    *(
        Inert(name, ("use_peft",), lambda c: not c.use_peft, "without use_peft: true", "Add use_peft: true or remove it")
        for name in LORA_OPTIONS
    ),
    Inert("dataset_config", ("dataset_name",), lambda c: c.dataset_name is None, "without dataset_name", "Name the dataset"),
    Inert(
        "dataset_train_split",
        ("datasets",),
        lambda c: c.datasets is not None,
        "beside datasets, whose entries have a split each",
        "Write split: in the entry",
    ),
    Inert("packing_strategy", ("packing",), lambda c: not c.packing, "with packing: false", ONE),
    Inert(
        "overlong",
        ("packing", "packing_strategy"),
        _wraps,
        "with packing_strategy: wrapped, which never cuts a document off",
        "Add packing: false or packing_strategy: bfd, or remove it",
    ),
    Inert(
        "max_lost_tokens",
        ("packing", "packing_strategy", "overlong"),
        lambda c: _wraps(c) or c.overlong == "split",
        "where no text is lost",
        "Add overlong: truncate or drop, with packing: false or packing_strategy: bfd, or remove it",
    ),
    Inert(
        "lr_scheduler_kwargs",
        ("lr_scheduler_type",),
        lambda c: not SCHEDULE_ARGUMENTS[c.lr_scheduler_type],
        "on a schedule that takes no arguments",
        "Remove it or name another lr_scheduler_type",
    ),
    *(
        Inert(
            name,
            ("lr_scheduler_type",),
            lambda c: c.lr_scheduler_type == "constant",
            "with lr_scheduler_type: constant",
            "Write lr_scheduler_type: constant_with_warmup",
        )
        for name in ("warmup_steps", "warmup_ratio")
    ),
    Inert("num_train_epochs", ("max_steps",), lambda c: c.max_steps > 0, "beside max_steps, which ends the run", UNSET),
    Inert(
        "gradient_checkpointing_kwargs",
        ("gradient_checkpointing",),
        lambda c: not c.gradient_checkpointing,
        "with gradient_checkpointing: false",
        ONE,
    ),
    Inert(
        "offload_folder",
        ("gradient_checkpointing", "gradient_checkpointing_kwargs"),
        lambda c: not c.offload,
        "where the layers' inputs never leave the GPU",
        "Set gradient_checkpointing_kwargs: {offload: true} or remove it",
    ),
    Inert(
        "allow_slow_disk",
        ("offload_folder",),
        lambda c: c.offload_folder is None,
        "without offload_folder",
        "Name a folder on a disk or remove it",
    ),
    Inert(
        "data_seed",
        ("shuffle_dataset", "train_sampling_strategy"),
        lambda c: not c.shuffle_dataset and c.train_sampling_strategy == "sequential",
        "on data that is not shuffled",
        "Add shuffle_dataset: true or remove it",
    ),
    *(
        Inert(
            name,
            (strategy,),
            lambda c, strategy=strategy: getattr(c, strategy) != "steps",  # type: ignore[misc]
            f"without {strategy}: steps",
            f"Write {strategy}: steps or remove it",
        )
        for name, strategy in STEPS_ONLY
    ),
    Inert("save_minutes", ("save_strategy",), lambda c: c.save_strategy == "no", "with save_strategy: no", ONE),
    Inert("save_total_limit", ("save_strategy",), lambda c: c.save_strategy == "no", "with save_strategy: no", ONE),
    Inert("memory_limit", ("use_cpu",), lambda c: c.use_cpu, "with use_cpu: true, where all memory is the host's", ONE),
    Inert("offload_optimizer", ("use_cpu",), lambda c: c.use_cpu, "with use_cpu: true, where all memory is the host's", ONE),
)


class WithoutEffect(UserError):
    """An option that changes nothing beside `others`."""

    def __init__(self, rule: Inert) -> None:
        super().__init__(f"{rule.option} has no effect {rule.because}", do=rule.do, option=rule.option)
        self.others = rule.others


def idle_options(config: SFTConfig) -> set[str]:
    """The options that change nothing here, set or not."""
    return {rule.option for rule in INERT if rule.idle(config)}


def combinations(config: SFTConfig, wrong: set[str]) -> list[UserError]:
    """Every broken rule that involves no option of `wrong` (those already have an error of their own)."""
    errors: list[UserError] = [
        WithoutEffect(rule)
        for rule in INERT
        if rule.option in config.model_fields_set
        and getattr(config, rule.option) is not None
        and not wrong & {rule.option, *rule.others}
        and rule.idle(config)
    ]
    for options, message, do in _conflicts(config):
        if not wrong & set(options):
            errors.append(UserError(message, do=do, option=options[0]))
    return errors


def _conflicts(c: SFTConfig) -> Iterator[tuple[tuple[str, ...], str, str]]:
    if c.use_dora:
        yield ("use_dora",), "use_dora: weight-decomposed LoRA is not proven exact with the chunked loss", "Leave it false"
    for name in ("seed", "data_seed"):
        if (getattr(c, name) or 0) > LARGEST_SEED:
            yield (name,), f"{name} must be at most {LARGEST_SEED}, numpy's largest seed", "Write a smaller one"
    if c.warmup_ratio is not None and c.warmup_steps:
        yield ("warmup_ratio", "warmup_steps"), "warmup_ratio and warmup_steps both set the warm-up", "Keep one of them"
    if c.dataset_name is not None and c.datasets is not None:
        yield (
            ("dataset_name", "datasets"),
            "dataset_name and datasets both say what to train on",
            "Put the first into the list as {path: …}",
        )
    if c.dtype == "bfloat16" and c.bf16 is False:
        yield (
            ("bf16", "dtype"),
            "bf16: false asks for fp32 computation, dtype: bfloat16 for bf16 weights",
            "Remove one of the two",
        )
    known = SCHEDULE_ARGUMENTS[c.lr_scheduler_type]
    for key in c.lr_scheduler_kwargs or {}:
        if known and key not in known:
            yield (
                ("lr_scheduler_kwargs", "lr_scheduler_type"),
                f"lr_scheduler_kwargs: the {c.lr_scheduler_type} schedule has no argument {key}",
                f"It takes {', '.join(known)}",
            )
    given = set(c.lr_scheduler_kwargs or {})
    if (
        c.lr_scheduler_type in ("cosine_with_min_lr", "cosine_warmup_with_min_lr")
        and len(given & {"min_lr", "min_lr_rate"}) != 1
    ):
        yield (
            ("lr_scheduler_type", "lr_scheduler_kwargs"),
            f"lr_scheduler_type {c.lr_scheduler_type} needs min_lr or min_lr_rate in lr_scheduler_kwargs",
            "Write lr_scheduler_kwargs: {min_lr_rate: 0.1}",
        )
    if c.lr_scheduler_type == "warmup_stable_decay" and "num_decay_steps" not in given:
        yield (
            ("lr_scheduler_type", "lr_scheduler_kwargs"),
            "lr_scheduler_type warmup_stable_decay needs num_decay_steps in lr_scheduler_kwargs",
            "Write lr_scheduler_kwargs: {num_decay_steps: 100}",
        )
