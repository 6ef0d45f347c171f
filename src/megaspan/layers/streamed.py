"""The streamed decoder layer on an unmodified transformers model: which layers take it, and what is kept where.

On the seam that checkpointing uses (each layer calls its `_gradient_checkpointing_func` with its own forward and the hidden
states), a layer of a family that is proven runs as one function (`stream.py`): attention forward once, token-wise work in
tiles. What it keeps of each row goes where the keep policy says (`tape.py`). Any other layer, and any call that the streamed
layer does not know (a cache, a foreign mask, several rows at once), takes ordinary checkpointing, with the reason.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megaspan.attention.context import RowContext
from megaspan.attention.seam import NAME, refuse_packed
from megaspan.layers.balance import Balance, knows_balance
from megaspan.layers.checkpoint import CheckpointStats, checkpointed_layers, checkpointing_of, hooks_to_run, layer_called
from megaspan.layers.dials import Counts, LayerPlan
from megaspan.layers.dropout import other_randomness
from megaspan.layers.family import Family, describe
from megaspan.layers.fused import Fused
from megaspan.layers.halves import Halves, find_halves
from megaspan.layers.norms import fuse_norms, unfuse_norms
from megaspan.layers.reuse import Reuse
from megaspan.layers.routing import Router, find_router, watching
from megaspan.layers.selfcheck import Part, exchanged, parts_of, prove_family, replaced_parts
from megaspan.layers.shards import compute_dtype, gathered
from megaspan.layers.stream import LayerRun
from megaspan.layers.tape import Stores, Tape, most_waiting, passing
from megaspan.layers.tile import hooks_inside, want_gradients
from megaspan.layers.tokenwise import tile_final_norm
from megaspan.memory.disk import DiskTier
from megaspan.plan.keep import KeepPolicy, LayerKeep, Place
from megaspan.plan.ranks import kv_heads_a_call

_CACHES = ("cache", "past_key_values", "past_key_value")
_WANTED_FROM_INSIDE = ("output_attentions", "output_router_logits")


@dataclass(frozen=True)
class StreamStats(CheckpointStats):
    """What the streamed layers of a model hold and have done; the fields of `CheckpointStats` count both kinds of layers.

    Attributes:
        streamed: layers that stream; the others are checkpointed.
        attention_forwards: attention kernels run forward by them, one a layer, row and step.
        attention_backwards: and backward.
        passed_on: training calls of them that took ordinary checkpointing: something was asked for that they do not give.
        reused: backwards whose gradient overwrote the incoming one.
        fused_attentions: layers whose first half (q/k norm, rotary embedding) runs fused.
        fused_mlps: layers whose MLP does.
        compiled: fused formulas that run compiled so far.
        routed: of the streamed layers those with experts, which are chosen in the forward alone.
    """

    streamed: int = 0
    attention_forwards: int = 0
    attention_backwards: int = 0
    passed_on: int = 0
    reused: int = 0
    fused_attentions: int = 0
    fused_mlps: int = 0
    compiled: int = 0
    routed: int = 0


@final
class Streaming:
    """Streams every layer of a transformers model that is proven, checkpoints the others.

    Args:
        plan: tile and head group sizes.
        keep: what each layer keeps, and where; None keeps everything on the device.
        on_layer: called as `on_layer("forward" | "backward", index)` when a layer begins.
        host_limit: most bytes of host memory, or None.
        disk: for what is kept there; whoever made it closes it after `remove`.
    """

    def __init__(
        self,
        plan: LayerPlan | None = None,
        keep: KeepPolicy | None = None,
        on_layer: Callable[[str, int], None] | None = None,
        *,
        host_limit: int | None = None,
        disk: DiskTier | None = None,
    ) -> None:
        self.plan, self.keep = plan or LayerPlan(), keep
        self.general = checkpointing_of(keep, on_layer, host_limit, disk)
        self.reasons: list[str | None] = []
        self.balances = False
        self.fused = Fused()
        self.reuse = Reuse()
        self._host_limit, self._disk = host_limit, disk
        self._counts = Counts()
        self._policy = KeepPolicy((LayerKeep("device", "device"),))
        self._stores: Stores | None = None
        self._tape: weakref.ref[Tape] | None = None
        self._layers: list[Any] = []
        self._fused: list[nn.Module] = []
        self._norm: nn.Module | None = None
        self.whole_norm: str | None = None
        self._halves: dict[int, Halves] = {}
        self._parts: dict[int, frozenset[Part]] = {}
        self._routers: dict[int, Router] = {}
        self._balance: Balance | None = None
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
        found = []
        for layer in self._layers:
            with gathered(layer):
                found.append(_router_of(layer))
        self._routers = {index: router for index, router in enumerate(found) if isinstance(router, Router)}
        self.balances = _balances(model, found)
        families = [
            _asks_for_more(layer, self.balances) or _draws(layer) or (router if isinstance(router, str) else describe(layer))
            for layer, router in zip(self._layers, found, strict=True)
        ]
        fused, proof = self.plan.fused, None
        if prove and any(isinstance(family, Family) for family in families):
            proof = prove_family(model, fused)
            if proof and fused:
                fused, self._unfused, proof = False, proof, prove_family(model, False)
        strange = replaced_parts(model, self._layers) if prove and proof is None else [proof] * len(families)
        self.reasons = [family if isinstance(family, str) else part for family, part in zip(families, strange, strict=True)]
        self._policy = self._policy_of(self.keep)
        for index, (layer, family) in enumerate(zip(self._layers, families, strict=True)):
            if self.reasons[index] is None:
                # The general path put the attribute there and takes it away again.
                run = functools.partial(self._run, index, family, layer.__dict__["_gradient_checkpointing_func"])
                layer.__dict__["_gradient_checkpointing_func"] = run
        for index in self._streamed() if fused else []:
            with gathered(self._layers[index]):
                self._halves[index] = find_halves(self._layers[index], families[index], self.fused)  # type: ignore[arg-type]
        if self.plan.fused_norms:
            self._fused = fuse_norms(self._layers[index] for index in self._streamed())
        if self._streamed():
            norm = tile_final_norm(model, self.plan.tile_tokens, self.reuse)
            self._norm, self.whole_norm = (None, norm) if isinstance(norm, str) else (norm, None)
        self._parts = {index: frozenset(parts_of(self._layers[index])) for index in self._streamed()}
        whole = [index for index, reason in enumerate(self.reasons) if reason is not None]
        self.general.tile_mlps(model, self.plan.tile_tokens, whole)
        return self.reasons

    def remove(self) -> None:
        """Restores the model and frees the host memory."""
        unfuse_norms(self._fused)
        if self._norm is not None:
            unfuse_norms([self._norm])
        self.general.remove()
        if self._stores is not None:
            self._stores.close()
        self._layers, self._fused, self._stores, self._tape, self.reasons = [], [], None, None, []
        self._halves, self._unfused, self._norm, self.whole_norm = {}, None, None, None
        self._routers, self.balances = {}, False

    def reserve(self, device: torch.device, layer_input_bytes: int, rows: int = 1) -> None:
        """Gets (and on a GPU pins) the host memory of `rows` rows whose layer inputs are this large, before step 1.

        Raises:
            UserError: the host has not that much, or it cannot be pinned.
        """
        if self._streamed():
            self._stores_on(device).reserve(layer_input_bytes, self._policy, rows)
        if len(self._streamed()) < len(self._layers):
            self.general.reserve(device, layer_input_bytes, rows)
        if self._disk is not None:
            self._disk.reserve(self.on_disk(layer_input_bytes, rows))

    def on_disk(self, layer_input_bytes: int, rows: int = 1) -> list[int]:
        """Bytes of each tensor that is on disk at once, in rows whose layer inputs are this large."""
        found = self.general.on_disk(layer_input_bytes, rows) if len(self._streamed()) < len(self._layers) else []
        if self._streamed():
            inputs, outputs = self._waiting("disk", rows)
            for size, count in zip(self._sizes(layer_input_bytes), (inputs, outputs, outputs), strict=True):
                found += [size] * count
        return found

    def row_to_disk(self, layer_input_bytes: int) -> int:
        """Bytes that a row with layer inputs of this size writes to the disk in a step, and reads back once."""
        found = sum(self.general.on_disk(layer_input_bytes)) if len(self._streamed()) < len(self._layers) else 0
        if self._streamed():
            (inputs, outputs), (input, output, sums) = passing(self._policy, "disk"), self._sizes(layer_input_bytes)
            found += inputs * input + outputs * self._groups() * (output + sums)
        return found

    def discard(self) -> None:
        """Lets go of everything saved after a step that was abandoned."""
        self._tape = None
        if self._stores is not None:
            self._stores.discard()
        self.general.discard()

    @contextmanager
    def balancing(self, model: Any, row: RowContext | None = None, real_t: Tensor | None = None) -> Iterator[Balance]:
        """Inside, forwards of `model` add to what is yielded, from which the balance loss of its experts is made.

        With `row` they are of a row that lies on several ranks; `real_t` says which of its tokens here are no padding. Only
        where `balances` says that all routers and the loss are known.
        """
        balance = Balance(model.num_experts_per_tok, len(self._routers), row, real_t)
        layers = checkpointed_layers(model)
        with ExitStack() as watched:
            for index, router in self._routers.items():
                if self.reasons[index] is not None or not torch.is_grad_enabled():
                    watched.enter_context(watching(layers[index], router, balance))
            self._balance = balance
            try:
                yield balance
            finally:
                self._balance = None

    def now_whole(self) -> dict[int, str]:
        """Streamed layers that run whole as they are now, with the reason: somebody's hooks or code have come to be inside."""
        found = {index: self._whole(index, self._layers[index]) for index in self._streamed()}
        return {index: reason for index, reason in found.items() if reason is not None}

    def stats(self) -> StreamStats:
        """Layers of both kinds, attention calls, host bytes held, bytes moved, seconds spent pinning."""
        totals = vars(self.general.stats()).copy()
        for name, value in (self._stores.stats() if self._stores is not None else {}).items():
            totals[name] += value
        return StreamStats(
            **totals,
            streamed=len(self._streamed()),
            attention_forwards=self._counts.forwards,
            attention_backwards=self._counts.backwards,
            passed_on=self._counts.passed_on,
            reused=self._counts.reused,
            fused_attentions=sum(halves.attention for halves in self._halves.values()),
            fused_mlps=sum(halves.activation is not None for halves in self._halves.values()),
            compiled=self.fused.compiled,
            routed=sum(index in self._routers for index in self._streamed()),
        )

    def places(self) -> dict[str, Counter[str]]:
        """How many layers keep their "input" and attention's "output" at which place; "again" where it is computed again."""
        found = self.general.places()
        if self._streamed():
            found = {"input": Counter(), "output": Counter()}
            for index, (keep, reason) in enumerate(zip(self._policy.layers, self.reasons, strict=True)):
                found["input"][(keep.input or "again") if reason is None else self.general.place_of(index)] += 1
                found["output"][(keep.output or "again") if reason is None else "again"] += 1
        return found

    def unfused(self) -> list[str]:
        """Why element-wise work of streamed layers is not fused or not compiled, each reason once; for the run's header."""
        reasons = [reason for halves in self._halves.values() for reason in halves.reasons]
        return list(dict.fromkeys(reason for reason in (self._unfused, self.fused.reason, *reasons) if reason))

    def _whole(self, index: int, layer: nn.Module) -> str | None:
        """Why a streamed layer cannot stream as it is now, or None."""
        return hooks_inside(layer) or exchanged(layer, self._parts[index])

    def _streamed(self) -> list[int]:
        return [index for index, reason in enumerate(self.reasons) if reason is None]

    def _policy_of(self, keep: KeepPolicy | None) -> KeepPolicy:
        """The policy of the streamed layers; one behind a layer that does not stream cannot be computed from one before it."""
        given = keep.layers if keep is not None else (LayerKeep("device", "device"),) * len(self._layers)
        if len(given) != len(self._layers):
            raise ValueError(f"a keep policy of {len(given)} layers for a model of {len(self._layers)}")
        layers = []
        again, attends = (keep.again, keep.attends) if keep is not None else ("device", "device")
        for index, layer in enumerate(given):
            alone = index == 0 or self.reasons[index - 1] is not None
            layers.append(replace(layer, input=again) if layer.input is None and alone else layer)
        return KeepPolicy(tuple(layers), again, attends)

    def _shares(self) -> tuple[float, float]:
        """Bytes of attention's output and of its log-sum-exp for each byte of a layer's input."""
        attention = self._layers[self._streamed()[0]].self_attn
        projection = attention.o_proj
        size = compute_dtype(next(self._layers[self._streamed()[0]].parameters())).itemsize
        heads = projection.in_features / getattr(attention, "head_dim", projection.in_features)
        return projection.in_features / projection.out_features, heads * max(4, size) / (projection.out_features * size)

    def _sizes(self, layer_input_bytes: int) -> tuple[int, int, int]:
        """Bytes of a layer's input, and of a head group's output and log-sum-exp."""
        groups = self._groups()
        output, sums = (-(-int(layer_input_bytes * share) // groups) for share in self._shares())
        return layer_input_bytes, output, sums

    def _waiting(self, place: Place, rows: int) -> tuple[int, int]:
        """Most inputs and most outputs of head groups that wait there at once."""
        inputs, outputs = most_waiting(self._policy, place)
        return rows * inputs, rows * outputs * self._groups()

    def _groups(self) -> int:
        """Head groups of a layer."""
        attention = self._layers[self._streamed()[0]].self_attn
        count = getattr(attention.config, "num_key_value_heads", None) or 1
        return -(-count // (kv_heads_a_call(count, self.plan.sp_size, self.plan.kv_heads_per_call) or count))

    def _stores_on(self, device: torch.device) -> Stores:
        if self._stores is None:
            self._stores = Stores(device, self._host_limit, self._shares(), self._disk, self._groups())
        return self._stores

    def _tape_at(self, device: torch.device) -> Tape:
        """The tape of the forward that runs; the first layer with a gradient begins a new one."""
        tape = None if self._tape is None else self._tape()
        if tape is None:
            whole = {index for index, reason in enumerate(self.reasons) if reason is not None}
            before_whole = frozenset(index - 1 for index in whole)
            tape = Tape(self._policy, self._stores_on(device), self.plan.stream_back, before_whole)
            self._tape = weakref.ref(tape)  # the graph holds it: with the graph goes what it keeps
        return tape

    def _run(self, index: int, family: Any, checkpointed: Callable[..., Any], function: Any, *args: Any) -> Any:
        """Runs one layer; `function` is its forward with all keyword arguments bound, `args` begins with the hidden states."""
        layer = layer_called(function, self._layers[index])
        if hooks_to_run(layer, function):
            return self._inside_hooks(layer, index, family, checkpointed, function, *args)
        arguments = dict(getattr(function, "keywords", {}))
        x = args[0] if args else arguments.pop("hidden_states", None)
        known = len(args) <= 1 and _known_call(layer, x, arguments) and self._whole(index, layer) is None
        known = known and not (torch.is_grad_enabled() and want_gradients(arguments.values()))
        if not known or self.general.dropout.cover(layer) is not None:
            self._counts.passed_on += 1
            if self._stores is not None and torch.is_grad_enabled():
                self._stores.land()  # as behind `before_whole`
            with self._watching(index, layer):
                return checkpointed(function, *args)
        if index == self._streamed()[0] and arguments.get("megaspan_row") is None:
            refuse_packed(arguments.get("position_ids"))
        trains = torch.is_grad_enabled()
        if trains:
            self.general._announce("forward", index, x.device)
            if index == 0:
                self.general.dropout.draw()
        run = LayerRun(
            index=index,
            layer=layer,
            family=family,
            plan=self.plan,
            place=self._policy.layers[index].output,
            attends=self._policy.attends,
            arguments=arguments,
            parameters=[parameter for parameter in layer.parameters() if parameter.requires_grad and trains],
            wants_x=x.requires_grad,
            dropout=self.general.dropout,
            seed=self.general.dropout.step_seed if trains else None,
            counts=self._counts,
            on_backward=functools.partial(self.general._announce, "backward", index, x.device),
            reuse=self.reuse,
            halves=self._halves.get(index),
            router=self._routers.get(index) if trains else None,
            balance=self._balance,
        )
        if index == self._streamed()[0]:
            self._tape = None
        if trains and (run.wants_x or run.parameters):
            return run(x, self._tape_at(x.device))
        return run.without_gradients(x, self._stores_on(x.device))

    def _watching(self, index: int, layer: Any) -> AbstractContextManager[None]:
        """Around a streamed layer's call that is passed on; without gradients `balancing` watches."""
        router = self._routers.get(index)
        if self._balance is None or router is None or not torch.is_grad_enabled():
            return nullcontext()
        return watching(layer, router, self._balance)

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


def _router_of(layer: Any) -> Router | str | None:
    """The layer's router, None for none, or why it has none that is known here: `find_router` wants a layer of a known form."""
    family = describe(layer)
    return family if isinstance(family, str) else find_router(layer)


def _balances(model: nn.Module, found: list[Router | str | None]) -> bool:
    """Whether the balance loss of this model's experts can be made of what its layers hand out."""
    live = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    routers = [router for router in found if router is not None]
    known = all(isinstance(router, Router) and router.logits is not None for router in routers)
    return bool(routers) and known and knows_balance(live)


def _asks_for_more(layer: Any, balances: bool) -> str | None:
    """What the model's configuration wants from inside its layers, which the streamed layer does not hand out."""
    config = getattr(getattr(layer, "self_attn", None), "config", None)
    wanted = [name for name in _WANTED_FROM_INSIDE if getattr(config, name, False)]
    wanted = [name for name in wanted if not (balances and name == "output_router_logits")]
    return f"its configuration asks for {', '.join(wanted)}" if wanted else None


def _draws(layer: Any) -> str | None:
    """What in the layer draws random numbers that would depend on the tile."""
    left = other_randomness(layer)
    return f"it draws random numbers in its own code: {left}" if left else None


def _known_call(layer: Any, x: Any, arguments: dict[str, Any]) -> bool:
    """Whether this call is a layer's plain training forward of one row, which is all that the streamed layer computes."""
    tables = arguments.get("position_embeddings", ())
    return (
        isinstance(x, Tensor)
        and x.ndim == 3
        and x.shape[0] == 1
        and (tables is None or (isinstance(tables, tuple) and bool(tables)))
        and all(isinstance(table, Tensor) and table.shape[-2] == x.shape[1] for table in tables or ())
        and all(arguments.get(name) is None for name in _CACHES)
        and not any(arguments.get(name, getattr(layer.self_attn.config, name, False)) for name in _WANTED_FROM_INSIDE)
        and layer.self_attn.config._attn_implementation == NAME
    )
