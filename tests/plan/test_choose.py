"""Plans: what is chosen, whether it fits, the longest row, levers that do nothing (R61, R65, R67, C8, C16)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.config import SFTConfig
from megaspan.human import UserError
from megaspan.plan import Machine, Plan, choose, localdisk, model_facts, plan_command
from megaspan.plan.cost import memory
from megaspan.plan.facts import ModelFacts
from megaspan.plan.fit import Limits, can_fit, fit
from megaspan.plan.keep import KeepPolicy
from megaspan.plan.parts import Settings
from megaspan.plan.seconds import step_seconds
from megaspan.plan.states import StatePlan, state_plans
from megaspan.plan.step import CONTEXT_BYTES, Step

GIB = 2**30
H200 = Machine("NVIDIA H200", 139 * GIB, 128 * GIB, 16)
SMALL = Machine("NVIDIA RTX", 24 * GIB, 32 * GIB, 8)
LAPTOP = Machine("CPU", 0, 16 * GIB, 4)


def plan(tokens: int | str = 131_072, machine: Machine = H200, model: str = "qwen3-4b", **options: Any) -> Plan:
    options = {"dtype": "bfloat16", "model_init_kwargs": {"rope_parameters": "auto"}} | options
    return plan_command(SFTConfig(model_name_or_path=model, max_length=tokens, **options), machine)


def lever(made: Plan, name: str) -> Any:
    return next(each for each in made.levers if each.name == name)


def test_a_plan_adds_up_and_says_what_it_chose() -> None:
    made = plan()
    assert made.fits
    beside = [part.bytes for part in made.parts if part.name in ("CUDA context", "slack")]
    assert len(beside) == 2
    assert made.device_needed == made.device_bytes + sum(beside)
    assert made.device_needed == sum(part.bytes for part in made.parts if part.place == "device")
    assert made.host_bytes == sum(part.bytes for part in made.parts if part.place == "host")
    assert made.device_bytes == dict(made.moments)[made.peak] == max(size for _, size in made.moments)
    assert (made.device_limit, made.host_limit) == (139 * GIB, 128 * GIB)
    assert (made.checkpoint, made.offload, made.loss_tile_tokens) == (True, True, 2048)
    assert "pure bf16" in made.precision
    assert any("yarn 4 x 40,960" in reason for reason in made.reasons)


def test_limits_come_from_the_options_first() -> None:
    assert not plan(memory_limit="12GiB").fits
    assert not plan(host_memory="1GiB").fits
    assert plan(memory_limit="60GiB").fits
    assert plan(machine=LAPTOP, memory_limit="80GiB", host_memory="64GiB").device_limit == 80 * GIB, "a GPU that is elsewhere"


@pytest.mark.parametrize("machine", [H200, SMALL, LAPTOP], ids=lambda machine: machine.device_name)
@pytest.mark.parametrize("offload", [True, False])
def test_the_longest_row_fits_and_one_token_more_does_not(machine: Machine, offload: bool) -> None:
    options: dict[str, Any] = {"gradient_checkpointing_kwargs": {"offload": offload}, "use_cpu": machine is LAPTOP}
    row = plan(model="qwen3-0.6b", machine=machine, **options).longest_row
    assert row > 0
    facts = model_facts("qwen3-0.6b")
    config = SFTConfig(model_name_or_path="qwen3-0.6b", max_length=row, dtype="bfloat16", **options)
    assert choose(config, facts, machine).fits
    assert not choose(config, facts, machine, longest=row + 1).fits


def test_what_does_not_fit_names_a_lever_that_does() -> None:
    little: dict[str, Any] = {"memory_limit": "40GiB", "host_memory": "40GiB", "tokens": 8192}
    made = plan(**little, dtype="float32")
    assert not made.fits
    assert made.next_lever is not None
    assert (made.next_lever.do, made.suffices) == ("dtype: bfloat16", True)
    assert plan(**little, dtype="bfloat16").fits

    tight: dict[str, Any] = {"memory_limit": "26GiB", "tokens": "256k"}
    made = plan(**tight, gradient_checkpointing_kwargs={"offload": False})
    assert not made.fits
    assert made.next_lever is not None
    assert "offload: true" in made.next_lever.do
    assert made.next_lever.saves > 10 * GIB
    assert plan(**tight).fits

    made = plan(tokens="4M", memory_limit="45GiB")
    assert made.next_lever is not None
    assert (made.next_lever.do, made.suffices) == (f"max_length: {made.longest_row}", True), "no lever alone is enough"
    assert plan(tokens=made.longest_row, memory_limit="45GiB").fits

    made = plan(host_memory="20GiB", tokens="256k")
    assert made.fits, "more stays on the device"
    made = plan(host_memory="3GiB", tokens=8192)
    assert not made.fits
    assert made.next_lever is None, "the process alone needs more"
    assert "no lever" in made.render()


def test_dials_are_turned_from_the_cheapest() -> None:
    """All heads a call and whole fetches while they fit; then those; inputs are given up before outputs, outputs last."""
    roomy = plan(tokens="256k")
    assert (roomy.streamed, roomy.kv_heads_per_call, roomy.layer_tile_tokens, roomy.stream_back) == (True, None, 16_384, False)
    assert (roomy.keep.outputs, roomy.keep.runs_again) == (36, 0)
    tight = plan(tokens="256k", memory_limit="36GiB", offload_optimizer=False)
    assert tight.fits
    assert tight.kv_heads_per_call is not None
    assert tight.stream_back
    assert tight.keep.outputs == 36
    assert tight.project_ahead
    assert tight.keep.runs_again <= 1, "the host holds what it held, but for the room of the heads that are made ahead"
    assert any("KV heads a call" in reason for reason in tight.reasons)
    segments = plan(tokens="256k", memory_limit="60GiB", host_memory="80GiB")
    assert segments.fits
    assert segments.keep.outputs == 36
    assert 0 < segments.keep.runs_again < 36
    little = plan(tokens="256k", memory_limit="48GiB", host_memory="50GiB")
    assert little.fits
    assert 0 < little.keep.outputs < 36
    assert any("runs forward twice" in reason for reason in little.reasons)
    assert little.host_bytes <= 50 * GIB
    assert "for want of room" in little.summary
    assert roomy.summary.startswith("every layer keeps its input and attention's output")
    seconds = [each.seconds.total or 0 for each in (roomy, tight, segments, little)]
    assert seconds[0] > 0
    assert seconds == sorted(seconds), "inputs read in tiles beside attention cost less than 30 layers' token-wise work"


def test_what_fits_on_the_device_stays_there_before_anything_is_computed_twice() -> None:
    made = plan(tokens="256k", host_memory="60GiB")
    assert (made.keep.outputs, made.keep.runs_again) == (36, 0)
    assert made.keep_on_device > 10
    assert any("want of host memory" in reason for reason in made.reasons)


def test_states_move_where_nothing_fits_otherwise() -> None:
    assert plan().states == StatePlan("device", "device")
    assert plan(memory_limit="34GiB").states == StatePlan("host", "device"), "16 bits a parameter, before 32"
    assert any("on the device there is no room" in reason for reason in plan(memory_limit="34GiB").reasons)
    assert plan(memory_limit="25GiB").states == StatePlan("device", "host")
    assert not any("step faster" in reason for reason in plan(memory_limit="25GiB").reasons), "nothing else fits"
    assert plan(memory_limit="17GiB").states == StatePlan("host", "host")
    assert plan(memory_limit="25GiB", max_grad_norm=0).states.gradients == "update"
    assert plan(max_grad_norm=0).device_bytes < plan().device_bytes
    assert any("in the backward" in reason for reason in plan(max_grad_norm=0).reasons)
    several = plan(max_grad_norm=0, gradient_accumulation_steps=4)
    assert several.states.gradients == "device"
    assert any("4 rows are summed" in reason for reason in several.reasons)
    moved = plan(memory_limit="34GiB", gradient_accumulation_steps=4)
    assert moved.states == StatePlan("host", "device"), "their sum waits there as well as one row's"
    assert any("the sum of 4 rows" in reason for reason in moved.reasons)
    assert moved.longest_row == pytest.approx(plan(memory_limit="34GiB").longest_row, rel=0.03)
    assert plan(memory_limit="25GiB", use_peft=True).states == StatePlan()
    assert plan(offload_optimizer=True).states == StatePlan("device", "host")
    asked = plan(memory_limit="25GiB", offload_optimizer=False)
    assert asked.states.moments == "device"
    assert not asked.fits
    assert asked.next_lever is not None
    assert (asked.next_lever.do, asked.suffices) == ("offload_optimizer: true", True)


def test_an_update_in_the_backward_is_left_out_where_it_lowers_no_peak() -> None:
    """At the loss there are no gradients yet: a row whose peak is there gains nothing."""
    made = plan(tokens=16_384, max_grad_norm=0, loss_type="nll")
    assert made.peak == "loss"
    assert made.states.gradients == "device"


@pytest.mark.parametrize("asked", [None, True, False])
def test_the_order_of_state_plans(asked: bool | None) -> None:
    def plans(**changes: Any) -> list[tuple[str, str]]:
        given: dict[str, Any] = {"gpu": True, "clips": True, "rows": 1, "adapter": False, "offload_optimizer": asked} | changes
        return [(each.gradients, each.moments) for each in state_plans(**given)]

    moments = {None: ("device", "host"), True: ("host",), False: ("device",)}[asked]
    assert plans() == [(gradients, there) for there in moments for gradients in ("device", "host")]
    assert plans(clips=False) == [("update", there) for there in moments]
    assert plans(clips=False, rows=2) == plans(rows=2) == plans()
    assert plans(gpu=False) == [("device", "device")]
    assert plans(adapter=True) == [("device", "host" if asked else "device")]


def test_a_disk_takes_the_lowest_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil
    from types import SimpleNamespace

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=500 * GIB))
    tight: dict[str, Any] = {"tokens": "512k", "memory_limit": "60GiB", "host_memory": "90GiB"}
    without, made = plan(**tight), plan(**tight, offload_folder=str(tmp_path))
    assert without.keep.runs_again
    assert (made.keep.outputs, made.keep.runs_again) == (36, 0)
    places = [layer.input for layer in made.keep.layers]
    count = places.count("disk")
    assert places[:count] == ["disk"] * count
    assert 0 < count < 36
    assert sum(part.bytes for part in made.parts if "on disk" in part.name) >= count * made.tokens * 2560 * 2
    assert any("wait on disk" in reason for reason in made.reasons)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=GIB))
    assert "disk" not in plan(**tight, offload_folder=str(tmp_path)).keep.places, "a full disk holds nothing"


def test_a_folder_in_memory_or_far_away_is_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training would refuse it: a plan that counts on its bytes would promise a fit."""
    monkeypatch.setattr(localdisk, "kind_of", lambda folder: "tmpfs")
    with pytest.raises(UserError, match=r"lies in memory \(tmpfs\)"):
        plan(offload_folder=str(tmp_path), allow_slow_disk=True)
    monkeypatch.setattr(localdisk, "kind_of", lambda folder: "nfs4")
    with pytest.raises(UserError, match=r"network file system \(nfs4\)"):
        plan(offload_folder=str(tmp_path))
    assert plan(offload_folder=str(tmp_path), allow_slow_disk=True).fits


def test_layers_that_are_not_streamed_keep_inputs_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "unknown", "num_hidden_layers": 8, "hidden_size": 1024, "num_attention_heads": 8,
        "intermediate_size": 3072, "vocab_size": 32_064,
    }))  # fmt: skip
    made = plan(tokens="64k", model=str(tmp_path), model_init_kwargs=None, memory_limit="16GiB", host_memory="6GiB")
    assert not made.streamed
    assert (made.keep.outputs, made.keep.runs_again, made.kv_heads_per_call, made.stream_back) == (0, 0, None, False)
    assert "run whole again" in made.summary


def test_windows_keep_outputs_of_layers_that_see_everything_first() -> None:
    facts = model_facts("qwen3-4b")
    types = ("sliding_attention",) * 30 + ("full_attention",) * 6
    facts = replace(facts, layer_types=types[::-1], window=4096)
    s = Settings(262_144, True, 2, False, True, True, True, 2048, streamed=True)
    policy = fit(facts, s, Limits(50 * GIB, 25 * GIB)).settings.policy(36)
    assert 0 < policy.outputs < 36
    kept = [layer.output is not None for layer in policy.layers]
    assert all(kept[:6])


def test_the_goals_of_one_gpu_fit() -> None:
    """8B at a million tokens inside 80 GiB of device and 128 GiB of host; 4B at 262,144 under 40 and 524,288 under 80."""
    for model, tokens, device, host in (
        ("qwen3-8b", "1M", "80GiB", "128GiB"),
        ("qwen3-8b", "1M", "80GiB", "256GiB"),
        ("qwen3-4b", "256k", "40GiB", "128GiB"),
        ("qwen3-4b", "512k", "80GiB", "128GiB"),
    ):
        assert plan(tokens, model=model, memory_limit=device, host_memory=host).fits, (model, tokens, device, host)
    short = plan("1M", model="qwen3-8b", memory_limit="80GiB", host_memory="128GiB")
    assert short.keep.runs_again > 20
    assert short.states.moments == "host"
    assert plan("1M", model="qwen3-8b", memory_limit="80GiB", host_memory="256GiB").keep.outputs > 20


def test_limits_say_where_they_come_from() -> None:
    machine = replace(H200, host_source="cgroup limit")
    assert plan(machine=machine).limits_from == ("the GPU", "cgroup limit")
    assert plan(machine=machine, memory_limit="60GiB", host_memory="64GiB").limits_from == ("memory_limit", "host_memory")
    assert "of 128.0 GiB (cgroup limit)" in plan(machine=machine).render()


def test_heads_are_projected_ahead_where_their_input_comes_by_tiles_and_there_is_room() -> None:
    """4B at 262,144 tokens in 40 GiB on an H200, as measured there: 3 s of copies less, for 0.6 GB beside attention."""
    made = plan("256k", memory_limit="40GiB", host_memory="120GiB", dtype="bfloat16")
    assert made.fits
    assert made.stream_back
    assert made.project_ahead
    assert any("made of it while these are attended" in reason for reason in made.reasons)
    assert not any(part.name == "fetching by tiles" for part in made.seconds.parts), "every output is kept: none is waited for"
    assert made.as_dict()["project_ahead"] is True
    context = next(part for part in made.parts if part.name == "CUDA context")
    assert context.bytes > CONTEXT_BYTES, "tiles on a stream of their own"
    assert not plan("256k", dtype="bfloat16").project_ahead, "what comes back whole comes a layer ahead"
    packed = plan("256k", memory_limit="40GiB", host_memory="120GiB", dtype="bfloat16", packing_strategy="bfd")
    assert packed.fits
    assert not packed.project_ahead, "head groups of several documents are not made ahead"
    tight = plan(str(made.longest_row), memory_limit="40GiB", host_memory="120GiB", dtype="bfloat16")
    assert tight.fits
    assert not tight.project_ahead, "the longest row has no room for it"


def test_the_table_of_what_is_kept_names_every_layer_once() -> None:
    made = plan("1M", model="qwen3-8b", memory_limit="80GiB", host_memory="128GiB")
    rows = made.kept
    numbers = [int(number) for row in rows for number in re.findall(r"\d+", row[0].split(",")[0])]
    assert numbers[0] == 1
    assert numbers[-1] == 36
    x, out = made.tokens * 4096 * 2, made.tokens * (4096 * 2 + 32 * 4)
    inputs = sum(layer.input is not None for layer in made.keep.layers)
    assert sum(row[2] for row in rows) == inputs * x + made.keep.outputs * out
    text = made.render()
    assert "What is kept for the backward" in text
    assert re.search(r"layers 1-\d+.* input of (layer 1|the first of each) on the (host|device)", text)
    assert json.loads(json.dumps(made.as_dict()))["segments"] == [len(segment) for segment in made.keep.segments]
    few = plan(tokens=4096).kept
    assert [row[0] for row in few] == ["layers 1-36"]


def test_a_host_too_small_keeps_inputs_on_the_device() -> None:
    made = plan(host_memory="12GiB")
    assert made.fits
    assert made.keep_on_device > plan().keep_on_device
    assert made.host_bytes <= 12 * GIB


@pytest.mark.parametrize("streamed", [True, False])
def test_inputs_that_stay_on_the_device_do_not_raise_the_peak(streamed: bool) -> None:
    facts = model_facts("qwen3-4b")
    wished = Settings(65_536, True, 2, False, True, True, True, 2048, streamed=streamed)
    found = fit(facts, wished, Limits(139 * GIB, 128 * GIB))
    stay = found.settings.policy(36).keep_on_device
    assert 0 < stay < facts.layers

    def device(last: int) -> int:
        away, here = (KeepPolicy.everything(36, place, outputs=streamed).layers for place in ("host", "device"))  # type: ignore[arg-type]
        return memory(facts, replace(found.settings, keep=KeepPolicy(away[: 36 - last] + here[:last]))).device_bytes

    assert found.used.device_bytes == device(0)
    assert device(stay + 1) > device(0)


def test_offload_at_short_length_does_nothing_and_is_off_by_itself() -> None:
    """R65, R67, C16: the peak is elsewhere, so nothing is moved; the plan says from where on it helps."""
    made = plan(tokens=4096)
    assert made.keep_on_device == made.model.layers
    assert not any("pinned" in part.name for part in made.parts)
    assert any("offload moves nothing" in reason for reason in made.reasons)
    offload = lever(made, "offload")
    assert offload.saves == 0
    assert 4096 < offload.from_tokens < 131_072
    assert lever(plan(tokens=offload.from_tokens), "offload").saves > 0
    assert f"does nothing at 4,096 tokens, the peak is elsewhere; saves from {offload.from_tokens:,}" in made.render()


def test_a_small_vocabulary_gains_nothing_from_the_chunked_loss(tmp_path: Path) -> None:
    """R61: 32,777 words at 2,048 tokens: the peak is the end of the backward, not the logits."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 32_777,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = plan(tokens=2048, model=str(tmp_path), model_init_kwargs=None)
    chunked = lever(made, "chunked loss")
    assert chunked.on
    assert chunked.saves == 0
    assert re.search("chunked loss +on: does nothing at 2,048 tokens", made.render())
    assert lever(plan(tokens=32_768, model_init_kwargs=None), "chunked loss").saves > 50 * GIB


def test_precision_of_every_wish() -> None:
    def states(**options: Any) -> float:
        made = plan(tokens=1024, model="qwen3-0.6b", **options)
        return dict(made.moments)["optimizer"] / made.model.parameters

    assert 8 < states() < 10
    assert 18 < states(dtype=None) < 20.5
    assert 18 < states(dtype="float32") < 20.5
    assert 2 < states(use_peft=True) < 4
    assert "fp32" in plan(tokens=1024, machine=LAPTOP, dtype=None).precision
    assert "fp32 masters" in plan(tokens=1024, dtype=None).precision


def test_lora_counts_what_peft_makes() -> None:
    peft = pytest.importorskip("peft")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from megaspan.plan.adapter import adapter_size

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = AutoConfig.for_model("qwen3", vocab_size=64, num_hidden_layers=3, **sizes)
    for targets in (None, ("q_proj", "down_proj"), ("all-linear",), ("lm_head", "o_proj")):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        wanted = "all-linear" if targets == ("all-linear",) else list(targets) if targets else None
        made = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=wanted, task_type="CAUSAL_LM"))
        trained = sum(p.numel() for p in made.parameters() if p.requires_grad)
        wish = SFTConfig(max_length=8, use_peft=True, lora_r=4, **({"lora_target_modules": targets} if targets else {}))
        assert adapter_size(ModelFacts.from_config(config.to_dict()), wish)[0] == trained, targets


def test_a_row_past_the_window_is_refused_before_any_byte_is_counted() -> None:
    with pytest.raises(UserError, match="rope_parameters: auto"):
        plan(model_init_kwargs=None)
    assert plan(model_init_kwargs=None, allow_past_window=True).fits
    with pytest.raises(UserError, match="no model"):
        plan_command(SFTConfig(max_length=8), H200)


def test_what_training_would_refuse_is_refused_by_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    with pytest.raises(UserError, match="one token has nothing to train"):
        plan(tokens=1)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name))
    with pytest.raises(UserError, match="bitsandbytes, which is not installed"):
        plan(optim="adamw_8bit")
    assert plan(optim="adamw_8bit", machine=LAPTOP, memory_limit="80GiB").fits, "a GPU elsewhere has packages of its own"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True if name == "bitsandbytes" else find(name))
    assert plan(optim="adamw_8bit").fits


def test_what_the_host_has_for_layers_is_the_rest() -> None:
    """States that lie there and the process are no layer's."""
    made = plan(host_memory="100GiB", offload_optimizer=True)
    others = [part.bytes for part in made.parts if part.place == "host" and not part.name.startswith(("layer", "attention"))]
    assert sum(others) > 15 * GIB
    assert made.host_for_layers == 100 * GIB - sum(others)
    assert plan(host_memory="3GiB", tokens=8192).host_for_layers < 1


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"memory_limit": "1MiB"}, "the CUDA context alone takes 768.0 MiB, and memory_limit says 1.0 MiB"),
        ({"host_memory": "1MiB"}, "the process alone takes 4.0 GiB, and host_memory says 1.0 MiB"),
        ({"host_memory": "1MiB", "use_cpu": True}, "the process alone takes 1.0 GiB, and host_memory says 1.0 MiB"),
    ],
    ids=str,
)
def test_a_limit_that_an_empty_program_exceeds_has_no_lever(limits: dict[str, Any], words: str) -> None:
    made = plan(tokens=8192, model="qwen3-0.6b", **limits)
    assert not made.fits
    assert made.next_lever is None
    assert f"{words}: no lever changes that" in made.reasons
    assert not any("alone takes" in reason for reason in plan(tokens=8192).reasons)


def test_overrides_of_the_configuration_are_planned() -> None:
    made = plan(model_init_kwargs={"num_hidden_layers": 4, "rope_parameters": "auto"})
    assert made.model.layers == 4
    assert made.device_bytes < plan().device_bytes


def test_a_cpu_keeps_everything_on_the_host() -> None:
    made = plan(tokens=4096, machine=LAPTOP, model="qwen3-0.6b", dtype=None)
    assert (made.device_bytes, made.device_limit) == (0, 0)
    assert {part.place for part in made.parts} == {"host", "disk"}
    assert made.seconds.total is None
    assert "unknown" in made.seconds.note
    assert plan(tokens=4096, machine=H200, use_cpu=True, model="qwen3-0.6b", dtype=None).device_limit == 0


@pytest.mark.parametrize(
    ("tokens", "kernel", "measured"),
    [
        (32_768, "cuDNN", 5.1),
        (65_536, "cuDNN", 15.3),
        (131_072, "cuDNN", 52.0),
        (262_144, "cuDNN", 201.6),
        (131_072, "flash-attn-4", 46.1),
    ],
)
def test_seconds_are_near_what_plain_checkpointing_takes(tokens: int, kernel: str, measured: float) -> None:
    s = Settings(tokens, True, 2, False, True, False, True, 2048)
    made = step_seconds(model_facts("qwen3-4b"), s, "NVIDIA H200", kernel)
    assert made.total == pytest.approx(measured, rel=0.09)
    assert all(part.formula for part in made.parts)


def test_seconds_are_unknown_without_a_measured_gpu() -> None:
    made = plan(tokens=4096, machine=SMALL, model="qwen3-0.6b")
    assert made.seconds.total is None
    assert "NVIDIA RTX" in made.render()


def test_windows_cost_less_time() -> None:
    facts = model_facts("qwen3-4b")
    s = Settings(131_072, True, 2, False, True, False, True, 2048)
    windowed = replace(facts, layer_types=("sliding_attention",) * 36, window=4096)
    full, short = (step_seconds(each, s, "NVIDIA H200").parts[0].seconds for each in (facts, windowed))
    assert short / full == pytest.approx(2 * 4096 / 131_072, rel=0.03)


def test_the_dictionary_is_json_with_every_choice() -> None:
    made = plan()
    back = json.loads(json.dumps(made.as_dict()))
    assert back["fits"] is True
    assert back["device_bytes"] == made.device_bytes
    assert back["keep_on_device"] == made.keep_on_device
    assert all(part["formula"] for part in back["parts"])
    assert back["longest_row"] == made.longest_row


def test_the_tables_answer_in_the_last_lines() -> None:
    text = plan(memory_limit="13GiB").render()
    for words in ("place", "formula", "Moments of a step", "Levers", "Largest single tensor", "DOES NOT FIT", "next lever"):
        assert words in text
    assert all(len(line) <= 200 for line in text.splitlines())
    assert text.splitlines()[-1].startswith("next lever that makes it fit: --nproc 2 --cp_size 2 (2 GPUs;")


def test_a_plan_is_made_without_torch_in_a_fraction_of_a_second() -> None:
    code = """
import resource, sys
from megaspan.config import SFTConfig
from megaspan.plan import Machine, plan_command
config = SFTConfig(model_name_or_path="qwen3-8b", max_length="1M", model_init_kwargs={"rope_parameters": "auto"})
plan_command(config, Machine("NVIDIA H200", 139 * 2**30, 128 * 2**30, 16)).render()
loaded = [name for name in ("torch", "transformers", "datasets", "huggingface_hub") if name in sys.modules]
print(loaded, resource.getrusage(resource.RUSAGE_SELF).ru_utime)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded, seconds = out.rsplit(" ", 1)
    assert loaded == "[]"
    assert float(seconds) < 2.0, "processor time; half of it are imports"


def test_a_search_computes_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan's processor time is made of, without a clock. A plain bisection with every setting of the dials took 660."""
    made, own = [], Step.__init__
    monkeypatch.setattr(Step, "__init__", lambda self, *given: (made.append(1), own(self, *given))[1])
    assert plan("1M", model="qwen3-8b", memory_limit="80GiB", host_memory="128GiB").keep.runs_again
    assert len(made) <= 220


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(256, 1 << 21),
    device=st.integers(8, 200),
    host=st.integers(8, 800),
    offload=st.booleans(),
    model=st.sampled_from(["qwen3-0.6b", "qwen3-8b"]),
)
def test_any_machine_gets_a_consistent_plan(tokens: int, device: int, host: int, offload: bool, model: str) -> None:
    config = SFTConfig(max_length=tokens, gradient_checkpointing_kwargs={"offload": offload})
    made = choose(config, model_facts(model), Machine("a GPU", device * GIB, host * GIB, 8))
    assert not made.fits or (made.device_needed <= made.device_limit and made.host_bytes <= made.host_limit)
    assert made.fits == (made.longest_row >= tokens)
    assert 0 <= made.keep_on_device <= made.model.layers
    assert all(each.saves >= 0 for each in made.levers)
    assert made.render()


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(64, 1 << 21),
    device=st.integers(4, 160),
    host=st.integers(4, 300),
    offload=st.booleans(),
    gpu=st.booleans(),
    streamed=st.booleans(),
    clips=st.booleans(),
)
def test_what_can_fit_is_found(
    tokens: int, device: int, host: int, offload: bool, gpu: bool, streamed: bool, clips: bool
) -> None:
    """The quick question (used for the longest row) and the search for the cheapest dials agree."""
    facts = model_facts("qwen3-0.6b")
    s = Settings(tokens, gpu, 2, True, True, offload, True, 2048, streamed=streamed)
    limits = Limits(device * GIB, host * GIB)
    states = tuple(state_plans(gpu=gpu, clips=clips, rows=1, adapter=False, offload_optimizer=None))
    found = fit(facts, s, limits, states)
    assert found.fits == can_fit(facts, s, limits, states)
    assert limits.hold(found.used) or not found.fits
    again = memory(facts, found.settings)
    assert (found.used.moments, found.used.waiting) == (again.moments, again.waiting)
    group = found.settings.kv_heads_per_call
    assert group is None or facts.kv_heads % group == 0


@pytest.mark.parametrize("host", [112, 116, 120, 124])
def test_fewer_heads_a_call_fit_where_more_do(host: int) -> None:
    """8B at a million tokens in 80 GiB: the output of the layer at work needs the room that inputs would be given."""
    facts, limits = model_facts("qwen3-8b"), Limits(80 * GIB, host * GIB)
    s = Settings(1 << 20, True, 2, False, True, True, True, 2048, streamed=True)
    states = tuple(state_plans(gpu=True, clips=True, rows=1, adapter=False, offload_optimizer=None))
    found = fit(facts, s, limits, states)
    assert found.fits == can_fit(facts, s, limits, states) == (host > 112)
    assert not found.fits or found.settings.kv_heads_per_call == 2 or found.settings.project_ahead, "more than what would do"


@pytest.mark.parametrize(
    ("tokens", "host", "words"),
    [
        (131_072, "1TiB", " (without attention)"),
        (131_072, "12GiB", " (without attention in {kept} of 36 layers)"),
        (1_048_576, "20GiB", ""),
    ],
)
def test_checkpointing_costs_what_the_plan_says_of_attention(tokens: int, host: str, words: str) -> None:
    made = plan(tokens, host_memory=host, memory_limit="60GiB")
    kept = made.keep.outputs
    assert ((kept == 36), (kept == 0)) == ((host == "1TiB"), (words == ""))
    assert lever(made, "checkpointing").cost.startswith("a second forward" + words.format(kept=kept))
    assert ("(" in lever(made, "checkpointing").cost) == bool(words)
