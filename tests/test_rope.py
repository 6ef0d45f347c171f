"""The live rotary module says the same as its configuration, in fp32, for every kind of scaling (R46, R48, R49, R50)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GptOssConfig, LlamaConfig, PreTrainedConfig, Qwen3Config

from megaspan.attention.layout import lay_out
from megaspan.human import UserError
from megaspan.rope import read_back, require_exact, resolve_rope, tables_of_row, yarn_attention_factor

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "head_dim": 128,
}
GUIDE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 32768}


def qwen3(**changes: Any) -> Qwen3Config:
    settings = {"rope_type": "default", "rope_theta": 1e6}
    return Qwen3Config(**{**TINY, "max_position_embeddings": 40960, "rope_parameters": settings, **changes})


def build(config: PreTrainedConfig, wish: Any = None, tokens: int = 1024, **load: Any) -> Any:
    """The model as the loader builds it: settings decided first, then put into the configuration."""
    choice = resolve_rope(config.to_dict(), wish, tokens, False)
    if choice.rope_parameters is not None:
        config.rope_parameters = choice.rope_parameters
    config.max_position_embeddings = choice.max_position_embeddings
    return AutoModelForCausalLM.from_config(config, **load)


def test_unscaled_theta_is_read_from_the_table() -> None:
    """R46: theta 1e6 gives inv_freq[32] = 1e-3; the fallback 1e4 would give 1e-2."""
    model = build(qwen3())
    back = read_back(model)
    assert back.exact
    assert (back.theta, back.factor, back.attention_factor) == pytest.approx((1e6, 1.0, 1.0))
    assert model.model.rotary_emb.inv_freq[32].item() == pytest.approx(1e-3)
    assert back.dtype == "float32"
    assert back.first == 1.0


def test_the_guides_yarn_reaches_the_table() -> None:
    back = read_back(build(qwen3(), GUIDE, 1_048_576))
    assert back.exact
    assert back.theta == pytest.approx(1e6)
    assert back.factor == pytest.approx(32.0, rel=1e-5)
    assert back.attention_factor == pytest.approx(0.1 * math.log(32) + 1) == pytest.approx(yarn_attention_factor(32))
    assert back.last == pytest.approx(1e6 ** (-126 / 128) / 32, rel=1e-5)
    assert "yarn" in str(back)


def test_theta_of_another_model_is_told_from_its_own() -> None:
    """A lost theta: the configuration says 1e6, the table was built with 1e4."""
    model = build(qwen3())
    model.model.rotary_emb.inv_freq.copy_(1e4 ** (-torch.arange(0, 128, 2).float() / 128))
    back = read_back(model)
    assert not back.exact
    assert back.theta == pytest.approx(1e4, rel=1e-3)
    with pytest.raises(UserError, match="DIFFERS"):
        require_exact(back)


def test_garbage_after_a_meta_load_is_caught() -> None:
    with torch.device("meta"):
        model = build(qwen3())
    model.to_empty(device="cpu")
    model.model.rotary_emb.inv_freq.zero_()
    with pytest.raises(UserError, match="rotary_emb"):
        require_exact(read_back(model))


def test_a_table_rounded_to_bf16_is_caught() -> None:
    """R50: `model.to(bfloat16)` rounds the frequencies; loading with dtype= does not."""
    assert require_exact(read_back(build(qwen3(), GUIDE, 1_048_576, dtype=torch.bfloat16))).dtype == "float32"
    cast = build(qwen3(), GUIDE, 1_048_576).to(torch.bfloat16)
    back = read_back(cast)
    assert back.dtype == "bfloat16"
    with pytest.raises(UserError, match="bfloat16"):
        require_exact(back)


def test_an_attention_factor_lost_on_the_way_is_caught() -> None:
    model = build(qwen3(), GUIDE, 1_048_576)
    model.model.rotary_emb.attention_scaling = 1.0
    assert not read_back(model).exact


def test_sliding_layers_keep_their_own_table() -> None:
    """R48: Gemma 3 extended x4: the sliding table stays unscaled."""
    config = Gemma3TextConfig(
        **{**TINY, "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 32768}
    )
    back = read_back(build(config, "auto", 131_072))
    assert back.exact
    by_type = {entry.layer_type: entry for entry in back.entries}
    assert by_type["full_attention"].factor == pytest.approx(4.0, rel=1e-5)
    assert by_type["full_attention"].theta == pytest.approx(1e6)
    assert by_type["sliding_attention"].factor == pytest.approx(1.0)
    assert by_type["sliding_attention"].theta == pytest.approx(1e4)
    assert back.factor == by_type["full_attention"].factor


@pytest.mark.parametrize("kind", ["llama3", "linear", "gpt-oss"])
def test_native_scaling_is_kept_by_the_live_model(kind: str) -> None:
    """R46: llama3, linear and yarn of the model itself survive the loader untouched."""
    if kind == "gpt-oss":
        config: PreTrainedConfig = GptOssConfig(**{**TINY, "head_dim": 64, "num_local_experts": 2, "num_experts_per_tok": 1})
        expected = 32.0
    else:
        extra = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        settings = {"rope_type": kind, "factor": 8.0, "rope_theta": 5e5} | (extra if kind == "llama3" else {})
        config = LlamaConfig(**{**TINY, "max_position_embeddings": 131072, "rope_parameters": settings})
        expected = 8.0
    back = read_back(build(config, "auto", 131_072))
    assert back.exact
    assert back.factor == pytest.approx(expected, rel=1e-4)


def test_longrope_switches_exactly_past_the_native_length() -> None:
    """R49: at 64 tokens the short factors, at 65 the long ones, by the largest global position."""
    settings = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 64,
        "long_factor": [4.0] * 64,
    }
    model = build(LlamaConfig(**{**TINY, "max_position_embeddings": 256, "rope_parameters": settings}), None, 256)
    rotary, x = model.model.rotary_emb, torch.zeros(1, 1, 32)
    for tokens, factor in ((64, 1.0), (65, 4.0), (64, 1.0)):
        rotary(x, torch.arange(tokens)[None])
        back = read_back(model)
        assert back.exact
        assert back.factor == pytest.approx(factor, rel=1e-4)


def test_a_million_positions_stay_apart() -> None:
    """R50: phases in fp32 from integer positions; in bf16 a million positions would collapse to 1,793."""
    assert torch.arange(1_048_576).to(torch.bfloat16).unique().numel() == 1793
    model = build(qwen3(), GUIDE, 1_048_576, dtype=torch.bfloat16)
    positions = torch.tensor([[255, 256, 257, 131_073, 1_048_574, 1_048_575]])
    cos, sin = model.model.rotary_emb(torch.zeros(1, 1, 32), positions)
    assert cos.dtype == torch.float32
    phase = positions[0, :, None].float() * model.model.rotary_emb.inv_freq
    scale = yarn_attention_factor(32)
    assert torch.equal(cos[0, :, :64], phase.cos() * scale)
    assert torch.equal(sin[0, :, 64:], phase.sin() * scale)


def test_a_model_without_rotary_positions_reads_back_empty() -> None:
    back = read_back(torch.nn.Linear(2, 2))
    assert back.entries == ()
    assert back.exact
    assert "no rotary" in str(back)


# --- tables that depend on the length of the row ----------------------------------------------------------------------------

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, "factor": 4.0,
    "short_factor": [1.0 + 0.1 * i for i in range(64)], "long_factor": [2.0 + 0.3 * i for i in range(64)],
}  # fmt: skip
BY_LENGTH = {
    "longrope": LONGROPE,
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
}


def rotary(kind: str) -> Any:
    """A model whose tables change at 32 tokens, and its rotary module."""
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**TINY, max_position_embeddings=128 if kind == "longrope" else 32, rope_parameters=BY_LENGTH[kind])
    )
    return model, model.model.rotary_emb


@pytest.mark.parametrize("kind", BY_LENGTH)
@pytest.mark.parametrize(("documents", "cp"), [((70,), 2), ((70,), 4), ((20,), 4), ((40, 3, 9), 2), ((33,), 8)])
def test_every_rank_rotates_by_the_tables_of_the_whole_row(kind: str, documents: tuple[int, ...], cp: int) -> None:
    """Bit for bit, though no shard but one has the longest position, and some hold padding only."""
    layout, x = lay_out(documents, cp), torch.zeros(1, 1, 32)
    positions = torch.cat([torch.arange(length) for length in documents])
    _, plain = rotary(kind)
    want = [table[0] for table in plain(x, positions[None])]
    for rank in range(cp):
        model, live = rotary(kind)
        mine, index = torch.from_numpy(layout.positions(rank)), torch.from_numpy(layout.token_index(rank))
        with tables_of_row(model, max(documents) - 1):
            got = live(x, position_ids=mine[None])
        assert "forward" not in live.__dict__
        assert all(table.shape == (1, layout.shard_tokens, 128) for table in got)
        assert torch.equal(live.inv_freq, plain.inv_freq)
        for table, whole in zip(got, want, strict=True):
            assert torch.equal(table[0, index >= 0], whole[index[index >= 0]])


@pytest.mark.parametrize("kind", BY_LENGTH)
def test_tables_do_not_remember_earlier_rows(kind: str) -> None:
    """A row's tables are those of a fresh model, also of one that has seen a longer row (transformers' `dynamic` keeps it)."""
    (model, live), x = rotary(kind), torch.zeros(1, 1, 32)
    for length in (90, 40, 20, 50, 33, 32):
        with tables_of_row(model):
            got = live(x, torch.arange(length)[None])
        want = rotary(kind)[1](x, torch.arange(length)[None])
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True)), length


def test_tables_of_kinds_of_layers() -> None:
    """Gemma 3 has one for each kind of layer, in one module."""
    kinds = {"full_attention": BY_LENGTH["dynamic"], "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    config = Gemma3TextConfig(**TINY, max_position_embeddings=32, rope_parameters=kinds, sliding_window_pattern=2)
    models = [AutoModelForCausalLM.from_config(config).model.rotary_emb for _ in range(2)]
    x, positions = torch.zeros(1, 1, 32), torch.arange(70)[None]
    with tables_of_row(models[0]):
        models[0](x, torch.arange(90)[None], "full_attention")
    for layer_type in kinds:
        with tables_of_row(models[0], 69):
            got = models[0](x, positions[:, :9], layer_type=layer_type)
        want = models[1](x, positions, layer_type)
        assert all(torch.equal(short, long[:, :9]) for short, long in zip(got, want, strict=True))
