"""The rotary settings that a model brings, read from a configuration of any age into one form.

transformers 5 keeps them in `config.rope_parameters`, per layer type where a model has several (Gemma 3: full attention with
base 1e6, sliding windows with base 1e4); older files say `rope_scaling` and `rope_theta`. Reading the wrong place is how
trainers lost a model's base frequency (perplexity 13.8 at position 0, 11,316 at 7.8k) or applied a factor twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megaspan.human import UserError, format_tokens

_DO = "Correct it in the model's config.json"

FULL = "full_attention"

REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("attention_factor", "factor"),
}
SCALING = {"rope_type", *(key for keys in (*REQUIRED.values(), *OPTIONAL.values()) for key in keys)}


@dataclass(frozen=True)
class NativeRope:
    """A model's own rotary settings.

    Attributes:
        nested: settings per layer type, or None when the model has one for all layers.
        entry: those of the layers that attend to everything; empty when these layers have no rotary positions.
        max_positions: `max_position_embeddings`; 0 when the configuration states none.
        fixed_original: the original length that the configuration keeps beside the rotary settings (Phi 3), where it wins.
    """

    nested: dict[str, Any] | None
    entry: dict[str, Any]
    max_positions: int
    fixed_original: int | None

    @property
    def kind(self) -> str:
        """The `rope_type`."""
        return str(self.entry.get("rope_type", "default"))

    @property
    def original(self) -> int:
        """Positions before any scaling: linear scaling keeps only the scaled maximum."""
        if self.kind == "linear":
            return round(self.max_positions / float(self.entry.get("factor") or 1.0))
        return int(self.entry.get("original_max_position_embeddings") or self.max_positions)

    @property
    def window(self) -> int:
        """Positions that the model covers as it is. The maximum already contains the factor of linear and llama3 scaling."""
        factor = float(self.entry.get("factor") or 1.0)
        if self.kind == "dynamic":
            return round(factor * self.max_positions)
        if self.kind in ("yarn", "longrope"):
            return max(round(factor * self.original), self.max_positions)
        return self.max_positions


def read_rope(model_config: Mapping[str, Any]) -> NativeRope:
    """Read `config.to_dict()` of transformers 5, or the raw contents of a `config.json`.

    Raises:
        UserError: rotary settings that are no mapping, or lack their factor; a base frequency that is no number.
    """
    config = text_config(model_config)
    raw = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(raw, Mapping):
        name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        raise UserError(
            f"{name} of the model's configuration is no mapping", got=raw, allowed="{rope_type: …, factor: …}", do=_DO
        )
    for key in ("rope_theta", "rope_local_base_freq"):
        if config.get(key) is not None and not _is_positive(config[key]):
            raise UserError(f"{key} of the model's configuration is no number above 0", got=config[key], do=_DO)
    theta, partial = config.get("rope_theta"), config.get("partial_rotary_factor")

    def complete(entry: Mapping[str, Any], base: Any) -> dict[str, Any]:
        made = {key: value for key, value in entry.items() if key != "type" and value is not None}
        made.setdefault("rope_type", entry.get("type") or "default")
        if base is not None:
            made.setdefault("rope_theta", base)
        if partial is not None:
            made.setdefault("partial_rotary_factor", partial)
        return made

    nested: dict[str, Any] | None = None
    if any(isinstance(value, Mapping) for value in raw.values()):
        nested = {key: None if value is None else complete(value, theta) for key, value in raw.items()}
    elif "rope_local_base_freq" in config and "rope_parameters" not in config:  # Gemma 3 as written before transformers 5
        nested = {FULL: complete(raw, theta), "sliding_attention": complete({}, config["rope_local_base_freq"])}
    entry = dict((nested.get(FULL) or {}) if nested is not None else complete(raw, theta))
    if "factor" in REQUIRED.get(str(entry.get("rope_type")), ()) and not _is_positive(entry.get("factor")):
        raise UserError(
            f"{entry['rope_type']} of the model's configuration needs a factor above 0",
            got=entry.get("factor", "none"),
            do=_DO,
        )
    positions = next((config[key] for key in ("max_position_embeddings", "n_positions", "max_seq_len") if config.get(key)), 0)
    fixed = config.get("original_max_position_embeddings")
    if fixed and entry.get("rope_type", "default") != "default":
        entry["original_max_position_embeddings"] = fixed
    return NativeRope(nested, entry, int(positions), int(fixed) if fixed else None)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def text_config(model_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language part of a configuration: `text_config` where a model keeps several, else the whole."""
    inner = model_config.get("text_config")
    return inner if isinstance(inner, Mapping) else model_config


def describe(entry: Mapping[str, Any]) -> str:
    """An entry in a few words: `yarn 32 x 32,768`."""
    kind, factor, original = entry["rope_type"], entry.get("factor"), entry.get("original_max_position_embeddings")
    if kind == "default":
        return "default"
    text = f"{kind} {float(factor):g}" if factor is not None else str(kind)
    return f"{text} x {format_tokens(int(original))}" if original and kind not in ("linear", "dynamic") else text
