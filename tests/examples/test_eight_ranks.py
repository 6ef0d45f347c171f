"""The example of eight ranks: the losses of one process, on eight gloo processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
GUIDE = EXAMPLES / "sft_qwen3_8b_1m_context"


def start(folder: Path, *words: str) -> None:
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]


def entries(metrics: Path) -> list[dict]:
    return [json.loads(line) for line in metrics.read_text().splitlines()]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the toy model, its books, and the run of one process."""
    folder = tmp_path_factory.mktemp("eight")
    start(folder, str(GUIDE / "toy_model.py"), "build/toy")
    start(folder, "-m", "megaspan", "train", str(GUIDE / "toy.yaml"))
    return folder


def same(found: list[dict], wanted: list[dict]) -> None:
    """The first step to rounding; the last as near as twelve steps of Adam leave it."""
    assert len(found) == len(wanted) == 12
    for name, near in (("loss", 1e-6), ("grad_norm", 1e-5)):
        assert found[0][name] == pytest.approx(wanted[0][name], rel=near)
        assert found[-1][name] == pytest.approx(wanted[-1][name], rel=1e-2)
    assert [entry["num_tokens"] for entry in found] == [entry["num_tokens"] for entry in wanted]


@pytest.mark.timeout(600)
def test_eight_ranks_train_as_one(toy):
    start(toy, "-m", "megaspan", "train", str(EXAMPLES / "eight_ranks" / "eight_ranks.yaml"), "--nproc", "8")
    same(entries(toy / "build/toy/eight/metrics.jsonl"), entries(toy / "build/toy/run/metrics.jsonl"))


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_guides_launch_file_starts_eight_ranks(toy):
    options = ["--model", "build/toy/model", "--books", "build/toy/books", "--max-length", "1k", "--window", "32"]
    file = ["accelerate.commands.launch", "--cpu", "--config_file", str(GUIDE / "context_parallel_8gpu.yaml")]
    start(toy, "-m", *file, str(GUIDE / "sft_qwen3_8b_1m_context.py"), *options, "--output-dir", "accelerated")
    found, wanted = entries(toy / "accelerated/metrics.jsonl"), entries(toy / "build/toy/run/metrics.jsonl")
    assert found[0]["loss"] == pytest.approx(wanted[0]["loss"], rel=1e-6)
    assert found[0]["num_tokens"] == 1024.0
