"""`prepare`: the levers of a long run, put on an unmodified transformers model, and taken off again.

This is the one place of the package that changes somebody else's object: the attention that the model names in its
configuration, the checkpoint function of its layers and, on this instance alone, its `forward`. Weights, modules and their
names stay as they were, so that optimizers, `transformers.Trainer`, peft and `save_pretrained` see the model they know.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import PreTrainedModel

from megaspan.config.spelling import for_python
from megaspan.human import UserError
from megaspan.layers.shards import compute_dtype
from megaspan.model import proof
from megaspan.model.counted import facts_of
from megaspan.model.disk import Disk, open_disk
from megaspan.model.forward import (
    Settings,
    backbone_of,
    can_balance,
    long_forward,
    not_balanced_over_ranks,
    passes_arguments_on,
    signature_of,
)
from megaspan.model.kinds import check_loss_function, check_trainable, unwrap
from megaspan.model.limits import check_host_room, check_logits_fit, check_positions, device_of, free_bytes, past_window
from megaspan.model.lora import check_adapter
from megaspan.model.own_loop import check_own_loop
from megaspan.model.tables import gathered_head
from megaspan.plan.rope_native import read_rope

if TYPE_CHECKING:
    from megaspan.attention import KernelChoice
    from megaspan.config import SFTConfig
    from megaspan.layers.checkpoint import Checkpointing
    from megaspan.layers.streamed import Streaming
    from megaspan.plan.choose import Plan

Model = TypeVar("Model", bound=torch.nn.Module)
OnLayer = Callable[[str, int], None]
_STATE = "_megaspan"
_MARK = "_megaspan_forward"
_WHERE = {"device": "on the device", "host": "on the host", "disk": "on disk", "again": "computed again"}


@dataclass(eq=False)
class Levers:
    """What `prepare` put on a model; `levers(model)` returns it.

    Attributes:
        args: the configuration it was prepared with.
        plan: the plan that chose the levers.
        settings: what the forward works with.
        kernel: the attention kernel, with its reason.
        head: the formula of the logits, proven on the live model.
        checkpointing: what keeps and fetches the inputs of layers, or None where nothing is checkpointed.
        disk: where some of it waits, or None where nothing does.
        on_layer: called with ("forward" or "backward", layer) as a checkpointed step goes on; may be exchanged at any time.
    """

    args: SFTConfig
    plan: Plan
    settings: Settings
    kernel: KernelChoice
    head: str
    checkpointing: Checkpointing | Streaming | None = None
    disk: Disk | None = None
    on_layer: OnLayer | None = None

    def layer_reached(self, phase: str, layer: int) -> None:
        """Pass a layer on to whoever listens."""
        if self.on_layer is not None:
            self.on_layer(phase, layer)

    def reserve(self, model: torch.nn.Module, tokens: int, rows: int = 1) -> None:
        """Get, and on a GPU pin, the memory for what layers keep of `rows` rows of `tokens` tokens, before step 1; disk too.

        Raises:
            UserError: the host or the disk has not that much.
        """
        if self.checkpointing is not None:
            self.checkpointing.reserve(device_of(unwrap(model)), _input_bytes(unwrap(model), tokens), rows)

    def discard(self) -> None:
        """Let go of what an abandoned step left on the host and on disk."""
        if self.checkpointing is not None:
            self.checkpointing.discard()

    def give_back_disk(self) -> None:
        """Give the disk back until a next step needs it."""
        if self.disk is not None:
            self.discard()
            self.disk.tier.shrink()

    def close(self) -> None:
        """Take checkpointing off the model, free the host memory and the disk."""
        if self.checkpointing is not None:
            self.checkpointing.remove()
        if self.disk is not None:
            self.disk.tier.close()

    def read_back(self) -> Iterator[tuple[str, str, str]]:
        """Lines of the run header, (lever, value, reason), of what is on the live model."""
        for choice in (self.kernel, *self.kernel.also):
            yield "attention", choice.name, f"{choice.reason}. {choice.loud}" if choice.loud else choice.reason
        tiles = (
            "all logits at once"
            if self.settings.loss_type == "nll"
            else f"{self.settings.tile_tokens:,} tokens of logits at once"
        )
        yield "loss", f"{self.settings.loss_type}, {tiles}", f"logits are {self.head}"
        if self.checkpointing is None:
            yield "checkpointing", "off", "every layer keeps what its backward needs"
            return
        stats = self.checkpointing.stats()
        hooked: dict[int, str] = getattr(self.checkpointing, "now_whole", dict)()
        streamed = getattr(stats, "streamed", 0) - len(hooked)
        if streamed:
            yield "layers", f"{streamed} of {stats.layers} streamed", self._streaming()
        routed = getattr(stats, "routed", 0)
        if routed:
            balance = "a balance loss is made of sums over tiles" if self.settings.balancing is not None else ""
            yield "experts", f"chosen once in {routed} of {stats.layers} layers", balance
        reasons = getattr(self.checkpointing, "reasons", ["this family is not proven for streaming"] * stats.layers)
        for reason in sorted({reason for reason in reasons if reason is not None}):
            whole = f"{reasons.count(reason)} of {stats.layers} checkpointed whole"
            yield "layers", whole + self._tiled(), f"attention runs forward twice: {reason}"
        for reason in sorted(set(hooked.values())):
            whole = f"{list(hooked.values()).count(reason)} of {stats.layers} checkpointed whole"
            yield "layers", whole, f"attention runs forward twice: {reason}"
        for part in sorted(set(self._general().now_untiled().values())):
            yield "layers", "an MLP runs whole", part
        if streamed:
            yield from self._slower()
        for kind, name in (("input", "layer inputs"), ("output", "attention outputs")):
            places = self.checkpointing.places()[kind]
            yield name, ", ".join(f"{places[place]} {where}" for place, where in _WHERE.items() if places[place]), ""
        if self.disk is not None:
            yield "disk", *self.disk.describe()
        elif self.args.offload_folder is not None:
            yield "disk", "not used", "what layers keep fits without offload_folder"

    def _general(self) -> Checkpointing:
        """What runs the layers that do not stream."""
        either: Any = self.checkpointing
        found: Checkpointing = getattr(either, "general", either)
        return found

    def _slower(self) -> Iterator[tuple[str, str, str]]:
        """What streamed layers have to do without: fused passes, and a last norm in tiles."""
        streaming: Any = self.checkpointing
        for reason in streaming.unfused():
            yield "layers", "element-wise work is not fused", reason
        if streaming.whole_norm is not None:
            yield "layers", "the norm behind them runs whole", streaming.whole_norm

    def _tiled(self) -> str:
        """How their MLPs run, where a row may be longer than a tile."""
        tile = self.plan.layer_tile_tokens
        return f", MLP in tiles of {tile:,} tokens" if self._general().stats().tiled and tile < self.args.max_length else ""

    def _streaming(self) -> str:
        """How the streamed layers work, in words."""
        plan = self.plan
        streaming: Any = self.checkpointing
        stats = streaming.stats()
        again = streaming.places()["output"]["again"] - (stats.layers - stats.streamed)  # those that run whole do so too
        times = "once" if again <= 0 else f"twice in {again} layers, once in the others"
        heads = f", {plan.kv_heads_per_call} KV heads a call in attention's backward" if plan.kv_heads_per_call else ""
        ranks = plan.sizes.cp * plan.sizes.sp
        tiles = f"the rest in tiles of {plan.layer_tile_tokens:,} tokens"
        if plan.layer_tile_tokens * ranks >= plan.tokens:
            tiles = "a row is one tile" if ranks == 1 else "what a rank has of a row is one tile"
        return f"attention runs forward {times}; {tiles}{heads}"


@for_python()
def prepare(model: Model, args: SFTConfig, plan: Plan | None = None, *, on_layer: OnLayer | None = None) -> Model:
    """Make an unmodified transformers model (or a LoRA model of peft on top of one) long; returns the same object.

    Afterwards `model(input_ids, labels=...)` (or `shift_labels`, with `position_ids`, `attention_mask`, `inputs_embeds` and
    `num_items_in_batch` as transformers means them) returns a `LongOutput`; a call without labels is the model's own forward.
    Documents of a packed row see themselves only. With `megaspan_row` (`attention.context.RowContext`) the call is this rank's
    part of a row that several ranks share: the loss is its part of the sum, and gradients are summed over the ranks.

    Args:
        model: on its device, with its weights.
        args: the levers: `loss_type`, `gradient_checkpointing` and its `offload`, `max_length`, `allow_past_window`. In your
            own loop (without a plan) options are refused that ask for another model or optimizer.
        plan: what the planner chose; made from `args`, the model and the machine where it is not given.
        on_layer: called with ("forward" or "backward", layer) as a checkpointed step goes on.

    Raises:
        UserError: the model is of a kind that is not proven exact, or was prepared before with other settings; an option would
            have no effect here.
    """
    inner = unwrap(model)
    earlier = levers(model)
    if earlier is not None:
        if earlier.args == args and plan in (None, earlier.plan):
            return model
        raise UserError("the model was prepared before, with other settings", do="Call megaspan.model.unprepare(model) first")
    if "forward" in inner.__dict__:
        raise UserError(
            "the forward of this model was replaced already (by accelerate's device map, TRL or a kernel package)",
            do="Load the model onto one device without a device map, and prepare it before anything else wraps it",
        )
    for adapter in dict(getattr(model, "peft_config", None) or {}).values():
        check_adapter(adapter)
    check_trainable(inner)
    check_loss_function(inner)
    backbone_of(inner)
    if getattr(inner.config, "output_router_logits", False) and not can_balance(inner):
        raise UserError(
            f"the router's balance loss of {type(inner).__name__} is not known here", do="Set output_router_logits: false"
        )
    if plan is None:
        check_own_loop(model, args)
        plan = plan_of(model, args)
    _install(inner, args, plan, _settings(inner, args, plan), on_layer)
    return model


def unprepare(model: Model) -> Model:
    """Take the levers off again: the model is as it was before `prepare`. Without effect on a model that was not prepared.

    Raises:
        UserError: something else wrapped the forward after `prepare`.
    """
    inner, state = unwrap(model), levers(model)
    if state is None:
        return model
    if not getattr(inner.__dict__.get("forward"), _MARK, False):
        raise UserError("the forward of the model was wrapped again after prepare", do="Undo that first")
    state.close()
    _restore_attention(inner, state.settings)
    del inner.forward
    del inner.__dict__[_STATE]
    return model


def levers(model: torch.nn.Module) -> Levers | None:
    """The levers on this model, or None where it was not prepared."""
    state: Levers | None = unwrap(model).__dict__.get(_STATE)
    return state


def plan_of(model: torch.nn.Module, args: SFTConfig) -> Plan:
    """The plan for a model, as `prepare` is given it, on this machine.

    Raises:
        UserError: the options split a model that is whole, or no plan fits.
    """
    from megaspan import world
    from megaspan.config.parallel import OPTIONS
    from megaspan.model.shard import shards
    from megaspan.plan import choose

    split = [f"{option} {size}" for option in OPTIONS if (size := getattr(args, option) or 1) > 1]
    if split and shards(model) is None:
        raise UserError(
            f"{' × '.join(split)} asks for several devices, and this model is whole on one",
            do="Use megaspan's SFTTrainer, which splits model and rows, or remove it",
        )
    return choose(args, facts_of(unwrap(model)), world.machine())


def _settings(model: PreTrainedModel, args: SFTConfig, plan: Plan) -> Settings:
    """What the forward needs; refuses what cannot run at `max_length` before anything is installed."""
    # Not `max_position_embeddings`: YaRN beside an unraised one, as Qwen's model cards write it, covers its factor more.
    window = None if args.allow_past_window else read_rope(model.config.to_dict()).window or None
    if window is not None and args.max_length > window:
        raise past_window(args.max_length, window)
    check_positions(model, type(model).__name__, args.max_length)
    check_host_room(plan)
    if args.loss_type == "nll":
        check_logits_fit(args.max_length, model.config.vocab_size, free_bytes(device_of(model), plan.host_limit))
    return Settings(
        original=model.forward,
        loss_type=args.loss_type,
        tile_tokens=plan.loss_tile_tokens,
        window=window,
        plain_attention=model.config._attn_implementation,
        host_bytes=plan.host_limit,
        most_packed=args.max_length if passes_arguments_on(model) else 0,
    )


def _install(model: PreTrainedModel, args: SFTConfig, plan: Plan, settings: Settings, on_layer: OnLayer | None) -> None:
    """Head, attention, checkpointing, forward, in this order: the last makes the model a prepared one."""
    from megaspan.attention import install
    from megaspan.layers.head import check_head

    with gathered_head(model):
        head = check_head(model)
    signature = signature_of(settings.original)
    before = proof.reference(model)
    if plan.checkpoint:
        proof.prove_repeatable(model)
    state = None
    try:
        # A rank's part of a row is made of segments too.
        packed = args.cp_size > 1 or (args.packing and args.packing_strategy == "bfd")
        kernel = install(model, dtype=compute_dtype(next(model.parameters())), packed=packed, sp_size=args.sp_size)
        proof.prove_attention(model, before)
        state = Levers(args, plan, settings, kernel, head.describe(), on_layer=on_layer)
        if plan.checkpoint:
            _checkpoint(model, state)
        wanted = getattr(model.config, "output_router_logits", False) and state.settings.balancing is None
        if wanted and args.cp_size * args.sp_size > 1:
            raise not_balanced_over_ranks(model)
    except BaseException:
        if state is not None:
            state.close()
        _restore_attention(model, settings)
        raise
    model.__dict__[_STATE] = state
    model.forward = types.MethodType(_prepared_forward(signature), model)


def _checkpoint(model: PreTrainedModel, state: Levers) -> None:
    from megaspan.layers.checkpoint import checkpointed_layers, checkpointing_of
    from megaspan.layers.dials import LayerPlan
    from megaspan.layers.streamed import Streaming

    plan, keep, limit = state.plan, state.plan.keep, state.plan.host_for_layers
    layers = checkpointed_layers(model)
    if plan.streamed and len(keep.layers) != len(layers):
        raise UserError(
            f"{type(model).__name__} has {len(layers)} layers of its own, and its configuration tells of {len(keep.layers)}",
            do="Set model.config.num_hidden_layers to those that there are; one layer in several places is not supported",
        )
    state.disk = open_disk(state.args, keep)
    tier = None if state.disk is None else state.disk.tier
    if plan.streamed:
        tiles = LayerPlan(
            plan.layer_tile_tokens,
            plan.kv_heads_per_call,
            plan.stream_back,
            state.args.sp_size,
            project_ahead=plan.project_ahead,
        )
        state.checkpointing = Streaming(tiles, keep, state.layer_reached, host_limit=limit, disk=tier)
    else:
        state.checkpointing = checkpointing_of(keep, state.layer_reached, limit, tier)
    state.checkpointing.install(model)
    if not isinstance(state.checkpointing, Streaming):
        state.checkpointing.tile_mlps(model, plan.layer_tile_tokens)
    if state.disk is not None:
        row = state.checkpointing.row_to_disk(_input_bytes(model, plan.tokens))
        state.disk.judge(row, plan.seconds, state.args.allow_slow_disk)
    layer = checkpointed_layers(model)[0]
    state.settings = replace(state.settings, checkpoint_seam=(layer, layer.__dict__["_gradient_checkpointing_func"]))
    state.settings = replace(state.settings, dropout=state._general().dropout)
    if isinstance(state.checkpointing, Streaming) and state.checkpointing.balances:
        state.settings = replace(state.settings, balancing=state.checkpointing.balancing)


def _input_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Bytes of one layer's input."""
    width: int = model.config.hidden_size * compute_dtype(next(model.parameters())).itemsize
    return tokens * width


def _restore_attention(model: PreTrainedModel, settings: Settings) -> None:
    model.set_attn_implementation(settings.plain_attention)
    for module in model.modules():
        for name in ("megaspan_kernels", "megaspan_segments"):
            module.__dict__.pop(name, None)  # what attention.install left on the layers


def _prepared_forward(signature: inspect.Signature) -> Callable[..., Any]:
    """A function to bind to the model. Bound, not closed over it, so that a deep copy of the model calls itself."""

    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(signature.bind(self, *args, **kwargs).arguments)
        arguments.pop("self")
        arguments |= arguments.pop("kwargs", {})
        return long_forward(self, self.__dict__[_STATE].settings, arguments)

    forward.__signature__ = signature  # type: ignore[attr-defined]
    setattr(forward, _MARK, True)
    return forward
