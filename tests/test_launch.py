"""`megaspan train --nproc N`: how many ranks, one error once, signals to all; real ranks with a toy in place of the trainer."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megaspan import cli, launch, world
from megaspan.config import SFTConfig
from megaspan.human import UserError

TOY = Path(__file__).with_name("toy_train.py")
OPTIONS = ["--max_length", "8", "--use_cpu", "--report_to", "wandb"]


def command(what: str, *words: str) -> list[str]:
    return [sys.executable, str(TOY), "train", *OPTIONS, "--run_name", what, *words]


@pytest.fixture
def run(monkeypatch, capfd):
    """Starts two ranks of the toy from this process, which has imported torch already; the ranks are processes."""
    start = launch.run
    monkeypatch.setattr(launch, "run", lambda words, count: start(words, count, program=(str(TOY),)))

    def ended(what: str, *words: str) -> subprocess.CompletedProcess:
        code = cli.main(command(what, "--nproc", "2", *words)[2:])
        return subprocess.CompletedProcess([], code, *capfd.readouterr())

    return ended


@pytest.fixture
def gpus(monkeypatch):
    def see(count: int) -> None:
        monkeypatch.setattr(world, "gpus", lambda: [world.Gpu("a", 1, "1")] * count)

    return see


@pytest.mark.parametrize(
    ("seen", "wish", "options", "count"),
    [
        (0, None, {}, 1),
        (8, None, {}, 8),
        (8, 2, {"cp_size": 2}, 2),
        (8, None, {"cp_size": 8}, 8),
        (8, None, {"cp_size": 4}, 8),
        (0, 4, {"sp_size": 2}, 4),
        (8, None, {"use_cpu": True}, 1),
        (2, 16, {"use_cpu": True}, 16),
    ],
)
def test_one_rank_for_each_visible_gpu(gpus, seen, wish, options, count):
    gpus(seen)
    assert launch.processes(wish, SFTConfig(max_length=8, **options)) == count


@pytest.mark.parametrize(
    ("seen", "wish", "options", "sentence"),
    [
        (2, 4, {}, "--nproc must be a number of processes that each have a GPU; got 4; allowed: 1 to 2. Type megaspan train "
         "run.yaml --nproc 2, or add --use_cpu true: on the CPU any number works."),
        (0, 0, {}, r"--nproc must be at least 1; got 0\. Type megaspan train run\.yaml --nproc 1\.$"),
        (0, None, {"cp_size": 8}, r"got 1; .* Type megaspan train run\.yaml --nproc 8, or megaspan train run\.yaml --nproc 1 "),
        (2, None, {"cp_size": 8}, r"got 2; .* Type megaspan train run\.yaml --nproc 2 --cp_size 2\.$"),
    ],
)  # fmt: skip
def test_a_wrong_number_is_one_sentence(gpus, monkeypatch, seen, wish, options, sentence):
    gpus(seen)
    monkeypatch.setattr("sys.argv", ["megaspan", "train", "run.yaml"])
    with pytest.raises(UserError, match=sentence):
        launch.processes(wish, SFTConfig(max_length=8, **options))


def test_ranks_that_torchrun_has_started_start_no_others(gpus, monkeypatch):
    gpus(8)
    monkeypatch.setattr(world, "launch", lambda: world.Launch("torchrun", 0, 8, 0, 8))
    assert launch.processes(None, SFTConfig(max_length=8)) == 1
    with pytest.raises(UserError, match="torchrun has started 8 already"):
        launch.processes(2, SFTConfig(max_length=8))


def test_one_process_needs_no_launcher():
    done = subprocess.run(command("none"), capture_output=True, text=True, check=True)
    assert done.stdout == "mesh: 1 rank\n"


def test_the_result_and_the_header_are_rank_0_s(run):
    done = run("none", "--cp_size", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["mesh"] == "2 ranks: cp_size 2"
    assert done.stderr == "header of rank 0\na library talks\n"


def test_an_error_of_all_ranks_is_one_sentence(run):
    done = run("wrong", "--json")
    assert done.returncode == 2
    assert done.stderr.endswith("\nmegaspan: a wrong thing. Right it.\n")
    assert done.stderr.count("megaspan:") == 1
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout) == {"exit_code": 2, "errors": ["a wrong thing. Right it."]}


def test_a_fault_of_one_rank_ends_all_and_is_shown_once(run):
    done = run("fault")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count("ValueError: a fault of ours\n") == 2  # the traceback's last line, and the sentence
    assert done.stderr.endswith("megaspan: rank 1: ValueError: a fault of ours\n")


@pytest.mark.full
def test_a_rank_that_is_killed_is_named_with_its_last_words(run):
    done = run("killed")
    assert done.returncode == 1
    assert "last words\n" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("megaspan: rank 1 ")
    assert done.stderr.count("megaspan:") == 1


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.full)])
def test_a_signal_reaches_all_ranks_and_a_complete_checkpoint_is_left(tmp_path, signum, code):
    words = command("long", "--nproc", "2", "--output_dir", str(tmp_path), "--json")
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "in the loop" in line:
            break
    process.send_signal(signum)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code
    steps = [path.read_text() for path in sorted(tmp_path.glob("*.txt"))]
    assert len(steps) == 2  # the slower rank has written its part too
    assert len(set(steps)) == 1  # of the same step
    sentences = [f"interrupted by {signum.name}", "a checkpoint is complete"]
    assert json.loads(out) == {"exit_code": code, "errors": sentences}
    assert err == "".join(f"megaspan: {sentence}\n" for sentence in sentences)


@pytest.mark.parametrize(
    ("codes", "signals", "code", "sentence"),
    [
        ({0: -2, 1: -15}, [signal.SIGINT], 130, "interrupted by SIGINT"),
        ({0: -6, 1: -15}, [signal.SIGINT], 130, "interrupted by SIGINT"),
        ({0: -11, 1: -15}, [signal.SIGINT], 130, "interrupted by SIGINT"),
        ({0: -9, 1: -15}, [signal.SIGINT], 1, "rank 0 was ended by SIGKILL (often the host's lack of memory)"),
        ({0: -15, 1: -15}, [signal.SIGTERM], 143, "interrupted by SIGTERM"),
        ({0: -6, 1: -15}, [], 1, "rank 0 was ended by SIGABRT"),
    ],
)
def test_a_signal_while_ranks_are_still_loading_is_an_interruption(monkeypatch, tmp_path, codes, signals, code, sentence):
    """Then Python's own answer ends them, without a word of ours."""
    agent = SimpleNamespace(codes=codes, error=None, meeting=("", 0), close=lambda: None)
    monkeypatch.setattr(world, "read_failure", lambda meeting: None)
    found = launch._cause(agent, signals, tmp_path)
    assert (found.code, found.sentences) == (code, [sentence])
