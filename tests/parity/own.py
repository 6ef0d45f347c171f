"""Tiny models of the families whose layers run their own code in the second half, for the tests on one rank and on several."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoePreTrainedModel

from tests.models import _COMMON, WINDOW, randomise

RECORDED = "router_logits" in GraniteMoePreTrainedModel._can_record_outputs
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.2, "logits_scaling": 4.0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
HYBRID = GRANITE | {"layer_types": ["attention"], "shared_intermediate_size": 72, "mamba_n_heads": 2}
DENSE = HYBRID | {"num_local_experts": 0, "num_experts_per_tok": 0}
TYPES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
# A list has a value for each layer, and begins again where it is too short.
FAMILIES: dict[str, dict[str, Any]] = {
    "granitemoe": GRANITE | EXPERTS,
    "granitemoeshared": GRANITE | EXPERTS | {"shared_intermediate_size": 72},
    "granitemoehybrid": DENSE | {"position_embedding_type": "rope"},
    "granitemoehybrid experts": HYBRID | EXPERTS | {"position_embedding_type": "rope"},
    "phi3": {"num_key_value_heads": 2},
    "glm4": {},
    "apertus": {"hidden_act": "xielu"},
    "hyperclovax": {"use_post_norm": True, "residual_multiplier": 0.7},
    "vaultgemma": TYPES | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    "bitnet": {},
    "afmoe": TYPES | {
        "num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1, "num_dense_layers": 1,
        "moe_intermediate_size": 48, "route_scale": 1.5,
    },
    "laguna": TYPES | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40,
        "mlp_layer_types": ["dense", "sparse"],
    },
}  # fmt: skip
WITH_EXPERTS = ("granitemoe", "granitemoeshared", "granitemoehybrid experts", "afmoe", "laguna")
# transformers 5.17 records no router logits of these, and so has no balance loss.
BALANCED = ("granitemoe", "granitemoeshared", "granitemoehybrid experts") if RECORDED else ()


def config_of(family: str, layers: int = 2, heads: int = 4, **changes: Any) -> Any:
    """The configuration of a family of `FAMILIES`; a second word after the model's type tells variants apart."""
    # A copy: some configurations write into the dictionaries that they are given.
    own = {"num_hidden_layers": layers, "num_attention_heads": heads, "tie_word_embeddings": False}
    settings = copy.deepcopy(_COMMON | own | FAMILIES[family] | changes)
    if family == "laguna":
        settings.pop("rope_parameters")  # one for each kind of layer; its own
        settings["num_attention_heads_per_layer"] = [heads]
    if family == "bitnet":  # its norm behind attention is as wide as the layer
        settings["hidden_size"] = heads * settings["head_dim"]
    settings = {name: (value * layers)[:layers] if isinstance(value, list) else value for name, value in settings.items()}
    return AutoConfig.for_model(family.split()[0], **settings)


def model_of(family: str, dtype: torch.dtype = torch.float32, layers: int = 2, **changes: Any) -> Any:
    """An unmodified transformers model with random weights, always the same ones; in training mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(family, layers, **changes), attn_implementation="eager")
    randomise(model, 0)
    for parameter in model.parameters():  # rotary tables stay as they are
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model.train()
