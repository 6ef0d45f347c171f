"""Models whose rows cannot lie on several ranks are refused by the name of the layer (R39), and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaPreTrainedModel,
)

from megaspan.human import UserError
from megaspan.model import prepare
from megaspan.model.kinds import check_config, check_layers, check_trainable, refuse_shared_rows
from tests.model.support import plan, settings, step
from tests.models import FAMILIES, assert_same_gradients, batch, tiny, tiny_config

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
STRANGE: dict[str, tuple[dict[str, Any], str, str]] = {
    "qwen3_next": (
        {"layer_types": ["linear_attention", "full_attention"], "num_experts": 2, "linear_num_value_heads": 2,
         "linear_num_key_heads": 2},
        "layers of type linear_attention", r"layers\.0\.linear_attn",
    ),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "layers of type conv", r"layers\.0\.conv\.conv \(Conv1d\)"),
    "mamba": ({}, "carry a state", r"layers\.0\.mixer\.conv1d \(Conv1d\)"),
    "rwkv": ({"attention_hidden_size": 32}, "carry a state", r"blocks\.0\.attention \(RwkvSelfAttention\)"),
    "recurrent_gemma": (
        {"block_types": ["recurrent", "attention"], "lru_width": 32}, "carry a state", r"layers\.0\.temporal_block\."
    ),
    "jamba": (
        {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "use_mamba_kernels": False},
        "layers of type|carry a state", r"layers\.0\.mamba\.conv1d",
    ),
    "llama4_text": (
        {"num_local_experts": 2, "layer_types": ["chunked_attention", "full_attention"]},
        "layers of type chunked_attention", "chunked_attention",
    ),
    "bert": ({}, "later tokens", "later"),
}  # fmt: skip


@pytest.mark.parametrize("kind", STRANGE)
def test_strange_layers_are_refused_by_name(kind: str) -> None:
    """From the configuration before a weight is loaded, and from a model (on the meta device) by the module."""
    changes, of_config, of_model = STRANGE[kind]
    config = AutoConfig.for_model(kind, **(SIZES | changes))
    with pytest.raises(UserError, match=of_config):
        refuse_shared_rows(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match=of_model):
        refuse_shared_rows(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_softmax_attention_are_taken(family: str) -> None:
    config = tiny_config(family)
    refuse_shared_rows(config)
    refuse_shared_rows(config.to_dict())
    with torch.device("meta"):
        refuse_shared_rows(AutoModelForCausalLM.from_config(config))
    model = tiny(family)
    refuse_shared_rows(model)
    prepare(model, settings(), plan())
    refuse_shared_rows(model)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_decoder_whose_configuration_says_that_it_is_none() -> None:
    """GPT-NeoX carries `is_decoder: false` and never reads it; what its attention says decides. BERT reads it."""
    config = AutoConfig.for_model("gpt_neox", **SIZES)
    assert config.is_decoder is False
    for given in (config, config.to_dict()):
        refuse_shared_rows(given)
    check_config(config.to_dict() | {"architectures": ["GPTNeoXForCausalLM"]}, "neox")
    model: Any = AutoModelForCausalLM.from_config(config)
    check_trainable(model)
    model.gpt_neox.layers[1].attention.is_causal = False
    with pytest.raises(UserError, match="later tokens"):
        check_trainable(model)
    for kind, decoder in (("bert", False), ("bert", True), ("roberta", False), ("bert-generation", False)):
        entries = AutoConfig.for_model(kind, is_decoder=decoder, **SIZES).to_dict()
        if decoder:
            check_layers(entries, kind)
            continue
        with pytest.raises(UserError, match="later tokens"):
            check_layers(entries, kind)


class OddNameForCausalLM(LlamaForCausalLM):
    """Somebody's own name for it."""


class PenalisedForCausalLM(LlamaForCausalLM):
    """A loss with a part that tiles would leave out."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        if out.loss is not None:
            out.loss = out.loss + 1e-4 * out.logits.logsumexp(-1).square().mean()
        return out


class BesideForCausalLM(LlamaPreTrainedModel):
    """A class of its own on a known configuration."""


def test_a_class_made_from_a_known_one_is_taken() -> None:
    """As an object; its name in a config.json is not known to transformers, which would load the known class in its place."""
    plain, model = tiny("llama"), tiny("llama")
    model.__class__ = OddNameForCausalLM
    prepare(model, settings(), plan())
    expected, found = step(plain, **batch(37)), step(model, **batch(37))
    assert abs(expected[0] - found[0]) < 1e-5
    assert_same_gradients(found[1], expected[1])
    doing_more = tiny("llama")
    doing_more.__class__ = PenalisedForCausalLM
    with pytest.raises(UserError, match="loss of PenalisedForCausalLM is not known here"):
        prepare(doing_more, settings(), plan())
    for kind in (BesideForCausalLM, LlamaForSequenceClassification):
        with pytest.raises(UserError, match=rf"{kind.__name__} is not .* of llama, nor made from it.*LlamaForCausalLM and"):
            check_trainable(kind(tiny_config("llama")))


def test_gpt_neox_packs_documents() -> None:
    """Its attention has names of its own, and is found and told all the same."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_neox", **SIZES), attn_implementation="eager").train()
    prepare(model, settings(), plan())
    refuse_shared_rows(model)


def test_chunks_without_types_of_layers() -> None:
    with pytest.raises(UserError, match="chunks of 64 tokens"):
        refuse_shared_rows({"model_type": "llama", "attention_chunk_size": 64})


class Shifted(torch.nn.Module):
    """Adds a share of the token before, as RWKV does."""

    def __init__(self, own: torch.nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(x + 0.1 * torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_has_no_known_name_is_found_on_the_live_model(dtype: torch.dtype) -> None:
    """A shift over tokens in a module of somebody's own: the proof names the first that does it."""
    model: Any = tiny("qwen3", dtype=dtype)
    model.model.layers[1].mlp = Shifted(model.model.layers[1].mlp)
    prepare(model, settings(), plan(streamed=False))
    with pytest.raises(UserError, match=r"has model\.layers\.1\.mlp \(Shifted\).*cp_size: 1"):
        refuse_shared_rows(model)


def test_positions_that_are_counted_instead_of_given_are_found() -> None:
    model: Any = tiny("llama")
    rotary = model.model.rotary_emb
    own = rotary.forward
    rotary.forward = lambda x, position_ids: own(x, torch.arange(x.shape[1])[None])
    prepare(model, settings(), plan())
    with pytest.raises(UserError, match=r"model\.rotary_emb \(LlamaRotaryEmbedding\)"):
        refuse_shared_rows(model)


def test_a_model_that_drops_what_it_is_given_is_found() -> None:
    """A rank would attend to its own tokens only, and the loss be a little worse."""
    model: Any = tiny("llama")
    attention = model.model.layers[1].self_attn
    own = attention.forward
    attention.forward = lambda *args, **kwargs: own(
        *args, **{name: value for name, value in kwargs.items() if not name.startswith("megaspan")}
    )
    prepare(model, settings(), plan(streamed=False))
    with pytest.raises(UserError, match="1 of 2 layers pass it on"):
        refuse_shared_rows(model)


def test_dropout_over_ranks_needs_checkpointed_layers() -> None:
    """Elsewhere each rank would draw from a generator of its own."""
    for checkpoint, sizes in ((True, {"cp_size": 2}), (False, {}), (False, {"cp_size": 2})):
        model: Any = tiny("llama")
        model.model.layers[1].mlp.dropout = torch.nn.Dropout(0.1)
        args = settings()
        for name, size in sizes.items():
            object.__setattr__(args, name, size)
        prepare(model, args, plan(checkpoint=checkpoint, streamed=False))
        if checkpoint or not sizes:
            refuse_shared_rows(model)
            continue
        with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.dropout, 0\.1.*gradient_checkpointing: true"):
            refuse_shared_rows(model)
