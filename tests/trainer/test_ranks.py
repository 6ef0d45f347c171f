"""The same run on one process and on several gloo ranks, in every layout: losses, norms, counts, held-out metrics, weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.gloo import run_ranks
from tests.trainer.support import documents, logged, model_folder, trainer

__all__ = ["model_folder"]

# Rows of unequal length, shorter than the ranks are many too; seven rows in windows of four: the second one is not full.
DATA = documents([40, 11, 23, 1, 37, 7, 19])
HELD_OUT = documents([29, 3, 40], seed=1)
OPTIONS: dict[str, Any] = {
    "use_cpu": True,
    "num_train_epochs": 2, "eval_strategy": "steps", "eval_steps": 3, "learning_rate": 1e-3, "max_grad_norm": 0.5,
}  # fmt: skip
ROWS_A_STEP = 4


def launched(rank: int, world: int) -> None:
    """What a launcher would have set."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}


def options_of(sizes: dict[str, int], ranks: int, **changes: Any) -> dict[str, Any]:
    """Options with as many rows a step in every layout."""
    data = ranks // (sizes.get("cp_size", 1) * sizes.get("sp_size", 1))
    return OPTIONS | {"gradient_accumulation_steps": ROWS_A_STEP // data} | sizes | changes


def train(rank: int, world: int, folder: Path, out: Path, sizes: dict[str, int], changes: dict[str, Any]) -> None:
    """One run of one rank."""
    launched(rank, world)
    run = trainer(folder, out, DATA, eval_dataset=HELD_OUT, **options_of(sizes, world, **changes))
    assert str(run._job.ranks.mesh).startswith(f"{world} ranks")
    run.train()
    run.save_model()
    if rank == 0:
        (out / "history.json").write_text(json.dumps(run.state.log_history))
    assert run.state.is_world_process_zero == (rank == 0)
    run._job.ranks.heart.close()


def one(folder: Path, out: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """The same run on one process."""
    run = trainer(folder, out, DATA, eval_dataset=HELD_OUT, **options_of({}, 1, **changes))
    run.train()
    run.save_model()
    return saved(out)


def saved(out: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in (out / "model").glob("*.safetensors"):
        found |= load_file(file)
    return found


def assert_same_run(out: Path, want: Path) -> None:
    """Every logged number, and the final weights."""
    got, wanted = logged(out), logged(want)
    assert [entry.keys() for entry in got] == [entry.keys() for entry in wanted]
    for entry, other in zip(got, wanted, strict=True):
        for name, value in other.items():
            tolerance = 1e-3 if name == "grad_norm" or "accuracy" in name else 2e-5
            exact = name in ("step", "num_tokens", "epoch", "learning_rate", "eval_num_tokens")
            if name == "eval_runtime":
                continue
            assert entry[name] == (value if exact else pytest.approx(value, rel=tolerance)), (out.name, name, entry["step"])
    weights, others = saved(out), saved(want)
    assert weights.keys() == others.keys()
    for name, tensor in others.items():
        # AdamW divides by the root of the second moment, which magnifies the rounding of tiny gradients.
        assert (weights[name] - tensor).norm() <= 1e-3 * tensor.norm(), (out.name, name)


def test_two_ranks(tmp_path, model_folder):
    one(model_folder, tmp_path / "one")
    layouts = [{"dp_shard_size": 2}, {"cp_size": 2}, {"sp_size": 2}]
    cases = [(train, (model_folder, tmp_path / "_".join(sizes), sizes, {})) for sizes in layouts]
    run_ranks(2, cases)
    for sizes in layouts:
        assert_same_run(tmp_path / "_".join(sizes), tmp_path / "one")
