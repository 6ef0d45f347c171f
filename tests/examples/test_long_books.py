"""The example of the million-token run, at toy size, by every launcher that its page names."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys

import pytest

from tests.examples.conftest import GUIDE, Toy, entries


def test_toy_yaml_is_the_guides_run_at_toy_size(toy: Toy) -> None:
    """4 rows, 12 steps; step 1 logs epoch 0.25 and num_tokens equal to max_length; the loss falls."""
    assert json.loads(toy.said)["steps"] == 12
    first, last = toy.entries[0], toy.entries[-1]
    assert (first["step"], first["epoch"], first["num_tokens"]) == (1, 0.25, 1024.0)
    assert (last["step"], last["epoch"], last["num_tokens"]) == (12, 3.0, 12 * 1024.0)
    assert last["loss"] < first["loss"]
    assert "'num_tokens': 1024.0, 'epoch': 0.25" in toy.told


def test_the_script_runs_by_itself(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python SCRIPT` runs it, in this process; its losses are those of the file for `megaspan train`."""
    monkeypatch.chdir(toy.folder)
    options = ["--model", "build/toy/model", "--books", "build/toy/books", "--max-length", "1k", "--window", "32"]
    monkeypatch.setattr("sys.argv", ["sft_qwen3_8b_1m_context.py", *options, "--output-dir", "script"])
    runpy.run_path(str(GUIDE / "sft_qwen3_8b_1m_context.py"), run_name="__main__")
    assert entries(toy.folder / "script/metrics.jsonl")[0]["loss"] == pytest.approx(toy.entries[0]["loss"], rel=1e-6)
    assert (toy.folder / "script/model/model.safetensors").exists()


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_the_script_runs_under_each_launcher(toy: Toy, launcher: str) -> None:
    start = {
        "torchrun": ["torch.distributed.run", "--nproc-per-node", "1"],
        "accelerate": ["accelerate.commands.launch", "--config_file", str(GUIDE / "one_gpu.yaml"), "--cpu"],
    }[launcher]
    options = ["--model", "build/toy/model", "--books", "build/toy/books", "--max-length", "1k", "--window", "32"]
    out = toy.folder / launcher
    done = subprocess.run(
        [sys.executable, "-m", *start, str(GUIDE / "sft_qwen3_8b_1m_context.py"), *options, "--output-dir", str(out)],
        cwd=toy.folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert entries(out / "metrics.jsonl")[0]["num_tokens"] == 1024.0
    assert (out / "model" / "model.safetensors").exists()
    shutil.rmtree(out)


def test_the_file_of_the_real_run_is_a_legal_configuration():
    """The guide's two settings of YaRN pass the check of positions; the whole file is read as a user's would be."""
    from megaspan.config import load_config

    config = load_config(GUIDE / "sft_qwen3_8b_1m_context.yaml", [])
    assert config.max_length == 1_048_576
    assert config.rope_parameters["factor"] == 32.0
    assert config.offload
    assert config.max_rows == 4
