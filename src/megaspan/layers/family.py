"""What a decoder layer does around its attention, as data: which norms stand where, read from the live layer.

The streamed layer (`streamed.py`) runs a layer in two halves with attention between them: `before` makes queries, keys and
values, `after` takes attention's output to the layer's output. The first half is the live attention module's own code,
stopped at the moment it calls its attention function: biases, q/k norms, clipping and rotary tables of every family come
with it, and so do adapters. The second half of the most common layers is short and written here: output projection, norms, MLP
and residuals, where families differ by the places of their norms (Llama: before; Gemma 2 and 3: before and after; OLMo 2:
after; Cohere: attention and MLP side by side) and by a multiplier (Granite). Every other layer runs its own code in the second
half too, in which the call of attention is answered with what was kept: experts and a shared MLP beside them (Granite 4),
dropout on residuals (Phi-3 and 4), norms under other names (Apertus, GLM-4), a buffer that scales a layer. Where something
stands between the kernel and the output projection (a gate in AFMoE and Laguna, a norm in BitNet), the attention module runs
again with the kernel's output put in, its queries, keys and values left out. Whether this reading of a class is right is not
believed but tried: `selfcheck.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
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
        own: the second half is the layer's own code; of the names above only `before_attention` is known.
        gated: attention does more behind its kernel than project; its own code does that too. Only with `own`.
    """

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None
    multiplier: str | None = None
    parallel: bool = False
    own: bool = False
    gated: bool = False


_ATTENTION, _PROJECTION, _MLP = "self_attn", "o_proj", "mlp"
_INPUTS = ("q_proj", "k_proj", "v_proj")
# Parts of an attention module that work before its kernel. Any other one may work behind it.
_IN_FRONT = {*_INPUTS, "qkv_proj", "q_norm", "k_norm", "v_norm", "q_layernorm", "k_layernorm", "rotary_emb"}
_FIRST_NORMS = ("input_layernorm", "attention_layernorm")
# Of the tensors that a layer is called with, those that are cut into tiles, or are known to be no tokens.
_CUT = {"position_embeddings", "position_ids", "attention_mask", "cache_position"}
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
    if _ATTENTION not in children or not hasattr(layer.self_attn, _PROJECTION):
        return f"it has no {_ATTENTION}.{_PROJECTION}"
    if not all(hasattr(layer.self_attn.o_proj, size) for size in ("in_features", "out_features")):
        return f"its {_ATTENTION}.{_PROJECTION} ({type(layer.self_attn.o_proj).__name__}) is no linear layer"
    gated, norms = _works_behind(layer.self_attn), frozenset(children) & _NORMS
    # Numbers of the layer's own come with its weights, so that no toy shows what they do.
    by_hand = not gated and set(children) - norms == {_ATTENTION, _MLP} and not _tensors(layer)
    if by_hand and norms in _FAMILIES:
        family = _FAMILIES[norms]
        return replace(family, multiplier="residual_multiplier") if hasattr(layer, "residual_multiplier") else family
    first = [name for name in _FIRST_NORMS if name in children]
    if len(first) != 1:
        return f"no norm of its parts is known as the one before attention: {', '.join(sorted(children))}"
    return Family(first[0], None, None, None, own=True, gated=gated)


def _works_behind(attention: Any) -> bool:
    """Whether an attention module has parts that may stand between its kernel and its output projection."""
    children = {name for name, part in attention._modules.items() if part is not None}
    return bool(children - _IN_FRONT - {_PROJECTION} or _tensors(attention) - {"sinks"}) or _wide_queries(attention)


def _wide_queries(attention: Any) -> bool:
    """Whether the projection of queries makes something else beside them, as a gate."""
    queries, output = (getattr(getattr(attention, name, None), size, None) for name, size in _WIDTHS)
    return queries is not None and queries != output


_WIDTHS = (("q_proj", "out_features"), (_PROJECTION, "in_features"))


def _tensors(module: Any) -> set[str]:
    """Names of a module's own parameters and buffers."""
    return {name for held in (module._parameters, module._buffers) for name, tensor in held.items() if tensor is not None}


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
    if family.own:
        _refuse_tokens(layer, arguments)
    positions = arguments.get("position_ids") if _reads_positions(layer.self_attn) else None
    tables = arguments["position_embeddings"]  # none where a layer has no rotary embedding
    arguments = arguments | {
        "position_embeddings": None if tables is None else tuple(part[..., tokens, :] for part in tables),
        # The whole row's have been looked at, so the attention function need not; some attention modules scale by them.
        "position_ids": None if positions is None else positions[..., tokens],
        "megaspan_capture": _stop,
    }
    try:
        layer.self_attn(hidden_states=normed(layer, family.before_attention, x_BtE), **arguments)
    except _Stopped as stopped:
        return stopped.call
    raise UserError(
        f"{type(layer.self_attn).__name__} did not call the attention that is set", do="Set gradient_checkpointing: false"
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
    if family.own:
        return _by_own_code(layer, family, x_BtE, out_BtHD, mlp)
    mlp = mlp or layer.mlp
    factor = getattr(layer, family.multiplier) if family.multiplier else None
    attended = normed(layer, family.after_attention, layer.self_attn.o_proj(out_BtHD.flatten(2)))
    attended = attended if factor is None else attended * factor
    if family.parallel:
        return x_BtE + attended + _first(mlp(normed(layer, family.before_attention, x_BtE)))
    hidden = x_BtE + attended
    mixed = normed(layer, family.after_mlp, _first(mlp(normed(layer, family.before_mlp, hidden))))
    return hidden + (mixed if factor is None else mixed * factor)


def _by_own_code(layer: Any, family: Family, x_BtE: Tensor, out_BtHD: Tensor, mlp: Callable[[Tensor], Any] | None) -> Tensor:
    """The layer's own forward of a tile, its attention answered."""
    attention = layer.self_attn
    own = attention.forward  # before it is answered

    def answer(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        if not family.gated:
            return attention.o_proj(out_BtHD.flatten(2)), None
        return _first(
            _behind(attention, own, kwargs["hidden_states"] if "hidden_states" in kwargs else args[0], out_BtHD)
        ), None

    parameters = list(inspect.signature(type(layer).forward).parameters.values())[2:]
    needed = {each.name: None for each in parameters if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD}
    with ExitStack() as answered:
        answered.enter_context(_instead(attention, "forward", answer))
        if mlp is not None and mlp is not getattr(layer, _MLP, None):
            answered.enter_context(_instead(layer.mlp, "forward", mlp))
        # The class's forward checkpoints itself since transformers 5.20; the layer's own may be the one which streams.
        answered.enter_context(_instead(layer, "gradient_checkpointing", False))
        return _first(type(layer).forward(layer, x_BtE, **needed))


def _behind(attention: Any, own: Callable[..., Any], hidden_BtE: Tensor, out_BtHD: Tensor) -> Any:
    """What an attention module makes of its kernel's output; its queries, keys and values are not computed for it."""
    # A rotation by nothing, as long as the tile: of one channel, which all channels are multiplied with.
    table_Bt1 = hidden_BtE.new_ones(*hidden_BtE.shape[:2], 1)
    with ExitStack() as answered:
        for name in _INPUTS[1:] if _wide_queries(attention) else _INPUTS:
            projection = getattr(attention, name, None)
            width = getattr(projection, "out_features", None)
            if width is not None:
                answered.enter_context(_instead(projection, "forward", _zeros(width)))
        return own(
            hidden_states=hidden_BtE,
            position_embeddings=(table_Bt1, torch.zeros_like(table_Bt1)),
            attention_mask=None,
            megaspan_capture=lambda _: out_BtHD,
        )


def _zeros(width: int) -> Callable[[Tensor], Tensor]:
    """In place of a projection: zeros that take no memory."""
    return lambda x: x.new_zeros(()).expand(*x.shape[:-1], width)


@contextmanager
def _instead(module: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, a module has another value, or method, under a name."""
    before = {name: module.__dict__[name]} if name in module.__dict__ else {}
    module.__dict__[name] = value
    try:
        yield
    finally:
        del module.__dict__[name]
        module.__dict__.update(before)


def _refuse_tokens(layer: Any, arguments: dict[str, Any]) -> None:
    """A layer that runs its own code in tiles is given nothing else that may be of the whole row."""
    for name, value in arguments.items():
        given = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else (value,)
        if name not in _CUT and not name.startswith("megaspan_") and any(isinstance(each, Tensor) for each in given):
            raise UserError(
                f"{type(layer).__name__} is called with {name}, which is not known to be right in tiles",
                do="Set gradient_checkpointing_kwargs or model options so that it is not given, or report the model",
            )


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
