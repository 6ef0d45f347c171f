"""What a decoder layer of each model family is made of, as data: enough to count every parameter without building the model.

A plan must answer in a fraction of a second, so no model is built, not even on the meta device (two seconds of imports). The
counts are exact: a test compares them with transformers for every family named here. Of other families the live model is
counted, or one that is built on the meta device (`model/counted.py`); where neither can be, they are counted like Llama and
the plan says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from megaspan.human import UserError

Bias = bool | str  # always, never, or the configuration's key that says so


@dataclass(frozen=True)
class Family:
    """One family's deviations from Llama.

    Attributes:
        norms: norms over the hidden size in a layer; zero-length for families whose norms have no weight.
        norm_vectors: trained vectors in such a norm: 1, or 2 with a bias.
        norm_tensors: tensors of hidden width that the norms of a layer keep for the backward, in fp32 and in the computation's
            type: an RMS norm its input in fp32, the normalised value and its output.
        qk_norm_tensors: the same for the norms on queries and keys, beside the rotated ones.
        more_heads: tensors of query and of KV width kept beside q, k, v and the output (q, k, v in one tensor, sinks …).
        latent: channels of the latent queries, keys and values that are normed before the heads are made of them (MLA).
        mlp_tensors: tensors of MLP width that a gated MLP keeps: gate, its activation, up and their product.
        qk_norm: norms on queries and keys: none, over one head's channels, over all heads together, or a vector per head.
        qk_norm_key: the configuration's key that switches them on, where there is one.
        qkv_bias, out_bias, mlp_bias: biases of the projections.
        gated: the MLP has a gate and an up projection.
        sinks: one trained logit a query head.
        tied: whether embedding and head are one matrix when the configuration does not say.
        window_every: every n-th layer sees everything, the others a window; 1 means that all layers have the window.
        experts: name of the mixture-of-experts scheme, or None.
        weighs_in_fp32: the router's weights are fp32, and so is what they are multiplied with: the outputs of experts.
        streamed: its layers run in tiles; others are checkpointed whole.
        fused: norms and gated product of a streamed layer run fused on a GPU (`layers/norms.py`, `layers/fused.py`).
    """

    norms: int = 2
    norm_vectors: int = 1
    norm_tensors: tuple[int, int] = (2, 4)
    qk_norm_tensors: tuple[int, int] = (1, 1)
    more_heads: tuple[int, int] = (0, 0)
    latent: int = 0
    mlp_tensors: int = 4
    qk_norm: Literal["", "head", "full", "each"] = ""
    qk_norm_key: str | None = None
    qkv_bias: Bias = "attention_bias"
    out_bias: Bias = "attention_bias"
    mlp_bias: Bias = False
    gated: bool = True
    sinks: bool = False
    tied: bool = False
    window_every: int = 0
    experts: Literal["qwen", "mixtral", "gpt_oss", "olmoe"] | None = None
    weighs_in_fp32: bool = False
    streamed: bool = True
    fused: bool = False


UNKNOWN = Family(qkv_bias=False, out_bias=False, weighs_in_fp32=True, streamed=False)
FAMILIES: dict[str, Family] = {
    "llama": Family(mlp_bias="mlp_bias", fused=True),
    "mistral": Family(qkv_bias=False, out_bias=False, window_every=1, fused=True),
    "ministral": Family(qkv_bias=False, out_bias=False, window_every=1, fused=True),
    "qwen2": Family(qkv_bias=True, out_bias=False, fused=True),
    "qwen3": Family(qk_norm="head", fused=True),
    "gemma": Family(norm_tensors=(4, 2), tied=True),
    "gemma2": Family(norms=4, norm_tensors=(8, 2), tied=True, window_every=2),
    "gemma3_text": Family(norms=4, norm_tensors=(8, 2), qk_norm="head", qk_norm_tensors=(2, 0), tied=True, window_every=6),
    "gpt_oss": Family(norm_tensors=(4, 2), more_heads=(1, 0), mlp_tensors=7, sinks=True, window_every=2, experts="gpt_oss"),
    "qwen2_moe": Family(qkv_bias="qkv_bias", out_bias=False, experts="qwen"),
    "qwen3_moe": Family(qk_norm="head", experts="qwen"),
    "mixtral": Family(qkv_bias=False, out_bias=False, window_every=1, experts="mixtral", weighs_in_fp32=True),
    "olmo2": Family(norm_tensors=(4, 1), qk_norm="full", qk_norm_tensors=(2, 0)),
    "olmo3": Family(norm_tensors=(4, 1), qk_norm="full", qk_norm_tensors=(2, 0), window_every=4),
    "olmoe": Family(qk_norm="full", experts="olmoe"),
    "granite": Family(mlp_bias="mlp_bias", fused=True),
    "cohere": Family(
        norms=1, norm_tensors=(3, 1), qk_norm="each", qk_norm_tensors=(2, 0), qk_norm_key="use_qk_norm", tied=True
    ),
    "cohere2": Family(norms=1, norm_tensors=(3, 1), tied=True, window_every=4),
    "phi3": Family(qkv_bias=False, out_bias=False, more_heads=(2, 1)),
    "smollm3": Family(mlp_bias="mlp_bias", tied=True, fused=True),
    "glm4": Family(norms=4, norm_tensors=(4, 6), more_heads=(1, 0), out_bias=False),
    "seed_oss": Family(out_bias="attention_out_bias", mlp_bias="mlp_bias", fused=True),
    "exaone4": Family(norm_tensors=(2, 3), qk_norm="head", qkv_bias=False, out_bias=False, window_every=4),
    "hunyuan_v1_dense": Family(qk_norm="head", fused=True),
    "ernie4_5": Family(qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias", tied=True, fused=True),
    "starcoder2": Family(
        norm_vectors=2,
        norm_tensors=(0, 3),
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        gated=False,
        tied=True,
        window_every=1,
    ),
}
# Keys that are on unless the configuration switches them off.
_DEFAULTS: dict[tuple[str, str], bool] = {
    ("gpt_oss", "attention_bias"): True,
    ("qwen2_moe", "qkv_bias"): True,
    ("glm4", "attention_bias"): False,
    ("seed_oss", "attention_bias"): True,
    ("starcoder2", "use_bias"): True,
}
# Keys that a configuration of the family may leave out and may not write as null: transformers passes it on to sums and masks.
_NUMBERS: dict[str, tuple[str, ...]] = {
    "ministral": ("head_dim", "sliding_window"),
    "gemma2": ("sliding_window",),
    "gemma3_text": ("sliding_window",),
    "gpt_oss": ("sliding_window",),
    "qwen2_moe": ("num_key_value_heads",),
    "olmo3": ("sliding_window",),
    "cohere": ("logit_scale",),
    "cohere2": ("head_dim", "sliding_window"),
    "hunyuan_v1_dense": ("head_dim",),
}
# Families whose pattern of windows a configuration may state.
_PATTERNED = ("gemma3_text", "cohere2", "exaone4")


def family_of(config: Mapping[str, Any], model_type: str) -> Family:
    """What a layer of this configuration is made of; of families that are not known here, what Llama's is.

    Where values are as wide as keys (GLM-4.7-Flash), attention keeps the product that both are cut from; where they are
    narrower, the output that was cut to their width.
    """
    family = FAMILIES.get(model_type, UNKNOWN)
    if not is_latent(config) or model_type in FAMILIES:
        return family
    wide = config.get("v_head_dim") == head_dim_of(config, 0, 1)
    latent = int(config.get("q_lora_rank") or 0) + int(config["kv_lora_rank"])
    return replace(family, more_heads=(2 if wide else 1, 0), latent=latent)


def is_latent(config: Mapping[str, Any]) -> bool:
    """Whether keys and values are made of a latent of all heads (MLA; DeepSeek-AI 2024, arXiv 2405.04434)."""
    return bool(config.get("kv_lora_rank") and config.get("qk_rope_head_dim"))


def head_dim_of(config: Mapping[str, Any], hidden: int, heads: int) -> int:
    """Channels of a query; MLA's have a part with positions, which some configurations call head_dim, and one without."""
    if is_latent(config):
        return int(config["qk_rope_head_dim"]) + int(config.get("qk_nope_head_dim") or 0)
    return int(config.get("head_dim") or hidden // heads)


def has(config: Mapping[str, Any], model_type: str, bias: Bias | None) -> bool:
    """Whether a switch of the family is on in this configuration."""
    if isinstance(bias, bool) or bias is None:
        return bool(bias)
    value = config.get(bias)
    return _DEFAULTS.get((model_type, bias), False) if value is None else bool(value)


def switches(model_type: str) -> tuple[str, ...]:
    """Keys of a family's configuration that are true or false."""
    family = FAMILIES.get(model_type, UNKNOWN)
    keys = (family.qkv_bias, family.out_bias, family.mlp_bias, family.qk_norm_key)
    return tuple(key for key in keys if isinstance(key, str))


def numbers(model_type: str) -> tuple[str, ...]:
    """Keys of a family's configuration that are numbers and never null."""
    return _NUMBERS.get(model_type, ())


def need(config: Mapping[str, Any], *names: str) -> int:
    """The first of several names of a positive whole number.

    Raises:
        UserError: the configuration has none of them, or another value.
    """
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        if value is not None:
            raise UserError(
                f"{name} of the model's configuration cannot be this",
                got=value,
                allowed="a whole number of at least 1",
                do="Correct it in the model's config.json",
            )
    raise UserError(
        f"the model's configuration has no {' or '.join(names)}",
        found=config.get("model_type", "no model_type"),
        allowed="a causal language model in transformers' format",
        do="Choose another model, or complete its config.json",
    )


@dataclass(frozen=True)
class Widths:
    """The sizes that a layer's parameters are made of: hidden, query heads, KV heads, head size, MLP."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int


def attention_parameters(config: Mapping[str, Any], model_type: str, w: Widths) -> int:
    """Projections, biases, norms and sinks of one attention block."""
    family = FAMILIES.get(model_type, UNKNOWN)
    q, kv = w.heads * w.head_dim, w.kv_heads * w.head_dim
    total = w.hidden * (q + 2 * kv) + q * w.hidden
    total += (q + 2 * kv) * has(config, model_type, family.qkv_bias) + w.hidden * has(config, model_type, family.out_bias)
    if family.qk_norm and (family.qk_norm_key is None or has(config, model_type, family.qk_norm_key)):
        total += 2 * w.head_dim if family.qk_norm == "head" else q + kv
    return total + (w.heads if family.sinks else 0)


def norm_parameters(model_type: str, hidden: int) -> int:
    """Norms over the hidden size in one layer."""
    family = FAMILIES.get(model_type, UNKNOWN)
    return family.norms * family.norm_vectors * hidden


def mlp_parameters(config: Mapping[str, Any], model_type: str, w: Widths) -> int:
    """A dense MLP."""
    family = FAMILIES.get(model_type, UNKNOWN)
    up = 2 if family.gated else 1
    return (up + 1) * w.hidden * w.mlp + (up * w.mlp + w.hidden) * has(config, model_type, family.mlp_bias)


@dataclass(frozen=True)
class Experts:
    """A mixture-of-experts MLP: `count` experts of `width`, `active` a token, and a shared one of `shared` (0 for none)."""

    count: int
    active: int
    width: int
    shared: int
    sparse_layers: tuple[bool, ...]


def experts_of(config: Mapping[str, Any], model_type: str, layers: int) -> Experts | None:
    """The experts of a model, or None for a dense one."""
    scheme = FAMILIES.get(model_type, UNKNOWN).experts
    if scheme is None or (scheme == "qwen" and config.get("num_experts") == 0):  # of which transformers makes dense layers
        return None
    count = need(config, "num_experts", "num_local_experts")
    active = need(config, "num_experts_per_tok", "experts_per_token")
    width = need(config, "moe_intermediate_size") if scheme == "qwen" else need(config, "intermediate_size")
    shared = need(config, "shared_expert_intermediate_size") if model_type == "qwen2_moe" else 0
    step, dense = int(config.get("decoder_sparse_step") or 1), config.get("mlp_only_layers") or ()
    sparse = tuple(scheme != "qwen" or (layer not in dense and (layer + 1) % step == 0) for layer in range(layers))
    return Experts(count, active, width, shared, sparse)


def moe_parameters(model_type: str, hidden: int, experts: Experts) -> int:
    """Router, experts and shared expert of one sparse layer."""
    each = 3 * hidden * experts.width
    router = experts.count * hidden
    if model_type == "gpt_oss":
        each += 2 * experts.width + hidden
        router += experts.count
    shared = 3 * hidden * experts.shared + hidden if experts.shared else 0
    return router + experts.count * each + shared


def layer_types_of(config: Mapping[str, Any], model_type: str, layers: int) -> tuple[str, ...]:
    """`full_attention` or `sliding_attention` for each layer.

    Raises:
        UserError: the pattern of the family has layers with a window, and the configuration says that there is none.
    """
    given = config.get("layer_types")
    if given:
        return tuple(str(kind) for kind in given[:layers])
    every = FAMILIES.get(model_type, UNKNOWN).window_every
    window = config.get("sliding_window")
    if every < 2:
        return ("sliding_attention" if every and window else "full_attention",) * layers
    if model_type in _PATTERNED and "sliding_window_pattern" in config:
        if config["sliding_window_pattern"] is None:
            raise _no_window("sliding_window_pattern", None)
        every = int(config["sliding_window_pattern"])
    types = tuple("sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers))
    if "sliding_attention" in types and "sliding_window" in config and not window:
        raise _no_window("sliding_window", window)
    return types if window else ("full_attention",) * layers


def _no_window(key: str, value: int | None) -> UserError:
    return UserError(
        f"{key} of the model's configuration cannot be this: layers of its family have a window",
        found="null" if value is None else str(value),
        allowed="a whole number of at least 1",
        do="Correct it in the model's config.json; where every layer sees all tokens, layer_types says so for each",
    )
