"""Plans: what is chosen, whether it fits, the longest row, levers that do nothing (R61, R65, R67, C8, C16)."""

from __future__ import annotations

import json
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
from megaspan.plan import Machine, Plan, choose, model_facts, plan_command
from megaspan.plan.cost import memory
from megaspan.plan.facts import ModelFacts
from megaspan.plan.fit import Limits, can_fit, fit
from megaspan.plan.parts import Settings
from megaspan.plan.seconds import step_seconds

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
    assert made.device_bytes == sum(part.bytes for part in made.parts if part.place == "device")
    assert made.host_bytes == sum(part.bytes for part in made.parts if part.place == "host")
    assert made.device_bytes == dict(made.moments)[made.peak] == max(size for _, size in made.moments)
    assert (made.device_limit, made.host_limit) == (139 * GIB, 128 * GIB)
    assert (made.checkpoint, made.offload, made.loss_tile_tokens) == (True, True, 2048)
    assert "pure bf16" in made.precision
    assert any("yarn 4 x 40,960" in reason for reason in made.reasons)


def test_limits_come_from_the_options_first() -> None:
    assert not plan(memory_limit="34GiB").fits
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
    made = plan(memory_limit="50GiB", dtype="float32", tokens=8192)
    assert not made.fits
    assert made.next_lever is not None
    assert (made.next_lever.do, made.suffices) == ("dtype: bfloat16", True)
    assert plan(memory_limit="50GiB", dtype="bfloat16", tokens=8192).fits

    made = plan(memory_limit="48GiB", gradient_checkpointing_kwargs={"offload": False})
    assert not made.fits
    assert made.next_lever is not None
    assert "offload: true" in made.next_lever.do
    assert made.next_lever.saves > 10 * GIB
    assert plan(memory_limit="48GiB").fits

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
    """All heads a call and large tiles while they fit; outputs are given up before the row is refused."""
    roomy = plan(tokens="256k")
    assert (roomy.streamed, roomy.kv_heads_per_call, roomy.layer_tile_tokens, roomy.keep_outputs) == (True, None, 16_384, 36)
    tight = plan(tokens="256k", memory_limit="44GiB")
    assert tight.fits
    assert tight.kv_heads_per_call is not None
    assert any("KV heads a call" in reason for reason in tight.reasons)
    little_host = plan(tokens="256k", host_memory="60GiB")
    assert little_host.fits
    assert 0 < little_host.keep_outputs < 36
    assert any("runs forward twice" in reason for reason in little_host.reasons)
    assert little_host.host_bytes <= 60 * GIB


def test_a_host_too_small_keeps_inputs_on_the_device() -> None:
    made = plan(host_memory="12GiB")
    assert made.fits
    assert made.keep_on_device > plan().keep_on_device
    assert made.host_bytes <= 12 * GIB


def test_inputs_that_stay_on_the_device_do_not_raise_the_peak() -> None:
    for streamed in (True, False):
        facts = model_facts("qwen3-4b")
        wished = Settings(65_536, True, 2, False, True, True, 0, True, 2048, streamed=streamed)
        made, used = fit(facts, wished, Limits(139 * GIB, 128 * GIB))
        assert 0 < made.keep_on_device < facts.layers
        bare = memory(facts, replace(made, keep_on_device=0)).device_bytes
        assert used.device_bytes == bare
        assert memory(facts, replace(made, keep_on_device=made.keep_on_device + 1)).device_bytes > bare


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
    assert "chunked loss   on: does nothing at 2,048 tokens" in made.render()
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
    s = Settings(tokens, True, 2, False, True, False, 0, True, 2048)
    made = step_seconds(model_facts("qwen3-4b"), s, "NVIDIA H200", kernel)
    assert made.total == pytest.approx(measured, rel=0.09)
    assert all(part.formula for part in made.parts)


def test_seconds_are_unknown_without_a_measured_gpu() -> None:
    made = plan(tokens=4096, machine=SMALL, model="qwen3-0.6b")
    assert made.seconds.total is None
    assert "NVIDIA RTX" in made.render()


def test_windows_cost_less_time() -> None:
    facts = model_facts("qwen3-4b")
    s = Settings(131_072, True, 2, False, True, False, 0, True, 2048)
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
    text = plan(memory_limit="34GiB").render()
    for words in ("place", "formula", "Moments of a step", "Levers", "Largest single tensor", "DOES NOT FIT", "next lever"):
        assert words in text
    assert all(len(line) <= 200 for line in text.splitlines())
    assert text.splitlines()[-1].startswith("next lever that makes it fit: use_peft: true")


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
    assert float(seconds) < 1.0, "processor time; 0.35 s on a quiet machine"


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
    assert made.fits == (made.device_bytes <= made.device_limit and made.host_bytes <= made.host_limit)
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
)
def test_what_can_fit_is_found(tokens: int, device: int, host: int, offload: bool, gpu: bool, streamed: bool) -> None:
    """The quick question (used for the longest row) and the search for the cheapest dials agree."""
    facts = model_facts("qwen3-0.6b")
    s = Settings(tokens, gpu, 2, True, True, offload, 0, True, 2048, streamed=streamed)
    limits = Limits(device * GIB, host * GIB)
    made, used = fit(facts, s, limits)
    assert limits.hold(used) == can_fit(facts, s, limits)
    assert used == memory(facts, made)
    if made.kv_heads_per_call:
        assert facts.kv_heads % made.kv_heads_per_call == 0
