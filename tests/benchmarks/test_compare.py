"""The benchmark command: cases, results, failures as results, and the whole thing once at toy size on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import compare, loss


def outcome(name: str, seconds: float, peak: int, *, tokens: int = 1024, failed: str | None = None) -> compare.Outcome:
    made = compare.Outcome(name, {"system": name.split("-")[0], "tokens": tokens})
    for step in (1, 2, 3):
        compare.collect(
            made,
            {
                "step": step,
                "seconds": seconds * (9 if step == 1 else 1),
                "peak_bytes": peak,
                "reserved_bytes": peak,
                "host_bytes": 2**30,
            },
        )
    if failed:
        compare.collect(made, {"failed": failed, "why": "because"})
    return made


def test_the_first_step_is_not_quoted() -> None:
    assert outcome("trl-default", 2.0, 2**30).seconds == 2.0


def test_ratios_are_to_trls_default_at_the_same_length() -> None:
    args = compare.arguments(["--peers", "trl-default"])
    lines = compare.show(
        [
            outcome("trl-default", 4.0, 4 * 2**30, tokens=1024),
            outcome("trl-default", 8.0, 4 * 2**30, tokens=2048),
            outcome("megaspan", 2.0, 2**30, tokens=2048),
        ],
        args,
    ).splitlines()
    assert "0.25 x time, 0.25 x memory" in lines[-1]
    assert "2,048" in lines[-1]


def test_a_case_that_runs_out_of_memory_is_a_line_of_the_table() -> None:
    args = compare.arguments([])
    text = compare.show([outcome("trl-default", 4.0, 2**30, failed="out of memory"), outcome("megaspan", 2.0, 2**30)], args)
    assert "out of memory" in text
    assert "because" in text
    assert "x time" not in text, "no ratio to a run that failed"


def test_cases_are_every_length_with_every_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed in (True, False):
        monkeypatch.setattr(compare, "has_flash4", lambda installed=installed: installed)
        args = compare.arguments(["--tokens", "64k", "128k", "--offload", "both", "--layers", "4", "--limit", "80GiB"])
        made = compare.cases(args)
        names = [name for name, case in made if case["tokens"] == 131_072]
        flash = ["trl-flash4"] if installed else []
        assert names == ["trl-default", *flash, "trl-selective", "megaspan, inputs on the device", "megaspan"]
        assert {case["tokens"] for _, case in made} == {65_536, 131_072}
        assert all(case["layers"] == 4 and case["limit"] == 80 * 2**30 for _, case in made)


def test_one_step_is_refused() -> None:
    with pytest.raises(SystemExit):
        compare.arguments(["--steps", "1"])


@pytest.mark.parametrize(
    ("code", "failed", "why"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed", "signal 9"),
        ("raise SystemExit('no such thing')", "failed", "no such thing"),
        ("import time; time.sleep(60)", "timeout", "more than 1 s"),
    ],
)
def test_a_child_that_dies_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, failed: str, why: str
) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "case.py").write_text('print(\'RESULT {"device": "CPU", "torch": "2"}\', flush=True)\n' + code)
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    made = compare.run_case("trl-default", {"system": "trl", "tokens": 8}, timeout=1 if failed == "timeout" else 60)
    assert (made.failed, made.why, made.device) == (failed, why, "CPU")


def test_tiny_runs_both_systems_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--tiny` is the same code at toy size; TRL is an extra for developers."""
    pytest.importorskip("trl")
    out = tmp_path / "out.json"
    assert compare.main(["--tiny", "--peers", "trl-default", "--json", str(out)]) == 0
    table = capsys.readouterr().out
    assert "trl-default" in table
    assert "x time" in table
    written: dict[str, Any] = json.loads(out.read_text())
    assert [case["name"] for case in written["cases"]] == ["trl-default", "megaspan"]
    for case in written["cases"]:
        assert [step["step"] for step in case["steps_measured"]] == [1, 2], case["why"]
        assert case["seconds"] > 0
        assert len(case["losses"]) == 2
        assert case["losses"][0] == pytest.approx(6.24, abs=0.5), "log of 512 words"
    assert written["versions"]["torch"] in sys.modules["torch"].__version__


def test_the_loss_benchmark_runs_at_toy_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "loss.json"
    assert loss.main(["--tiny", "--tiles", "128", "256", "--json", str(out)]) == 0
    assert "x floor" in capsys.readouterr().out
    written = json.loads(out.read_text())
    assert [case["tile"] for case in written["cases"]] == [128, 256, 0]
    assert all(case["seconds"] > 0 for case in written["cases"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU is the point")
def test_without_a_gpu_it_says_so_at_once(capsys):
    assert compare.main(["--tokens", "64"]) == 2
    assert "no GPU" in capsys.readouterr().err
