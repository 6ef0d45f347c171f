"""A prepared model that keeps things on disk: opened, judged, read back, given back."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from megaspan.human import UserError
from megaspan.memory.diskspeed import DiskSpeed
from megaspan.model import disk, levers, prepare, unprepare
from megaspan.plan.facts import ModelFacts, read_config
from megaspan.plan.keep import KeepPolicy, LayerKeep
from megaspan.plan.parts import Settings
from megaspan.plan.seconds import Seconds, SecondsPart, step_seconds
from tests.memory.latedisk import empties
from tests.memory.test_disk import ours
from tests.model.support import plan, settings, step
from tests.models import batch, tiny

LENGTH = 40
MIXED = KeepPolicy((LayerKeep("disk", "disk"), LayerKeep(None, "host"), LayerKeep("host", None)))


def on_disk(keep: KeepPolicy, **changes: Any) -> Any:
    made = plan(**changes)
    made.keep = keep
    made.model.layers = len(keep.layers)
    made.seconds = Seconds((), "unknown")
    return made


@pytest.mark.parametrize("streamed", [True, False])
def test_gradients_are_those_of_plain_levers_and_the_disk_is_given_back(tmp_path: Path, streamed: bool) -> None:
    gc.collect()
    plain, known = tiny("qwen3", layers=3), len(ours())
    inputs = batch(LENGTH)
    here = prepare(copy.deepcopy(plain), settings(), on_disk(KeepPolicy.everything(3, "device"), streamed=streamed))
    keep = MIXED if streamed else KeepPolicy((LayerKeep("disk", None), LayerKeep("host", None), LayerKeep("device", None)))
    there = prepare(copy.deepcopy(plain), settings(offload_folder=str(tmp_path)), on_disk(keep, streamed=streamed))
    live = levers(there)
    live.reserve(there, LENGTH)
    tier = live.disk.tier
    reserved = tier.stats().file_bytes
    assert reserved == (12288 + 12288 + 4096 if streamed else 12288)  # whole pages of an input, an output and its sums
    for _ in range(2):
        (want, wanted), (loss, got) = step(here, **inputs), step(there, **inputs)
        assert loss == want
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)
        assert empties(tier)
        assert tier.stats().file_bytes == reserved
    assert tier.stats().peak == reserved
    live.give_back_disk()
    assert tier.stats().file_bytes == 0
    assert step(there, **inputs)[0] == want
    unprepare(there)
    assert len(ours()) == known
    assert list(tmp_path.iterdir()) == []


def test_the_header_reads_back_what_lies_where(tmp_path: Path) -> None:
    model = prepare(tiny("qwen3", layers=3), settings(offload_folder=str(tmp_path)), on_disk(MIXED))
    levers(model).reserve(model, LENGTH)
    lines = {label: (value, reason) for label, value, reason in levers(model).read_back()}
    assert lines["layer inputs"][0] == "1 on the host, 1 on disk, 1 computed again"
    assert lines["attention outputs"][0] == "1 on the host, 1 on disk, 1 computed again"
    value, reason = lines["disk"]
    assert value == f"28.0 KiB in {tmp_path}"
    assert "too little to measure its speed" in reason
    copied = copy.deepcopy(model)
    assert levers(copied).disk is levers(model).disk
    unprepare(model)


def test_an_unused_folder_is_said(tmp_path: Path) -> None:
    """No option is accepted and ignored."""
    model = prepare(tiny("qwen3"), settings(offload_folder=str(tmp_path)), plan())
    assert ("disk", "not used") in {(label, value) for label, value, _ in levers(model).read_back()}
    assert levers(model).disk is None
    unprepare(model)


@pytest.mark.parametrize("again", ["host", "disk"])
def test_a_plan_with_a_disk_needs_a_folder(again: Any) -> None:
    keep = KeepPolicy((LayerKeep("host", None), LayerKeep(None, None)), again)
    if again == "disk":
        with pytest.raises(UserError, match="no folder is named"):
            prepare(tiny("qwen3"), settings(), on_disk(keep))
    else:
        unprepare(prepare(tiny("qwen3"), settings(), on_disk(keep)))


def seconds(total: float) -> Seconds:
    return Seconds((SecondsPart("attention", total, ""), SecondsPart("waiting for the disk", 1e9, "assumed")), "")


def test_the_planners_own_guess_has_the_name_that_is_left_out() -> None:
    facts = ModelFacts.from_config(read_config("qwen3-8b"))
    keep = KeepPolicy.everything(facts.layers, "disk")
    made = Settings(2**17, True, 2, False, True, True, True, 2048, keep, streamed=True)
    assert disk._WAITING in {part.name for part in step_seconds(facts, made, "NVIDIA H200").parts}


def test_a_slow_disk_is_refused_and_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step's seconds are those without the planner's own guess of the disk."""
    asked = []

    def slow(folder: Path, *, bytes: int, allow_network: bool) -> DiskSpeed:
        asked.append(bytes)
        return DiskSpeed(10 * 2**10, 10 * 2**10)

    monkeypatch.setattr(disk, "measure", slow)
    monkeypatch.setattr(disk, "_LEAST", 1)
    model, args = tiny("qwen3", layers=3), settings(offload_folder=str(tmp_path))
    made = on_disk(MIXED)
    made.seconds = seconds(10.0)
    gc.collect()
    known = len(ours())
    with pytest.raises(UserError, match="too slow"):
        prepare(model, args, made)
    assert levers(model) is None
    assert not any("_gradient_checkpointing_func" in layer.__dict__ for layer in model.model.layers)
    assert len(ours()) == known
    row = 256 * (64 * 4 + 64 * 4 + 4 * 4)
    assert asked == [row]
    made.seconds = seconds(100.0)
    prepare(model, args, made)
    assert levers(model).disk.waits == 0
    assert "no step waits" in levers(model).disk.describe()[1]
    unprepare(model)
    made.seconds = seconds(10.0)
    prepare(model, args.replace(allow_slow_disk=True), made)
    assert levers(model).disk.waits == pytest.approx(2 * row / 10240 - 10, rel=0.01)
    assert "a step waits" in levers(model).disk.describe()[1]
    unprepare(model)


def test_what_is_measured_grows_with_what_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(disk, "measure", lambda folder, *, bytes, allow_network: asked.append(bytes) or DiskSpeed(1e9, 2e9))
    opened = disk.open_disk(settings(offload_folder=str(tmp_path)), MIXED)
    assert opened is not None
    for size in (2**20, 2**27, 2**40):
        opened.judge(size, None, False)
    assert asked == [2**27, 2**30]
    assert "1.00 GB/s written, 2.00 GB/s read; nobody knows" in opened.describe()[1]
    opened.tier.close()
