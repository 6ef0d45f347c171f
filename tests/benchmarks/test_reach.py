"""The prepared command for 2, 4 and 8 GPUs: it goes on where it stopped, ends in time, takes the fastest layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.layouts import Layout
from benchmarks.outcome import Outcome
from benchmarks.works import GIB, MACHINES, PLANS, YARN, Work

from benchmarks import reach, record
from megaspan.plan import Plan

FAST = {"cp8": 60.0, "sp8": 50.0, "cp4xsp2": 70.0}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Cases that would have run, each as long as it is expected; time goes by with them alone."""
    cases: list[dict[str, Any]] = []
    clock = [0.0]
    seconds = {work.name: work.seconds for works in PLANS.values() for work in works}

    def run(name: str, case: dict[str, Any], timeout: float, heard: Any = None) -> Outcome:
        cases.append(case | {"name": name, "timeout": timeout})
        clock[0] += seconds[name]
        outcome = Outcome(name, case)
        step = {"peak_bytes": GIB, "reserved_bytes": GIB, "host_bytes": GIB, "seconds": FAST.get(case["layout"], 10.0)}
        for number in (1, 2):
            for rank in range(Layout.read(case["layout"]).ranks):
                outcome.collect(step | {"step": number, "rank": rank})
        return outcome

    def run_command(name: str, words: Any, timeout: float, heard: Any) -> Outcome:
        cases.append({"name": name, "command": words, "timeout": timeout})
        clock[0] += seconds[name]
        return Outcome(name, {"command": words})

    monkeypatch.setattr(record, "run_case", run)
    monkeypatch.setattr(record, "run_command", run_command)
    monkeypatch.setattr(reach.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(reach, "wants_a_gpu", lambda name, tiny: False)
    monkeypatch.setattr(reach, "plan_of", lambda case: planned(case))
    return cases


def planned(case: dict[str, Any]) -> Plan:
    """The plan on the machine of eight GPUs, or of one."""
    from benchmarks.depth import plan_of

    return plan_of(case, MACHINES["one" if case["layout"] == "one" else "eight"])


def test_it_stops_in_time_and_goes_on_where_it_stopped(ran, tmp_path, capsys):
    out = tmp_path / "new" / "reach.jsonl"
    given = ["--plan", "eight", "--only", "reference", "--seconds", "560", "--json", str(out)]
    assert reach.main(given) == 1
    nine = ["8B 1M 9 layers cp8", "8B 1M 9 layers sp8", "8B 1M 9 layers cp4xsp2"]
    assert [case["name"] for case in ran] == nine, "TRL would have taken 190 of the 140 seconds that are left"
    assert "left: 8B 1M 9 layers TRL cp8 (190 s), 8B 1M best (420 s)" in capsys.readouterr().out
    del ran[:]
    assert reach.main(given) == 1
    assert [case["name"] for case in ran] == ["8B 1M 9 layers TRL cp8"], "and then 370 are left of 420"
    assert reach.main(given) == 1
    assert (ran[-1]["name"], ran[-1]["layout"], ran[-1]["layers"]) == ("8B 1M best", "sp8", 0), "the fastest of the three"
    assert reach.main(given) == 0
    assert ran[-1]["name"] == "8B 1M best, all on the devices"
    assert not ran[-1]["offload"]
    assert len(ran) == 3
    assert reach.main(given) == 0
    assert len(ran) == 3, "all is there"


def test_a_smaller_work_goes_before_one_that_does_not_fit(ran):
    given = ["--plan", "two", "--only", "reference", "part"]
    assert reach.main([*given, "--seconds", "310"]) == 1
    assert [case["name"] for case in ran] == ["8B 1M 2 layers cp2", "8B 1M 2 layers sp2"]
    del ran[:]
    assert reach.main(["--plan", "two", "--only", "part", "8B 1M 9 layers cp2", "--seconds", "370"]) == 1
    assert [case["name"] for case in ran] == ["0.6B 1M 7 layers"], "then 190 seconds are left"
    assert ran[0]["timeout"] == 370


def test_commands_are_works_too(ran, tmp_path, capsys):
    out = tmp_path / "one.jsonl"
    given = ["--plan", "one", "--only", "kernels", "longest", "--json", str(out)]
    assert reach.main([*given, "--seconds", "660"]) == 0
    kernels, longest = ran
    assert kernels["command"][:3] == ("benchmarks.kernels", "--tokens", "32768")
    assert longest["command"][:2] == ("benchmarks.rehearse", "qwen3-4b,512k,80GiB,120GiB")
    assert (kernels["timeout"], longest["timeout"]) == (330, 550)
    assert reach.main(given) == 0
    assert len(ran) == 2, "all is there"


def test_what_is_asked_of_one_gpu(ran):
    assert reach.main(["--plan", "one", "--only", "short", "8B 1M 2 layers, host 120 GiB", "--seconds", "590"]) == 0
    peer, short, deep = ran
    assert (peer["system"], peer["attention"], peer["masters"], peer["tokens"]) == ("trl", "sdpa", False, 32_768)
    assert (short["system"], short["steps"], short["masters"]) == ("megaspan", 3, False)
    assert (deep["layers"], deep["dials"]["kind"]) == (2, "again")
    assert (deep["limit"], deep["host"]) == (80 * GIB, 120 * GIB)


def test_few_layers_run_as_the_whole_model_would(ran):
    assert reach.main(["--plan", "eight", "--only", "8B 1M 9 layers cp8"]) == 0
    (case,) = ran
    whole = planned(case | {"layers": 0})
    assert whole.model.layers == 36
    assert case["dials"]["kv_heads_per_call"] == whole.kv_heads_per_call
    assert case["rope"] == YARN
    assert (case["limit"], case["host"]) == (42 * GIB, 500 * GIB)


def test_what_failed_is_run_again_only_if_wished(tmp_path):
    out = tmp_path / "reach.jsonl"
    lines = [{"outcome": {"name": name, "failed": failed}} for name, failed in (("a", None), ("b", "timeout"), ("c", "killed"))]
    out.write_text("\n".join(json.dumps(line) for line in [{"begun": "now"}, *lines]) + "\n")
    assert set(reach.held(out, retry=False)) == {"a", "c"}
    assert set(reach.held(out, retry=True)) == {"a"}
    assert reach.held(tmp_path / "none", retry=False) == {}


def test_works_together_say_the_whole_depth_and_the_speed_up(ran, capsys):
    works = [work for work in PLANS["four"] if work.name.startswith("4B 1M") and not work.rehearsal]
    done = {work.name: {"seconds": 3.0 + 2.0 * work.layers, "failed": None} for work in works}
    (told,) = reach.conclusions(works, done)
    assert told == "qwen3-4b, 1,048,576 tokens, cp4: 3.00 s + 2.00 s x layers; 36 of them: 75.0 s"
    works = [work for work in PLANS["eight"] if work.part == "scaling"]
    done = {work.name: {"seconds": 40.0 / work.layout.ranks, "failed": None} for work in works}
    told = list(reach.conclusions(works, done))
    assert "4B 131,072 cp8: 4.00 x as fast as 2 GPUs" in told
    assert "4B 131,072 cp4: 2.00 x as fast as 2 GPUs" in told
    assert len(told) == 4


def test_works_together_say_ratios_to_trl_and_to_one_gpu():
    done = {
        "4B 32,768 TRL": 8.0, "4B 32,768": 4.0, "4B 131,072 in 64 documents one": 9.0, "4B 131,072 in 64 documents cp2": 5.0,
        "4B 131,072 cp2": 20.0,
    }  # fmt: skip
    told = list(
        reach.conclusions(
            [work for plan in ("one", "two") for work in PLANS[plan]],
            {name: {"seconds": seconds, "failed": None} for name, seconds in done.items()},
        )
    )
    assert told == [
        "4B 32,768: 0.50 x the time of 4B 32,768 TRL",
        "4B 131,072 in 64 documents cp2: 1.80 x as fast as 1 GPU",
    ]


def test_every_work_fits_into_a_command_and_has_a_name_of_its_own():
    for kind, works in PLANS.items():
        names = [work.name for work in works]
        assert len(set(names)) == len(names)
        for work in works:
            assert work.seconds < 560 or work.part == "background"
            assert set(work.best_of) <= set(names)
            assert work.layout.ranks <= {"one": 1, "two": 2, "four": 4, "eight": 8}[kind]
            tiny = work.tiny()
            assert tiny.layout.ranks <= 2
            assert work.command or tiny.case()["tokens"] == 256


def test_list_predicts_without_a_gpu(capsys):
    assert reach.main(["--plan", "four", "--list", "--only", "4B 1M 9 layers cp4", "4B 131,072 cp4"]) == 0
    first, second, total = capsys.readouterr().out.splitlines()
    assert "s a step" in first
    assert "DOES NOT FIT" not in first + second
    assert "of 128 GiB a rank" in second
    assert total.startswith("290 s in all")


def test_an_unknown_work_is_refused():
    with pytest.raises(SystemExit):
        reach.arguments(["--plan", "two", "--only", "capacity"])


@pytest.mark.full  # two more processes than `make test` has time for
def test_tiny_runs_a_work_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "reach.jsonl"
    assert (
        reach.main(["--plan", "four", "--tiny", "--only", "4B 1M rehearsal cp4", "--seconds", "200", "--json", str(out)]) == 0
    )
    assert "4B 1M rehearsal cp4: fits" in capsys.readouterr().out
    works = reach.chosen(reach.arguments(["--plan", "four", "--tiny"]))
    assert all(isinstance(work, Work) and work.shape == "tiny" for work in works)
