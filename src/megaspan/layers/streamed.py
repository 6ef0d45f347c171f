"""The streamed decoder layer on an unmodified transformers model: which layers take it, and what is kept where.

On the seam that checkpointing uses (each layer calls its `_gradient_checkpointing_func` with its own forward and the hidden
states), a layer of a family that is proven runs as one function (`stream.py`): attention forward once, token-wise work in
tiles. It keeps its input and attention's output, 8.6 GB each a layer at 1,048,576 tokens of an 8B model; both wait on the
host if asked to. Any other layer, and any call that the streamed layer does not know (a cache, a foreign mask), takes
ordinary checkpointing, with the reason.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megaspan.attention.seam import NAME, refuse_packed
from megaspan.layers.checkpoint import Checkpointing, CheckpointStats, checkpointed_layers, draws_random_numbers
from megaspan.layers.family import Family, describe
from megaspan.layers.fused import Fused
from megaspan.layers.halves import Halves, find_halves
from megaspan.layers.norms import fuse_norms, unfuse_norms
from megaspan.layers.selfcheck import prove_family
from megaspan.layers.stream import Counts, LayerPlan, LayerRun
from megaspan.memory.offload import LayerInputs, SavedInput

_CACHES = ("cache", "past_key_values", "past_key_value")
_WANTED_FROM_INSIDE = ("output_attentions", "output_router_logits")


@dataclass(frozen=True)
class StreamStats(CheckpointStats):
    """What the streamed layers of a model hold and have done; the fields of `CheckpointStats` count both kinds of layers.

    Attributes:
        streamed: layers that stream; the others are checkpointed.
        attention_forwards: attention kernels run forward by them, one a layer, row and step.
        attention_backwards: and backward.
        passed_on: training calls of them that took ordinary checkpointing, because something was asked for that they do not
        give.
        fused_attentions: layers whose first half (q/k norm, rotary embedding) runs fused.
        fused_mlps: layers whose MLP does.
        compiled: fused formulas that run compiled so far.
    """

    streamed: int = 0
    attention_forwards: int = 0
    attention_backwards: int = 0
    passed_on: int = 0
    fused_attentions: int = 0
    fused_mlps: int = 0
    compiled: int = 0


@final
class Streaming:
    """Streams every layer of a transformers model that is proven, checkpoints the others.

    Args:
        plan: tile and head group sizes.
        offload: layer inputs and attention outputs wait on the host.
        keep_on_device: of the last layers, how many keep theirs on the device anyway.
        keep_outputs: of the last layers, how many keep attention's output; the others run attention forward a second time.
            All by default.
        on_layer: called as `on_layer("forward" | "backward", index)` when a layer begins.
        host_limit: most bytes of host memory, or None.
    """

    def __init__(
        self,
        plan: LayerPlan | None = None,
        offload: bool = False,
        keep_on_device: int = 0,
        on_layer: Callable[[str, int], None] | None = None,
        *,
        keep_outputs: int | None = None,
        host_limit: int | None = None,
    ) -> None:
        self.plan = plan or LayerPlan()
        self.offload, self.keep_on_device, self.keep_outputs = offload, keep_on_device, keep_outputs
        self.general = Checkpointing(offload, keep_on_device, on_layer, host_limit=host_limit)
        self.reasons: list[str | None] = []
        self.fused = Fused()
        self._host_limit = host_limit
        self._counts = Counts()
        self._kept: tuple[LayerInputs, LayerInputs] | None = None
        self._layers: list[Any] = []
        self._fused: list[nn.Module] = []
        self._halves: dict[int, Halves] = {}
        self._unfused: str | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Streaming:
        return self  # a copy of the model shares the arenas and the streams

    def install(self, model: nn.Module, *, prove: bool = True) -> list[str | None]:
        """Streams the layers of `model`, whose attention is megaspan's already.

        Args:
            model: a transformers causal language model, or one wrapped by peft.
            prove: try the families on a toy model of the same class first (about a second).

        Returns:
            For each layer None if it streams, else why it does not.

        Raises:
            UserError: the model has no layers that transformers can checkpoint.
        """
        self.general.install(model)
        self._layers = list(checkpointed_layers(model))
        families = [_asks_for_more(layer) or describe(layer) for layer in self._layers]
        fused, proof = self.plan.fused, None
        if prove and any(isinstance(family, Family) for family in families):
            proof = prove_family(model, fused)
            if proof and fused:
                fused, self._unfused, proof = False, proof, prove_family(model, False)
        self.reasons = [family if isinstance(family, str) else proof for family in families]
        for index, (layer, family) in enumerate(zip(self._layers, families, strict=True)):
            if self.reasons[index] is None:
                # The general path put the attribute there and takes it away again.
                run = functools.partial(self._run, index, family, layer.__dict__["_gradient_checkpointing_func"])
                layer.__dict__["_gradient_checkpointing_func"] = run
        if fused:
            self._halves = {
                index: find_halves(self._layers[index], families[index], self.fused)  # type: ignore[arg-type]
                for index in self._streamed()
            }
        if self.plan.fused_norms:
            self._fused = fuse_norms(self._layers[index] for index in self._streamed())
        return self.reasons

    def remove(self) -> None:
        """Restores the model and frees the host memory."""
        unfuse_norms(self._fused)
        self.general.remove()
        for kept in self._kept or ():
            kept.close()
        self._layers, self._fused, self._kept, self.reasons = [], [], None, []
        self._halves, self._unfused = {}, None

    def reserve(self, device: torch.device, layer_input_bytes: int, rows: int = 1) -> None:
        """Gets (and on a GPU pins) the host memory of `rows` rows whose layer inputs are this large, before step 1.

        Raises:
            UserError: the host has not that much, or it cannot be pinned.
        """
        if not self.offload:
            return
        inputs, outputs = self._moved()
        if inputs:
            kept_inputs, kept_outputs = self._keepers(device)
            kept_inputs.reserve(rows * inputs, layer_input_bytes)
            if outputs:
                kept_outputs.reserve(rows * outputs, int(layer_input_bytes * self._output_share()))
        if len(self._streamed()) < len(self._layers):
            self.general.reserve(device, layer_input_bytes, rows)

    def discard(self) -> None:
        """Lets go of everything saved after a step that was abandoned."""
        self.general.discard()
        for kept in self._kept or ():
            kept.discard()

    def stats(self) -> StreamStats:
        """Layers of both kinds, attention calls, host bytes held, bytes moved, seconds spent pinning."""
        totals = vars(self.general.stats()).copy()
        for kept in self._kept or ():
            for name, value in vars(kept.stats()).items():
                totals[name] += value
        return StreamStats(
            **totals,
            streamed=len(self._streamed()),
            attention_forwards=self._counts.forwards,
            attention_backwards=self._counts.backwards,
            passed_on=self._counts.passed_on,
            fused_attentions=sum(halves.attention for halves in self._halves.values()),
            fused_mlps=sum(halves.activation is not None for halves in self._halves.values()),
            compiled=self.fused.compiled,
        )

    def unfused(self) -> list[str]:
        """Why element-wise work of streamed layers is not fused or not compiled, each reason once; for the run's header."""
        reasons = [reason for halves in self._halves.values() for reason in halves.reasons]
        return list(dict.fromkeys(reason for reason in (self._unfused, self.fused.reason, *reasons) if reason))

    def _streamed(self) -> list[int]:
        return [index for index, reason in enumerate(self.reasons) if reason is None]

    def _moves(self, index: int) -> bool:
        return self.offload and index < len(self._layers) - self.keep_on_device

    def _keeps_output(self, index: int) -> bool:
        return self.keep_outputs is None or index >= len(self._layers) - self.keep_outputs

    def _moved(self) -> tuple[int, int]:
        """How many layer inputs and how many attention outputs of a row go to the host."""
        moved = [index for index in self._streamed() if self._moves(index)]
        return len(moved), len([index for index in moved if self._keeps_output(index)])

    def _output_share(self) -> float:
        """Bytes of attention's output for each byte of a layer's input."""
        projection = self._layers[self._streamed()[0]].self_attn.o_proj
        return float(projection.in_features / projection.out_features)

    def _keepers(self, device: torch.device) -> tuple[LayerInputs, LayerInputs]:
        """The two keepers of inputs and of outputs: each prefetches its own kind one layer ahead."""
        if self._kept is None:
            inputs_limit = outputs_limit = None
            if self._host_limit is not None:
                inputs_limit = int(self._host_limit / (1 + self._output_share()))
                outputs_limit = self._host_limit - inputs_limit
            self._kept = LayerInputs(device, limit=inputs_limit), LayerInputs(device, limit=outputs_limit)
        return self._kept

    def _run(self, index: int, family: Any, checkpointed: Callable[..., Any], function: Any, *args: Any) -> Any:
        """Runs one layer; `function` is its forward with all keyword arguments bound, `args` begins with the hidden states."""
        layer = _layer_of(function)
        if _hooks_inside(layer, function):
            return self._inside_hooks(layer, index, family, checkpointed, function, *args)
        arguments = dict(getattr(function, "keywords", {}))
        x = args[0] if args else arguments.pop("hidden_states", None)
        if not torch.is_grad_enabled():
            return checkpointed(function, *args)
        if len(args) > 1 or not _known_call(layer, x, arguments):
            self._counts.passed_on += 1
            return checkpointed(function, *args)
        if index == self._streamed()[0]:
            refuse_packed(arguments.get("position_ids"))
        self.general._announce("forward", index, x.device)
        parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        run = LayerRun(
            layer=layer,
            family=family,
            plan=self.plan,
            keep_output=self._keeps_output(index),
            arguments=arguments,
            parameters=parameters,
            wants_x=x.requires_grad,
            seed=int(torch.randint(2**62, ())) if draws_random_numbers(layer) else None,
            counts=self._counts,
            on_backward=functools.partial(self.general._announce, "backward", index, x.device),
            halves=self._halves.get(index),
        )
        if not self.offload:
            return run(x)
        inputs, outputs = self._keepers(x.device)
        if index == self._streamed()[0]:
            for keeper, moved in zip((inputs, outputs), self._moved(), strict=True):
                keeper.start_row(moved)
        return _with_hooks(inputs, outputs, not self._moves(index), functools.partial(run, x))

    def _inside_hooks(
        self, layer: Any, index: int, family: Any, checkpointed: Callable[..., Any], function: Any, *args: Any
    ) -> Any:
        """Calls the layer with its hooks (those that gather a sharded layer's weights), around a forward that streams."""
        own = layer.forward

        def forward(*inner: Any, **arguments: Any) -> Any:
            return self._run(index, family, checkpointed, functools.partial(own, **arguments), *inner)

        before = layer.__dict__.get("forward")
        layer.__dict__["forward"] = forward
        try:
            return function(*args)
        finally:
            layer.__dict__.pop("forward")
            if before is not None:
                layer.__dict__["forward"] = before


def _layer_of(function: Any) -> Any:
    """The layer whose forward this is; not one remembered from `install`, for a deep copy of the model runs its own layers."""
    return function.args[0] if function.args else function.func.__self__


def _hooks_inside(layer: Any, function: Any) -> bool:
    """Whether the layer's hooks are still to run: transformers 5.17 binds `__call__`, which runs them, 5.24 binds `forward`."""
    name = getattr(getattr(function, "func", None), "__name__", "")
    return name in ("__call__", "_wrapped_call_impl") and bool(layer._forward_hooks or layer._forward_pre_hooks)


def _asks_for_more(layer: Any) -> str | None:
    """What the model's configuration wants from inside its layers, which the streamed layer does not hand out."""
    config = getattr(getattr(layer, "self_attn", None), "config", None)
    wanted = [name for name in _WANTED_FROM_INSIDE if getattr(config, name, False)]
    return f"its configuration asks for {', '.join(wanted)}" if wanted else None


def _known_call(layer: Any, x: Any, arguments: dict[str, Any]) -> bool:
    """Whether this call is a layer's plain training forward, which is all that the streamed layer computes."""
    tables = arguments.get("position_embeddings")
    return (
        isinstance(x, Tensor)
        and x.ndim == 3
        and isinstance(tables, tuple)
        and all(isinstance(table, Tensor) and table.shape[-2] == x.shape[1] for table in tables)
        and all(arguments.get(name) is None for name in _CACHES)
        and not any(arguments.get(name) for name in _WANTED_FROM_INSIDE)
        and layer.self_attn.config._attn_implementation == NAME
    )


def _with_hooks(inputs: LayerInputs, outputs: LayerInputs, keep: bool, run: Callable[[], Tensor]) -> Tensor:
    """Runs a layer whose saved tensors, in the order in which it saves them, go through their keepers."""
    order = iter((inputs, outputs))

    def pack(tensor: Tensor) -> Tensor | tuple[LayerInputs, SavedInput]:
        keeper = next(order, None)  # the third is the log-sum-exp, which is small and stays
        return tensor if keeper is None else (keeper, keeper.pack(tensor, keep=keep))

    def unpack(saved: Tensor | tuple[LayerInputs, SavedInput]) -> Tensor:
        return saved if isinstance(saved, Tensor) else saved[0].unpack(saved[1])

    with saved_tensors_hooks(pack, unpack):
        return run()
