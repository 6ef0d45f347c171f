"""Real ranks under torchrun and accelerate launch, with a toy in place of the trainer."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megaspan import world
from megaspan.config import SFTConfig

TOY = Path(__file__).with_name("toy_script.py")
TORCHRUN = ["torch.distributed.run", "--nproc-per-node", "2"]
FSDP2 = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_version: 2
machine_rank: 0
main_process_port: 0
mixed_precision: bf16
num_machines: 1
num_processes: 2
parallelism_config:
  parallelism_config_cp_size: 2
use_cpu: false
"""


def run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False)


def own_lines(text: str) -> list[str]:
    """What megaspan says, without the launcher's own report."""
    return [line for line in text.splitlines() if line.startswith("megaspan: ")]


def test_one_process_has_no_other_to_watch():
    ranks = world.join(SFTConfig(max_length=8, use_cpu=True))
    assert (ranks.heart, ranks.connect(), ranks.speaks) == (None, None, True)
    ranks.beat("forward layer 1")
    assert (ranks.boundary(None), ranks.boundary(15)) == (None, 15)
    ranks.leave()


def test_a_script_under_torchrun():
    done = run(*TORCHRUN, str(TOY), "none", "sp_size=2")
    assert done.returncode == 0, done.stderr
    assert "torchrun: 2 ranks: sp_size 2, rank 1" in done.stdout
    assert done.stdout.count("all 4\n") == 2  # doubled along row and shard, once along data and cp
    assert "Traceback" not in done.stderr


@pytest.mark.gpu
def test_a_script_on_two_gpus():
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    done = run(*TORCHRUN, str(TOY), "gpu", "cp_size=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all 8\n") == 2


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("sleep", r"rank 1 has been in 'forward layer 5' for [2-9].*at toy_script.py:\d+ in main; the other rank waits"),
        pytest.param("killed", r"rank 1 died in '.*' without a word", marks=pytest.mark.full),
    ],
)
def test_a_rank_that_hangs_or_dies_is_named(what, words):
    done = run(*TORCHRUN, str(TOY), what, "cp_size=2")
    assert done.returncode != 0
    assert re.search(words, own_lines(done.stderr)[-1])


def test_a_script_under_accelerate_launch(tmp_path):
    (tmp_path / "fsdp2.yaml").write_text(FSDP2)
    done = run("accelerate.commands.launch", "--config_file", str(tmp_path / "fsdp2.yaml"), str(TOY), "none")
    assert done.returncode == 0, done.stderr
    assert "accelerate launch: 2 ranks: cp_size 2, rank 1" in done.stdout


def test_a_file_for_fsdp1_is_refused_once_with_the_lines_to_paste(tmp_path):
    """Both ranks refuse it, and one says so: a sentence, no traceback of a rank, exit code 2."""
    (tmp_path / "fsdp1.yaml").write_text(FSDP2.replace("fsdp_version: 2", "fsdp_version: 1\n  fsdp_ofload_params: true"))
    done = run("accelerate.commands.launch", "--config_file", str(tmp_path / "fsdp1.yaml"), str(TOY), "none")
    assert done.returncode != 0
    assert own_lines(done.stderr) == [
        "megaspan: the launch file asks for FSDP1, which megaspan does not use. Write in its place:",
        "megaspan: the launch file's fsdp_config has the key fsdp_ofload_params, which accelerate drops without a word; got "
        "True. Did you mean fsdp_offload_params?",
    ]
    assert "\n  fsdp_version: 2\n" in done.stderr
    assert "UserErrors" not in done.stderr
    assert "exitcode  : 2" in done.stderr


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("accelerate", marks=pytest.mark.full)])
def test_a_wrong_option_is_said_by_one_rank(tmp_path, launcher):
    """Before any rank has joined: the options are checked where a script makes them."""
    (tmp_path / "fsdp2.yaml").write_text(FSDP2)
    accelerate = ["accelerate.commands.launch", "--config_file", str(tmp_path / "fsdp2.yaml")]
    done = run(*(TORCHRUN if launcher == "torchrun" else accelerate), str(TOY), "none", "cp_sise=2")
    assert done.returncode != 0
    assert own_lines(done.stderr) == ["megaspan: cp_sise is not an option. Did you mean cp_size?"]
    assert "UserErrors" not in done.stderr
    assert "exitcode  : 2" in done.stderr


def test_a_process_of_its_own_shows_where_a_wrong_option_was_given():
    done = subprocess.run([sys.executable, str(TOY), "none", "cp_sise=2"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "in main" in done.stderr
    assert done.stderr.endswith("UserErrors: cp_sise is not an option. Did you mean cp_size?\n")
