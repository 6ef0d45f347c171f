"""Which layers stream: what a layer is read as, what its class is found to do on a toy, and what is not in the toy."""

from __future__ import annotations

import copy

import pytest
import torch

from megaspan.attention import install as install_attention
from megaspan.layers.dials import LayerPlan
from megaspan.layers.family import Family, describe
from megaspan.layers.selfcheck import prove_family
from megaspan.layers.streamed import Streaming
from tests.layers.test_streamed import assert_parity, step, streamed
from tests.models import FAMILIES, assert_same_gradients, batch, tiny

torch.set_num_threads(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_self_check_proves_every_family(family):
    model = tiny(family, layers=3)
    install_attention(model)
    assert prove_family(model) is None


def test_a_norm_with_two_names_in_a_layer_is_two_norms():
    plain = tiny("qwen3")
    for layer in plain.model.layers:
        layer.post_attention_layernorm = layer.input_layernorm
        layer.self_attn.k_norm = layer.self_attn.q_norm
    model = copy.deepcopy(plain)
    install_attention(model)
    Streaming(LayerPlan(5)).install(model)
    data = batch(12)
    want, got = (each(**data, use_cache=False).loss for each in (plain, model))
    torch.testing.assert_close(got, want)


def test_the_self_check_finds_a_class_that_does_something_else(monkeypatch):
    """A changed upstream class under the same module names takes the general path, still exact, and the reason says where."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    def forward(self, hidden_states, **kwargs):
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + 1.02 * attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

    class Changed(LlamaDecoderLayer):
        def forward(self, hidden_states, **kwargs):
            return forward(self, hidden_states, **kwargs)

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaDecoderLayer", Changed)
    plain = tiny("llama")
    model = copy.deepcopy(plain)
    install_attention(model)
    streaming = Streaming(LayerPlan(tile_tokens=5))
    reasons = streaming.install(model)
    assert len(reasons) == 2
    assert all("differs from plain transformers" in (reason or "") for reason in reasons)
    assert_parity(plain, model, batch(12))
    assert streaming.stats().streamed == 0


@pytest.mark.parametrize("part", ["mlp", "self_attn"])
def test_a_class_that_draws_where_no_name_tells_is_checkpointed_and_draws_the_same_again(part, monkeypatch):
    """A rate that stands in the code: under one seed the gradients are those of plain transformers."""
    from transformers.models.llama import modeling_llama

    kind = {"mlp": modeling_llama.LlamaMLP, "self_attn": modeling_llama.LlamaAttention}[part]
    own = kind.forward

    def forward(self, hidden_states, *args, **kwargs):
        hidden_states = hidden_states * (1 + 0.1 * torch.rand(hidden_states.shape[1], 1)) if self.training else hidden_states
        return own(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", forward)
    plain = tiny("llama")
    model = copy.deepcopy(plain)
    install_attention(model)
    reasons = Streaming(LayerPlan(tile_tokens=5)).install(model)
    assert all("draws random numbers in its own code" in (reason or "") for reason in reasons)
    found = []
    for one in (plain, model):
        torch.manual_seed(3)
        found.append(step(one, batch(23)))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-6, atol=0)
    assert_same_gradients(found[1][1], found[0][1], 1e-5)


def test_parts_that_somebody_has_exchanged_are_not_streamed():
    """They are not in the toy that was tried. Adapters are looked through; a part's own forward is seen."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    class Mine(Qwen3MLP):
        def forward(self, hidden_states):
            return super().forward(hidden_states - 0.3 * hidden_states.mean(1, keepdim=True))

    plain = tiny("qwen3", layers=4)
    plain.model.layers[0].mlp.__class__ = Mine
    plain.model.layers[1].self_attn.more = torch.nn.Linear(4, 4)
    own = plain.model.layers[2].mlp.act_fn.forward
    plain.model.layers[2].mlp.act_fn.forward = lambda x: own(x)
    model = copy.deepcopy(plain)
    install_attention(model)
    reasons = Streaming(LayerPlan(tile_tokens=5)).install(model)
    assert reasons == [
        "mlp is a Mine, which its class has not there",
        "self_attn.more is a Linear, which its class has not there",
        "mlp.act_fn has a forward of somebody's own",
        None,
    ]
    assert_parity(plain, model, batch(12))


def test_attention_that_scales_by_positions_has_those_of_its_tile():
    """Ministral 3: queries far along the row are longer. Not fused, since the fused form knows tables alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 20, "beta_fast": 32.0}
    config = AutoConfig.for_model(
        "ministral3", vocab_size=128, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_hidden_layers=2, max_position_embeddings=24, rope_parameters=rope | {"llama_4_scaling_beta": 0.7},
    )  # fmt: skip
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().train()
    model, streaming = streamed(plain, prove=True)
    assert_parity(plain, model, batch(23))
    assert streaming.stats().fused_attentions == 0


def test_a_layer_that_is_not_known_by_heart_runs_its_own_code():
    layer = tiny("llama").model.layers[0]
    own = Family("input_layernorm", None, None, None, own=True)
    assert describe(layer) == Family("input_layernorm", None, "post_attention_layernorm", None)
    layer.add_module("adapter", torch.nn.Linear(4, 4))
    assert describe(layer) == own
    del layer.adapter
    layer.register_buffer("layer_scalar", torch.ones(1))  # its value comes with the weights, so that no toy shows what it does
    assert describe(layer) == own
    del layer.layer_scalar
    layer.self_attn.add_module("gate_proj", torch.nn.Linear(64, 64))
    assert describe(layer) == Family("input_layernorm", None, None, None, own=True, gated=True)
    del layer.self_attn.gate_proj
    layer.self_attn.o_proj, projection = torch.nn.Identity(), layer.self_attn.o_proj
    assert "o_proj (Identity) is no linear layer" in str(describe(layer))
    layer.self_attn.o_proj = projection
    layer.add_module("strange_norm", layer.input_layernorm)
    del layer.input_layernorm
    assert "no norm of its parts is known as the one before attention" in str(describe(layer))
