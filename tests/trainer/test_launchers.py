"""The same trainer under `megaspan train`, torchrun and accelerate launch, as processes that a user would start."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.trainer.support import logged, model_folder

__all__ = ["model_folder"]

SCRIPT = """
from megaspan import SFTTrainer
from megaspan.config import load_config

trainer = SFTTrainer(args=load_config("run.yaml"))
trainer.train()
trainer.save_model()
"""
FSDP2 = """
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: {layer}
  fsdp_version: 2
mixed_precision: 'no'
num_machines: 1
num_processes: 2
machine_rank: 0
main_process_port: 0
parallelism_config:
  parallelism_config_cp_size: 2
use_cpu: true
"""
SIZE = "cp_size: 2\n"


def prepare(folder: Path, model: Path, more: str = "", layer: str = "Qwen3DecoderLayer") -> None:
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text("In the beginning God created the heaven and the earth. " * 40)
    (folder / "script.py").write_text(SCRIPT)
    (folder / "fsdp2.yaml").write_text(FSDP2.format(layer=layer))
    (folder / "run.yaml").write_text(
        textwrap.dedent(f"""
        model_name_or_path: {model}
        dataset_name: text.txt
        output_dir: out
        max_length: 99
        max_steps: 3
        """)
        + more
    )


def start(folder: Path, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, check=False)


LAUNCHERS = {
    "megaspan": (["megaspan", "train", "run.yaml", "--nproc", "2", "--use_cpu", "true"], SIZE),
    "torchrun": (["torch.distributed.run", "--nproc-per-node", "2", "script.py"], SIZE + "use_cpu: true\n"),
    "accelerate": (["accelerate.commands.launch", "--config_file", "fsdp2.yaml", "script.py"], ""),
}


@pytest.mark.full
def test_every_launcher_starts_the_same_run(tmp_path, model_folder):
    prepare(tmp_path / "one", model_folder, "use_cpu: true\n")
    assert start(tmp_path / "one", "megaspan", "train", "run.yaml").returncode == 0
    wanted = logged(tmp_path / "one" / "out")
    for name, (words, more) in LAUNCHERS.items():
        prepare(tmp_path / name, model_folder, more)
        done = start(tmp_path / name, *words)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("2 ranks: cp_size 2") == 1  # one header
        assert done.stderr.count("'num_tokens': 297.0") == 1  # one line a step
        for entry, other in zip(logged(tmp_path / name / "out"), wanted, strict=True):
            assert entry["loss"] == pytest.approx(other["loss"], rel=1e-5)
            assert entry["num_tokens"] == other["num_tokens"]
        assert (tmp_path / name / "out" / "model" / "model.safetensors").exists()


@pytest.mark.full
def test_a_layer_to_wrap_that_the_model_has_not_is_one_sentence(tmp_path, model_folder):
    prepare(tmp_path, model_folder, layer="LlamaDecoderLayer")
    done = start(tmp_path, *LAUNCHERS["accelerate"][0])
    assert done.returncode != 0
    assert "fsdp_transformer_layer_cls_to_wrap is not the class of this model's layers; got LlamaDecoderLayer" in done.stderr
    assert done.stderr.count("megaspan:") == 1
