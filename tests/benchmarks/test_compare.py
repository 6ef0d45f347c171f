"""The benchmark command: cases, results, failures as results, and the whole thing once at toy size on the CPU."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.layouts import layout_of
from benchmarks.outcome import Outcome

from benchmarks import compare, loss


def outcome(
    name: str, seconds: float, peak: int, *, tokens: int = 1024, failed: str | None = None, layout: str = "one"
) -> Outcome:
    made = Outcome(name, {"system": re.split("[-, ]", name)[0], "tokens": tokens, "layout": layout})
    for step in (1, 2, 3):
        for rank in range(layout_of(made.case).ranks):
            made.collect(
                {
                    "step": step,
                    "rank": rank,
                    "seconds": seconds * (9 if step == 1 else 1),
                    "peak_bytes": peak - rank * 2**30,
                    "reserved_bytes": peak,
                    "host_bytes": 2**30,
                }
            )
    if failed:
        made.collect({"failed": failed, "why": "because"})
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


def test_ratios_on_several_gpus_are_to_trls_context_parallelism_and_to_one_gpu() -> None:
    args = compare.arguments(["--layouts", "one", "cp2", "dp2"])
    text = compare.show(
        [
            outcome("trl-default", 9.0, 9 * 2**30),
            outcome("megaspan", 8.0, 8 * 2**30),
            outcome("trl-cp", 5.0, 5 * 2**30, layout="cp2"),
            outcome("megaspan cp2", 4.0, 4 * 2**30, layout="cp2"),
            outcome("megaspan dp2", 8.5, 4 * 2**30, layout="dp2"),
            outcome("megaspan cp2", 4.0, 4 * 2**30, layout="cp2", tokens=2048),
        ],
        args,
    ).splitlines()
    assert text[0] == "qwen3-4b on no device, bf16 with fp32 masters"
    assert "0.89 x time, 0.89 x memory" in text[3]
    assert "1.00 x time" in text[4]
    columns = text[5].split()
    assert columns[3:7] == ["4.00", "4.0", "3.0", "4.0"], "seconds, fullest rank, emptiest rank, reserved"
    assert columns[7] == "2.0", "host memory of both"
    assert text[5].endswith("0.80 x time, 0.80 x memory; 2.00 x as fast as one GPU")
    assert text[6].endswith("0.85 x time, 0.80 x memory; 1.88 x as fast as one GPU"), "two rows a step"
    assert "x" not in text[7].split("1.0")[-1], "nothing of this length beside it"


def test_one_command_runs_several_layouts() -> None:
    args = compare.arguments(
        ["--tokens", "128k", "--layouts", "one", "cp2", "sp2", "--nproc", "2", "--peers", "trl-cp", "trl-default"]
    )
    assert [(name, case["layout"], case["masters"]) for name, case in compare.cases(args)] == [
        ("trl-default", "one", True), ("megaspan", "one", True), ("trl-cp", "cp2", True), ("megaspan cp2", "cp2", True),
        ("megaspan sp2", "sp2", True),
    ]  # fmt: skip
    args = compare.arguments(["--tokens", "128k", "--cp", "2", "--no-masters"])
    assert [(name, case["layout"], case["masters"]) for name, case in compare.cases(args)] == [
        ("trl-cp", "cp2", False), ("megaspan cp2", "cp2", False),
    ]  # fmt: skip
    assert not compare.arguments([]).masters


def test_packed_rows_run_beside_the_same_rows_without_masks() -> None:
    given = ["--tokens", "128k", "--layouts", "one", "cp2", "--documents", "64"]
    made = compare.cases(compare.arguments([*given, "--peers", "trl-cp"]))
    assert [(name, case.get("documents")) for name, case in made] == [
        ("megaspan", 0), ("megaspan, 64 documents", 64), ("trl-cp", None),
        ("megaspan cp2", 0), ("megaspan cp2, 64 documents", 64),
    ]  # fmt: skip
    made = compare.cases(compare.arguments([*given, "--no-unmasked"]))
    assert [name for name, _ in made] == ["megaspan, 64 documents", "megaspan cp2, 64 documents"]
    outcomes = [
        outcome(f"megaspan{more}", seconds, 2**30, layout="cp2" if "cp2" in more else "one")
        for more, seconds in (("", 40.0), (", 64 documents", 10.0), (" cp2", 20.0), (" cp2, 64 documents", 5.0))
    ]
    for each in outcomes[1::2]:
        each.case["documents"] = 64
    told = [compare.beside(each, outcomes) for each in outcomes]
    assert told == [
        "",
        "4.00 x as fast as without masks",
        "2.00 x as fast as one GPU",
        "2.00 x as fast as one GPU; 4.00 x as fast as without masks",
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        ["--no-unmasked"],
        ["--no-unmasked", "--documents", "2", "--peers", "trl-default"],
        ["--nproc", "4", "--cp", "2"],
        ["--layouts", "cp2", "--cp", "2"],
        ["--layouts", "cp0"],
        ["--layouts", "cp2xcp2"],
        ["--layouts", "cp2", "cp4", "--nproc", "2"],
        ["--cp", "2", "--peers", "trl-default"],
        ["--peers", "trl-cp"],
    ],
)
def test_what_would_be_ignored_is_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        compare.arguments(wrong)


def test_one_step_is_refused() -> None:
    with pytest.raises(SystemExit):
        compare.arguments(["--steps", "1"])
    made = compare.cases(compare.arguments(["--steps", "1", "--warm", "4096", "--profile", "--peers", "trl-default"]))
    assert [(case["warm"], case["steps"], bool(case.get("profile"))) for _, case in made[:2]] == [
        (4096, 1, False),
        (4096, 1, True),
    ]


def test_tiny_runs_both_systems_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--tiny` is the same code at toy size; TRL is an extra for developers."""
    pytest.importorskip("trl")
    out = tmp_path / "out.json"
    assert compare.main(["--tiny", "--peers", "trl-default", "--json", str(out)]) == 0
    table, told = capsys.readouterr()
    assert "trl-default" in table
    assert "x time" in table
    assert told.count("  step 2: ") == 2, "a line as each step comes, of both systems"
    written: dict[str, Any] = json.loads(out.read_text())
    assert [case["name"] for case in written["cases"]] == ["trl-default", "megaspan"]
    for case in written["cases"]:
        assert [step["step"] for step in case["steps_measured"]] == [1, 2], case["why"]
        assert case["seconds"] > 0
        assert len(case["losses"]) == 2
        assert case["losses"][0] == pytest.approx(6.24, abs=0.5), "log of 512 words"
        assert all(0 < norm < 100 for norm in case["gradient_norms"])
        assert 0 < case["seconds_to_import"] < case["seconds_to_training"] < case["wall_seconds"]
    assert written["versions"]["torch"] in sys.modules["torch"].__version__


def test_tiny_runs_a_layout_of_two_ranks_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The public trainer under torchrun."""
    out = tmp_path / "out.json"
    assert compare.main(["--tiny", "--sp", "2", "--peers", "--profile", "--json", str(out)]) == 0
    assert "megaspan sp2" in capsys.readouterr().out
    (case,) = json.loads(out.read_text())["cases"]
    assert [step["step"] for step in case["steps_measured"]] == [1, 2, 3], "the profiled one comes on top"
    assert case["losses"] == pytest.approx([6.24] * 3, abs=0.5), "log of 512 words"
    assert case["host_bytes"] > 2 * 2**28, "of two processes"


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
