"""The example of the million-token run, at toy size, by every launcher that its page names."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "sft_qwen3_8b_1m_context"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the toy model and its books."""
    folder = tmp_path_factory.mktemp("toy")
    subprocess.run([sys.executable, str(EXAMPLE / "toy_model.py"), "build/toy"], cwd=folder, check=True, capture_output=True)
    return folder


def first_and_last(metrics: Path) -> tuple[dict, dict]:
    entries = [json.loads(line) for line in metrics.read_text().splitlines()]
    return entries[0], entries[-1]


def test_toy_yaml_is_the_guides_run_at_toy_size(toy):
    """4 rows, 12 steps; step 1 logs epoch 0.25 and num_tokens equal to max_length; the loss falls."""
    done = subprocess.run(
        [sys.executable, "-m", "megaspan", "train", str(EXAMPLE / "toy.yaml"), "--json"],
        cwd=toy,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 12
    first, last = first_and_last(toy / "build/toy/run/metrics.jsonl")
    assert (first["step"], first["epoch"], first["num_tokens"]) == (1, 0.25, 1024.0)
    assert (last["step"], last["epoch"], last["num_tokens"]) == (12, 3.0, 12 * 1024.0)
    assert last["loss"] < first["loss"]
    assert "'num_tokens': 1024.0, 'epoch': 0.25" in done.stderr


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_the_script_runs_under_each_launcher(toy, launcher):
    start = {
        "torchrun": ["torch.distributed.run", "--nproc-per-node", "1"],
        "accelerate": ["accelerate.commands.launch", "--config_file", str(EXAMPLE / "one_gpu.yaml"), "--cpu"],
    }[launcher]
    options = ["--model", "build/toy/model", "--books", "build/toy/books", "--max-length", "1k", "--window", "32"]
    out = toy / launcher
    done = subprocess.run(
        [sys.executable, "-m", *start, str(EXAMPLE / "sft_qwen3_8b_1m_context.py"), *options, "--output-dir", str(out)],
        cwd=toy,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert first_and_last(out / "metrics.jsonl")[0]["num_tokens"] == 1024.0
    assert (out / "model" / "model.safetensors").exists()
    shutil.rmtree(out)


def test_the_file_of_the_real_run_is_a_legal_configuration():
    """The guide's two settings of YaRN pass the check of positions; the whole file is read as a user's would be."""
    from megaspan.config import load_config

    config = load_config(EXAMPLE / "sft_qwen3_8b_1m_context.yaml", [])
    assert config.max_length == 1_048_576
    assert config.rope_parameters["factor"] == 32.0
    assert config.offload
    assert config.max_rows == 4
