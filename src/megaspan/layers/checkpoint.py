"""Checkpointing of whole layers, their inputs kept on the device or on the host.

A layer of an 8B model saves some 20 tensors of its own size for the backward: at 131,072 tokens about 37 GB, times 36 layers.
Checkpointing keeps one of them, the input (1.07 GB), and runs the layer again in the backward; `megaspan.memory.offload` then
moves that one to the host while the next layer computes.

It hangs on the seam that transformers has for this: each `GradientCheckpointingLayer` calls its `_gradient_checkpointing_func`
with its own forward, everything but the positional arguments bound, and the hidden states. (transformers 5.17 binds `__call__`,
5.24 binds `forward`, so that the hooks of a sharded module stay outside; both work.) torch's non-reentrant checkpoint does the
rest: it saves the positional tensors, which is where the offload's hooks sit, and its recomputation stops at the last tensor
that the backward needs. cos, sin and masks are keyword arguments, shared by all layers, and stay.

Most of what a layer computes again is its MLP, four to seven tensors of its width: `tiled_mlp.py` has a tile of them at a time.

The recomputation sees what the forward saw: autocast, the permitted attention backends (the backward may run after the scope
that chose them has been left, case R62) and the generators' states, for a layer may draw random numbers in its own code where
no name tells. Two states are 5 KB a layer, taken and put back in some 50 microseconds.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import _cur_sdpa_kernel_backends, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from megaspan.attention.context import RowContext
from megaspan.human import UserError
from megaspan.layers.dropout import DropoutHandle, install_dropout
from megaspan.layers.shards import gathered
from megaspan.layers.tile import hooks_inside
from megaspan.layers.tiled_mlp import TiledForward, Tiling, find_mlps
from megaspan.memory.disk import DiskTier
from megaspan.memory.offload import LayerInputs, OffloadStats
from megaspan.memory.saved import SavedInput
from megaspan.plan.keep import KeepPolicy, Place

_LAYERS_AHEAD = 2


def checkpointed_layers(model: torch.nn.Module) -> list[GradientCheckpointingLayer]:
    """The layers that transformers can checkpoint, in order, without those inside another one."""
    layers: list[GradientCheckpointingLayer] = []
    inside = "\0"
    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer) and not name.startswith(inside):
            layers.append(module)
            inside = f"{name}."
    return layers


@dataclass(frozen=True)
class CheckpointStats(OffloadStats):
    """What the checkpointing of a model holds and has done.

    Attributes:
        layers: layers that are checkpointed.
        moved: of those, how many send their input to the host.
        tiled: how many run whole but for their MLP, which runs in tiles.
    """

    layers: int = 0
    moved: int = 0
    tiled: int = 0


class Checkpointing:
    """Checkpoints every layer of a transformers model.

    Args:
        offload: layer inputs wait on the host.
        keep_on_device: of the last layers, how many keep their input on the device anyway: the backward wants those first.
        on_layer: called as `on_layer("forward" | "backward", index)` when a layer begins, on the thread that runs it. With it,
            the host is held back to two layers ahead of a GPU, so that the calls are true to a layer or two. It may raise to
            abandon the step: call `discard` before the next one.
        host_limit: most bytes of host memory, or None.
        disk: where the inputs of the first `layers_on_disk` layers wait, of those that do not stay on the device.
    """

    def __init__(
        self,
        offload: bool,
        keep_on_device: int = 0,
        on_layer: Callable[[str, int], None] | None = None,
        *,
        host_limit: int | None = None,
        disk: DiskTier | None = None,
        layers_on_disk: int = 0,
    ) -> None:
        self.offload, self.keep_on_device, self.on_layer = offload, keep_on_device, on_layer
        self._host_limit, self._disk, self._layers_on_disk = host_limit, disk, layers_on_disk
        self.dropout = DropoutHandle()
        self.untiled: dict[int, str] = {}
        self._tiling: Tiling | None = None
        self._tiled: dict[int, list[torch.nn.Module]] = {}
        self._inputs: LayerInputs | None = None
        self._layers: list[GradientCheckpointingLayer] = []
        self._before: list[tuple[torch.nn.Module, dict[str, Any]]] = []
        self._marks: deque[torch.cuda.Event] = deque()

    def __deepcopy__(self, memo: dict[int, Any]) -> Checkpointing:
        # A copy of the model (a reference model, an average) shares the arena and the streams.
        return self

    def install(self, model: torch.nn.Module) -> None:
        """Switches checkpointing on for every layer of `model` (unwrapped or inside peft).

        Raises:
            UserError: the model has no layer that transformers can checkpoint.
        """
        if self._layers:
            raise RuntimeError("this Checkpointing is installed already; make one for each model")
        self._layers = checkpointed_layers(model)
        if not self._layers:
            raise UserError(
                f"{type(model).__name__} has no layers that transformers can checkpoint", do="Set gradient_checkpointing: false"
            )
        self.dropout = install_dropout(self._layers)
        for index, layer in enumerate(self._layers):
            self._set(layer, functools.partial(self._run, index))
        for module in model.modules():
            # The model around the layers has the same flag: transformers reads it to leave the cache of keys and values out.
            if hasattr(module, "gradient_checkpointing") and not isinstance(module, GradientCheckpointingLayer):
                self._set(module, functools.partial(checkpoint, use_reentrant=False))

    def tile_mlps(self, model: torch.nn.Module, tile_tokens: int, indices: Iterable[int] | None = None) -> None:
        """Runs the MLPs of layers in tiles wherever they are found to work token by token; after `install`.

        Afterwards `untiled` has, by layer, why a part of it that looks like an MLP runs whole.

        Args:
            model: the one that was installed on. All ranks of a sharded one call this together.
            tile_tokens: most tokens of a tile; shorter rows run in one pass.
            indices: of the layers; None for all.
        """
        live: Any = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
        if live is None:
            return
        self._tiling = Tiling(tile_tokens, self.dropout)
        tried: set[str] = set()
        for index in range(len(self._layers)) if indices is None else indices:
            layer = self._layers[index]
            with gathered(layer):
                found, reasons = find_mlps(layer, live.config.get_text_config().hidden_size, tried)
            if found:
                self._tiled[index] = [layer.get_submodule(name) for name in found]
            if reasons:
                self.untiled[index] = "; ".join(reasons)
            for module in self._tiled.get(index, []):
                module.__dict__["forward"] = TiledForward(module, self._tiling)

    def now_untiled(self) -> dict[int, str]:
        """Why MLPs run whole, by layer: `untiled`, and those that somebody's hooks have come to be inside of."""
        found = dict(self.untiled)
        for index, modules in self._tiled.items():
            hooks = [f"{type(module).__name__}: {reason}" for module in modules if (reason := hooks_inside(module))]
            if hooks:
                found[index] = "; ".join(hooks)
        return found

    def remove(self) -> None:
        """Restores the model and frees the host memory."""
        for module in itertools.chain(*self._tiled.values()):
            module.__dict__.pop("forward", None)
        self._tiled, self._tiling, self.untiled = {}, None, {}
        for module, before in self._before:
            for name, value in before.items():
                if value is _ABSENT:
                    module.__dict__.pop(name, None)
                else:
                    setattr(module, name, value)
        self.dropout.remove()
        self._before, self._layers = [], []
        if self._inputs is not None:
            self._inputs.close()
            self._inputs = None

    def reserve(self, device: torch.device, layer_input_bytes: int, rows: int = 1) -> None:
        """Gets (and on a GPU pins) the memory of `rows` rows whose layer inputs are this large, before step 1; disk too.

        Raises:
            UserError: the host or the disk has not that much, or it cannot be pinned.
        """
        if self._moved:
            on_disk = self.places()["input"]["disk"]
            self._offload(device).reserve(rows * (self._moved - on_disk), layer_input_bytes, rows * on_disk)
        if self._disk is not None:
            self._disk.reserve(self.on_disk(layer_input_bytes, rows))

    def on_disk(self, layer_input_bytes: int, rows: int = 1) -> list[int]:
        """Bytes of each input that is on disk at once, in rows whose layer inputs are this large."""
        return [layer_input_bytes] * (rows * self.places()["input"]["disk"])

    def row_to_disk(self, layer_input_bytes: int) -> int:
        """Bytes that a row with layer inputs of this size writes to the disk in a step, and reads back once."""
        return sum(self.on_disk(layer_input_bytes))

    def place_of(self, index: int) -> Place:
        """Where the input of a layer waits."""
        if index >= self._moved:
            return "device"
        return "disk" if self._disk is not None and index < self._layers_on_disk else "host"

    def places(self) -> dict[str, Counter[str]]:
        """How many layers keep their "input" at which place; attention's "output" is always computed "again"."""
        places = Counter[str](self.place_of(index) for index in range(len(self._layers)))
        return {"input": places, "output": Counter(again=len(self._layers))}

    def discard(self) -> None:
        """Lets go of all saved inputs after a step that was abandoned, on the disk of everything."""
        self._marks.clear()
        if self._inputs is not None:
            self._inputs.discard()
        if self._disk is not None:
            self._disk.discard()

    def stats(self) -> CheckpointStats:
        """Layers, host bytes held, bytes moved, seconds spent pinning."""
        moved = vars(self._inputs.stats()) if self._inputs is not None else {}
        return CheckpointStats(**moved, layers=len(self._layers), moved=self._moved, tiled=len(self._tiled))

    @property
    def _moved(self) -> int:
        return max(0, len(self._layers) - self.keep_on_device) if self.offload else 0

    def _offload(self, device: torch.device) -> LayerInputs:
        if self._inputs is None:
            self._inputs = LayerInputs(device, limit=self._host_limit, disk=self._disk)
        return self._inputs

    def _set(self, module: torch.nn.Module, function: Callable[..., Any]) -> None:
        settings = {"gradient_checkpointing": True, "_gradient_checkpointing_func": function}
        self._before.append((module, {name: module.__dict__.get(name, _ABSENT) for name in settings}))
        for name, value in settings.items():
            setattr(module, name, value)

    def _run(self, index: int, function: Callable[..., Any], *args: Any) -> Any:
        """Runs one layer; `function` is its forward with all keyword arguments bound, `args` begins with the hidden states."""
        draws = self.dropout.cover(self._layers[index]) is not None
        if not torch.is_grad_enabled():  # transformers 5.17 asks here without gradients too
            self._allow_tiles(draws)
            return function(*args)
        if not args and isinstance(function, functools.partial):  # a model that passes the hidden states by name
            function, args = _hidden_first(function)
        hidden = args[0]
        if index == 0:
            self.dropout.draw()
        row: RowContext | None = getattr(function, "keywords", {}).get("megaspan_row")
        first = 0 if row is None or self.dropout.step_seed is None else row.token_index
        place = (self.dropout.step_seed, index, first, hidden.shape[-2] if hidden.ndim == 3 and hidden.shape[0] == 1 else None)
        # In order of preference; torch reads them for its own context manager and has no public reader.
        backends = _cur_sdpa_kernel_backends(with_priority=True)
        recomputing = False

        def run(*inputs: Any) -> Any:
            nonlocal recomputing
            self._allow_tiles(draws)
            if not recomputing:
                recomputing = True
                with self.dropout.at(*place):
                    return function(*inputs)
            self._announce("backward", index, inputs[0].device)
            with sdpa_kernel(backends, set_priority=True), self.dropout.at(*place):
                return function(*inputs)

        self._announce("forward", index, hidden.device)
        checkpointed = functools.partial(checkpoint, run, *args, use_reentrant=False)
        if not self.offload:
            return checkpointed()
        inputs = self._offload(hidden.device)
        if index == 0:
            inputs.start_row(self._moved - self.places()["input"]["disk"])
        return _with_hooks(inputs, hidden.data_ptr(), self.place_of(index), checkpointed)

    def _allow_tiles(self, draws: bool) -> None:
        """A layer that draws random numbers in its own code would draw others when a tile of it runs again."""
        if self._tiling is not None:
            self._tiling.allowed = not draws

    def _announce(self, phase: str, index: int, device: torch.device) -> None:
        """Tells the progress bar, once the device has come within two layers of it."""
        if self.on_layer is None:
            return
        if device.type == "cuda":
            mark = torch.cuda.Event(blocking=True)
            mark.record(torch.cuda.current_stream(device))
            self._marks.append(mark)
            if len(self._marks) > _LAYERS_AHEAD:
                self._marks.popleft().synchronize()
        self.on_layer(phase, index)


def checkpointing_of(
    keep: KeepPolicy | None, on_layer: Callable[[str, int], None] | None, host_limit: int | None, disk: DiskTier | None
) -> Checkpointing:
    """Checkpointing that keeps layer inputs where a policy wants them, as far as whole layers can; None: on the device."""
    places = [layer.input for layer in keep.layers] if keep is not None else []
    stay = len(list(itertools.takewhile(lambda place: place == "device", reversed(places))))
    on_disk = len(list(itertools.takewhile(lambda place: place == "disk", places)))
    return Checkpointing(stay < len(places), stay, on_layer, host_limit=host_limit, disk=disk, layers_on_disk=on_disk)


_ABSENT = object()


def _with_hooks(inputs: LayerInputs, hidden: int, place: Place, checkpointed: Callable[[], Any]) -> Any:
    """Runs a checkpointed layer whose input, the tensor at the address `hidden`, goes through `inputs`.

    The address and not the tensor: autograd keeps the hooks, and with them all that they refer to, until the backward.
    """

    def pack(tensor: torch.Tensor) -> torch.Tensor | SavedInput:
        return inputs.pack(tensor, place) if tensor.data_ptr() == hidden else tensor

    def unpack(saved: torch.Tensor | SavedInput) -> torch.Tensor:
        return inputs.unpack(saved) if isinstance(saved, SavedInput) else saved

    with saved_tensors_hooks(pack, unpack):
        return checkpointed()


def layer_called(function: Any, otherwise: Any) -> Any:
    """The layer whose forward this is; not one remembered from `install`, for a deep copy of the model runs its own layers.

    `otherwise` where it is somebody's plain function, set on a layer in the place of its forward.
    """
    return function.args[0] if function.args else getattr(function.func, "__self__", otherwise)


def hooks_to_run(layer: Any, function: Any) -> bool:
    """Whether the layer's hooks are still to run: transformers 5.17 binds `__call__`, which runs them, 5.24 binds `forward`."""
    name = getattr(getattr(function, "func", None), "__name__", "")
    return name in ("__call__", "_wrapped_call_impl") and bool(layer._forward_hooks or layer._forward_pre_hooks)


def _hidden_first(function: functools.partial[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The same call with `hidden_states` as positional argument, where checkpointing can see it."""
    keywords = dict(function.keywords)
    hidden = keywords.pop("hidden_states", None)
    if hidden is None:
        raise RuntimeError("a checkpointed layer was called without hidden states")
    return functools.partial(function.func, *function.args, **keywords), (hidden,)
