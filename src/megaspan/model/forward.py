"""The forward of a prepared model: the backbone, then the head and the loss tile by tile.

An unmodified transformers model computes the logits of the whole sequence before its loss: at 1,048,576 tokens and 151,936
words that is 297 GiB in bf16 and as much again for the gradient. Here the backbone alone runs, on packed rows of the batch's
stretches of tokens (`rows.py`) or on this rank's part of a row that many share, and `layers.loss` takes its last hidden state
to the loss without ever holding more than one tile of logits. A call without labels is the model's own forward, so that
`generate()` and scoring code keep working.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import ModelOutput

from megaspan.attention.context import RowContext
from megaspan.attention.seam import is_attention
from megaspan.human import UserError
from megaspan.layers.balance import real_tokens
from megaspan.layers.dropout import DropoutHandle
from megaspan.model.kinds import check_loss_function
from megaspan.model.limits import check_logits_fit, device_of, free_bytes, past_window
from megaspan.model.rows import Piece, Run, check_covered, cut, run_of_row, runs_of, shift
from megaspan.model.tables import gathered_head
from megaspan.rope import tables_of_row

_OURS = ("labels", "shift_labels", "num_items_in_batch", "megaspan_seed", "megaspan_row", "megaspan_padding")
_INPUTS = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", *_OURS)
_NEUTRAL = {"use_cache": (None, False), "return_dict": (None, True, False), "logits_to_keep": (None, 0)}
"""Other arguments of transformers' forwards that mean nothing when there are labels, at these values."""


@dataclass
class LongOutput(ModelOutput):
    """What a prepared model returns when it is given labels.

    Attributes:
        loss: fp32 scalar, the sum over trained tokens divided by `num_items_in_batch`, or by `tokens` where that is not given.
        logits: always None: they are never held whole.
        tokens: int64 scalar, how many tokens were trained in this call.
        correct: int64 scalar, how many of them had the highest logit.
        entropy: fp32 scalar, the sum over them of the entropy of the prediction, in nats.
        aux_loss: the router's balance loss of a mixture of experts, where `output_router_logits` asks for it; part of `loss`.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    correct: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None


@dataclass(frozen=True)
class Settings:
    """What the forward needs to know, fixed when the model is prepared.

    Attributes:
        original: the model's forward as it was.
        loss_type: `chunked_nll` or `nll`.
        tile_tokens: rows of logits held at once.
        window: the longest row that the positions of the model cover, or None for no limit.
        plain_attention: transformers' name of the attention that was set before.
        host_bytes: what full logits may take on a CPU.
        checkpoint_seam: a checkpointed layer and the function that `prepare` gave it, to see whether it is still there.
        balancing: around forwards of the model, collects what the router's balance loss is made of; None where its layers do
            not stream or its loss is not known.
        dropout: the layers' dropouts by counter, where layers are checkpointed.
        most_packed: tokens of a packed row that is made of a batch's documents and rows; 0 where they run one by one.
    """

    original: Callable[..., Any]
    loss_type: str
    tile_tokens: int
    window: int | None
    plain_attention: str
    host_bytes: int
    checkpoint_seam: tuple[torch.nn.Module, Any] | None = None
    balancing: Callable[[Any, RowContext | None, torch.Tensor | None], AbstractContextManager[Any]] | None = None
    dropout: DropoutHandle | None = None
    most_packed: int = 0


def long_forward(model: PreTrainedModel, settings: Settings, arguments: dict[str, Any]) -> Any:
    """One call of a prepared model; `arguments` are those of the call, by name.

    Returns:
        A `LongOutput` if there are labels, else whatever the model's own forward returns.

    Raises:
        UserError: an argument that a long forward cannot honour.
    """
    if arguments.get("labels") is None and arguments.get("shift_labels") is None:
        if arguments.get("megaspan_row") is not None:
            raise UserError("megaspan_row goes with labels only", do="Give shift_labels, -100 where there is none")
        with _checkpointing_paused(model):
            return _without_labels(model, settings, arguments)
    with _layers_by_tiles(model):
        return _with_labels(model, settings, arguments)


def _without_labels(model: PreTrainedModel, settings: Settings, arguments: dict[str, Any]) -> Any:
    """The model's own forward; under the long attention unless the call needs a mask, which that does not know."""
    arguments = {name: value for name, value in arguments.items() if name not in _OURS}
    if not _needs_mask(arguments):
        return settings.original(**arguments)
    long_attention = model.config._attn_implementation
    model.set_attn_implementation(settings.plain_attention)
    try:
        return settings.original(**arguments)
    finally:
        model.set_attn_implementation(long_attention)


def _needs_mask(arguments: dict[str, Any]) -> bool:
    """Whether padding, packed documents or a cache with empty places make plain causal attention wrong."""
    mask = arguments.get("attention_mask")
    cache = arguments.get("past_key_values", arguments.get("cache"))
    positions = arguments.get("position_ids")
    if mask is not None:
        masked = not isinstance(mask, torch.Tensor) or mask.ndim != 2 or not bool(mask.all())
    else:
        # Positions that start again mean packed documents to transformers, where there is neither mask nor cache.
        masked = cache is None and positions is not None and positions.ndim == 2 and bool((positions.diff(dim=1) != 1).any())
    return masked or bool(getattr(cache, "is_compileable", False))


def _with_labels(model: Any, settings: Settings, arguments: dict[str, Any]) -> Any:
    from megaspan.layers.head import head_of
    from megaspan.layers.loss import linear_cross_entropy, plain_cross_entropy

    check_loss_function(model)
    extra = _checked_extras(arguments)
    tokens_b = arguments.get("input_ids") if arguments.get("inputs_embeds") is None else arguments["inputs_embeds"]
    if tokens_b is None or (arguments.get("input_ids") is not None and arguments.get("inputs_embeds") is not None):
        raise UserError("labels need either input_ids or inputs_embeds with them")
    if tokens_b.ndim < 2:
        raise UserError("a batch has rows of tokens", got=tuple(tokens_b.shape), allowed="(rows, tokens)")
    rows, length = tokens_b.shape[:2]
    shifted_bT = _shifted_labels(arguments, rows, length)
    _check_place(model, settings, tokens_b)
    row: RowContext | None = arguments.get("megaspan_row")
    if row is not None:
        pieces: tuple[Piece, ...] = (Piece(0, 0, length),)
        runs, longest = [run_of_row(arguments, row)], int(row.layout.lengths.max()) - 1
        _check_window(settings, longest)
    else:
        positions = arguments.get("position_ids")
        pieces = cut(rows, length, attention_mask=arguments.get("attention_mask"), position_ids=positions)
        check_covered(shifted_bT, pieces)
        _check_pieces(model, pieces, positions)
        runs = list(runs_of(arguments, pieces, settings.most_packed))
        longest = max(piece.stop for piece in pieces) - 1 if positions is None else int(positions.max())
        _check_window(settings, longest)

    wanted = extra["output_router_logits"]
    wanted = bool(getattr(model.config, "output_router_logits", False) if wanted is None else wanted)
    seed = arguments.get("megaspan_seed")
    real_t = real_tokens(length, tokens_b.device, row, int(arguments.get("megaspan_padding") or 0)) if wanted else None
    collecting = settings.balancing(model, row, real_t) if wanted and settings.balancing is not None else nullcontext()
    if wanted and settings.balancing is None and row is not None and row.ranks.sizes != (1, 1):
        raise not_balanced_over_ranks(model)
    drawing = nullcontext() if settings.dropout is None else settings.dropout.row(seed)
    with collecting as balance, drawing, tables_of_row(model, longest):
        hidden_tE, routers = _backbone(model, runs, router=wanted and balance is None)
    labels_t = torch.cat([shifted_bT[piece.row, piece.start : piece.stop] for piece in pieces])
    labels_t = labels_t.to(hidden_tE.device, torch.int64)
    plain = settings.loss_type == "nll"
    with gathered_head(model, read_later=plain):  # in tiles the loss makes its gradients in the forward
        head = head_of(model)
        if plain:
            check_logits_fit(hidden_tE.shape[0], head.weight_VE.shape[0], free_bytes(hidden_tE.device, settings.host_bytes))
        loss_function = plain_cross_entropy if plain else linear_cross_entropy
        items = arguments.get("num_items_in_batch")
        items = labels_t.ne(-100).sum() if items is None else torch.as_tensor(items, device=labels_t.device)
        items = items.clamp(min=1)
        # With the divisor known the gradient of the hidden states is rounded once, not once more when it is scaled.
        loss_function = functools.partial(loss_function, seed=seed, tokens=None if row is None else row.token_index)
        sums = loss_function(hidden_tE, head, labels_t, tile_tokens=settings.tile_tokens, incoming=1 / items)
    loss = sums.loss / items
    aux_loss = None
    if balance is not None:
        aux_loss = balance.loss(hidden_tE.shape[0])
    elif routers is not None:
        aux_loss = _router_loss(model, routers, real_t)
    if aux_loss is not None:
        # A window's rows share it by their trained tokens, so that it does not grow with their number.
        trained = sums.tokens if balance is None else balance.over_row(sums.tokens)
        loss = loss + float(model.router_aux_loss_coef) * aux_loss * (trained / items)
    output = LongOutput(loss=loss, tokens=sums.tokens, correct=sums.correct, entropy=sums.entropy, aux_loss=aux_loss)
    return output.to_tuple() if arguments.get("return_dict") is False else output


def _checked_extras(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments beyond the known ones: neutral values pass, `output_router_logits` is kept, everything else is refused."""
    extra = {"output_router_logits": None}
    for name, value in arguments.items():
        if name in _INPUTS or value is None or value in _NEUTRAL.get(name, ()):
            continue
        if name == "output_router_logits":
            extra[name] = value
        elif name in ("output_attentions", "output_hidden_states") and value is False:
            continue
        elif name == "use_cache":
            continue  # A cache holds nothing that training reads: every prepared training forward runs without.
        else:
            raise UserError(
                f"{name} cannot be used together with labels in a prepared model",
                do="Leave it out, or call the model without labels",
            )
    return extra


def _shifted_labels(arguments: dict[str, Any], rows: int, length: int) -> torch.Tensor:
    """int64 [rows, length]: `shift_labels` as they are (they win, as in transformers), or `labels` moved by one."""
    name = "labels" if arguments.get("shift_labels") is None else "shift_labels"
    labels = arguments[name]
    if tuple(labels.shape) != (rows, length):
        raise UserError(f"{name} do not fit the tokens", got=tuple(labels.shape), allowed=f"({rows}, {length})")
    return labels.clone() if name == "shift_labels" else shift(labels)


def _check_place(model: PreTrainedModel, settings: Settings, tokens_b: torch.Tensor) -> None:
    device = device_of(model)
    if tokens_b.device != device:
        raise UserError(f"the batch lies on {tokens_b.device} and the model on {device}", do=f"Move the batch to {device}")
    if settings.checkpoint_seam is not None:
        layer, function = settings.checkpoint_seam
        if layer.__dict__.get("_gradient_checkpointing_func") is not function:
            raise UserError(
                "gradient checkpointing was switched on again after prepare, which put the offload out of action",
                do="Set gradient_checkpointing=False in TrainingArguments: a prepared model checkpoints by itself",
            )


def _check_pieces(model: Any, pieces: tuple[Piece, ...], position_ids: torch.Tensor | None) -> None:
    if not pieces:
        raise UserError("the batch holds no token: its attention_mask is zero everywhere")
    padded = any(piece.start > 0 for piece in pieces)
    if padded and position_ids is None and not getattr(model.config, "rope_parameters", None):
        raise UserError(
            "padding on the left leaves the positions open: some families count it, others don't",
            do="Give position_ids, or pad on the right",
        )


def _check_window(settings: Settings, longest: int) -> None:
    """Refuse positions that the model does not have; those of a packed row start again with each document."""
    if settings.window is not None and longest + 1 > settings.window:
        raise past_window(longest + 1, settings.window)


def _backbone(model: PreTrainedModel, runs: Sequence[Run], *, router: bool) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
    """The last hidden state of all runs, [tokens, hidden], and each layer's router logits where they are asked for."""
    # Said aloud where the configuration may say otherwise: logits of all layers are more than a long row has room for.
    more = {"output_router_logits": router} if router or hasattr(model.config, "output_router_logits") else {}
    backbone = backbone_of(model)
    hidden: list[torch.Tensor] = []
    routers: list[tuple[torch.Tensor, ...]] = []
    for run in runs:
        with _told_to_all(model, run.row) as told:
            out = backbone(**run.inputs, **told, use_cache=False, return_dict=True, **more)
        hidden.append(out.last_hidden_state.flatten(0, 1))  # a view, whose gradient is one too: [0] would copy it
        if router:
            routers.append(out.router_logits)
    # One run is the rule at a million tokens and is not copied.
    hidden_tE = hidden[0] if len(hidden) == 1 else torch.cat(hidden)
    return hidden_tE, [torch.cat(layer) for layer in zip(*routers, strict=True)] if router else None


@contextmanager
def _told_to_all(model: PreTrainedModel, row: RowContext | None) -> Iterator[dict[str, Any]]:
    """Arguments that tell every attention of the model how a row lies, with a look whether they got there.

    Raises:
        UserError: some attention was not told: it has looked across documents, or at this rank's tokens alone.
    """
    if row is None:
        yield {}
        return
    before = row.asked
    # A mask of ones keeps transformers from reading documents out of the positions, of which it would make a mask.
    yield {"megaspan_row": row, "attention_mask": torch.ones(1, row.slots, dtype=torch.bool, device=row.device)}
    told, layers = row.asked - before, sum(hasattr(module, "megaspan_kernels") for module in model.modules())
    if told != layers:
        raise UserError(
            f"{type(model).__name__} does not tell all of its layers how a packed or shared row lies",
            found=f"{told} of {layers} attention layers were told",
            do="Train it on one GPU, with one document a row (packing: false)",
        )


def backbone_of(model: PreTrainedModel) -> torch.nn.Module:
    """The decoder without its head.

    Raises:
        UserError: the model has none of its own.
    """
    backbone = model.get_decoder()
    if backbone is None or backbone is model:
        raise UserError(f"{type(model).__name__} has no decoder apart from its head, so its loss cannot be taken tile by tile")
    return backbone


def not_balanced_over_ranks(model: torch.nn.Module) -> UserError:
    """What is said where a balance loss is wanted of a row on several ranks, and layers run whole."""
    return UserError(
        f"the router's balance loss of {type(model).__name__} cannot be taken of a row on several ranks: its layers do not "
        "stream",
        do="Set output_router_logits: false, or gradient_checkpointing: true",
    )


def _router_loss(model: Any, routers: list[torch.Tensor], real_t: torch.Tensor | None) -> torch.Tensor:
    """The balance loss by the model's own function, over all tokens of the batch as there, where no layer streams."""
    if torch.is_grad_enabled() and model.training and not all(logits.requires_grad for logits in routers):
        raise UserError(
            "the router's balance loss would not train: gradient checkpointing keeps no router logits",
            do="Set output_router_logits: false (transformers' default) or gradient_checkpointing: false",
        )
    balance = sys.modules[type(model).__module__].load_balancing_loss_func
    mask = None if real_t is None else real_t[None].to(torch.int64)
    loss: torch.Tensor = balance(tuple(routers), model.num_experts, model.num_experts_per_tok, mask)
    return loss


def can_balance(model: PreTrainedModel) -> bool:
    """Whether the router's balance loss of this model is known here."""
    module = sys.modules[type(model).__module__]
    return hasattr(module, "load_balancing_loss_func") and all(
        hasattr(model, name) for name in ("router_aux_loss_coef", "num_experts", "num_experts_per_tok")
    )


@contextmanager
def _layers_by_tiles(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation runs long rows in tiles too: transformers leaves the layers' seam out there, so their `forward` goes to it."""
    layers: list[Any] = []
    if not torch.is_grad_enabled():
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        layers = [layer for layer in layers if layer.gradient_checkpointing and "forward" not in layer.__dict__]
    for layer in layers:
        layer.__dict__["forward"] = functools.partial(_through_seam, layer, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["forward"]


def _through_seam(layer: Any, own: Callable[..., Any], *args: Any, **arguments: Any) -> Any:
    return layer._gradient_checkpointing_func(functools.partial(own, **arguments), *args)


@contextmanager
def _checkpointing_paused(model: PreTrainedModel) -> Iterator[None]:
    """Without gradients nothing is checkpointed; transformers 5.17 would drop the cache of `generate()` in training mode."""
    if torch.is_grad_enabled():
        yield
        return
    layers: list[Any] = [module for module in model.modules() if module.__dict__.get("gradient_checkpointing") is True]
    for layer in layers:
        layer.gradient_checkpointing = False
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = True


def passes_arguments_on(model: PreTrainedModel) -> bool:
    """Whether the decoder, its layers and their attention take arguments that they do not know, as those of a packed row."""
    modules = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer) or is_attention(module)]
    signatures = [inspect.signature(type(module).forward) for module in (backbone_of(model), *modules)]
    return all(any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()) for signature in signatures)


def signature_of(original: Callable[..., Any]) -> inspect.Signature:
    """The original's signature with `self`, `shift_labels` and `num_items_in_batch`: Trainer and `generate()` read it."""
    given = list(inspect.signature(original).parameters.values())
    named = [p for p in given if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    names = {p.name for p in named}
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
        for name in ("shift_labels", "num_items_in_batch", "megaspan_row")
        if name not in names
    ]
    if not any(p.kind is p.VAR_KEYWORD for p in given):
        raise UserError("the forward of this model takes no further keyword arguments, so it cannot be prepared")
    rest = inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)
    return inspect.Signature([inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), *named, *more, rest])
