"""Parameters counted on a model, of any family: the header, the plan and the FLOP have what the model has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megaspan import cli
from megaspan.model import adopt_model, levers, prepare, wrap_lora
from megaspan.model.counted import count, counts_of, facts_of
from megaspan.plan.facts import Counts, ModelFacts
from megaspan.plan.families import Experts
from megaspan.report.flops import linear_weights
from tests.model.support import settings, step
from tests.models import FAMILIES, assert_same_gradients, batch, tiny, tiny_config

SIZES: dict[str, Any] = {
    "vocab_size": 104, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_hidden_layers": 2, "max_position_embeddings": 256, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
# Families that the planner does not know, and the matrices of an MLP. Arcee and Helium have layers of the common form.
UNKNOWN = {"gpt_neox": 2, "phi": 2, "stablelm": 3, "arcee": 2, "helium": 3}


def config_of(family: str) -> Any:
    more = {"head_dim": 16} if family == "helium" else {}
    return AutoConfig.for_model(family, **SIZES, **more)


def built(family: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(family), attn_implementation="eager")


@pytest.mark.parametrize("family", UNKNOWN)
def test_a_family_that_the_planner_does_not_know_is_counted_on_the_model(family: str) -> None:
    model = built(family)
    guess, facts = ModelFacts.from_config(model.config.to_dict()), facts_of(model)
    assert not guess.exact
    assert facts.exact
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    attention, mlp = 4 * 64 * 64, UNKNOWN[family] * 64 * 96
    assert [facts.linear_parameters(layer) for layer in range(2)] == [attention + mlp] * 2
    assert linear_weights(facts) == 2 * (attention + mlp) + 104 * 64
    assert facts.family.gated == (UNKNOWN[family] == 3)
    assert facts.family.streamed == (family in ("arcee", "helium", "stablelm"))


@pytest.mark.parametrize("family", [*FAMILIES, "mixtral", "olmoe", "qwen2_moe"])
def test_what_is_counted_is_what_the_planner_knows(family: str) -> None:
    """Counting without knowing the family is right for every one that is known: routers alone are counted more."""
    model = tiny(family, layers=3)
    facts, counts = ModelFacts.from_config(model.config.to_dict()), count(model, prove=False)
    assert facts.counted(counts) is facts
    for layer, module in enumerate(model.model.layers):
        own = dict(module.named_parameters())
        routers = sum(weight.numel() for name, weight in own.items() if name.endswith(("gate.weight", "router.weight")))
        biases = sum(bias.numel() // 2 for name, bias in own.items() if name.endswith("proj_bias"))  # 2 of 4 experts
        assert counts.linear[layer] == facts.linear_parameters(layer) + routers + biases


def test_experts_of_a_family_that_the_planner_does_not_know() -> None:
    """Their number, width and place, and that their layers stream where a toy proves it; mixtures of another form run whole."""
    facts = facts_of(tiny("glm4_moe", layers=3))
    assert facts.experts == Experts(8, 2, 48, 48, (False, True, True))
    assert facts.family.streamed
    assert facts.active_mlp_width == 3 * 48
    for family in ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe"):
        model = tiny(family, layers=3)
        assert count(model, prove=False).experts == ModelFacts.from_config(model.config.to_dict()).experts
    model: Any = tiny("glm4_moe", layers=3)
    model.model.layers[2].mlp.experts.more = torch.nn.Parameter(torch.ones(8, 7, 5))
    assert facts_of(model).experts is None
    assert not facts_of(model).family.streamed


def test_somebodys_change_of_a_known_model_is_counted() -> None:
    model = tiny("qwen3")
    model.model.layers[1].mlp.more = torch.nn.Linear(64, 64)
    facts = facts_of(model)
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert facts.layer_parameters[1] - facts.layer_parameters[0] == 64 * 65
    assert facts.family == ModelFacts.from_config(model.config.to_dict()).family


def test_adapters_do_not_count() -> None:
    plain = built("phi")
    before = facts_of(plain)
    args = settings(use_peft=True, lora_r=4, lora_target_modules=["fc1"], lora_modules_to_save=["lm_head"])
    assert count(wrap_lora(plain, args)) == Counts(
        before.parameters, before.layer_parameters, before.linear or (), before.family.gated, before.family.streamed
    )


def test_a_model_given_as_an_object_and_one_prepared_without_a_plan() -> None:
    model = built("gpt_neox")
    total = sum(parameter.numel() for parameter in model.parameters())
    assert adopt_model(model, settings(), "cpu").facts.parameters == total
    prepare(model, settings())
    placed = levers(model)
    assert placed is not None
    assert placed.plan.model.parameters == total


def test_a_family_that_the_planner_does_not_know_streams_where_that_is_proven() -> None:
    """By its own plan, and with the gradients of plain transformers."""
    plain, model = built("arcee").double(), built("arcee").double()
    prepare(model, settings())
    placed = levers(model)
    assert placed is not None
    assert placed.checkpointing.stats().streamed == 2  # type: ignore[union-attr]
    data = batch(37, vocab=104)
    want_loss, want = step(plain, **data)
    loss, got = step(model, **data)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert_same_gradients(got, want, 1e-5)


def test_megaspan_plan_counts_on_the_meta_device_or_says_that_it_estimates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a config.json alone; a family that the planner knows loads nothing."""
    place = tmp_path / "config.json"
    place.write_text(json.dumps(config_of("gpt_neox").to_dict() | {"architectures": ["GPTNeoXForCausalLM"]}))
    options = ["plan", f"--model_name_or_path={place}", "--max_length=64", "--use_cpu"]
    cli.main([*options, "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert shown["parameters_exact"]
    assert shown["parameters"] == sum(parameter.numel() for parameter in built("gpt_neox").parameters())
    layers = config_of("gpt_neox")
    layers.num_hidden_layers = 3
    assert counts_of(settings(model_name_or_path=str(place), model_init_kwargs={"num_hidden_layers": 3})) == count(
        AutoModelForCausalLM.from_config(layers)
    )

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("its constructor reads its weights")

    monkeypatch.setattr("megaspan.model.counted.skeleton", broken)
    cli.main(options)
    assert "parameters of gpt_neox are an estimate" in capsys.readouterr().out


def test_a_sharded_skeleton_counts_like_the_model() -> None:
    with torch.device("meta"):
        hollow = AutoModelForCausalLM.from_config(tiny_config("qwen3"))
    assert count(hollow) == count(tiny("qwen3"))


def test_experts_stated_for_each_layer_are_counted_on_the_model(tmp_path: Path) -> None:
    """Hunyuan's files have lists of them, of one number."""
    each = {
        "num_experts": 4,
        "moe_topk": [2, 2],
        "moe_intermediate_size": [96, 96],
        "num_shared_expert": [1, 1],
        "head_dim": 16,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "hunyuan_v1_moe", **SIZES, **each}))
    counts = counts_of(settings(model_name_or_path=str(tmp_path)))
    assert counts is not None
    assert counts.experts == Experts(4, 2, 96, 96, (True, True))
