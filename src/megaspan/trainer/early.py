"""What is refused before a row is made, of what nobody would find out before the weights are there.

Rows of a large corpus take minutes, weights of 8B parameters another, and a wrong word in the options costs both when it is
read behind them. So a schedule is asked for rates, an adapter is put on a model without memory, and held-out data is looked
for, while all that has been spent is a second.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from megaspan.config import SFTConfig
from megaspan.config.foreign import table
from megaspan.data.prepare import OpenData, open_data
from megaspan.human import UserError
from megaspan.model import wrap_lora
from megaspan.model.fill import skeleton
from megaspan.model.source import apply_overrides, find_source, read_config
from megaspan.optimizer.schedule import LearningRate

_SOME_STEPS = 10**9  # of a run whose length only its rows tell: more than any argument of a schedule
_HELD_OUT = ("validation", "valid", "val", "dev", "eval", "test")


def check_schedule(args: SFTConfig) -> None:
    """Asks the schedule for its first rate and its last: what it does not take is known without one row.

    Raises:
        UserError: it does not take its arguments, or has no rate with them.
    """
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


def try_adapter(args: SFTConfig, peft_config: Any) -> None:
    """Puts the adapter on the model without its weights: modules that it names and that are not there are found in a second.

    Raises:
        UserError: as `wrap_lora`.
    """
    model_config = read_config(find_source(args), trust_remote_code=args.trust_remote_code)
    apply_overrides(model_config, args.config_overrides)
    bare = skeleton(model_config, torch.float32, trust_remote_code=args.trust_remote_code)
    wrap_lora(bare, args, copy.deepcopy(peft_config))  # peft writes into what it is given


def open_all(args: SFTConfig, tokenizer: Any, train_dataset: Any, eval_dataset: Any) -> list[OpenData]:
    """The training data and, where the run has some, the held-out data; nothing of them is read.

    Raises:
        UserError: one of them is not there; both are looked for before either is read.
    """
    found = [open_data(args, tokenizer, "train", train_dataset)]
    if eval_dataset is None and args.eval_strategy == "no":
        return found
    if eval_dataset is None and args.dataset_name is None and args.datasets is None:
        raise UserError(
            f"eval_strategy: {args.eval_strategy} needs held-out data, and the training data came from Python",
            do="Pass eval_dataset=…, or set eval_strategy: no",
            option="eval_strategy",
        )
    try:
        return [*found, open_data(args, tokenizer, "test", eval_dataset)]
    except UserError as error:
        if eval_dataset is not None or error.do is not None:
            raise
        there = next((name for name in _HELD_OUT if name in (error.allowed or "").split(", ")), None)
        named = f"dataset_test_split: {there}, or " if there else ""
        what = f"eval_strategy: {args.eval_strategy}, and {error.what}"
        raise UserError(what, allowed=error.allowed, do=f"Write {named}eval_strategy: no") from error


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


def refuse_others(given: Mapping[str, Any]) -> None:
    """Refuses parameters that `SFTTrainer` has not: those that TRL's had before, and options.

    Raises:
        UserError: the first one, with what to write.
    """
    for name in given:
        if name == "tokenizer":
            raise UserError("SFTTrainer's tokenizer is called processing_class now", do="Write processing_class=tokenizer")
        if name in SFTConfig.model_fields or name in table()["older"]:
            raise UserError(f"{name} is an option, not a parameter of SFTTrainer", do=f"Write args=SFTConfig({name}=…)")
        raise UserError(f"SFTTrainer has no parameter {name}", do=f"Leave {name} out")


def refuse_parameters(**given: Any) -> None:
    """Refuses, by name, the parameters of TRL's trainer that have no meaning here."""
    for name, value in given.items():
        if value is not None:
            raise UserError(f"SFTTrainer's {name} is not supported: {_REFUSED[name]}", do=f"Leave {name} out")
