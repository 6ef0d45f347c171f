"""Facts: parameters counted to the last one against transformers, shapes with the public values, refusals in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megaspan.human import UserError
from megaspan.plan.facts import ModelFacts, model_facts, proxy_to_the_hub, read_config, shape_names
from megaspan.plan.families import FAMILIES
from tests import models

SIZES: dict[str, Any] = {
    "vocab_size": 104,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MORE: dict[str, dict[str, Any]] = {
    "cohere": {"use_qk_norm": True},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "decoder_sparse_step": 2},
    "gpt_oss": {"num_local_experts": 4},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
}


def on_meta(config: Any) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def check(config: Any) -> ModelFacts:
    model = on_meta(config)
    facts = ModelFacts.from_config(config.to_dict())
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    assert list(facts.layer_parameters) == layers
    assert facts.exact
    return facts


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_known_family_is_counted_exactly(family: str) -> None:
    for tied in (False, True):
        check(AutoConfig.for_model(family, **{**SIZES, **MORE.get(family, {}), "tie_word_embeddings": tied}))


@pytest.mark.parametrize("switch", ["attention_bias", "mlp_bias", "use_bias", "qkv_bias", "attention_out_bias"])
def test_biases_follow_their_switch(switch: str) -> None:
    for family, parts in FAMILIES.items():
        if switch in (parts.qkv_bias, parts.out_bias, parts.mlp_bias):
            for value in (True, False):
                check(AutoConfig.for_model(family, **{**SIZES, **MORE.get(family, {}), switch: value}))


@pytest.mark.parametrize("family", models.FAMILIES)
def test_the_shared_tiny_models_are_counted_exactly(family: str) -> None:
    config = models.tiny_config(family, layers=3)
    facts = check(config)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        assert facts.layer_types == tuple(kinds)


def test_an_unknown_family_says_that_it_is_a_guess() -> None:
    facts = ModelFacts.from_config({**SIZES, "model_type": "never-heard-of"})
    assert not facts.exact
    assert facts.parameters > 0


@pytest.mark.parametrize(
    ("name", "parameters"), [("qwen3-0.6b", 596_049_920), ("qwen3-4b", 4_022_468_096), ("qwen3-8b", 8_190_735_360)]
)
def test_shapes_have_the_public_size(name: str, parameters: int) -> None:
    facts = model_facts(name)
    assert facts.parameters == parameters
    config = AutoConfig.for_model(**read_config(name))
    assert sum(p.numel() for p in on_meta(config).parameters()) == parameters
    assert (facts.max_positions, facts.vocab, facts.head_dim, facts.window) == (40_960, 151_936, 128, None)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1_000_000}


def test_layer_types_of_old_configurations_are_those_of_transformers() -> None:
    """Files of before transformers 5 say only a window and a pattern."""
    for family in ("gemma2", "gemma3_text", "cohere2", "mistral", "gpt_oss", "olmo3", "exaone4"):
        settings = {**SIZES, **MORE.get(family, {}), "num_experts_per_tok": 1, "num_hidden_layers": 12, "sliding_window": 8}
        new = AutoConfig.for_model(family, **settings)
        facts = ModelFacts.from_config({**settings, "model_type": family})
        assert facts.window == 8
        if getattr(new, "layer_types", None):
            assert facts.layer_types == tuple(new.layer_types), family


def test_a_switched_off_window_is_none() -> None:
    facts = ModelFacts.from_config({**SIZES, "model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False})
    assert facts.window is None
    assert facts.span(0) is None


def test_a_folder_a_file_and_a_shape_are_read(tmp_path: Path) -> None:
    config = {**SIZES, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(str(tmp_path)) == read_config(str(tmp_path / "config.json")) == config
    assert set(shape_names()) == {"qwen3-0.6b", "qwen3-4b", "qwen3-8b"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen3-4", "Did you mean qwen3-4b?"),
        ("./nowhere", "Check its spelling"),
        ("a/b/c", "no hub name and no shape; got 'a/b/c'"),
        ("modle", "Did you mean model?"),
        ("./modle", "Did you mean model?"),
    ],
)
def test_a_name_that_is_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="model_name_or_path is no folder in /") as error:
        read_config(name)
    assert words in str(error.value)


def test_broken_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json"):
        read_config(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="JSON"):
        read_config(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="no configuration"):
        read_config(str(tmp_path))
    with pytest.raises(
        UserError, match=r"num_hidden_layers of the model's configuration cannot be this; got 'many'; allowed: a whole"
    ):
        ModelFacts.from_config({"model_type": "llama", "num_hidden_layers": "many"})
    sizes = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 8, "num_hidden_layers": 3}
    for more, sentence in (
        ({"layer_types": ["full_attention"]}, "layer_types of the model's configuration names too few layers; got 1"),
        (
            {"num_key_value_heads": 3},
            "num_key_value_heads .* does not divide its num_attention_heads, 4; got 3; allowed: 1, 2, 4",
        ),
        ({"hidden_size": 66}, "hidden_size .* is no multiple of its num_attention_heads, 4; got 66"),
    ):
        with pytest.raises(UserError, match=sentence):
            ModelFacts.from_config(sizes | more)
    with pytest.raises(UserError, match="has no hidden_size"):
        ModelFacts.from_config({"model_type": "llama", "num_hidden_layers": 2})


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"HTTPS_PROXY": "http://me:secret@proxy.corp:3128"}, ", through the proxy proxy.corp:3128 that HTTPS_PROXY names"),
        ({"all_proxy": "proxy.corp:3128"}, ", through the proxy proxy.corp:3128 that ALL_PROXY names"),
        ({"HTTPS_PROXY": "http://proxy.corp:3128", "NO_PROXY": "huggingface.co,hub.corp"}, ""),
        ({"HTTP_PROXY": "http://proxy.corp:3128"}, ""),
        ({}, ""),
    ],
    ids=str,
)
def test_the_proxy_that_fails_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch, variables, told) -> None:
    for name in ("http", "https", "all", "no"):
        monkeypatch.delenv(f"{name}_proxy", raising=False)
        monkeypatch.delenv(f"{name.upper()}_PROXY", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://hub.corp")
    assert proxy_to_the_hub() == told


@pytest.mark.parametrize(("kind", "asks"), [("ConnectError", 2), ("ConnectTimeout", 2), ("ReadTimeout", 1)])
def test_a_machine_without_a_network_says_so_at_once(monkeypatch: pytest.MonkeyPatch, kind: str, asks: int) -> None:
    """The hub's client tries six times, for 24 s; a hub that is only slow is still left to it."""
    import huggingface_hub

    asked: list[str] = []

    def fails(url: str) -> None:
        asked.append(url)
        raise type(kind, (Exception,), {})("Name or service not known")

    def patient(*_: object, **__: object) -> str:
        raise OSError("the patient client was asked")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", fails)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", patient)
    monkeypatch.setattr("time.sleep", lambda _: None)
    with pytest.raises(UserError) as refused:
        read_config("nobody/nothing")
    assert len(asked) == asks
    if kind == "ReadTimeout":
        assert "the patient client was asked" in str(refused.value)
    else:
        assert "hub cannot be reached: Name or service not known. Give a model folder" in str(refused.value)
        assert "hf download nobody/nothing" in str(refused.value)


def test_a_name_that_is_not_cached_and_may_not_be_fetched_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"not in the hub's cache, and HF_HUB_OFFLINE=1 forbids .* hf download nobody/nothing"):
        read_config("nobody/nothing")
