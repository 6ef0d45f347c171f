"""A prepared model inside plain `transformers.Trainer`, on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from megaspan.model import prepare, wrap_lora
from tests.model.support import plan, settings
from tests.models import batch, tiny

LENGTHS = (37, 11, 24, 9)


def rows() -> list[dict[str, torch.Tensor]]:
    return [{name: tensor[0] for name, tensor in batch(length, seed=seed).items()} for seed, length in enumerate(LENGTHS)]


def train(model: Any, folder: Path, **changes: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=1, per_device_eval_batch_size=1,
        gradient_accumulation_steps=2, optim="sgd",
        learning_rate=0.05, lr_scheduler_type="constant", max_grad_norm=0.0, logging_steps=1, save_strategy="no",
        report_to="none", use_cpu=True, disable_tqdm=True, seed=3, dataloader_pin_memory=False, **changes,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows(), eval_dataset=rows())  # type: ignore[arg-type]
    trainer.train()
    return trainer


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_trainer_takes_the_same_steps(tmp_path: Path, lora: bool) -> None:
    """Accumulation 2 over rows of different length; Trainer counts the items and hands them over."""
    plain, long = tiny("qwen3"), tiny("qwen3")
    if lora:
        args = settings(use_peft=True, lora_dropout=0.0, lora_target_modules=["q_proj", "v_proj"])
        torch.manual_seed(0)
        plain = wrap_lora(plain, args)
        torch.manual_seed(0)
        long = wrap_lora(long, args)
    before = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
    want = train(plain, tmp_path / "plain")
    got = train(prepare(long, settings(), plan()), tmp_path / "long")
    assert losses(got) == pytest.approx(losses(want), rel=2e-4)  # Trainer rounds what it logs
    moved = 0
    for (name, one), (_, other) in zip(plain.named_parameters(), long.named_parameters(), strict=True):
        step = one.detach() - before[name]
        assert float((other.detach() - one.detach()).norm()) <= 1e-4 * float(step.norm()) + 1e-7, name
        moved += bool(step.any())
    assert moved > 4


def test_trainer_evaluates(tmp_path: Path) -> None:
    plain = train(tiny("qwen3"), tmp_path / "plain").evaluate()["eval_loss"]
    trainer = train(prepare(tiny("qwen3"), settings(), plan()), tmp_path / "long")
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain, rel=1e-5)
    trainer.args.prediction_loss_only = True
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain, rel=1e-5)


def test_trainer_in_bf16_autocast(tmp_path: Path) -> None:
    """accelerate wraps the forward once more; the loss is that of the plain model up to bf16."""
    want = losses(train(tiny("qwen3"), tmp_path / "plain", bf16=True))
    got = losses(train(prepare(tiny("qwen3"), settings(), plan()), tmp_path / "long", bf16=True))
    assert got == pytest.approx(want, rel=1e-2)
