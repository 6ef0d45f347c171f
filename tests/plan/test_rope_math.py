"""Rotary settings: what a wish becomes, and every sentence of refusal (cases R46, R47, R48, R52)."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaspan.human import UserError
from megaspan.plan.rope_math import resolve_rope
from megaspan.plan.rope_native import read_rope

QWEN3 = {
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}
YARN4 = {
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
}
LLAMA3 = {
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
PHI3 = {
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
}
GEMMA3 = {
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
GEMMA3_SMALL = {
    "max_position_embeddings": 32768,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
GUIDE_1M = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 32768}
GUIDE_160K = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40960}


def refuse(config: dict[str, Any], wish: Any, tokens: int, *, allow: bool = False) -> str:
    with pytest.raises(UserError) as error:
        resolve_rope(config, wish, tokens, allow)
    return str(error.value)


def test_the_guides_million_tokens_pass_and_theta_comes_from_the_model() -> None:
    choice = resolve_rope(QWEN3, GUIDE_1M, 1_048_576, False)
    assert choice.rope_parameters == {**GUIDE_1M, "rope_theta": 1e6}
    assert choice.max_position_embeddings == choice.window == 1_048_576
    assert "yarn 32 x 32,768 = 1,048,576 positions, theta 1,000,000" in choice.reason


def test_the_guides_160k_snippet_passes() -> None:
    choice = resolve_rope(QWEN3, GUIDE_160K, 163_840, False)
    assert choice.rope_parameters == {**GUIDE_160K, "rope_theta": 1e6}
    assert choice.max_position_embeddings == 163_840


def test_theta_of_an_old_config_file_is_found_beside_the_scaling() -> None:
    old = {"max_position_embeddings": 40960, "rope_theta": 1000000, "rope_scaling": None}
    choice = resolve_rope(old, GUIDE_1M, 1_048_576, False)
    assert choice.rope_parameters is not None
    assert choice.rope_parameters["rope_theta"] == 1000000


def test_everything_but_the_scaling_is_kept_from_the_model() -> None:
    config = {
        "max_position_embeddings": 4096,
        "partial_rotary_factor": 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [4, 2, 2]},
    }
    entry = resolve_rope(config, "auto", 8192, False).rope_parameters
    assert entry == {
        "rope_theta": 5e5,
        "mrope_section": [4, 2, 2],
        "partial_rotary_factor": 0.5,
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 4096,
    }


@pytest.mark.parametrize(
    ("tokens", "factor"), [(40_961, 2.0), (81_920, 2.0), (131_072, 4.0), (163_840, 4.0), (1_048_576, 26.0)]
)
def test_auto_rounds_the_factor_up_to_a_whole_number(tokens: int, factor: float) -> None:
    choice = resolve_rope(QWEN3, "auto", tokens, False)
    assert choice.rope_parameters is not None
    assert choice.rope_parameters["factor"] == factor
    assert choice.rope_parameters["original_max_position_embeddings"] == 40960
    assert choice.max_position_embeddings == factor * 40960


def test_auto_and_none_leave_a_row_inside_the_window_alone() -> None:
    for wish in ("auto", None):
        choice = resolve_rope(QWEN3, wish, 40_960, False)
        assert (choice.rope_parameters, choice.max_position_embeddings) == (None, 40_960)
        assert "own window of 40,960" in choice.reason


def test_a_row_past_the_window_prints_three_lines_to_paste() -> None:
    """R52: never extended unasked, never trained past the window without a word."""
    text = refuse(QWEN3, None, 131_072)
    assert "40,960" in text
    assert "131,072" in text
    for line in ("max_length: 40960", "model_init_kwargs: {rope_parameters: auto}", "allow_past_window: true"):
        assert f"\n  {line}" in text


def test_the_pasted_lines_are_yaml_that_work() -> None:
    yaml = pytest.importorskip("yaml")
    lines = refuse(QWEN3, None, 131_072).split("lines:\n")[1].rstrip(".").splitlines()
    parsed = [yaml.safe_load(line) for line in lines]
    assert resolve_rope(QWEN3, None, parsed[0]["max_length"], False).rope_parameters is None
    assert resolve_rope(QWEN3, parsed[1]["model_init_kwargs"]["rope_parameters"], 131_072, False).window == 163_840
    assert resolve_rope(QWEN3, None, 131_072, parsed[2]["allow_past_window"]).max_position_embeddings == 131_072


def test_allow_past_window_says_so_loudly() -> None:
    choice = resolve_rope(QWEN3, None, 131_072, True)
    assert choice.rope_parameters is None
    assert choice.max_position_embeddings == 131_072
    assert "NOT COVERED" in choice.reason
    choice = resolve_rope(QWEN3, GUIDE_160K, 200_000, True)
    assert "NOT COVERED" in choice.reason
    assert choice.max_position_embeddings == 200_000


def test_native_yarn_is_kept_and_never_stacked() -> None:
    """R47: x4 of 32,768 asked for 131,072 stays; asked for 262,144 it becomes factor 8 of 32,768."""
    for wish in ("auto", None):
        assert resolve_rope(YARN4, wish, 131_072, False).rope_parameters is None
    choice = resolve_rope(YARN4, "auto", 262_144, False)
    assert choice.rope_parameters == {**YARN4["rope_parameters"], "factor": 8.0}  # type: ignore[dict-item]
    assert choice.max_position_embeddings == 262_144


def test_stacking_by_hand_is_refused_with_the_right_numbers() -> None:
    """R47: the 131,072 of the file contain the factor already."""
    text = refuse(YARN4, {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 131072}, 262_144)
    assert "already scaled 4 x 32,768" in text
    assert "factor: 8.0 and original_max_position_embeddings: 32768" in text


def test_an_attention_factor_computed_for_the_old_factor_is_computed_anew() -> None:
    entry = {**YARN4["rope_parameters"], "attention_factor": 0.1 * math.log(4) + 1}  # type: ignore[dict-item]
    new = resolve_rope({**YARN4, "rope_parameters": entry}, "auto", 262_144, False).rope_parameters
    assert new is not None
    assert "attention_factor" not in new
    own = resolve_rope({**YARN4, "rope_parameters": {**entry, "attention_factor": 1.0}}, "auto", 262_144, False).rope_parameters
    assert own is not None
    assert own["attention_factor"] == 1.0


def test_linear_scaling_of_gemma_keeps_its_kind_and_the_sliding_entry() -> None:
    """R48: only the full-attention entry changes; 131,072 contains the factor 8 of 16,384 already."""
    choice = resolve_rope(GEMMA3, "auto", 262_144, False)
    assert choice.rope_parameters == {
        "full_attention": {"rope_type": "linear", "factor": 16.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert choice.max_position_embeddings == 262_144
    assert "full_attention layers only" in choice.reason


@pytest.mark.parametrize("wish", ["auto", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}])
def test_one_wish_reaches_only_the_full_attention_layers(wish: Any) -> None:
    """R48: T-sw with two rotary entries, extended x4."""
    choice = resolve_rope(GEMMA3_SMALL, wish, 131_072, False)
    assert choice.rope_parameters is not None
    assert choice.rope_parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}
    assert choice.rope_parameters["full_attention"] == {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    }


def test_a_wish_per_layer_type_may_not_touch_sliding_layers() -> None:
    full = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    same = {"full_attention": full, "sliding_attention": {"rope_type": "default"}}
    assert resolve_rope(GEMMA3_SMALL, same, 131_072, False).window == 131_072
    assert "sliding_attention" in refuse(GEMMA3_SMALL, {**same, "sliding_attention": full}, 131_072)
    assert "no layer type" in refuse(QWEN3, {"full_attention": full}, 131_072)


def test_gemma_as_written_before_transformers_5() -> None:
    old = {
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    assert resolve_rope(old, "auto", 262_144, False).rope_parameters == {
        "full_attention": {"rope_type": "linear", "factor": 16.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }


def test_llama3_is_kept_and_auto_says_what_is_possible() -> None:
    assert resolve_rope(LLAMA3, None, 131_072, False).rope_parameters is None
    text = refuse(LLAMA3, "auto", 262_144)
    assert "llama3" in text
    assert "max_length: 131072" in text
    assert "factor: 16.0" in text
    assert "allow_past_window: true" in text
    yaml = pytest.importorskip("yaml")
    pasted = yaml.safe_load(next(line for line in text.splitlines() if "model_init_kwargs" in line))
    choice = resolve_rope(LLAMA3, pasted["model_init_kwargs"]["rope_parameters"], 131_072, False)
    assert choice.rope_parameters is not None
    assert choice.rope_parameters["rope_theta"] == 500000.0


def test_an_explicit_dictionary_replaces_native_scaling_and_says_so() -> None:
    """R46: native scaling is kept unless the user says replace."""
    wish = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 8192}
    choice = resolve_rope(LLAMA3, wish, 262_144, False)
    assert choice.rope_parameters == {**wish, "rope_theta": 500000.0}
    assert "replaces the model's own llama3 8 x 8,192" in choice.reason


def test_longrope_is_kept_and_not_extended() -> None:
    assert resolve_rope(PHI3, "auto", 131_072, False).rope_parameters is None
    assert "longrope" in refuse(PHI3, "auto", 262_144)
    assert resolve_rope(PHI3, None, 262_144, True).max_position_embeddings == 131_072, "its factors are computed from it"


def test_an_original_length_that_the_file_fixes_elsewhere_wins() -> None:
    assert "wins over" in refuse(PHI3, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 65_536)


def test_dynamic_scaling_never_changes_the_maximum_it_is_computed_from() -> None:
    config = {"max_position_embeddings": 4096, "rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    assert resolve_rope(config, None, 8192, False).max_position_embeddings == 4096
    choice = resolve_rope(config, "auto", 16_384, False)
    assert choice.rope_parameters == {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 4.0}
    assert choice.max_position_embeddings == 4096


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"factor": 4.0}, "rope_type"),
        ({"rope_type": "yran", "factor": 4.0}, "Did you mean yarn?"),
        ({"rope_type": "yarn", "factor": 32.0}, "need original_max_position_embeddings"),
        ({"rope_type": "yarn"}, "need factor and original_max_position_embeddings"),
        ({**GUIDE_1M, "orignal_max_position_embeddings": 1}, "Did you mean original_max_position_embeddings?"),
        ({**GUIDE_1M, "low_freq_factor": 1.0}, "means nothing to rope_type yarn"),
        ({**GUIDE_1M, "factor": "32"}, "factor has no meaning"),
        ({**GUIDE_1M, "factor": 0.5}, "factor has no meaning"),
        ({**GUIDE_1M, "factor": True}, "factor has no meaning"),
        ({**GUIDE_1M, "original_max_position_embeddings": 32768.5}, "whole number"),
        ({**GUIDE_1M, "rope_theta": 10000.0}, "rope_theta is not the model's"),
        ({**GUIDE_1M, "original_max_position_embeddings": 65536}, "at most 40960"),
        ({**GUIDE_1M, "factor": 16.0}, "Write factor: 32.0"),
        ({"rope_type": "default"}, "max_length: 40960"),
        ("yarn", "auto, or a dictionary"),
        (7, "auto, or a dictionary"),
    ],
)
def test_a_wrong_dictionary_is_refused_in_one_sentence(wish: Any, words: str) -> None:
    assert words in refuse(QWEN3, wish, 1_048_576)


def test_another_base_frequency_needs_the_override() -> None:
    choice = resolve_rope(QWEN3, {"rope_type": "default", "rope_theta": 5e6}, 131_072, True)
    assert choice.rope_parameters == {"rope_type": "default", "rope_theta": 5e6}
    assert "NOT COVERED" in choice.reason


def test_the_callers_dictionaries_are_left_alone() -> None:
    wish = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 32768}
    config = {"max_position_embeddings": 40960, "rope_parameters": dict(QWEN3["rope_parameters"])}  # type: ignore[call-overload]
    assert resolve_rope(config, wish, 1_048_576, False).rope_parameters == {**GUIDE_1M, "rope_theta": 1e6}
    assert wish["type"] == "yarn"
    assert config["rope_parameters"] == QWEN3["rope_parameters"]


def test_models_with_several_parts_are_read_from_their_text_part() -> None:
    assert resolve_rope({"text_config": QWEN3, "max_position_embeddings": 7}, "auto", 81_920, False).window == 81_920


def test_a_model_without_a_stated_maximum_is_left_alone() -> None:
    assert resolve_rope({"n_embd": 8}, None, 131_072, False).rope_parameters is None


@given(
    original=st.integers(16, 1 << 17),
    factor=st.integers(1, 64),
    tokens=st.integers(1, 1 << 24),
    native=st.sampled_from(["default", "yarn", "linear"]),
)
def test_auto_always_covers_and_is_stable(original: int, factor: int, tokens: int, native: str) -> None:
    """Whatever the model brings, the new settings cover the row, and reading them back changes nothing (R47)."""
    entry: dict[str, Any] = {"rope_type": native, "rope_theta": 1e6}
    if native != "default":
        entry["factor"] = float(factor)
    if native == "yarn":
        entry["original_max_position_embeddings"] = original
    scale = 1 if native == "default" else factor
    config = {"max_position_embeddings": original * scale, "rope_parameters": entry}
    choice = resolve_rope(config, "auto", tokens, False)
    assert choice.window >= tokens
    saved = {
        "max_position_embeddings": choice.max_position_embeddings,
        "rope_parameters": choice.rope_parameters or entry,
    }
    again = resolve_rope(saved, "auto", tokens, False)
    assert again.rope_parameters is None
    assert again.max_position_embeddings == choice.max_position_embeddings
    grown = (choice.rope_parameters or entry).get("factor", 1.0)
    assert grown * original < tokens + original or grown == scale, "no larger than the next whole factor"


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"rope_parameters": "yarn"}, "rope_parameters of the model's configuration is no mapping; got 'yarn'"),
        ({"rope_scaling": [1]}, "rope_scaling of the model's configuration is no mapping"),
        ({"rope_theta": "1e6"}, "rope_theta of the model's configuration is no number above 0; got '1e6'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "yarn of the model's configuration needs a factor"),
        ({"rope_theta": -1.0}, "rope_theta of the model's configuration is no number above 0"),
    ],
)
def test_a_configuration_of_the_wrong_kind_is_one_sentence(more, sentence):
    with pytest.raises(UserError, match=sentence):
        read_rope({"model_type": "llama", "max_position_embeddings": 64} | more)
