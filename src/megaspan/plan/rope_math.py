"""Which rotary settings a run needs: arithmetic on configuration dictionaries, shared by the planner and the model loader.

A rotary model has seen positions up to its window (Qwen3: 40,960). Trained past it without rescaling nothing fails: the loss
of late tokens climbs above the unigram entropy of the text (7.3 against 2.8 nats over the last 20k of 160k tokens). So a row
longer than the window stops here unless the user chose one of three things, and an extension that the model carries already is
never applied a second time. Sources: YaRN (arXiv 2309.00071); the key names are those of transformers 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megaspan.human import UserError, format_tokens, nearest
from megaspan.plan.rope_native import FULL, OPTIONAL, REQUIRED, SCALING, NativeRope, describe, read_rope

# Their frequencies are computed from max_position_embeddings, so raising it would change them.
_READS_MAX_POSITIONS = ("dynamic", "longrope")


@dataclass(frozen=True)
class RopeChoice:
    """What to put into the model's configuration before the model is built.

    Attributes:
        rope_parameters: the complete new value of `config.rope_parameters`; None leaves the model's own.
        max_position_embeddings: the new value of `config.max_position_embeddings`; 0 when the model states none.
        reason: one sentence for the run header.
        window: positions that the settings cover; 0 when the model states none.
    """

    rope_parameters: dict[str, Any] | None
    max_position_embeddings: int
    reason: str
    window: int


def resolve_rope(
    model_config: Mapping[str, Any], wish: Mapping[str, Any] | str | None, max_length: int, allow_past_window: bool
) -> RopeChoice:
    """Decide the rotary settings of a run.

    Args:
        model_config: `config.to_dict()` of transformers 5, or the raw contents of a `config.json` of any age.
        wish: the user's `model_init_kwargs.rope_parameters`: a dictionary, `"auto"`, or None.
        max_length: tokens in the longest row.
        allow_past_window: the user accepts positions that the settings do not cover.

    Raises:
        UserError: the row is longer than what the settings cover, or the wish is incomplete, contradicts the model or cannot
            be built for it.
    """
    native = read_rope(model_config)
    if wish is None:
        return _keep(native, max_length, allow_past_window)
    if wish == "auto":
        return _extend(native, max_length, allow_past_window)
    if not isinstance(wish, Mapping):
        allowed = "auto, or a dictionary with rope_type, factor and original_max_position_embeddings"
        raise UserError(
            "model_init_kwargs.rope_parameters is not a dictionary", got=wish, allowed=allowed, do="Write rope_parameters: auto"
        )
    return _replace(native, _full_attention_part(wish, native), max_length, allow_past_window)


def yarn_attention_factor(factor: float) -> float:
    """YaRN's temperature on cos and sin: 0.1 ln(factor) + 1; 1.347 at factor 32."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def _keep(native: NativeRope, max_length: int, allow_past_window: bool) -> RopeChoice:
    window = native.window
    if not window:
        return RopeChoice(None, 0, "RoPE unchanged: the model's configuration states no longest position", 0)
    if max_length <= window:
        own = "" if native.kind == "default" else f" ({describe(native.entry)})"
        covers = f"the model's own window of {format_tokens(window)} tokens{own} covers {format_tokens(max_length)}"
        return RopeChoice(None, native.max_positions, f"RoPE unchanged: {covers}", window)
    if not allow_past_window:
        raise _past_window(window, max_length)
    positions = native.max_positions if native.kind in _READS_MAX_POSITIONS else max_length
    return RopeChoice(None, positions, f"RoPE unchanged; {_not_covered(window, max_length)}", window)


def _extend(native: NativeRope, max_length: int, allow_past_window: bool) -> RopeChoice:
    """The wish `auto`: the model's own kind of scaling with a larger factor, YaRN where it has none."""
    window, original, kind = native.window, native.original, native.kind
    if not window or max_length <= window:
        return _keep(native, max_length, allow_past_window)
    _refuse_unknown_layers(native)
    if kind not in ("default", "yarn", "linear", "dynamic"):
        larger = {**native.entry, "factor": math.ceil(max_length / window) * float(native.entry.get("factor") or 1.0)}
        inline = ", ".join(f"{key}: {value}" for key, value in larger.items())
        own_words = f"\n  model_init_kwargs: {{rope_parameters: {{{inline}}}}}" if kind == "llama3" else ""
        raise UserError(
            f"rope_parameters: auto cannot extend {kind} scaling, whose factors were fitted to {format_tokens(window)} tokens",
            found=f"max_length {format_tokens(max_length)}",
            do=f"Paste one of these:\n  max_length: {window}{own_words}\n  allow_past_window: true",
        )
    if kind == "default":
        scaling: dict[str, Any] = {"rope_type": "yarn", "original_max_position_embeddings": original}
    else:
        scaling = {key: value for key, value in native.entry.items() if key in SCALING}
        had = scaling.get("attention_factor")
        if had is not None and math.isclose(float(had), yarn_attention_factor(float(scaling["factor"])), rel_tol=1e-3):
            del scaling["attention_factor"]  # the formula's value for the old factor
    # Whole factors: 3.2 becomes 4. A factor somewhat too large costs nothing measurable, a fraction is hard to type elsewhere.
    scaling["factor"] = float(math.ceil(max_length / original))
    return _chosen(native, scaling, max_length, allow_past_window, "rope_parameters: auto")


def _replace(native: NativeRope, wish: dict[str, Any], max_length: int, allow_past_window: bool) -> RopeChoice:
    """The wish is a dictionary: check it against its kind and against the model."""
    _refuse_unknown_layers(native)
    _check_keys(wish, native)
    theta, own_theta = wish.get("rope_theta"), native.entry.get("rope_theta")
    if theta is not None and own_theta is not None and float(theta) != float(own_theta) and not allow_past_window:
        raise UserError(
            "rope_parameters.rope_theta is not the model's, which changes every position it has learned",
            got=theta,
            allowed=str(own_theta),
            do="Leave rope_theta out to take the model's, or set allow_past_window: true to train the model to a new base",
        )
    original, trained = wish.get("original_max_position_embeddings"), native.max_positions
    stacked = ""
    if native.kind in ("yarn", "linear"):
        trained = native.original
        stacked = (
            f": the model is already scaled {float(native.entry['factor']):g} x {format_tokens(trained)}; factors do not stack"
        )
    if original is not None and trained and original > trained and not allow_past_window:
        raise UserError(
            f"rope_parameters.original_max_position_embeddings is more than the model was trained for{stacked}",
            got=original,
            allowed=f"at most {trained}",
            do=f"Write factor: {math.ceil(max_length / trained)}.0 and original_max_position_embeddings: {trained}",
        )
    scaling = {key: value for key, value in wish.items() if value is not None}
    own = {key: value for key, value in native.entry.items() if key in SCALING}
    if own == {key: value for key, value in scaling.items() if key in SCALING}:
        note = "the model's own"
    elif native.kind != "default":
        note = f"as asked, replaces the model's own {describe(native.entry)}"
    else:
        note = "as asked"
    return _chosen(native, scaling, max_length, allow_past_window, note)


def _chosen(native: NativeRope, scaling: dict[str, Any], max_length: int, allow_past_window: bool, note: str) -> RopeChoice:
    """Add what the model knows besides the scaling (base frequency, rotary share …), check coverage, put it in its place."""
    entry = {key: value for key, value in native.entry.items() if key not in SCALING} | scaling
    kind, factor = entry["rope_type"], entry.get("factor")
    original = int(entry.get("original_max_position_embeddings") or native.original)
    if kind != "default" and native.fixed_original is not None and original != native.fixed_original:
        raise UserError(
            "this model fixes original_max_position_embeddings outside rope_parameters, where it wins over them",
            got=original,
            allowed=str(native.fixed_original),
            do=f"Write original_max_position_embeddings: {native.fixed_original}, or leave it out",
        )
    if kind == "dynamic":
        window = round(float(factor or 1.0) * native.max_positions)
    elif kind == "longrope" and factor is None:
        window = native.max_positions
    else:
        window = round(float(factor or 1.0) * original)
    past = 0 < window < max_length
    if past and not allow_past_window:
        if kind == "default":
            raise _past_window(window, max_length)
        raise UserError(
            f"rope_parameters cover {format_tokens(window)} tokens ({describe(entry)}), fewer than max_length",
            found=f"max_length {format_tokens(max_length)}",
            do=f"Write factor: {math.ceil(max_length / original)}.0, or max_length: {window}, or allow_past_window: true",
        )
    positions = native.max_positions if kind in _READS_MAX_POSITIONS else max(window, max_length if past else 0)
    theta = f", theta {float(entry['rope_theta']):,.0f}" if "rope_theta" in entry else ""
    layers = f", {FULL} layers only" if native.nested is not None else ""
    reason = f"RoPE {describe(entry)} = {format_tokens(window)} positions{theta}{layers} ({note})"
    if past:
        reason += f"; {_not_covered(window, max_length)}"
    parameters = {**native.nested, FULL: entry} if native.nested is not None else entry
    return RopeChoice(parameters, positions, reason, window)


def _full_attention_part(wish: Mapping[str, Any], native: NativeRope) -> dict[str, Any]:
    """The part of a wish that may differ from the model: sliding layers see only their window and stay as they are."""
    if not any(isinstance(value, Mapping) for value in wish.values()):
        return dict(wish)
    for key, value in wish.items():
        if native.nested is None or key not in native.nested:
            allowed = ", ".join(native.nested) if native.nested else "keys such as rope_type: this model has one rotary setting"
            raise UserError(f"rope_parameters.{key} is no layer type of this model", allowed=allowed, do=f"Leave {key} out")
        own = native.nested[key]
        if key != FULL and any((own or {}).get(name) != wanted for name, wanted in dict(value or {}).items()):
            raise UserError(
                f"rope_parameters.{key} differs from the model's, but only {FULL} layers see past their window",
                do=f"Leave {key} out",
            )
    return dict(wish.get(FULL) or {})


def _check_keys(wish: dict[str, Any], native: NativeRope) -> None:
    """Refuse a dictionary that transformers would crash on or misread; renames the old key `type` in place."""
    if "type" in wish:
        wish.setdefault("rope_type", wish.pop("type"))
    kind = wish.get("rope_type")
    example = f"{{rope_type: yarn, factor: 4.0, original_max_position_embeddings: {native.original or 32768}}}"
    if kind not in REQUIRED:
        hint = nearest(str(kind), REQUIRED)
        raise UserError(
            "rope_parameters need a rope_type",
            got=kind,
            allowed=", ".join(REQUIRED),
            do=f"Did you mean {hint}?" if hint else f"Write for example {example}",
        )
    missing = [key for key in REQUIRED[kind] if wish.get(key) is None]
    if missing:
        raise UserError(
            f"rope_parameters of rope_type {kind} need {' and '.join(missing)}",
            found=", ".join(wish),
            do=f"Write for example {example}" if kind == "yarn" else f"Write rope_type, {', '.join(REQUIRED[kind])}",
        )
    own = [key for key in native.entry if key not in SCALING]
    legal = dict.fromkeys(("rope_type", *REQUIRED[kind], *OPTIONAL.get(kind, ()), "rope_theta", *own))
    for key, value in wish.items():
        if key not in legal:
            hint = nearest(key, legal)
            raise UserError(
                f"rope_parameters.{key} means nothing to rope_type {kind}",
                allowed=", ".join(legal),
                do=f"Did you mean {hint}?" if hint else None,
            )
        if key not in ("factor", "rope_theta", "original_max_position_embeddings") or value is None:
            continue
        number = int if key == "original_max_position_embeddings" else int | float
        if isinstance(value, bool) or not isinstance(value, number) or not 1 <= value < math.inf:
            whole = "whole " if number is int else ""
            raise UserError(
                f"rope_parameters.{key} has no meaning", got=value, allowed=f"a {whole}number of 1 or more", do=f"Correct {key}"
            )


def _refuse_unknown_layers(native: NativeRope) -> None:
    if native.nested is not None and not native.nested.get(FULL):
        raise UserError(
            "rope_parameters cannot be changed for this model: no layer type of its rotary settings attends to everything",
            found=", ".join(native.nested),
            allowed=f"an entry {FULL}",
            do="Leave rope_parameters out",
        )


def _past_window(window: int, max_length: int) -> UserError:
    return UserError(
        f"the model has seen positions up to {format_tokens(window)} only; past them the loss climbs without any error",
        found=f"max_length {format_tokens(max_length)}",
        do="Paste one of these three lines:\n"
        f"  max_length: {window}\n  model_init_kwargs: {{rope_parameters: auto}}\n  allow_past_window: true",
    )


def _not_covered(window: int, max_length: int) -> str:
    return (
        f"NOT COVERED: rows of {format_tokens(max_length)} tokens run past the window of {format_tokens(window)} "
        "(allow_past_window), watch the loss of late tokens"
    )
