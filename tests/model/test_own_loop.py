"""Options that a model alone cannot follow, in somebody's own loop: each is refused, before anything is put on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megaspan.human import UserError
from megaspan.model import levers, prepare, wrap_lora
from megaspan.model.own_loop import TRAINERS
from tests.model.support import plan, settings
from tests.models import tiny

LORA = {"use_peft": True, "lora_r": 4, "lora_dropout": 0.0}
ELSEWHERE = [
    (LORA, "use_peft asks for an adapter, and this model has none"),
    ({"model_init_kwargs": {"rope_parameters": "auto"}}, "rope_parameters are settled while a model is loaded"),
    ({"dtype": "bfloat16"}, "dtype: bfloat16 asks for weights in bf16.*got float32"),
    ({"memory_limit": "40GiB"}, "memory_limit is for a GPU, and this model is not on one"),
]
# A value of each option of the loop that is not its default.
OTHERS: dict[str, Any] = {
    "num_train_epochs": 2, "max_steps": 7, "learning_rate": 1e-4, "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "warmup_steps": 3, "warmup_ratio": 0.1, "optim": "adamw_torch",
    "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6, "max_grad_norm": 0.5,
    "offload_optimizer": True,
}  # fmt: skip
TOGETHER = {
    "lr_scheduler_kwargs": {"lr_scheduler_type": "cosine_with_min_lr"},
    "lr_scheduler_type": {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
}


@pytest.mark.parametrize(("options", "said"), ELSEWHERE, ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
def test_an_option_that_contradicts_the_model_or_the_machine_is_refused(options: dict[str, Any], said: str) -> None:
    model = tiny("qwen3")
    with pytest.raises(UserError, match=said):
        prepare(model, settings(**options))
    assert levers(model) is None


@pytest.mark.parametrize("name", TRAINERS)
def test_an_option_of_the_trainers_loop_is_refused(name: str) -> None:
    model = tiny("qwen3")
    with pytest.raises(UserError, match=rf"\b{name}\b.* of the trainer's loop, which prepare is not"):
        prepare(model, settings(**{name: OTHERS[name]} | TOGETHER.get(name, {})))
    assert levers(model) is None


def test_what_does_fit_is_taken_and_a_default_is_no_wish() -> None:
    args = settings(**LORA)
    assert levers(prepare(wrap_lora(tiny("qwen3"), args), args)) is not None
    args = settings(dtype="bfloat16", bf16=True)
    assert levers(prepare(tiny("qwen3", dtype=torch.bfloat16), args)) is not None
    assert levers(prepare(tiny("qwen3"), settings(max_grad_norm=1.0, optim="adamw_torch_fused"))) is not None


def test_whoever_brings_a_plan_has_a_loop() -> None:
    args = settings(max_grad_norm=0.5, learning_rate=0.01)
    assert levers(prepare(tiny("qwen3"), args, plan())) is not None
