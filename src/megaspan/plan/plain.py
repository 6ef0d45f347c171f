"""Whether the files of a model show by themselves that training takes it, so that a plan needs no library to ask.

What training refuses, a plan has to refuse with the same sentence: one that promises a fit for a quantised model, or for a
folder that was copied by half, costs an afternoon. Those sentences are made where transformers is at hand (`model/taken.py`),
after two to four seconds of imports. Most models are of a family that the planner knows, and their `config.json` says nothing
unusual: these pass here, in a millisecond. Everything else is asked there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaspan.human import UserError
from megaspan.plan.entries import check_entries
from megaspan.plan.facts import ModelFacts, read_config
from megaspan.plan.families import FAMILIES
from megaspan.plan.rope_native import REQUIRED, read_rope

if TYPE_CHECKING:
    from megaspan.config import SFTConfig

EXACT_LAYERS = ("full_attention", "sliding_attention")
"""Layer types whose attention is a slice of keys: all earlier ones, or a window of them."""

DROPOUTS = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")
OTHER_SENSES = ("vision_config", "audio_config", "image_token_id", "audio_token_id")
KEPT_STATES = ("output_hidden_states", "output_attentions")
ACTIVATIONS = ("hidden_act", "hidden_activation")

_USUAL_ACTIVATIONS = (None, "silu", "gelu", "gelu_pytorch_tanh", "relu")
_UNUSUAL = (
    "quantization_config", "text_config", "is_encoder_decoder", "auto_map", "layers_block_type", "use_bidirectional_attention",
    *OTHER_SENSES, *KEPT_STATES,
)  # fmt: skip
_NULL = type(None)
_FORMS: dict[tuple[type, ...], tuple[str, ...]] = {
    (bool,): (
        "attention_bias", "attention_out_bias", "is_encoder_decoder", "mlp_bias", "norm_topk_prob", "output_router_logits",
        "qkv_bias", "tie_word_embeddings", "use_bias", "use_cache", "use_sliding_window",
    ),
    (bool, _NULL): ("output_hidden_states", "return_dict", "use_bidirectional_attention", "use_qk_norm"),
    (float,): (
        "initializer_range", "layer_norm_eps", "logit_scale", "norm_epsilon", "rms_norm_eps", "router_aux_loss_coef",
        "router_jitter_noise", "swiglu_alpha", "swiglu_limit",
    ),
    (float, int): (
        "attention_dropout", "attention_multiplier", "embd_pdrop", "embedding_dropout", "embedding_multiplier",
        "logits_scaling", "resid_pdrop", "residual_dropout", "residual_multiplier",
    ),
    (float, _NULL): ("attn_logit_softcapping", "clip_qkv", "final_logit_softcapping"),
    (int,): (
        "chunk_size_feed_forward", "decoder_sparse_step", "head_dim", "hidden_size", "intermediate_size",
        "max_position_embeddings", "max_window_layers", "moe_intermediate_size", "no_rope_layer_interval",
        "num_attention_heads", "num_experts", "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads",
        "num_local_experts", "original_max_position_embeddings", "pretraining_tp", "query_pre_attn_scalar",
        "shared_expert_intermediate_size", "vocab_size",
    ),
    (int, _NULL): ("bos_token_id", "eod_token_id", "pad_token_id", "sliding_window"),
    (int, list, _NULL): ("eos_token_id",),
    (int, str, _NULL): ("sliding_window_pattern",),
    (str,): ACTIVATIONS,
    (str, _NULL): ("transformers_version",),
    (list, _NULL): ("architectures", "layer_types", "mlp_only_layers", "no_rope_layers"),
    (dict, _NULL): ("id2label", "label2id", "rope_parameters", "rope_scaling"),
}  # fmt: skip
"""The kinds of value that transformers' configurations of the known families take under a key, all of them."""

_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_CHOSEN_BY_PEFT = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
_COMMON_PARTS = (*_CHOSEN_BY_PEFT, "olmo2", "olmo3", "granite", "cohere", "cohere2", "smollm3", "seed_oss")
"""Families whose layers are of `_PARTS`; of the first ones peft chooses some by itself."""

_DTYPES = (None, "float32", "bfloat16", "float16")


def is_plain(config: SFTConfig) -> bool:
    """Whether `model_name_or_path` is surely a model that is trained here; False where somebody else has to say.

    Raises:
        UserError: there is no configuration of that name.
    """
    name = str(config.model_name_or_path)
    raw, changes = read_config(name, config.model_revision), config.config_overrides
    # What replaces an entry of the file by one of its kind needs no more than a look at both.
    if config.trust_remote_code or any(type(value) is not type(raw.get(key)) for key, value in changes.items()):
        return False
    changed = raw | changes
    if changed.get("layer_types") and "num_hidden_layers" in changes:
        changed["layer_types"] = changed["layer_types"][: changed["num_hidden_layers"]]  # fewer layers are the first ones
    dropped = any(changed.get(key) for key in DROPOUTS)
    return is_usual(raw) and is_usual(changed) and not dropped and _is_whole(Path(name).expanduser())


def has_plain_adapter(config: SFTConfig, model: ModelFacts) -> bool:
    """Whether there is surely a place for the adapter that the options ask for, or none is asked for; else peft has to say.

    Args:
        config: the options.
        model: facts of its model.
    """
    if not config.use_peft:
        return True
    targets, saved = config.lora_target_modules, config.lora_modules_to_save
    if model.model_type not in _COMMON_PARTS or model.experts is not None or saved is not None:
        return False
    names = [targets] if isinstance(targets, str) else targets
    if names is None:
        return model.model_type in _CHOSEN_BY_PEFT
    return names in (["all-linear"], ("all-linear",)) or set(names) <= {*_PARTS}


def is_usual(raw: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of a family that is known here and says nothing that others have to look at."""
    kind, types = raw.get("model_type"), raw.get("layer_types")
    try:
        check_entries(raw)
    except UserError:  # of a file whose entry is replaced; whether it can be read at all is transformers' to say
        return False
    if kind not in FAMILIES or any(raw.get(key) not in (None, False) for key in _UNUSUAL):
        return False
    if any(key in raw and type(raw[key]) not in forms for forms, keys in _FORMS.items() for key in keys):
        return False
    if int(raw.get("hidden_size") or 0) % int(raw.get("num_attention_heads") or 1):
        return False  # right with a head_dim, and some families refuse it all the same
    if any(raw.get(key) not in _DTYPES for key in ("dtype", "torch_dtype")):
        return False
    if raw.get("return_dict", True) is not True or raw.get("is_causal") is False or raw.get("is_decoder") is False:
        return False
    if types is not None and (set(types) - set(EXACT_LAYERS) or len(types) != raw.get("num_hidden_layers")):
        return False
    if read_rope(raw).kind not in REQUIRED or any(raw.get(key) not in _USUAL_ACTIVATIONS for key in ACTIVATIONS):
        return False
    own = str(kind).removesuffix("_text").replace("_", "") + "forcausallm"
    return all(str(name).lower().replace("_", "") == own for name in raw.get("architectures") or [own])


def _is_whole(place: Path) -> bool:
    """Whether a folder's weights are safetensors of the length that they say, or no weights at all. A hub name passes."""
    if not place.is_dir():
        return True
    weights = [*place.glob("*.safetensors")]
    if weights:
        return all(map(_has_its_length, weights))
    return {file.suffix for file in place.iterdir()} <= {"", ".json", ".jinja", ".md", ".model", ".txt"}


def _has_its_length(file: Path) -> bool:
    """A safetensors file begins with the length of its header, which says where each tensor ends."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            size = file.stat().st_size
            header = json.loads(opened.read(length)) if 8 + length <= size else {}
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return bool(8 + length + max(ends, default=0) == size)
    except (OSError, ValueError, TypeError, AttributeError, KeyError, IndexError):
        return False
