"""The example of eight ranks: the losses of one process, on eight gloo processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from megaspan import world
from megaspan.config import load_config
from megaspan.trainer.sft import run
from megaspan.world.heartbeat import running
from tests.examples.conftest import EXAMPLES, GUIDE, Toy, entries
from tests.gloo import run_ranks

FILE = EXAMPLES / "eight_ranks" / "eight_ranks.yaml"


def same(found: list[dict], wanted: list[dict]) -> None:
    """The first step to rounding; the last as near as twelve steps of Adam leave it."""
    assert len(found) == len(wanted) == 12
    for name, near in (("loss", 1e-6), ("grad_norm", 1e-5)):
        assert found[0][name] == pytest.approx(wanted[0][name], rel=near)
        assert found[-1][name] == pytest.approx(wanted[-1][name], rel=1e-2)
    assert [entry["num_tokens"] for entry in found] == [entry["num_tokens"] for entry in wanted]


def train(rank: int, ranks: int, folder: Path, out: str) -> None:
    """What `megaspan train FILE --nproc 8` runs on each rank; the family is proven by the run of one process."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    os.chdir(folder)
    with patch("megaspan.layers.streamed.prove_family", lambda *_: None):
        result = run(load_config(FILE, ["--output_dir", out]))
    assert result["steps"] == 12
    heart = running(world.launch())
    assert heart is not None
    assert str(world.mesh(load_config(FILE, []))) == "8 ranks: cp_size 4 × sp_size 2"
    heart.close()


@pytest.mark.timeout(600)
def test_eight_ranks_train_as_one(toy: Toy) -> None:
    run_ranks(8, [(train, (toy.folder, "forked"))], seconds=240, limit=560)
    same(entries(toy.folder / "forked/metrics.jsonl"), toy.entries)


def start(toy: Toy, *words: str) -> None:
    done = subprocess.run([sys.executable, "-m", *words], cwd=toy.folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_command_of_the_page(toy: Toy) -> None:
    start(toy, "megaspan", "train", str(FILE), "--nproc", "8")
    same(entries(toy.folder / "build/toy/eight/metrics.jsonl"), toy.entries)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_guides_launch_file_starts_eight_ranks(toy: Toy) -> None:
    options = ["--model", "build/toy/model", "--books", "build/toy/books", "--max-length", "1k", "--window", "32"]
    file = ["accelerate.commands.launch", "--config_file", str(GUIDE / "context_parallel_8gpu.yaml")]
    start(toy, *file, str(GUIDE / "sft_qwen3_8b_1m_context.py"), *options, "--output-dir", "accelerated")
    found = entries(toy.folder / "accelerated/metrics.jsonl")
    assert found[0]["loss"] == pytest.approx(toy.entries[0]["loss"], rel=1e-6)
    assert found[0]["num_tokens"] == 1024.0
