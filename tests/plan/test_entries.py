"""Values that no model can have: one sentence, of the key, the same in plan and training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megaspan import cli
from megaspan.config import SFTConfig
from megaspan.human import UserError
from megaspan.plan.facts import ModelFacts

GOOD: dict[str, Any] = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2, "hidden_size": 32,
    "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300,
    "max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
OF = "of the model's configuration"
WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"head_dim": 15},
        f"head_dim {OF} is odd, and its rotary positions turn channels in pairs; got 15; allowed: an even number",
    ),
    ({"head_dim": None, "hidden_size": 36}, f"hidden_size / num_attention_heads {OF} is odd"),
    ({"head_dim": 15, "rope_parameters": {"partial_rotary_factor": 1.0}}, f"head_dim {OF} is odd"),
    ({"model_type": "phi", "head_dim": 15}, f"head_dim {OF} is odd"),
    ({"tie_word_embeddings": "yes"}, f"tie_word_embeddings {OF} cannot be this; got 'yes'; allowed: true or false"),
    ({"attention_bias": "no"}, f"attention_bias {OF} cannot be this; got 'no'; allowed: true or false"),
    ({"rms_norm_eps": float("nan")}, f"rms_norm_eps {OF} cannot be this; got nan; allowed: a number of at least 0"),
    ({"rms_norm_eps": -1e-6}, "got -1e-06"),
    ({"rms_norm_eps": "1e-6"}, "got '1e-6'"),
    ({"num_attention_heads": 0}, f"num_attention_heads {OF} cannot be this; got 0; allowed: a whole number of at least 1"),
    ({"num_key_value_heads": 0}, f"num_key_value_heads {OF} cannot be this; got 0"),
    ({"num_key_value_heads": -2}, "got -2"),
    (
        {"num_key_value_heads": 3},
        f"num_key_value_heads {OF} does not divide its num_attention_heads, 4; got 3; allowed: 1, 2, 4",
    ),
    ({"vocab_size": 0}, f"vocab_size {OF} cannot be this; got 0"),
    ({"vocab_size": 300.0}, "got 300.0"),
    ({"intermediate_size": [64, 0]}, f"intermediate_size {OF} cannot be this"),
    ({"sliding_window_pattern": "LG"}, "sliding_window_pattern"),
    ({"max_position_embeddings": "many"}, "max_position_embeddings"),
    ({"sliding_window": -4}, "allowed: a whole number of at least 1, or null"),
    ({"layer_types": "full_attention"}, f"layer_types {OF} is no list of names"),
    ({"dtype": [1]}, "dtype"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}}, "rope_theta in rope_parameters"),
    ({"rope_parameters": {"full_attention": {"rope_theta": -1}}}, "rope_theta in rope_parameters.full_attention"),
    ({"rope_parameters": {"rope_theta": 1e4, "full_attention": {"rope_theta": 1e4}}}, "beside settings of all"),
    ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 0}, "its sliding_window says none; got 0"),
    ({"model_type": "gpt_neox", "hidden_dropout": float("nan")}, "hidden_dropout"),
    ({"num_experts": 4, "num_experts_per_tok": 8}, f"num_experts_per_tok {OF} is more than its 4 experts; got 8"),
]
"""What is wrong with the configuration, and words of the sentence."""


@pytest.mark.parametrize(("changes", "words"), WRONG, ids=lambda value: str(value)[:40])
def test_a_value_that_no_model_can_have(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as refused:
        ModelFacts.from_config({key: value for key, value in (GOOD | changes).items() if value is not None})
    assert words in str(refused.value)
    assert str(refused.value).endswith("Correct it in the model's config.json.")


@pytest.mark.parametrize(
    "changes",
    [{}, {"sliding_window": 0}, {"rms_norm_eps": 0.0}, {"model_type": "gpt2", "head_dim": 15, "rope_parameters": None},
     {"model_type": "glm", "head_dim": 15, "partial_rotary_factor": 0.5}, {"pad_token_id": -1},
     {"sliding_window_pattern": "LG", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},  # Exaone 4
     {"num_local_experts": 0, "num_experts_per_tok": 0}, {"moe_intermediate_size": [64, 64]}],  # Granite 4, Hunyuan
    ids=str,
)  # fmt: skip
def test_a_value_that_some_models_have(changes: dict[str, Any]) -> None:
    ModelFacts.from_config(GOOD | changes)


NULLS: list[tuple[str, dict[str, Any], str]] = [
    ("gemma3_text", {"sliding_window": None}, "sliding_window"),
    ("gemma3_text", {"sliding_window": None, "layer_types": ["full_attention"] * 2}, "sliding_window"),
    ("gemma3_text", {"sliding_window": 8, "attention_dropout": None}, "attention_dropout"),
    ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": None}, "sliding_window_pattern"),
    ("gemma2", {"sliding_window": None}, "sliding_window"),
    ("olmo3", {"sliding_window": None}, "sliding_window"),
    ("gpt_oss", {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2}, "sliding_window"),
    ("cohere2", {"sliding_window": None}, "sliding_window"),
    ("cohere2", {"sliding_window": 8, "head_dim": None, "hidden_size": 64}, "head_dim"),
    ("cohere", {"logit_scale": None}, "logit_scale"),
    ("cohere", {"layer_norm_eps": None}, "layer_norm_eps"),
    ("ministral", {"sliding_window": None}, "sliding_window"),
    ("exaone4", {"sliding_window": None}, "sliding_window"),
    ("exaone4", {"sliding_window": 8, "sliding_window_pattern": None}, "sliding_window_pattern"),
    ("hunyuan_v1_dense", {"head_dim": None, "hidden_size": 64}, "head_dim"),
    ("llama", {"attention_dropout": None}, "attention_dropout"),
]
"""A family, what its file writes as null, and the key to blame."""


@pytest.mark.parametrize(("kind", "changes", "key"), NULLS, ids=lambda value: str(value)[:40])
def test_a_null_that_transformers_computes_with(tmp_path: Path, kind: str, changes: dict[str, Any], key: str) -> None:
    entries = GOOD | {"model_type": kind, "architectures": None, "pad_token_id": None, "eos_token_id": None} | changes
    del entries["rope_parameters"]
    with pytest.raises(UserError, match=rf"^{key} of .*got null.*config\.json"):
        ModelFacts.from_config(entries)
    (tmp_path / "config.json").write_text(json.dumps(entries))  # and plain transformers cannot build or run it
    with pytest.raises((TypeError, ValueError, ZeroDivisionError)):
        _run_plain(tmp_path)


def _run_plain(folder: Path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model(input_ids=torch.arange(3, 12)[None], use_cache=False)


def test_a_pattern_of_one_means_no_windows() -> None:
    """And Exaone's layers may all see everything; Mistral's file says so with a null."""
    gemma = GOOD | {"model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 1}
    exaone = GOOD | {"model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 2}
    mistral = GOOD | {"model_type": "mistral", "sliding_window": None}
    for entries in (gemma, exaone, mistral):
        assert ModelFacts.from_config(entries).layer_types == ("full_attention", "full_attention")


def test_sizes_of_each_layer_are_no_mistake_of_the_file() -> None:
    with pytest.raises(UserError, match=r"intermediate_size .* is one for each layer, .*not supported yet; got \[64, 64\]"):
        ModelFacts.from_config(GOOD | {"intermediate_size": [64, 64]})


def test_no_experts_are_a_dense_mlp() -> None:
    changes = {"model_type": "qwen3_moe", "num_experts": 0, "num_experts_per_tok": 8, "moe_intermediate_size": 16}
    dense = ModelFacts.from_config(GOOD | changes)
    assert dense.experts is None
    assert dense.parameters == ModelFacts.from_config(GOOD).parameters


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 15},
        {"tie_word_embeddings": "yes"},
        {"pad_token_id": 300},
        {"attention_dropout": None},
        {"rope_parameters": {"rope_theta": 1e4, "full_attention": {}}},
    ],
)
def test_plan_and_training_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]) -> None:
    from megaspan.trainer import SFTTrainer

    (tmp_path / "config.json").write_text(json.dumps(GOOD | changes))
    options = {"model_name_or_path": str(tmp_path), "max_length": 256, "use_cpu": True}
    assert cli.main(["plan", *(f"--{name}={value}" for name, value in options.items())]) == 2
    said = capsys.readouterr().err
    assert next(iter(changes)) in said
    with pytest.raises(UserError) as refused:
        SFTTrainer(args=SFTConfig(**options, output_dir=str(tmp_path / "run"), datasets=[{"path": "nothing here"}]))
    assert str(refused.value) in said


def test_a_padding_token_counted_from_the_end_is_taken_by_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """-1 is the last row of the embedding to torch, so plain transformers runs it, and training gets as far as the data."""
    from megaspan.trainer import SFTTrainer

    (tmp_path / "config.json").write_text(json.dumps(GOOD | {"pad_token_id": -1}))
    options = {"model_name_or_path": str(tmp_path), "max_length": 256, "use_cpu": True}
    assert cli.main(["plan", *(f"--{name}={value}" for name, value in options.items())]) == 0
    _run_plain(tmp_path)
    trainer = SFTTrainer(
        args=SFTConfig(**options, output_dir=str(tmp_path / "run"), max_steps=1, save_strategy="no"),
        train_dataset=[{"input_ids": list(range(3, 40))}],
    )
    assert trainer.model.get_input_embeddings().padding_idx == 299
