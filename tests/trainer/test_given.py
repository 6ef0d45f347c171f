"""A model that comes as an object, for the first time or again (of several ranks: test_ranks.py)."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from megaspan.human import UserError
from tests.trainer.support import assert_same_bits, documents, model_folder, trainer, weights

__all__ = ["model_folder"]

DATA = documents([40, 30])


def load(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def test_a_second_trainer_goes_on_from_the_weights_of_the_first(tmp_path, model_folder):
    model = load(model_folder)
    trainer(model, tmp_path / "first", DATA, max_steps=1).train()
    untouched = load(model_folder)
    untouched.load_state_dict(copy.deepcopy(model.state_dict()))
    again = trainer(model, tmp_path / "again", DATA, max_steps=2, learning_rate=1e-3, loss_type="nll")
    again.train()
    anew = trainer(untouched, tmp_path / "anew", DATA, max_steps=2, learning_rate=1e-3, loss_type="nll")
    anew.train()
    assert_same_bits(weights(again.model), weights(anew.model))
    losses = [[entry["loss"] for entry in run.state.log_history] for run in (again, anew)]
    assert losses[0] == losses[1]


def test_an_adapter_of_the_first_trainer_is_not_trained_upon(tmp_path, model_folder):
    model = load(model_folder)
    trainer(model, tmp_path, DATA, max_steps=1, use_peft=True)
    for options in ({"use_peft": True}, {}):
        with pytest.raises(UserError, match="there is an adapter inside the model that was given"):
            trainer(model, tmp_path, DATA, max_steps=1, **options)


@pytest.mark.parametrize(
    ("bf16", "dtype", "sentence"),
    [
        (
            True,
            torch.float32,
            r"bf16: true asks .*; got float32; allowed: bfloat16\. Load it with dtype=torch\.bfloat16, masters",
        ),
        (False, torch.bfloat16, r"bf16: false asks .*; got bfloat16; allowed: float32\. Load it with dtype=torch\.float32\.$"),
    ],
)
def test_bf16_is_what_the_model_is_in(tmp_path, model_folder, bf16, dtype, sentence):
    model = load(model_folder, dtype)
    with pytest.raises(UserError, match=sentence):
        trainer(model, tmp_path, DATA, max_steps=1, bf16=bf16)
    trainer(model, tmp_path, DATA, max_steps=1, bf16=not bf16)


def test_gradients_that_were_there_before_are_none_of_the_runs(tmp_path, model_folder):
    """The model's own, and those of a run that failed between its backward and its update."""
    options = {"max_steps": 1, "logging_steps": 1, "learning_rate": 1e-3}
    clean = trainer(model_folder, tmp_path / "clean", DATA, **options)
    clean.train()

    class Fails(TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__):
            raise ZeroDivisionError

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ZeroDivisionError):
        trainer(model, tmp_path / "failed", DATA, callbacks=[Fails()], **options).train()
    again = trainer(model, tmp_path / "again", DATA, **options)
    again.train()
    norms = [[each["grad_norm"] for each in run.state.log_history if "grad_norm" in each] for run in (clean, again)]
    assert norms[0] == norms[1]
    assert_same_bits(weights(again.model), weights(clean.model))
