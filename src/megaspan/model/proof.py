"""A proof on the user's own model, at the moment it is prepared: the same tokens through it before and after.

Two families that look alike in their configuration can differ in their code. A bias on the attention scores that arrives
inside a mask, or a second use of the attention weights, would vanish without a word under long attention, which takes no mask
and returns no weights, and the loss would merely be a little worse. So a few dozen tokens run through the plain model first
(milliseconds), and a model whose hidden states come out different is refused. (The head has its own proof,
`layers.head.check_head`.)

A second proof is for rows on several ranks and for packed rows: whatever stands between the attentions must work token by
token.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from megaspan.attention import AttentionCall
from megaspan.attention.context import RowContext, RowRanks
from megaspan.attention.layout import lay_out
from megaspan.attention.seam import OtherMask
from megaspan.human import UserError
from megaspan.layers.shards import compute_dtype
from megaspan.layers.tile import drawing
from megaspan.model.forward import backbone_of
from megaspan.model.limits import device_of

_TOKENS = 64
_LONGEST_WINDOW = 512
"""Windows up to this are crossed by the proof; a longer one would make it slow."""

_FEW, _STEP = 11, 4
"""Tokens of the second proof, a number that no other dimension of a model is likely to have, and the step of their shuffle."""

_EXACT, _ROUNDED = 1e-4, 0.1
"""Largest relative distance in fp32, and in bf16, where two right kernels differ by some percent after dozens of layers."""


@dataclass(frozen=True)
class Reference:
    """What the plain model makes of the tokens: ids [tokens] and hidden states [tokens, hidden], fp32."""

    ids_t: torch.Tensor
    hidden_tE: torch.Tensor


def reference(model: PreTrainedModel) -> Reference:
    """The plain model's answer, to be taken before anything is installed."""
    window = getattr(model.config, "sliding_window", None) or 0
    length = _TOKENS + (window if window <= _LONGEST_WINDOW else 0)
    length = min(length, getattr(model.config, "max_position_embeddings", length))
    # A prime stride walks over the whole vocabulary before it repeats.
    ids_t = torch.arange(1, length + 1, device=device_of(model)) * 7919 % model.config.vocab_size
    return Reference(ids_t, _hidden(model, ids_t))


def prove_attention(model: PreTrainedModel, before: Reference) -> None:
    """Compare the model under long attention with what it was.

    Raises:
        UserError: its hidden states are not the plain model's, or it has a mask of its own.
    """
    try:
        distance = _distance(_hidden(model, before.ids_t), before.hidden_tE)
    except OtherMask as error:  # one text whose positions count up, so nobody but the model asks for more than causal
        raise UserError(
            f"{type(model).__name__} makes a mask of its own for its attention, and exact long attention takes none",
            allowed="models whose attention is causal, full or windowed",
            do="Choose a model of another family",
        ) from error
    if not distance <= _allowed(model):
        raise UserError(
            f"{type(model).__name__} does something in its attention that long attention does not: "
            f"the hidden states of {len(before.ids_t)} tokens differ by {distance:.1e}",
            do="Report the model; it cannot be trained with exact long attention yet",
        )


@torch.no_grad()
def prove_repeatable(model: PreTrainedModel) -> None:
    """Run the plain model twice in training mode from the same states of torch's generators: layers must give the same.

    A checkpointed layer runs again in the backward. What it draws from numpy, from Python's `random` or from a generator of its
    own is not put back for that, and the gradient would be another function's. Two forwards of 11 tokens.

    Raises:
        UserError: the first module inside a layer for which that is not so, by its class.
    """
    device = device_of(model)
    ids_t = torch.arange(1, _FEW + 1, device=device) * 7919 % model.config.vocab_size
    seen: list[dict[str, _Seen]] = []
    for _ in range(2):
        with _training(model), drawing(0, device), _watched(model) as modules:
            backbone_of(model)(input_ids=ids_t[None], use_cache=False)
        seen.append(modules)
    layers = {name for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)}
    first, second = seen
    for name in first:  # in the order of their ends, so that of a module and one inside it the inner one is named
        inside = any(f"{name}.".startswith(f"{layer}.") for layer in layers) and name in second
        if inside and _same(model, first[name].input, second[name].input) and not _same(
            model, first[name].output, second[name].output
        ):  # fmt: skip
            raise UserError(
                f"{type(model.get_submodule(name)).__name__} ({name}) draws random numbers outside torch's generators, so that "
                "running it again gives something else",
                do="Draw them with torch's default generator, or set gradient_checkpointing: false",
            )


def _same(model: PreTrainedModel, one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether no token differs by more than a sum in another order makes."""
    if one is None or other is None:
        return True
    exact = compute_dtype(next(model.parameters())) in (torch.float32, torch.float64)
    return bool(((one - other).norm(dim=1) <= (1e-5 if exact else 0.02) * other.norm(dim=1)).all())


@torch.no_grad()
def prove_token_wise(model: PreTrainedModel) -> None:
    """Shuffle tokens together with their positions, each seeing itself alone: every module's outputs must be shuffled alike.

    So nothing but attention brings tokens together, every position comes from `position_ids`, and what is handed to the model
    for its attention arrives there. A rank that holds any tokens of a row, in any order, then computes its part of the row.
    For a model under long attention; two forwards of 11 tokens.

    Raises:
        UserError: the first module for which that is not so, by its name.
    """
    order = torch.arange(_FEW) * _STEP % _FEW
    plain, shuffled = (_alone(model, each) for each in (torch.arange(_FEW), order))
    order = order.to(plain.device)
    if _distance(shuffled, plain[order]) <= _allowed(model):
        return
    seen: list[dict[str, _Seen]] = []
    for each in (torch.arange(_FEW), order.cpu()):
        with _watched(model) as modules:
            _alone(model, each)
        seen.append(modules)

    def alike(plain: torch.Tensor | None, shuffled: torch.Tensor | None) -> bool:
        return plain is None or shuffled is None or _distance(shuffled, plain[order]) <= _allowed(model)

    pairs = ((name, here, seen[1][name]) for name, here in seen[0].items() if name in seen[1])
    # In the order of their ends, so that of a module and one inside it the inner one is named.
    name = next((name for name, a, b in pairs if alike(a.input, b.input) and not alike(a.output, b.output)), "")
    module = model.get_submodule(name)
    raise UserError(
        f"{type(model).__name__} has {name or 'itself'} ({type(module).__name__}), which does more than work token by token at "
        "the positions that it is given: its rows can neither be split over ranks nor hold packed documents",
        do="Set cp_size: 1, sp_size: 1, packing_strategy: wrapped and per_device_train_batch_size: 1",
    )


def _alone(model: PreTrainedModel, positions_t: torch.Tensor) -> torch.Tensor:
    """Hidden states [tokens, hidden], fp32, of the tokens at these positions, in an attention where each sees itself alone."""
    device, calls = device_of(model), 0

    def own(call: AttentionCall) -> torch.Tensor:
        nonlocal calls
        calls += 1
        q, heads = call.q_BHTD, call.q_BHTD.shape[1] // call.k_BGSD.shape[1]
        k, v = (x.repeat_interleave(heads, dim=1) for x in (call.k_BGSD, call.v_BGSD))
        # Something of queries and keys too, or what is done to them would not be seen; not their product, in which one rotation
        # of both is nothing.
        gates = (torch.sigmoid(x.sum(-1, keepdim=True) * call.scoring.scale) for x in (q, k))
        return (v * next(gates) * next(gates)).transpose(1, 2).contiguous()

    positions_t = positions_t.to(device)
    ids_t = (positions_t + 1) * 7919 % model.config.vocab_size
    row = RowContext(lay_out([_FEW], 1), RowRanks(), device)
    with _evaluating(model):
        out = backbone_of(model)(
            input_ids=ids_t[None],
            position_ids=positions_t[None],
            # Without it transformers looks for packed documents in positions that jump.
            attention_mask=torch.ones(1, _FEW, dtype=torch.int64, device=device),
            use_cache=False,
            megaspan_row=row,
            megaspan_capture=own,
        )
    if calls < model.config.num_hidden_layers:
        raise UserError(
            f"{type(model).__name__} does not tell its attention how a row lies, {calls} of {model.config.num_hidden_layers} "
            "layers pass it on: its rows can neither be split over ranks nor hold packed documents",
            do="Set cp_size: 1, sp_size: 1, packing_strategy: wrapped and per_device_train_batch_size: 1",
        )
    hidden: torch.Tensor = out.last_hidden_state[0]
    return hidden.float()


@dataclass(frozen=True)
class _Seen:
    """First input and first output of a module, fp32 [tokens, …]; None for one that has no tokens."""

    input: torch.Tensor | None
    output: torch.Tensor | None


@contextmanager
def _watched(model: PreTrainedModel) -> Iterator[dict[str, _Seen]]:
    """What goes through the modules, by name, in the order in which they end."""
    seen: dict[str, _Seen] = {}

    def note(name: str, _module: Any, args: Any, kwargs: Any, output: Any) -> None:
        seen.setdefault(name, _Seen(_by_token([*args, *kwargs.values()]), _by_token(output)))

    hooks = [
        module.register_forward_hook(functools.partial(note, name), with_kwargs=True) for name, module in model.named_modules()
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _by_token(values: Any) -> torch.Tensor | None:
    """The first of some tensors, with its tokens in front."""
    tensor = next(iter(values), None) if isinstance(values, tuple | list) else values
    if not isinstance(tensor, torch.Tensor) or _FEW not in tensor.shape[:2]:
        return None
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor  # rotary tables of DeepSeek V2
    return tensor.movedim(tensor.shape.index(_FEW), 0).flatten(1).float()


def _distance(got_tE: torch.Tensor, want_tE: torch.Tensor) -> float:
    """Relative, of the median token: in bf16 the router of a mixture of experts may send a few of them elsewhere."""
    distance_t = (got_tE - want_tE).norm(dim=1) / want_tE.norm(dim=1).clamp(min=1e-30)
    return float(distance_t.median())


def _allowed(model: PreTrainedModel) -> float:
    exact = compute_dtype(next(model.parameters())) in (torch.float32, torch.float64)
    return _EXACT if exact else _ROUNDED


@torch.no_grad()
def _hidden(model: PreTrainedModel, ids_t: torch.Tensor) -> torch.Tensor:
    with _evaluating(model):
        hidden: torch.Tensor = backbone_of(model)(input_ids=ids_t[None], use_cache=False).last_hidden_state[0]
    return hidden.float()


@contextmanager
def _training(model: PreTrainedModel) -> Iterator[None]:
    """In training mode; each module's mode and each buffer's value is put back."""
    before = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.train()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training
        for buffer, value in buffers:
            buffer.copy_(value)


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Without dropout; each module's mode is put back, since a user may have frozen some."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
