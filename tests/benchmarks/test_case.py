"""Cases at toy size in this process: a short first row, adapters, masters, rehearsals; the same options on both sides."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import case

CASE: dict[str, Any] = {
    "system": "megaspan", "shape": "tiny", "layers": 1, "tokens": 96, "steps": 1, "limit": 0, "offload": True,
    "selective": False, "attention": "sdpa", "warm": 32,
}  # fmt: skip


def results(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    lines = capsys.readouterr().out.splitlines()
    return [json.loads(line.removeprefix("RESULT ")) for line in lines if line.startswith("RESULT ")]


@pytest.mark.parametrize(("warm", "wanted"), [(0, [96]), (32, [32, 96]), (4096, [96, 96])])
def test_a_short_row_comes_first(warm, wanted):
    made = CASE | {"warm": warm}
    assert case.lengths(made) == wanted
    assert [len(row) for row in case.rows(made, 512)["input_ids"]] == wanted


def test_a_profiled_step_comes_last_and_on_top(monkeypatch):
    made = CASE | {"profile": True}
    assert case.lengths(made) == [32, 96, 96]
    assert len(case.watchers(made)) == 1, "there is no GPU to profile"
    monkeypatch.setattr(case.torch.cuda, "is_available", lambda: True)
    clock, profile = case.watchers(made)
    assert clock.profiled == profile.step == 3
    assert len(case.watchers(CASE)) == 1


def test_rows_are_documents_that_begin_anew():
    made = CASE | {"documents": 5, "warm": 3, "layout": "dp2xcp2"}
    rows = case.rows(made, 512)
    assert [len(row) for row in rows["input_ids"]] == [3, 3, 96, 96], "a row for each of two data ranks"
    for row, documents in zip(rows["position_ids"], (3, 3, 5, 5), strict=True):
        begins = [place for place, position in enumerate(row) if position == 0]
        assert len(begins) == documents
        assert all(row[place] == row[place - 1] + 1 for place in range(1, len(row)) if place not in begins)
    assert "position_ids" not in case.rows(CASE, 512).column_names
    assert rows["input_ids"][2] == case.rows(made | {"documents": 0}, 512)["input_ids"][2], "the same row without masks"
    sizes = case.cut(131_072, 64)
    assert (sum(sizes), len(sizes), min(sizes) > 0) == (131_072, 64, True)
    assert max(sizes) > 4 * 2048, "some are many times others"


@pytest.mark.parametrize("more", [{}, {"lora": 2, "clip": 0.0, "host": 2**36}], ids=["all weights", "adapter"])
def test_megaspan_runs_a_case(tmp_path: Path, capsys, more):
    case.run_megaspan(CASE | more, tmp_path)
    found = results(capsys)
    assert [result["step"] for result in found if "step" in result] == [1, 2]
    assert len([result for result in found if "loss" in result]) == 2
    levers = next(result["levers"] for result in found if "levers" in result)
    assert "attention" in [line[0] for line in levers]


@pytest.mark.parametrize("kind", case.KINDS)
def test_few_layers_run_with_dials_that_are_given(tmp_path: Path, capsys, kind, monkeypatch):
    from megaspan import SFTTrainer
    from megaspan.model import levers

    seen = []
    inner = SFTTrainer.train

    def train(self: Any) -> Any:
        placed = levers(self.model)
        assert placed is not None
        seen.append((placed.plan, self._job.plan))
        return inner(self)

    monkeypatch.setattr(SFTTrainer, "train", train)
    dials = {
        "kind": kind,
        "layer_tile_tokens": 40,
        "kv_heads_per_call": 1,
        "stream_back": True,
        "project_ahead": True,
        "again": "host",
        "attends": "host",
    }
    states = {"gradients": "device", "moments": "device"}
    case.run_megaspan(CASE | {"layers": 3, "dials": dials | {"states": states}}, tmp_path)
    ((plan, of_job),) = seen
    assert plan is of_job
    assert (plan.layer_tile_tokens, plan.kv_heads_per_call, plan.stream_back, plan.project_ahead) == (40, 1, True, True)
    assert [case.kind_of(keep) for keep in plan.keep.layers[1:]] == [kind] * 2
    assert plan.keep.layers[0].input == "host"
    assert case.dials_of(plan, kind) == dials | {"states": states}
    losses = [result["loss"] for result in results(capsys) if "loss" in result]
    assert losses == pytest.approx([6.24, 6.24], abs=0.5), "log of 512 words"


def test_a_process_knows_its_age():
    here, begun = case.age(), time.perf_counter()
    assert here == pytest.approx(time.time() - psutil.Process().create_time(), abs=1.5)  # psutil comes with accelerate
    assert case.age() - here == pytest.approx(time.perf_counter() - begun, abs=0.05)


def test_options_reach_megaspans_configuration(tmp_path: Path):
    args = case.settings(CASE | {"lora": 8, "clip": 0.5, "host": 2**36, "offload": False, "options": {"seed": 7}}, tmp_path)
    assert args.seed == 7
    assert (args.use_peft, args.lora_r, args.lora_dropout, args.max_grad_norm) == (True, 8, 0.0, 0.5)
    assert (args.host_memory, args.offload, args.max_length, args.max_steps) == (2**36, False, 96, 2)
    assert json.loads((tmp_path / "shape" / "config.json").read_text())["num_hidden_layers"] == 1


def test_masters_are_fp32_on_a_gpu_only_where_asked_for(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(case.torch.cuda, "is_available", lambda: True)
    assert case.settings(CASE, tmp_path).dtype == "bfloat16"
    assert case.settings(CASE | {"masters": True}, tmp_path).dtype is None
    assert case.settings(CASE | {"lora": 16}, tmp_path).dtype is None, "an adapter's masters are small"
    assert case.settings(CASE | {"limit": 2**36}, tmp_path).memory_limit == 2**36


def test_a_rehearsal_is_a_case(tmp_path: Path, capsys):
    case.run_rehearsal(CASE, tmp_path)
    (found,) = [result for result in results(capsys) if "rehearsal" in result]
    assert found["rehearsal"]["fits"]
    assert found["longest_row"] > 0
    assert "plan" not in found["rehearsal"], "tables of a plan have no place in a line"


@pytest.mark.parametrize("more", [{}, {"lora": 2, "masters": True}], ids=["all weights", "adapter"])
def test_trl_runs_the_same_case(tmp_path: Path, capsys, more, monkeypatch):
    trl = pytest.importorskip("trl")
    seen: list[dict[str, Any]] = []
    inner = trl.SFTTrainer

    def made(**options: Any) -> Any:
        seen.append(options)
        return inner(**options)

    monkeypatch.setattr(trl, "SFTTrainer", made)
    case.run_trl(CASE | {"offload": False} | more, tmp_path)
    assert [result["step"] for result in results(capsys) if "step" in result] == [1, 2]
    (options,) = seen
    assert (options["peft_config"] is None) == (not more)
    assert options["args"].train_sampling_strategy == "sequential", "the short row is the first"
