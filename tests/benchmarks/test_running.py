"""Processes of a case: what several ranks say together, whose failure is shown, and that none is left behind."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from benchmarks.outcome import Outcome

from benchmarks import running

SAY = r"""
import json, os, sys, time
def say(**result):
    print("\nRESULT " + json.dumps(result | {"rank": int(os.environ.get("RANK", 0))}), flush=True)
rank = int(os.environ.get("RANK", 0))
"""
STEP = {"seconds": 1.0, "peak_bytes": 8, "reserved_bytes": 9, "host_bytes": 10}


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str, *, layout: str = "one", timeout: float = 60) -> Outcome:
    """A case whose ranks run `code`."""
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "case.py").write_text(SAY + code)
    monkeypatch.setattr(running, "ROOT", folder)
    return running.run_case("case", {"system": "megaspan", "tokens": 8, "layout": layout}, timeout)


@pytest.mark.parametrize(
    ("code", "failed", "why"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed", "signal 9"),
        ("raise SystemExit('no such thing')", "failed", "no such thing"),
        ("time.sleep(60)", "timeout", "more than 1 s"),
    ],
)
def test_a_child_that_dies_is_reported(monkeypatch, tmp_path, code, failed, why):
    made = run(monkeypatch, tmp_path, "say(device='CPU', torch='2')\n" + code, timeout=1 if failed == "timeout" else 60)
    assert (made.failed, made.why, made.device) == (failed, why, "CPU")


def test_ranks_say_their_steps_and_a_step_is_of_all(monkeypatch, tmp_path):
    code = """
say(device="CPU", torch="2")
for step in (1, 2):
    say(step=step, seconds=1.0 + rank, peak_bytes=8 - rank, reserved_bytes=9, host_bytes=10)
"""
    made = run(monkeypatch, tmp_path, code, layout="cp2")
    assert made.failed is None, made.why
    assert [step["step"] for step in made.steps] == [1, 2]
    assert made.seconds == 2.0
    assert (made.most("peak_bytes"), made.least_peak, made.most("host_bytes")) == (8, 7, 20)


def test_an_error_of_any_rank_is_shown_by_its_rank(monkeypatch, tmp_path):
    code = """
if rank == 1:
    say(failed="ValueError", why="one rank only")
    raise ValueError("one rank only")
time.sleep(60)
"""
    begun = time.monotonic()
    made = run(monkeypatch, tmp_path, code, layout="sp2")
    assert (made.failed, made.why) == ("ValueError", "rank 1: one rank only")
    assert any("ValueError: one rank only" in line for line in made.facts["stderr"])
    assert time.monotonic() - begun < 40


def test_a_rank_that_dies_without_a_word_is_told_by_its_stderr(monkeypatch, tmp_path):
    made = run(monkeypatch, tmp_path, "if rank == 1: raise LookupError('not said')\ntime.sleep(60)", layout="sp2")
    assert (made.failed, made.why) == ("failed", "LookupError: not said")


def test_a_step_that_not_all_ranks_finish_is_none(monkeypatch, tmp_path):
    made = run(monkeypatch, tmp_path, f"if rank == 0: say(step=1, **{STEP})", layout="sp2")
    assert (made.steps, made.failed) == ([], "incomplete")
    assert "step 1 came from rank 0 only" in made.why


def test_a_case_that_hangs_is_ended_with_all_its_processes(monkeypatch, tmp_path):
    """Ranks are in sessions of their own, and so may be what they start."""
    code = f"""
import subprocess
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(r"{tmp_path}/ranks-" + str(rank), "w").write("there")
time.sleep(600)
"""

    class Timer(threading.Thread):
        """Late as soon as all have started."""

        def __init__(self, seconds: float, function: Any) -> None:
            super().__init__(daemon=True)
            self.function, self.cancel = function, lambda: None

        def run(self) -> None:
            while len(list(tmp_path.glob("ranks-*"))) < 2:
                time.sleep(0.05)
            self.function()

    monkeypatch.setattr(running.threading, "Timer", Timer)
    marks: list[str] = []
    inner = running.environment_of
    monkeypatch.setattr(running, "environment_of", lambda case, mark: marks.append(mark) or inner(case, mark))
    made = run(monkeypatch, tmp_path, code, layout="cp2")
    assert made.failed == "timeout"
    assert running.marked(marks[0]) == []


def test_out_of_memory_is_the_cause_whoever_is_heard_first():
    made = Outcome("case", {"tokens": 8, "layout": "cp2"})
    made.collect({"failed": "DistBackendError", "why": "closed by peer", "rank": 0})
    made.collect({"failed": "out of memory", "why": "tried to allocate", "rank": 1})
    made.collect({"failed": "RuntimeError", "why": "late", "rank": 0})
    assert (made.failed, made.why) == ("out of memory", "rank 1: tried to allocate")
    assert len(made.facts["failures"]) == 3


def test_a_step_under_a_profiler_is_not_quoted():
    made = Outcome("case", {"tokens": 8})
    for step, more in ((1, {}), (2, {}), (3, {"profiled": True, "seconds": 99.0})):
        made.collect({"step": step, **STEP, **more})
    assert made.seconds == 1.0


def test_trl_is_started_as_its_guide_says(tmp_path):
    case: dict[str, Any] = {"system": "trl", "layout": "cp4"}
    command = running.command_of(case, tmp_path)
    assert command[command.index("accelerate.commands.launch") + 2] == str(tmp_path / "accelerate.yaml")
    assert yaml.safe_load((tmp_path / "accelerate.yaml").read_text())["num_processes"] == 4
    made = running.accelerate_file(4, cuda=True)
    assert made["fsdp_config"]["fsdp_version"] == 2
    assert (made["mixed_precision"], made["parallelism_config"]) == ("bf16", {"parallelism_config_cp_size": 4})


@pytest.mark.full  # 13 s of two cores; one rank's dials are held by test_case.py
def test_dials_are_turned_on_every_rank():
    """Few layers of two ranks run as the whole model's plan says, as on one."""
    dials = {"kind": "outputs", "layer_tile_tokens": 40, "kv_heads_per_call": 1, "stream_back": True, "again": "host"}
    states = {"gradients": "device", "moments": "device"}
    case = {"system": "megaspan", "shape": "tiny", "layers": 2, "tokens": 96, "steps": 1, "limit": 0, "offload": True}
    case |= {"warm": 32, "layout": "cp2", "dials": dials | {"states": states}}
    made = running.run_case("few layers", case, 120)
    assert made.failed is None, made.why
    told = {line[0]: line[1:] for line in made.facts["levers"]}
    assert "tiles of 40 tokens" in told["layers"][1]
    assert made.losses == pytest.approx([6.24, 6.24], abs=0.5), "log of 512 words"


def test_a_command_is_heard_and_says_how_it_ended():
    heard: list[str] = []
    outcome = running.run_command("versions", ("timeit", "-n", "1", "-r", "1", "pass"), 60, heard.append)
    assert outcome.failed is None
    assert len(outcome.facts["said"]) == len(heard) == 1
    assert heard[0].startswith("1 loop")
    outcome = running.run_command("wrong", ("benchmarks.kernels", "--tokens", "many"), 60, heard.append)
    assert (outcome.failed, "many" in outcome.why) == ("failed", True)
    outcome = running.run_command("slow", ("timeit", "-n", "1", "-r", "1", "import time; time.sleep(60)"), 1, heard.append)
    assert outcome.failed == "timeout"
    assert outcome.wall_seconds < 30
