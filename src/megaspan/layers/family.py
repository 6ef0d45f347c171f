"""What a decoder layer does around its attention, as data: which norms stand where, read from the live layer.

The streamed layer (`streamed.py`) runs a layer in two halves with attention between them: `before` makes queries, keys and
values, `after` takes attention's output to the layer's output. The first half is the live attention module's own code,
stopped at the moment it calls its attention function: biases, q/k norms, clipping and rotary tables of every family come
with it, and so do adapters. The second half is short and written here: output projection, norms, MLP and residuals, where
families differ by the places of their norms (Llama: before; Gemma 2 and 3: before and after; OLMo 2: after; Cohere:
attention and MLP side by side) and by a multiplier (Granite). Whether this reading of a class is right is not believed but
tried: `selfcheck.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megaspan.attention import AttentionCall
from megaspan.human import UserError


@dataclass(frozen=True)
class Family:
    """Names of a layer's modules by what they do; None where the layer has none.

    Attributes:
        before_attention: norm of the layer's input.
        after_attention: norm of attention's projected output, before it is added.
        before_mlp: norm of the MLP's input.
        after_mlp: norm of the MLP's output, before it is added.
        multiplier: attribute with the factor on both additions.
        parallel: the MLP reads the same normed input as attention, and both are added to the layer's input.
    """

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None
    multiplier: str | None = None
    parallel: bool = False


_ATTENTION, _PROJECTION, _MLP = "self_attn", "o_proj", "mlp"
_NORMS = {"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"}
# Which norms a layer has decides what each of them does: the names alone do not (`post_attention_layernorm` stands before the
# MLP in Llama and after attention in Gemma 2).
_FAMILIES = {
    frozenset({"input_layernorm", "post_attention_layernorm"}): Family(
        "input_layernorm", None, "post_attention_layernorm", None
    ),
    frozenset(_NORMS): Family(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
    frozenset({"post_attention_layernorm", "post_feedforward_layernorm"}): Family(
        None, "post_attention_layernorm", None, "post_feedforward_layernorm"
    ),
    frozenset({"input_layernorm"}): Family("input_layernorm", None, None, None, parallel=True),
}


def describe(layer: Any) -> Family | str:
    """The layer's family, or why it has none that is known here."""
    # Not `named_children`: it leaves out the second name of a module that has two, and a layer with one norm is another family.
    children = {name: part for name, part in layer._modules.items() if part is not None}
    norms = frozenset(children) & _NORMS
    strange = set(children) - norms - {_ATTENTION, _MLP}
    if strange:
        return f"it has parts that are not known here: {', '.join(sorted(strange))}"
    if _ATTENTION not in children or _MLP not in children or not hasattr(layer.self_attn, _PROJECTION):
        return f"it has no {_ATTENTION}.{_PROJECTION} and {_MLP}"
    if not all(hasattr(layer.self_attn.o_proj, size) for size in ("in_features", "out_features")):
        return f"its {_ATTENTION}.{_PROJECTION} ({type(layer.self_attn.o_proj).__name__}) is no linear layer"
    if norms not in _FAMILIES:
        return f"its norms stand in places that are not known here: {', '.join(sorted(norms)) or 'none'}"
    family = _FAMILIES[norms]
    if hasattr(layer, "residual_multiplier"):
        return replace(family, multiplier="residual_multiplier")
    return family


class _Stopped(Exception):
    """Carries what attention was asked for out of the attention module."""

    def __init__(self, call: AttentionCall) -> None:
        self.call = call


def _stop(call: AttentionCall) -> Tensor:
    raise _Stopped(call)


def before(layer: Any, family: Family, x_BtE: Tensor, tokens: slice, arguments: dict[str, Any]) -> AttentionCall:
    """The first half of a layer on a tile of tokens: what it asks attention for.

    Args:
        layer: the live layer, its attention being megaspan's.
        family: from `describe`.
        x_BtE: the layer's input, these tokens only.
        tokens: which tokens of the row they are.
        arguments: the layer's own keyword arguments, for the whole row.
    """
    positions = arguments.get("position_ids") if _reads_positions(layer.self_attn) else None
    arguments = arguments | {
        "position_embeddings": tuple(part[..., tokens, :] for part in arguments["position_embeddings"]),
        # The whole row's have been looked at, so the attention function need not; some attention modules scale by them.
        "position_ids": None if positions is None else positions[..., tokens],
        "megaspan_capture": _stop,
    }
    try:
        layer.self_attn(hidden_states=normed(layer, family.before_attention, x_BtE), **arguments)
    except _Stopped as stopped:
        return stopped.call
    raise UserError(
        f"{type(layer.self_attn).__name__} did not call the attention that is set", do="Set gradient_checkpointing: true"
    )


def _reads_positions(attention: Any) -> bool:
    """Whether an attention module takes positions by name, for itself and not for its attention function."""
    return "position_ids" in inspect.signature(type(attention).forward).parameters


def after(layer: Any, family: Family, x_BtE: Tensor, out_BtHD: Tensor, mlp: Callable[[Tensor], Any] | None = None) -> Tensor:
    """The second half of a layer on a tile of tokens: its output [batch, tokens, hidden].

    Args:
        layer: the live layer.
        family: from `describe`.
        x_BtE: the layer's input, these tokens only.
        out_BtHD: attention's output for them.
        mlp: in place of the layer's own.
    """
    mlp = mlp or layer.mlp
    factor = getattr(layer, family.multiplier) if family.multiplier else None
    attended = normed(layer, family.after_attention, layer.self_attn.o_proj(out_BtHD.flatten(2)))
    attended = attended if factor is None else attended * factor
    if family.parallel:
        return x_BtE + attended + _first(mlp(normed(layer, family.before_attention, x_BtE)))
    hidden = x_BtE + attended
    mixed = normed(layer, family.after_mlp, _first(mlp(normed(layer, family.before_mlp, hidden))))
    return hidden + (mixed if factor is None else mixed * factor)


def attention_trains(layer: Any, family: Family) -> bool:
    """Whether a parameter of the first half wants a gradient."""
    last = {id(parameter) for parameter in layer.self_attn.o_proj.parameters()}
    first = [parameter for parameter in layer.self_attn.parameters() if id(parameter) not in last]
    norm = list(getattr(layer, family.before_attention).parameters()) if family.before_attention else []
    return any(parameter.requires_grad for parameter in [*first, *norm])


def normed(layer: Any, name: str | None, x: Tensor) -> Tensor:
    """x through the norm of that name, as it is without a name."""
    return x if name is None else getattr(layer, name)(x)


def _first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """An MLP's output; a mixture of experts may return its router's scores beside it."""
    return result if isinstance(result, torch.Tensor) else result[0]
