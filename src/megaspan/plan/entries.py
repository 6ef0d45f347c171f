"""Values in a model's configuration that no model can have, refused by their key before anything is computed from them.

A `config.json` is edited by hand more often than one thinks: a head size that is odd cannot be rotated in halves, a negative
epsilon makes every loss NaN, and `"yes"` is true wherever Python asks. Found in the constructor of the model these are an
assertion about tensors; found at the first step they have cost the text's preparation. Here each is one sentence, which plan
and training share, and no library is needed for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megaspan.human import UserError

_OF = "of the model's configuration"
_DO = "Correct it in the model's config.json"

_SIZES = (
    "num_hidden_layers", "n_layer", "hidden_size", "n_embd", "num_attention_heads", "n_head", "num_key_value_heads",
    "head_dim", "intermediate_size", "n_inner", "vocab_size", "max_position_embeddings", "n_positions", "num_experts",
    "num_local_experts", "n_routed_experts", "num_experts_per_tok", "experts_per_token", "moe_intermediate_size",
    "shared_expert_intermediate_size", "original_max_position_embeddings", "decoder_sparse_step",
    "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
)  # fmt: skip
"""Whole numbers of at least 1, where they are there."""

_OR_NOTHING = (
    "sliding_window", "attention_chunk_size", "shared_expert_intermediate_size", "decoder_sparse_step", "num_experts",
    "num_local_experts", "n_routed_experts", "num_experts_per_tok", "experts_per_token",
)  # fmt: skip
"""Of these 0 means none: Granite 4's dense models state no experts."""

_OF_EACH_LAYER = ("moe_intermediate_size",)
"""Hunyuan's files have a list of these."""

_SWITCHES = ("tie_word_embeddings", "use_sliding_window")
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "initializer_range")
_ABOVE_0 = (
    "rope_theta", "rope_local_base_freq", "partial_rotary_factor", "attn_logit_softcapping", "final_logit_softcapping",
    "query_pre_attn_scalar", "logits_scaling",
)  # fmt: skip
_NUMBERS = ("logit_scale", "embedding_multiplier", "residual_multiplier", "attention_multiplier")
_SHARES = (
    "attention_dropout", "attn_pdrop", "dropout", "embd_pdrop", "embedding_dropout", "hidden_dropout", "resid_pdrop",
    "residual_dropout",
)  # fmt: skip
_NEVER_NULL = (*_SHARES, "layer_norm_eps")
"""Some families' configurations pass a null on, and their layers compute with it; the others' refuse it themselves."""

_IN_ROPE = ("rope_theta", "factor", "partial_rotary_factor", "original_max_position_embeddings")
_TEXTS = ("model_type", "hidden_act", "hidden_activation", "dtype", "torch_dtype")


def check_entries(text: Mapping[str, Any], switches: tuple[str, ...] = (), numbers: tuple[str, ...] = ()) -> None:
    """Refuse values that no model can have, and sizes that cannot stand together.

    Args:
        text: the contents of a `config.json`, its language part where it has several.
        switches: further keys of the family that are true or false.
        numbers: further keys of the family that are numbers and never null.

    Raises:
        UserError: the first such value, by its key.
    """
    for keys, good, allowed in (
        (set(_SIZES) - {*_OR_NOTHING, *_OF_EACH_LAYER}, _is_size, "a whole number of at least 1"),
        (_OF_EACH_LAYER, lambda value: _is_size(value) or _are_sizes(value), "a whole number of at least 1"),
        # Exaone 4's files write LLLG, and what it stands for in layer_types.
        (
            ("sliding_window_pattern",),
            lambda value: _is_size(value) or (isinstance(value, str) and bool(text.get("layer_types"))),
            "a whole number of at least 1",
        ),
        (_OR_NOTHING, lambda value: _is_size(value) or value in (0, False), "a whole number of at least 1, or null"),
        ((*_SWITCHES, *switches), lambda value: isinstance(value, bool), "true or false"),
        (_EPSILONS, lambda value: _is_number(value) and value >= 0, "a number of at least 0, such as 1e-6"),
        (_ABOVE_0, lambda value: _is_number(value) and value > 0, "a number above 0"),
        (_NUMBERS, _is_number, "a number"),
        (_SHARES, lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
        (_TEXTS, lambda value: isinstance(value, str), "a name"),
    ):
        for key in keys:
            _check(text, key, key, good, allowed)
    for key in (*_NEVER_NULL, *numbers):
        if key in text and text[key] is None:
            what = f"{key} {_OF} is null, and the layers of this family compute with it"
            raise UserError(what, found="null", allowed="a number", do=f"{_DO}, or remove the line")
    for name, entry in _rope_entries(text):
        nested = {isinstance(value, Mapping) for value in entry.values() if value is not None}
        if len(nested) > 1:
            what = f"{name} {_OF} has settings of single layer types beside settings of all"
            raise UserError(what, found=", ".join(map(str, entry)), allowed="one or the other", do=_DO)
        for key in _IN_ROPE:
            _check(entry, key, f"{key} in {name}", lambda value: _is_number(value) and value > 0, "a number above 0")
    types = text.get("layer_types")
    if types is not None and not (isinstance(types, list | tuple) and all(isinstance(kind, str) for kind in types)):
        raise UserError(f"layer_types {_OF} is no list of names", got=types, allowed="a name for each layer", do=_DO)
    if "sliding_attention" in (types or ()) and "sliding_window" in text and not text["sliding_window"]:
        what = f"layer_types {_OF} names layers with a window, and its sliding_window says none"
        raise UserError(what, got=text["sliding_window"], found="null", allowed="a whole number of at least 1", do=_DO)
    _check_experts(text)


def check_rotary(text: Mapping[str, Any], head_dim: int) -> None:
    """Refuse a head with an odd number of channels that are all rotated: rotation goes over pairs. (Of a part of them, families
    make the next even number.)

    Raises:
        UserError: it is odd.
    """
    stated = [entry["partial_rotary_factor"] for _, entry in _rope_entries(text) if "partial_rotary_factor" in entry]
    if head_dim % 2 and all(part in (None, 1) for part in (text.get("partial_rotary_factor"), *stated)):
        names = (name for name in ("qk_rope_head_dim", "head_dim") if text.get(name))
        size = next(names, "hidden_size / num_attention_heads")
        what = f"{size} {_OF} is odd, and its rotary positions turn channels in pairs"
        raise UserError(what, got=head_dim, allowed="an even number", do=_DO)


def check_padding(text: Mapping[str, Any]) -> None:
    """Refuse a padding token that the embedding of a model to be built has no row for. (A live one has been built.)

    Raises:
        UserError: it is no token of the vocabulary; -1 and the like count from its end, as torch does.
    """
    pad, vocab = text.get("pad_token_id"), text.get("vocab_size")
    if isinstance(pad, int) and isinstance(vocab, int) and not -vocab <= pad < vocab:
        raise UserError(
            f"pad_token_id {_OF} is none of its {vocab:,} tokens", got=pad, allowed=f"0 to {vocab - 1:,}, or null", do=_DO
        )


def _check(entries: Mapping[str, Any], key: str, name: str, good: Callable[[Any], bool], allowed: str) -> None:
    value = entries.get(key)
    if value is not None and not good(value) and key in _SIZES and _are_sizes(value):
        what = f"{name} {_OF} is one for each layer, and layers of different sizes are not supported yet"
        raise UserError(what, got=value, allowed="a whole number of at least 1", do="Choose a model of another family")
    if value is not None and not good(value):
        raise UserError(f"{name} {_OF} cannot be this", got=value, allowed=allowed, do=_DO)


def _rope_entries(text: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Rotary settings by the key that they stand in, those of single layer types too."""
    for name in ("rope_parameters", "rope_scaling"):
        found = text.get(name)
        if isinstance(found, Mapping):
            yield name, found
            yield from ((f"{name}.{kind}", entry) for kind, entry in found.items() if isinstance(entry, Mapping))


def _check_experts(text: Mapping[str, Any]) -> None:
    count = next((n for key in ("num_experts", "num_local_experts", "n_routed_experts") if (n := text.get(key))), None)
    for key in ("num_experts_per_tok", "experts_per_token"):
        if count is not None and (active := text.get(key)) is not None and active > count:
            raise UserError(f"{key} {_OF} is more than its {count} experts", got=active, allowed=f"1 to {count}", do=_DO)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(map(_is_size, value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
