"""Real ranks under torchrun and accelerate launch, with a toy in place of the trainer."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import TCPStore

from megaspan import world
from megaspan.config import SFTConfig
from megaspan.world import Failure
from tests.gloo import forked
from tests.world.test_launchfile import FSDP2 as SET_BY_ACCELERATE

TOY = Path(__file__).with_name("toy_script.py")
PRIORITY = "TORCH_NCCL_HIGH_PRIORITY"
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


def two_ranks(folder: Path, *words: str, environ: Mapping[str, str] | None = None) -> tuple[list[int | None], str, str]:
    """The toy as two ranks that torchrun could have started, forks of a process that has imported torch.

    Returns:
        Exit codes by rank, and what both wrote to stdout and to stderr.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun keeps one
    ranks = [forked(toy_rank, rank, store.port, folder, words, environ or {}) for rank in range(2)]
    for each in ranks:
        each.join(60)
    out, err = ((folder / name).read_text() for name in ("out", "err"))
    return [each.exitcode for each in ranks], out, err


def toy_rank(rank: int, port: int, folder: Path, words: tuple[str, ...], environ: Mapping[str, str]) -> None:
    """Ends as a script of its own would: an error goes to the hook, and the interpreter ends with what that raises."""
    os.environ |= environ | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    sys.__stderr__ = sys.stderr = os.fdopen(2, "w", buffering=1)
    sys.argv = [str(TOY), *words]
    try:
        runpy.run_path(str(TOY), run_name="__main__")
    except SystemExit as end:
        os._exit(int(end.code or 0))
    except BaseException as error:
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as end:
            os._exit(int(end.code or 0))
        os._exit(1)


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
    assert done.stdout.count("before attention True\n") == 2


@pytest.mark.parametrize(("given", "wanted"), [(None, "1"), ("0", "0")])
def test_collectives_between_gpus_come_before_attention(given, wanted, monkeypatch):
    """NCCL reads the environment when a group is made, and a user's own word counts."""
    seen = []
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **__: seen.append(os.environ.get(PRIORITY)))
    monkeypatch.setattr("megaspan.world.ranks.device_axes", lambda mesh, kind: SimpleNamespace(set_timeout=lambda limit: None))
    monkeypatch.setenv(PRIORITY, given or "")
    if given is None:
        monkeypatch.delenv(PRIORITY)
    heart = SimpleNamespace(beat=lambda *_: None, meshes=[])
    place = SimpleNamespace(ranks=2, sizes=(1, 1, 2, 1))
    world.Ranks(place, torch.device("cuda", 0), heart).connect()
    assert seen == [wanted]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("sleep", r"rank 1 has been in 'forward layer 5' for [2-9].*at toy_script.py:\d+ in main; the other rank waits"),
        ("killed", r"rank 1 died in '.*' without a word"),
    ],
)
def test_a_rank_that_hangs_or_dies_is_named(tmp_path, what, words):
    codes, _, err = two_ranks(tmp_path, what, "cp_size=2")
    assert codes == [1, 1 if what == "sleep" else -signal.SIGKILL]
    assert re.search(words, own_lines(err)[-1])


def test_an_error_of_one_rank_is_said_once_with_its_number(tmp_path):
    """torchrun's summary blames the rank whose process ended first, which may have waited for this one."""
    codes, _, err = two_ranks(tmp_path, "broken", "cp_size=2")
    assert codes == [1, 1]
    assert own_lines(err) == ["megaspan: rank 1: RuntimeError: a broken thing"]


def test_an_error_of_one_process_has_no_number():
    failure = Failure(0, 1, ["RuntimeError: a broken thing", "a note"])
    assert failure.told(several=False) == failure.sentences
    assert failure.told() == ["rank 0: RuntimeError: a broken thing", "a note"]
    assert Failure(0, 2, ["wrong"]).told() == ["wrong"]
    assert Failure(0, 1, ["rank 1 died"]).told() == ["rank 1 died"]


def test_a_script_under_accelerate_launch(tmp_path):
    (tmp_path / "fsdp2.yaml").write_text(FSDP2)
    done = run("accelerate.commands.launch", "--config_file", str(tmp_path / "fsdp2.yaml"), str(TOY), "none")
    assert done.returncode == 0, done.stderr
    assert "accelerate launch: 2 ranks: cp_size 2, rank 1" in done.stdout


def test_a_file_of_another_engine_is_refused_once_with_the_lines_to_paste(tmp_path):
    """FSDP1 and DeepSpeed: what accelerate would have set for two ranks."""
    for engine, environ in (("FSDP1", {"FSDP_VERSION": "1"}), ("DeepSpeed", {"ACCELERATE_USE_DEEPSPEED": "true"})):
        folder = tmp_path / engine
        folder.mkdir()
        codes, _, err = two_ranks(folder, "none", environ=SET_BY_ACCELERATE | environ)
        assert codes == [2, 2]
        assert own_lines(err) == [
            f"megaspan: the launch file asks for {engine}, which megaspan does not use. Write in its place:"
        ]
        assert "\n  fsdp_version: 2\n" in err
        assert "Traceback" not in err


@pytest.mark.full
def test_a_file_for_fsdp1_is_refused_once_with_what_accelerate_drops(tmp_path):
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


def test_a_wrong_option_is_said_by_one_rank(tmp_path):
    """Before any rank has joined: the options are checked where a script makes them."""
    codes, _, err = two_ranks(tmp_path, "none", "cp_sise=2")
    assert codes == [2, 2]
    assert err == "megaspan: cp_sise is not an option. Did you mean cp_size?\n"


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_a_wrong_option_is_said_once_by_each_launcher(tmp_path, launcher):
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
