"""Options that a model alone cannot follow, in somebody's own loop: each is refused, before anything is put on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megaspan.human import UserError
from megaspan.model import levers, prepare, wrap_lora
from tests.model.support import plan, settings
from tests.models import tiny

LORA = {"use_peft": True, "lora_r": 4, "lora_dropout": 0.0}
ELSEWHERE = [
    (LORA, "use_peft asks for an adapter, and this model has none"),
    ({"model_init_kwargs": {"rope_parameters": "auto"}}, "rope_parameters are settled while a model is loaded"),
    ({"dtype": "bfloat16"}, "dtype: bfloat16 asks for weights in bf16.*got float32"),
    ({"memory_limit": "40GiB"}, "memory_limit is for a GPU, and this model is not on one"),
    ({"offload_optimizer": True}, "offload_optimizer is for the trainer's optimizer, and prepare makes none"),
]
# What a loop reads for itself, from the configuration that it shares with the trainer.
OF_THE_LOOP: dict[str, Any] = {
    "max_steps": 7, "learning_rate": 1e-4, "warmup_steps": 3, "optim": "adamw_torch",
    "weight_decay": 0.1, "max_grad_norm": 0.5,
}  # fmt: skip


@pytest.mark.parametrize(("options", "said"), ELSEWHERE, ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
def test_an_option_that_contradicts_the_model_or_the_machine_is_refused(options: dict[str, Any], said: str) -> None:
    model = tiny("qwen3")
    with pytest.raises(UserError, match=said):
        prepare(model, settings(**options))
    assert levers(model) is None


def test_what_fits_and_what_is_for_the_loop_to_read_is_taken() -> None:
    args = settings(**LORA)
    assert levers(prepare(wrap_lora(tiny("qwen3"), args), args)) is not None
    args = settings(dtype="bfloat16", bf16=True)
    assert levers(prepare(tiny("qwen3", dtype=torch.bfloat16), args)) is not None
    assert levers(prepare(tiny("qwen3"), settings(**OF_THE_LOOP))) is not None


def test_whoever_brings_a_plan_has_a_loop() -> None:
    args = settings(offload_optimizer=True)
    assert levers(prepare(tiny("qwen3"), args, plan())) is not None


def test_a_refusal_says_what_to_write_in_python() -> None:
    with pytest.raises(UserError, match=r"allow_past_window=True"):
        prepare(tiny("qwen3"), settings(max_length=2**20))


def test_the_remedy_for_a_second_backward_is_one() -> None:
    """offload: false was said to be one, and a streamed layer lets go of its input all the same."""
    ids = torch.arange(40)[None]
    model = prepare(tiny("qwen3"), settings()).train()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"Run the forward again before each backward, or .* gradient_checkpointing=False\."):
        loss.backward()
    model = prepare(tiny("qwen3"), settings(gradient_checkpointing=False)).train()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in model.parameters()]
    loss.backward()
    assert all(torch.allclose(parameter.grad, 2 * first) for parameter, first in zip(model.parameters(), once, strict=True))
