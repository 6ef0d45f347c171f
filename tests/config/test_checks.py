"""Options without effect beside the others, and contradictions: none is accepted and ignored (complaint 4, R93, R94)."""

from __future__ import annotations

import pytest

from megaspan.config import SFTConfig
from megaspan.config.checks import INERT, SCHEDULE_ARGUMENTS
from megaspan.human import UserErrors

INERT_CASES = [
    ({"lora_r": 16}, "lora_r"), ({"lora_alpha": 8}, "lora_alpha"), ({"lora_dropout": 0.1}, "lora_dropout"),
    ({"lora_target_modules": ["q_proj"]}, "lora_target_modules"),
    ({"lora_modules_to_save": ["lm_head"]}, "lora_modules_to_save"), ({"use_rslora": True}, "use_rslora"),
    ({"dataset_config": "en"}, "dataset_config"),
    ({"datasets": ["a"], "dataset_train_split": "train[:9]"}, "dataset_train_split"),
    ({"packing": False, "packing_strategy": "bfd"}, "packing_strategy"), ({"overlong": "drop"}, "overlong"),
    ({"packing_strategy": "bfd", "max_lost_tokens": 0.5}, "max_lost_tokens"), ({"max_lost_tokens": 0.5}, "max_lost_tokens"),
    ({"packing": False, "max_lost_tokens": 0.5}, "max_lost_tokens"),
    ({"lr_scheduler_kwargs": {"power": 2}}, "lr_scheduler_kwargs"),
    ({"lr_scheduler_type": "constant", "warmup_steps": 3}, "warmup_steps"),
    ({"lr_scheduler_type": "constant", "warmup_ratio": 0.1}, "warmup_ratio"),
    ({"max_steps": 5, "num_train_epochs": 2}, "num_train_epochs"),
    ({"gradient_checkpointing": False, "gradient_checkpointing_kwargs": {"offload": True}}, "gradient_checkpointing_kwargs"),
    ({"gradient_checkpointing_kwargs": {"offload": False}, "offload_folder": "/nvme"}, "offload_folder"),
    ({"gradient_checkpointing": False, "offload_folder": "/nvme"}, "offload_folder"),
    ({"allow_slow_disk": True}, "allow_slow_disk"),
    ({"train_sampling_strategy": "sequential", "data_seed": 1}, "data_seed"), ({"eval_steps": 5}, "eval_steps"),
    ({"logging_strategy": "epoch", "logging_steps": 5}, "logging_steps"),
    ({"save_strategy": "no", "save_steps": 5}, "save_steps"), ({"save_strategy": "no", "save_minutes": 5}, "save_minutes"),
    ({"save_strategy": "no", "save_total_limit": 2}, "save_total_limit"),
    ({"offload_optimizer": True, "use_cpu": True}, "offload_optimizer"),
    ({"memory_limit": "80GiB", "use_cpu": True}, "memory_limit"),
]  # fmt: skip

CONFLICTS = [
    ({"warmup_steps": 5, "warmup_ratio": 0.1}, "warmup_ratio"), ({"dataset_name": "a", "datasets": ["b"]}, "dataset_name"),
    ({"bf16": False, "dtype": "bfloat16"}, "bf16"), ({"use_peft": True, "use_dora": True}, "use_dora"),
    ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"power": 1}}, "lr_scheduler_kwargs"),
    ({"lr_scheduler_type": "cosine_with_min_lr"}, "lr_scheduler_type"),
    ({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0, "min_lr_rate": 0}}, "lr_scheduler_type"),
    ({"lr_scheduler_type": "warmup_stable_decay"}, "lr_scheduler_type"),
    ({"activation_checkpointing": False, "gradient_checkpointing": True}, "gradient_checkpointing"),
]  # fmt: skip

LEGAL = [
    {"use_peft": True, "lora_r": 8, "lora_target_modules": ["q_proj"], "dtype": "bfloat16"},
    {"packing": False, "overlong": "drop"}, {"packing": False, "overlong": "truncate", "max_lost_tokens": 0.5},
    {"max_steps": 5}, {"max_steps": -1, "num_train_epochs": 2},
    {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}, {"data_seed": 3},
    {"lr_scheduler_type": "constant"}, {"save_strategy": "epoch", "save_minutes": 10}, {"gradient_checkpointing": False},
    {"activation_checkpointing": True, "gradient_checkpointing": True}, {"warmup_ratio": 0.1},
    {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 5}},
    {"offload_folder": "/nvme"}, {"offload_folder": "/nvme", "allow_slow_disk": True},
    {"report_to": "wandb", "run_name": "a"}, {"run_name": "a"}, {"save_minutes": None, "save_strategy": "no"},
]  # fmt: skip


@pytest.mark.parametrize(("options", "blamed"), INERT_CASES)
def test_an_option_without_effect_is_an_error(options, blamed):
    with pytest.raises(UserErrors) as caught:
        SFTConfig(max_length=8, **options)
    (error,) = caught.value.errors
    assert error.option == blamed
    assert "has no effect" in str(error)
    assert error.do


def test_every_rule_has_a_case():
    assert {rule.option for rule in INERT} == {blamed for _, blamed in INERT_CASES}


@pytest.mark.parametrize(("options", "blamed"), CONFLICTS)
def test_a_contradiction_is_one_sentence(options, blamed):
    with pytest.raises(UserErrors) as caught:
        SFTConfig(max_length=8, **options)
    (error,) = caught.value.errors
    assert error.option == blamed


@pytest.mark.parametrize("options", LEGAL)
def test_what_belongs_together_passes(options):
    config = SFTConfig(max_length=8, **options)
    # A file written from it says the same again.
    assert SFTConfig(**config.model_dump()).model_dump() == config.model_dump()


@pytest.mark.parametrize("name", SCHEDULE_ARGUMENTS)
def test_schedules_and_their_arguments_are_those_of_transformers(name):
    """A schedule that this file lets through must not fail after the weights are loaded."""
    import torch
    from transformers import get_scheduler

    needed = {
        "cosine_with_min_lr": "min_lr_rate",
        "cosine_warmup_with_min_lr": "min_lr_rate",
        "warmup_stable_decay": "num_decay_steps",
    }
    value = {"warmup_type": "linear", "decay_type": "cosine", "timescale": 10, "num_decay_steps": 3, "num_stable_steps": 3}
    for argument in (None, *SCHEDULE_ARGUMENTS[name]):
        arguments = {} if argument is None else {argument: value.get(argument, 0.5)}
        if name in needed and not {"min_lr", "min_lr_rate"} & set(arguments):
            arguments[needed[name]] = value.get(needed[name], 0.5)
        SFTConfig(max_length=8, lr_scheduler_type=name, **({"lr_scheduler_kwargs": arguments} if arguments else {}))
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        total = None if "num_stable_steps" in arguments else 10
        get_scheduler(
            name, optimizer, num_warmup_steps=2, num_training_steps=total, scheduler_specific_kwargs=arguments or None
        )
