"""A tiny run: a model folder, pre-tokenised documents, a trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megaspan import SFTConfig, SFTTrainer
from tests.models import save_model_folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with a byte tokenizer."""
    return save_model_folder(tmp_path_factory.mktemp("model"))


def documents(lengths: list[int], seed: int = 0) -> list[dict[str, list[int]]]:
    """Random token documents of these lengths, pre-tokenised."""
    generator = np.random.default_rng(seed)
    return [{"input_ids": generator.integers(0, 256, length).tolist()} for length in lengths]


def settings(out: Path, **changes: Any) -> SFTConfig:
    """Short rows, one document each unless packing is asked for, fp32, no checkpoints."""
    own = {"output_dir": str(out), "max_length": 40, "packing": False, "learning_rate": 1e-2, "save_strategy": "no", "seed": 3}
    if changes.get("packing"):
        changes.pop("overlong", None)
    return SFTConfig(**(own | changes))


def trainer(model: Any, out: Path, data: Any, *, callbacks: Any = None, eval_dataset: Any = None, **changes: Any) -> SFTTrainer:
    """The trainer of a tiny run."""
    model = str(model) if isinstance(model, Path) else model
    made = SFTTrainer(model, settings(out, **changes), train_dataset=data, eval_dataset=eval_dataset, callbacks=callbacks)
    made._draws = False  # half a second each; `test_the_picture_of_a_run` has one
    return made


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of all parameters."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_bits(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """Every parameter equal to the last bit."""
    assert got.keys() == want.keys()
    different = [name for name in want if not torch.equal(got[name], want[name])]
    assert not different


def logged(out: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of a run, without times and memory, which no two runs share."""
    noise = {"time", "step_seconds", "tokens_per_second", "model_tflops", "peak_device_bytes", "peak_host_bytes"}
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in noise} for line in lines]
