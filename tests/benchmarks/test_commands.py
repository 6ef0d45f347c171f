"""The prepared commands: their cases, their arithmetic, and what a killed run leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.outcome import Outcome

from benchmarks import adapter, case, compare, depth, hiding, kernels, record, rehearse, short
from megaspan import SFTConfig
from megaspan.attention.tiled import TiledMath
from megaspan.plan import Machine, ModelFacts, Plan, choose
from megaspan.plan.facts import read_config

H200 = Machine("NVIDIA H200", 140 * 2**30, 256 * 2**30, 16)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Cases that would have run; each gives a warm step and one whose seconds are 3 + 2 x layers, 10 GiB and a GiB a layer."""
    ran: list[dict[str, Any]] = []

    def run(name: str, given: dict[str, Any], timeout: float, heard: Any = None) -> Outcome:
        ran.append(given)
        outcome = Outcome(name, given)
        factor = 2 if given["system"] == "trl" else 1
        size = (10 + given["layers"]) * 2**30 * factor
        for step, seconds in ((1, 99.0), (2, (3.0 + 2.0 * given["layers"]) * factor)):
            result = {"step": step, "seconds": seconds, "peak_bytes": size, "reserved_bytes": size, "host_bytes": 2**30}
            outcome.collect(result)
            heard(result)
        if given["system"] == "rehearsal":
            outcome.collect({"rehearsal": rehearsal(given["tokens"] <= 400), "longest_row": 500, "planned_seconds": None})
        return outcome

    monkeypatch.setattr(record, "run_case", run)
    return ran


def rehearsal(fits: bool) -> dict[str, Any]:
    figure = {"name": "device, tensors", "unit": "bytes", "planned": 11 * 2**30, "rehearsed": 10.1 * 2**30, "difference": -8.2}
    return {"fits": fits, "failed_at": None if fits else "backward of layer 1", "why": None, "figures": [figure]}


def written(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_depth_is_a_line_through_numbers_of_layers(children, tmp_path, capsys):
    out = tmp_path / "depth.jsonl"
    assert depth.main(["--tiny", "--peers", "trl-default", "--json", str(out)]) == 0
    assert "dials" not in children[-1], "a CPU's plan has no kinds of layers to tell apart"
    assert [(one["system"], one["layers"]) for one in children] == [("trl", 1), ("trl", 2), ("megaspan", 1), ("megaspan", 2)]
    assert {one["warm"] for one in children} == {64}
    lines = written(out)
    peer, ours = (line["summary"] for line in lines if "summary" in line)
    assert (ours["a"], ours["b"], ours["depth"]) == (pytest.approx(3), pytest.approx(2), 2)
    assert ours["whole_seconds"] == pytest.approx(7)
    assert ours["peak_bytes_b"] == pytest.approx(2**30)
    assert peer["b"] == pytest.approx(4)
    assert [line["step"] for line in lines if "step" in line] == [1, 2] * 4, "steps are there before their case is over"
    told = capsys.readouterr().out
    assert "megaspan, plan, 256 tokens: 3.00 s + 2.00 s x layers" in told
    assert "megaspan, 2 layers (2 as planned): 7.00 s a step" in told


def test_any_option_of_megaspans_can_be_set(children):
    given = ["--tiny", "--set", "seed=7", "max-grad-norm=0.25", "optim=adamw_torch"]
    assert depth.main(given) == 0
    assert rehearse.main(given) == 0
    assert all(one["options"] == {"seed": 7, "max_grad_norm": 0.25, "optim": "adamw_torch"} for one in children)
    with pytest.raises(SystemExit):
        depth.arguments(["--set", "seed"])


def test_a_line_needs_two_points_and_a_measured_step():
    for wrong in (["--layers", "2", "2"], ["--warm", "0"]):
        with pytest.raises(SystemExit):
            depth.arguments(wrong)
    assert depth.arguments(["--warm", "0", "--steps", "2"]).steps == 2


def plan(layers: int, limit: int, host: int) -> Plan:
    raw = read_config("qwen3-8b") | ({"num_hidden_layers": layers} if layers else {})
    config = SFTConfig(max_length="1M", memory_limit=limit, host_memory=host, dtype="bfloat16", allow_past_window=True)
    return choose(config, ModelFacts.from_config(raw), H200)


def test_few_layers_get_the_dials_of_the_whole_model(tmp_path):
    """Left alone two layers would run in larger pieces and keep all, and the whole would be predicted too fast."""
    whole = plan(0, 80 * 2**30, 256 * 2**30)
    counts = depth.kinds_of(whole)
    assert sum(counts.values()) == whole.model.layers == 36
    args = depth.arguments([])
    for name, peer, more in depth.systems(args, whole):
        kind = name.removeprefix("megaspan, ")
        assert peer is None
        assert kind in counts
        assert more["dials"]["layer_tile_tokens"] == whole.layer_tile_tokens
        assert more["dials"]["kv_heads_per_call"] == whole.kv_heads_per_call
    args = depth.arguments(["--peers", "trl-offload", "--kinds", "plan", "again"])
    assert [(name, bool(more)) for name, _, more in depth.systems(args, whole)] == [
        ("trl-offload", False), ("megaspan, plan", False), ("megaspan, again", True),
    ]  # fmt: skip
    lines = [{"name": f"megaspan, {kind}", "a": 5.0, "b": 10.0 + len(kind)} for kind in counts]
    total = 5.0 + sum(count * (10.0 + len(kind)) for kind, count in counts.items())
    assert depth.whole_seconds(lines, counts) == pytest.approx(total)
    assert depth.whole_seconds(lines[:-1], counts) is None, "a kind is missing"


def test_an_adapter_is_compared_with_trl_under_one_limit(children, tmp_path, capsys):
    out = tmp_path / "adapter.jsonl"
    assert adapter.main(["--tiny", "--memory-limit", "80GiB", "--json", str(out)]) == 0
    assert {one["lora"] for one in children} == {2}
    assert written(out)[-1]["ratios"] == {"trl-default": {"time": 0.5, "memory": 0.5}}
    table = capsys.readouterr().out
    assert "0.50 x time, 0.50 x memory" in table
    args = adapter.arguments([])
    assert [(name, one["attention"], one["offload"]) for name, one in adapter.cases(args) if name != "megaspan"] == [
        ("trl-flash4-offload", "flash_attention_4", True)
    ]
    assert {(one["limit"], one["tokens"], one["lora"]) for _, one in adapter.cases(args)} == {(80 * 2**30, 131_072, 16)}


def test_a_rehearsal_is_compared_with_the_real_step(children, tmp_path, capsys):
    out = tmp_path / "rehearse.jsonl"
    assert rehearse.main(["--tiny", "--real", "--json", str(out)]) == 0
    assert [one["system"] for one in children] == ["rehearsal", "megaspan"]
    compared = next(line["compared"] for line in written(out) if "compared" in line)
    assert compared == {"device, tensors": pytest.approx(1.0)}
    assert "rehearsed above real: device, tensors +1.00 %" in capsys.readouterr().out


def test_the_longest_row_is_searched_from_the_plans(children, tmp_path, capsys):
    out = tmp_path / "longest.jsonl"
    assert rehearse.main(["--tiny", "--longest", "--json", str(out)]) == 0
    found = written(out)[-1]
    assert (found["longest"], found["shortest_that_does_not_fit"], found["stopped_by"]) == (384, 448, "backward of layer 1")
    assert len(children) <= 5
    assert "384 tokens" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("border", [100, 6_000, 16_384 * 40, 16_384 * 63 + 5, 16_384 * 64, 16_384 * 90, 10**7])
def test_a_search_closes_in_on_the_border(border):
    tried: list[int] = []

    def fits(tokens: int) -> bool:
        tried.append(tokens)
        return tokens <= border

    low, high = rehearse.search(fits, 2**20, 40)
    assert low <= border
    assert high is None or high > border
    assert high is None or high - low <= 16_384 or low == 0
    assert len(tried) == len(set(tried))
    few: list[int] = []
    rehearse.search(lambda tokens: not few.append(tokens) and tokens <= border, 2**20, 3)
    assert len(few) <= 3


@pytest.mark.parametrize("wrong", ["qwen3-4b", "qwen3-4b,64k,80GiB,1GiB,1", "qwen3-4b,many"])
def test_a_case_that_cannot_be_read_is_refused(wrong):
    with pytest.raises(SystemExit):
        rehearse.arguments([wrong])
    assert rehearse.case_of("qwen3-4b,64k,80GiB") == {"shape": "qwen3-4b", "tokens": 65_536, "limit": 80 * 2**30, "host": 0}


def test_short_rows_run_in_turns_with_one_kernel(tmp_path, capsys, monkeypatch):
    turns: list[str] = []
    inner = short.seconds

    def seconds(model: Any, ids: torch.Tensor) -> float:
        turns.append("ours" if "_megaspan" in model.__dict__ else "plain")
        return inner(model, ids)

    monkeypatch.setattr(short, "seconds", seconds)
    out = tmp_path / "short.jsonl"
    assert short.main(["--tiny", "--tokens", "64", "--json", str(out)]) == 0
    assert turns == ["plain", "ours"] * 10, "two lengths, two turns to warm up and three measured"
    lines = [line for line in written(out) if "ratio" in line]
    assert [line["tokens"] for line in lines] == [64, 128]
    assert all(line["ratio"] == pytest.approx(line["megaspan"] / line["plain"]) for line in lines)
    assert "CPU flash" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU is the point")
@pytest.mark.parametrize(
    "command",
    [depth.main, adapter.main, short.main, kernels.main, hiding.main, lambda given: rehearse.main(["tiny,64", *given])],
)
def test_without_a_gpu_they_say_so_at_once(command, capsys):
    assert command([]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_kernels_are_timed_by_the_pairs_that_a_mask_shows(tmp_path):
    out = tmp_path / "kernels.jsonl"
    assert kernels.main(["--tiny", "--json", str(out)]) == 0
    lines = [line for line in written(out) if "kernel" in line]
    assert {line["mask"] for line in lines} == set(kernels.MASKS)
    ran = {(line["kernel"], line["mask"]): line for line in lines if "why" not in line}
    assert {mask for name, mask in ran if name == "tiled matrix products"} == set(kernels.MASKS), "it knows every mask"
    slow = kernels._measured(TiledMath(), "tiny", "causal", 40_000, 1)
    assert slow["why"] == "takes minutes, timed up to 32,768 tokens"
    pairs = {
        "causal": 96 * 97 // 2,
        "window 1024": 32 * 33 // 2 + 64 * 32,
        "64 documents": 32 * 1 + 32 * 3,
    }  # 32 documents of one token, 32 of two
    for mask, count in pairs.items():
        line = ran["tiled matrix products", mask]
        assert line["forward TFLOP/s"] * line["forward seconds"] == pytest.approx(4 * count * 4 * 16 / 1e12)
        assert line["backward TFLOP/s"] * line["backward seconds"] == pytest.approx(10 * count * 4 * 16 / 1e12)
    assert ran["tiled matrix products", "causal"]["error"] == 0
    assert 0 < ran["CPU flash", "causal"]["error"] < 1e-5
    assert all(line["why"] for line in lines if "forward seconds" not in line)


def test_compare_takes_a_limit_by_either_name_and_masters():
    for name in ("--limit", "--memory-limit"):
        args = compare.arguments([name, "80GiB", "--masters", "--peers", "trl-default"])
        assert all(one["limit"] == 80 * 2**30 and one["masters"] for _, one in compare.cases(args))
    assert "fp32 masters" in compare.show([Outcome("megaspan", case.TINY | {"tokens": 1}, device="H200")], args)
