"""Byte formulas against numbers that others reported, peaks measured on an H200, what autograd keeps (R65, R69)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from megaspan.plan.cost import input_bytes, largest_allocation, layer_inputs, loss_parts, loss_tile, memory
from megaspan.plan.facts import ModelFacts, model_facts
from megaspan.plan.families import FAMILIES
from megaspan.plan.layer import layer_bytes, streamed_layer_parts
from megaspan.plan.parts import Settings
from tests.plan.live import Live

PURE = Settings(
    tokens=131_072,
    gpu=True,
    compute_bytes=2,
    masters=False,
    checkpoint=True,
    offload=True,
    keep_on_device=0,
    chunked=True,
    loss_tile=2048,
)
GIB = 2**30


def sized(layers: int, hidden: int) -> ModelFacts:
    return ModelFacts.from_config(
        {
            "model_type": "llama",
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": hidden // 128,
            "intermediate_size": 3 * hidden,
            "vocab_size": 151_936,
        }
    )


@pytest.mark.parametrize(
    ("layers", "tokens", "hidden", "unit", "reported"),
    [(28, 131_072, 1024, 1e9, 7.52), (36, 131_072, 4096, 1e9, 38.65), (32, 500_000, 4096, GIB, 122.07)],
)
def test_layer_inputs_are_those_that_were_reported(layers: int, tokens: int, hidden: int, unit: float, reported: float) -> None:
    """R65: layers x tokens x hidden x 2 bytes."""
    (part,) = layer_inputs(sized(layers, hidden), replace(PURE, tokens=tokens))
    assert part.bytes / unit == pytest.approx(reported, abs=0.006)
    assert part.place == "host"
    assert f"{layers} layers x {tokens:,} tokens x {hidden:,} x 2 B" in part.formula


@pytest.mark.parametrize(
    ("tokens", "offload", "measured"),
    [(32_768, False, 36.6), (65_536, False, 47.7), (131_072, False, 72.0), (65_536, True, 43.0), (131_072, True, 56.1)],
)
def test_peaks_are_those_of_the_plain_stack_on_an_h200(tokens: int, offload: bool, measured: float) -> None:
    """Design section 8: 4B shape, pure bf16, `max_memory_allocated`; our tile makes the loss smaller, which is not the peak."""
    used = memory(model_facts("qwen3-4b"), replace(PURE, tokens=tokens, offload=offload))
    without_allowance = sum(part.bytes for part in used.peak.parts if "context" not in part.name)
    assert without_allowance / GIB == pytest.approx(measured, rel=0.02)
    assert used.device_bytes >= measured * GIB


TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 96,
    "num_hidden_layers": 2,
    "attention_dropout": 0.0,
    "residual_dropout": 0.0,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 320,
    "shared_expert_intermediate_size": 128,
}


def kept_by_autograd(family: str, dtype: torch.dtype, tokens: int) -> tuple[ModelFacts, int]:
    """Bytes of every tensor that a layer's forward saves, weights, its input and the rotary tables left out."""
    from megaspan.attention import install

    config = AutoConfig.for_model(family, **(TINY | (EXPERTS if FAMILIES[family].experts else {})))
    if family == "olmoe":
        config.head_dim = 64
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").train()
    install(model)
    x_tE = torch.randn(1, tokens, 256, dtype=dtype, requires_grad=True)
    positions = torch.arange(tokens)[None]
    kind = (positions, "sliding_attention") if family in ("gemma3_text", "olmo3") else (positions,)
    rotary = model.model.rotary_emb(x_tE, *kind)
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), x_tE, *rotary)}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and not (tensor.ndim == 4 and tensor.shape[:2] == (1, 1)):
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model.layers[0](x_tE, attention_mask=None, position_ids=positions, position_embeddings=rotary)
    return ModelFacts.from_config(config.to_dict()), sum(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.bfloat16) for family in sorted(FAMILIES)),
        *((name, torch.float32) for name in ("llama", "qwen3", "gemma2")),
    ],
)
def test_a_layer_keeps_what_the_plan_says(family: str, dtype: torch.dtype) -> None:
    """The working set is counted tensor by tensor; in fp32 the first norm's copy is its input, so less is kept."""
    tokens = 256
    facts, kept = kept_by_autograd(family, dtype, tokens)
    s = replace(PURE, gpu=False, tokens=tokens, compute_bytes=dtype.itemsize)
    planned = tokens * (layer_bytes(facts, 0, s).kept - dtype.itemsize * facts.hidden)
    room = 0.04 if facts.experts else 0.02
    low, high = (1 - room, 1 + room) if dtype == torch.bfloat16 else (1 - room, 1.10)
    assert low <= planned / kept <= high


@given(vocab=st.integers(32, 300_000))
def test_the_loss_is_planned_as_it_is_computed(vocab: int) -> None:
    """Tile and bytes are those of the loss itself, which the plan may not import."""
    from megaspan.layers.loss import loss_bytes, tile_tokens_for

    tile = loss_tile(vocab)
    assert tile == tile_tokens_for(vocab)
    facts = replace(sized(2, 256), vocab=vocab)
    parts = loss_parts(facts, replace(PURE, loss_tile=tile))
    assert sum(part.bytes for part in parts[1:]) == loss_bytes(131_072, 256, vocab, tile)


def test_all_logits_are_what_the_plain_loss_holds() -> None:
    """20 bytes a logit at the peak of the forward."""
    from megaspan.layers.head import Head
    from megaspan.layers.loss import plain_cross_entropy
    from megaspan.plan.cost import NLL_BYTES

    tokens, vocab = 64, 4096
    hidden = torch.randn(tokens, 8, dtype=torch.bfloat16, requires_grad=True)
    head = Head(torch.randn(vocab, 8, dtype=torch.bfloat16, requires_grad=True))
    with Live(free=(hidden, head.weight_VE)) as live:
        plain_cross_entropy(hidden, head, torch.randint(vocab, (tokens,)))
    assert live.peak / (tokens * vocab) == pytest.approx(NLL_BYTES, rel=0.05)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", torch.bfloat16), ("qwen3", torch.bfloat16), ("olmo2", torch.bfloat16), ("qwen3", torch.float32)],
    ids=str,
)
@pytest.mark.parametrize(("tokens", "tile", "group"), [(512, 4096, None), (2048, 256, None), (2048, 256, 1)])
def test_a_streamed_layer_needs_what_the_plan_says(
    family: str, dtype: torch.dtype, tokens: int, tile: int, group: int | None
) -> None:
    """The peak of its backward on the CPU is never above the plan, nor far below it."""
    from megaspan.attention import install
    from megaspan.layers.stream import LayerPlan
    from megaspan.layers.streamed import Streaming

    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **TINY), dtype=dtype, attn_implementation="eager"
    ).train()
    install(model)
    assert Streaming(LayerPlan(tile, group)).install(model)[0] is None
    x_tE = torch.randn(1, tokens, 256, dtype=dtype, requires_grad=True)
    positions = torch.arange(tokens)[None]
    rotary = model.model.rotary_emb(x_tE, positions)
    with Live(free=(*model.parameters(), *rotary), counted=(x_tE,)) as live:
        y_tE = model.model.layers[0](x_tE, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        live.restart()
        y_tE.backward(torch.ones_like(y_tE))
    facts = ModelFacts.from_config(model.config.to_dict())
    s = replace(
        PURE, gpu=False, tokens=tokens, compute_bytes=dtype.itemsize, streamed=True, layer_tile=tile, kv_heads_per_call=group
    )
    moments = streamed_layer_parts(facts, layer_bytes(facts, 0, s), s, facts.layer_parameters[0])
    beside = tokens * (dtype.itemsize * (2 * facts.hidden + facts.query_width) + 4 * facts.heads)
    planned = beside + max(sum(part.bytes for part in moment) for moment in moments.values())
    assert 0.98 <= planned / live.peak <= (1.35 if tokens <= tile else 1.15)


def test_states_by_precision() -> None:
    facts = model_facts("qwen3-0.6b")
    count = facts.parameters

    def states(**changes: Any) -> int:
        used = memory(facts, replace(PURE, **changes))
        optimizer = used.moments[-1]
        return sum(part.bytes for part in optimizer.parts if part.name not in ("cos, sin, ids, labels", "CUDA context, slack"))

    assert states() == 8 * count
    assert states(masters=True) == 18 * count
    assert states(adapter=1000) == 2 * count + 8 * 1000
    assert states(adapter=1000, masters=True) == 2 * count + 18 * 1000


def test_the_largest_allocation_is_named() -> None:
    """R69: untied embedding and head are separate, each at most one fp32 buffer of V x E."""
    facts = model_facts("qwen3-8b")
    assert largest_allocation(facts, PURE).name == "one MLP tensor"
    assert largest_allocation(facts, replace(PURE, tokens=1024)).bytes == 151_936 * 4096 * 4
    assert largest_allocation(facts, replace(PURE, chunked=False)).bytes == 131_072 * 151_936 * 4


@given(
    tokens=st.integers(1, 1 << 22),
    keep=st.integers(0, 28),
    offload=st.booleans(),
    chunked=st.booleans(),
    masters=st.booleans(),
    gpu=st.booleans(),
    checkpoint=st.booleans(),
)
def test_more_tokens_never_need_less(
    tokens: int, keep: int, offload: bool, chunked: bool, masters: bool, gpu: bool, checkpoint: bool
) -> None:
    facts = model_facts("qwen3-0.6b")
    s = replace(
        PURE,
        tokens=tokens,
        keep_on_device=keep if offload else 0,
        offload=offload and checkpoint,
        chunked=chunked,
        masters=masters,
        gpu=gpu,
        checkpoint=checkpoint,
    )
    here, there = memory(facts, s), memory(facts, replace(s, tokens=tokens + 1))
    assert there.device_bytes >= here.device_bytes
    assert there.host_bytes >= here.host_bytes
    assert all(part.bytes > 0 and part.formula for moment in here.moments for part in moment.parts)
    if s.offload and gpu:
        pinned = sum(part.bytes for part in here.waiting if "pinned" in part.name)
        assert pinned == (28 - keep) * input_bytes(facts, s)


@pytest.mark.parametrize(
    ("shape", "tokens", "tile", "measured"),
    [
        ("qwen3-4b", 32_768, 16_384, 4.1),
        ("qwen3-4b", 32_768, 8_192, 2.7),
        ("qwen3-4b", 65_536, 16_384, 5.2),
        ("qwen3-4b", 131_072, 16_384, 9.8),
        ("qwen3-8b", 131_072, 16_384, 10.9),
    ],
)
def test_a_streamed_layer_is_near_the_prototype(shape: str, tokens: int, tile: int, measured: float) -> None:
    """Design section 4, variant 2 on an H200: peak of one layer above its weights, its input and output on the device."""
    facts = model_facts(shape)
    s = replace(PURE, tokens=tokens, streamed=True, layer_tile=tile, offload=False, keep_outputs=36)
    moments = streamed_layer_parts(facts, layer_bytes(facts, 0, s), s, facts.layer_parameters[0])
    kept = tokens * 2 * (facts.hidden + facts.query_width)
    peak = kept + max(sum(part.bytes for part in moment) for moment in moments.values())
    assert peak / GIB == pytest.approx(measured, rel=0.13)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_families_stream_as_the_plan_says(family: str) -> None:
    """Which layers are streamed is decided on the live model; the planner has it as data."""
    from megaspan.attention import install
    from megaspan.layers.streamed import Streaming

    config = AutoConfig.for_model(family, **(TINY | (EXPERTS if FAMILIES[family].experts else {})))
    if family == "olmoe":
        config.head_dim = 64
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    install(model)
    reasons = Streaming().install(model, prove=False)
    assert all((reason is None) == FAMILIES[family].streamed for reason in reasons)
