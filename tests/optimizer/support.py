"""A tiny model, windows of rows, and the trained weights for every place that states may lie in."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megaspan.config import SFTConfig
from megaspan.optimizer import Optimizer, conveyor
from megaspan.plan.states import StatePlan
from tests.models import batch, tiny

BF16 = torch.bfloat16
DEVICE = StatePlan("device", "device")
PLACES = [
    StatePlan("device", "host"),
    StatePlan("host", "device"),
    StatePlan("host", "host"),
    StatePlan("update", "device"),
    StatePlan("update", "host"),
]
KINDS = {"fp32": (torch.float32, None), "masters": (BF16, None), "pure": (BF16, "bfloat16")}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model's matrices are several pieces, as large ones are."""
    monkeypatch.setattr(conveyor, "PIECE", 1024)


@dataclass
class Result:
    """What a run leaves."""

    weights: dict[str, torch.Tensor]
    state: dict[str, Any]
    norms: list[float]


def settings(**options: Any) -> SFTConfig:
    return SFTConfig(**({"max_length": 64, "learning_rate": 1e-2, "weight_decay": 0.1} | options))


def make(kind: str = "fp32", *, family: str = "qwen2", tied: bool = False, frozen: bool = False, **options: Any) -> Any:
    """A model and its settings; `frozen` trains the first layer's MLP and a norm only."""
    weights, dtype = KINDS[kind]
    model = tiny(family, tied=tied, dtype=weights)
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.0.mlp" in name or name == "model.norm.weight")
    return model, settings(dtype=dtype, **options)


def backward(model: Any, rows: list[dict[str, torch.Tensor]], optimizer: Optimizer) -> None:
    """One window, as the trainer's accumulator does it; a row whose labels are all -100 has a loss without a graph."""
    total = sum(int((row["labels"][:, 1:] != -100).sum()) for row in rows)
    for number, row in enumerate(rows):
        if number == len(rows) - 1:
            optimizer.last_row()
        if bool((row["labels"][:, 1:] != -100).any()):
            model(**row, use_cache=False, num_items_in_batch=torch.tensor(total)).loss.backward()


def window(step: int, rows: int, lengths: tuple[int, ...] = (31,)) -> list[dict[str, torch.Tensor]]:
    return [batch(lengths[(step * rows + number) % len(lengths)], seed=10 * step + number) for number in range(rows)]


def masked(length: int) -> dict[str, torch.Tensor]:
    """A row without a trained token."""
    row = batch(length)
    row["labels"][:] = -100
    return row


def train(
    model: Any, config: SFTConfig, states: StatePlan | None, windows: list[list[dict[str, torch.Tensor]]], backend: Any = None
) -> Result:
    """Trains a copy of the model."""
    model = copy.deepcopy(model)
    optimizer = Optimizer(model, config, len(windows), states=states, backend=backend)
    norms = []
    for rows in windows:
        backward(model, rows, optimizer)
        norms.append(optimizer.clip(config.max_grad_norm))
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.close()
    return Result(weights, state, norms)


def assert_same(got: Result, want: Result) -> None:
    """Bit for bit: weights, masters, moments, norms."""
    assert [name for name in want.weights if not torch.equal(got.weights[name], want.weights[name])] == []
    assert got.norms == want.norms
    assert got.state["steps"] == want.state["steps"]
    assert_same_state(got.state, want.state)


def assert_same_state(got: dict[str, Any], want: dict[str, Any]) -> None:
    for name, moments in want["parameters"].items():
        there = got["parameters"][name]
        assert there.keys() == moments.keys(), name
        for key, value in moments.items():
            assert there[key].shape == value.shape
            assert there[key].dtype == value.dtype
            assert torch.equal(there[key], value), (name, key)
