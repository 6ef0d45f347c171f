"""Weights straight into the shards of a model that was built without memory.

Eight ranks that each load an 8B model to cut it need 131 GB of host memory, and read its files eight times. Here each rank
reads the rows that it keeps, in pieces, from the same safetensors files (so a node reads a file about once), and draws the
weights of a bare shape one module at a time: beside its shards a rank holds one piece, or one module.

Everything is taken from a second model of the same class on the meta device, the plain one: the names of the weights, what
transformers does to those of older or differently cut checkpoints, and the initialisation, so that LoRA and FSDP2 around the
live modules make no difference.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from megaspan.human import UserError
from megaspan.layers.shards import local, rows_here
from megaspan.model.kinds import unwrap
from megaspan.model.source import Source, fill_the_cache

PIECE_BYTES = 64 * 2**20
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_WRAPPED = re.compile(r"\.base_layer\b|\.original_module\b|\.modules_to_save\.[^.]+")
_BUFFERS_OF_OLD = re.compile(r"rotary_emb\.inv_freq$")


def skeleton(model_config: PretrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """A model on the meta device: its classes and shapes, no memory."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(model_config), dtype=dtype, trust_remote_code=trust_remote_code
        )
    return model


@torch.no_grad()
def fill_random(model: nn.Module, plain: PreTrainedModel, seed: int, device: torch.device) -> None:
    """Fills shards with the weights that `from_config` on one device would draw after `manual_seed(seed)`, bit for bit.

    The same random numbers are drawn, those of constructors included, one module at a time, by every rank; it keeps its rows.
    A GPU draws the 16 GB of an 8B model in a fraction of a second. The global random states are left as they were.

    Args:
        model: sharded, its shards with memory.
        plain: from `skeleton`; it is used up.
        seed: of the run.
        device: where the one device would have drawn.

    Raises:
        UserError: the class leaves a weight to its constructor, so that it is not known here.
    """
    places, buffers, tied = _places(model), _buffers(model), _tied(plain)
    done: set[str] = set()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        for module, owner, prefix in _as_constructed(plain):
            with _real(module, device) as whole:
                if owner is None:
                    module.reset_parameters()
                    continue
                owner._init_weights(module)
                for name, tensor in whole.items():
                    name = f"{prefix}{name}"
                    _check_filled(tensor, name, type(plain).__name__)
                    _set_buffers(buffers.get(name, []), tensor)
                    if name in done:
                        continue  # tied to a weight that was drawn before
                    for other in tied.get(name, []):
                        done.add(other)
                        for parameter in places.get(other, []):
                            _put(parameter, tensor)


@torch.no_grad()
def fill_pretrained(model: nn.Module, plain: PreTrainedModel, source: Source, device: torch.device) -> int:
    """Fills shards from the safetensors files of a folder or of the hub, and computes buffers; returns how many are not used.

    Args:
        model: sharded, its shards with memory.
        plain: from `skeleton`; it is used up.
        source: where the weights are.
        device: of the buffers.

    Raises:
        UserError: a weight is missing or of another shape.
    """
    fill_buffers(model, plain, device)
    places, buffers, tied = _places(model), _buffers(model), _tied(plain)
    files = _where(_files(source, plain.config))
    loads, unused = _loads(plain, files)
    wanted = plain.state_dict(keep_vars=True)
    got: set[str] = set()
    for target, load in loads.items():
        for name, read in load.results(target, plain, files):
            if name not in wanted:
                continue
            _check_shape(name, read.shape, wanted[name].shape, source)
            for other in tied.get(name, [name]):
                got.add(other)
                for parameter in places.get(other, []):
                    read.into(parameter)
            if name in buffers:
                _set_buffers(buffers[name], read.whole())
    missing = sorted(wanted.keys() - got)
    if missing:
        raise UserError(
            f"{source.name} lacks {len(missing)} weights that the model needs, so they would be random",
            found=", ".join(missing[:3]) + (", …" if len(missing) > 3 else ""),
            do="Check model_init_kwargs and the folder; the checkpoint is of another model or incomplete",
        )
    return unused


@torch.no_grad()
def fill_buffers(model: nn.Module, plain: PreTrainedModel, device: torch.device) -> None:
    """Computes buffers that no checkpoint holds (rotary tables) by the class's own initialisation, the same on every rank.

    Raises:
        UserError: the class leaves one to its constructor.
    """
    buffers = _buffers(model)
    kept = plain.state_dict()
    for module, owner, names in _as_constructed(plain):
        own = [name for name, buffer in module.named_buffers(recurse=False) if buffer is not None]
        if owner is None or not own:
            continue
        for parameter in module.parameters(recurse=False):
            parameter._is_hf_initialized = True  # initialisation passes over it
        with _real(module, device, parameters=False) as whole:
            owner._init_weights(module)
            for name in own:
                if f"{names}{name}" not in kept:
                    _check_filled(whole[name], f"{names}{name}", type(plain).__name__)
                _set_buffers(buffers[f"{names}{name}"], whole[name])


@dataclass(frozen=True)
class _Read:
    """A weight of a checkpoint: rows are read when they are asked for."""

    shape: tuple[int, ...]
    rows: Callable[[slice], Tensor]

    def whole(self) -> Tensor:
        """All of it."""
        return self.rows(slice(0, self.shape[0])) if self.shape else self.rows(slice(None))

    def into(self, parameter: Tensor) -> None:
        """This rank's rows of it, a piece at a time, into a sharded parameter."""
        rows, target = rows_here(parameter), local(parameter.detach())  # type: ignore[arg-type]
        row_bytes = max(torch.Size(self.shape[1:]).numel() * 4, 1)
        step = max(PIECE_BYTES // row_bytes, 1)
        for start in range(rows.start, rows.stop, step):
            stop = min(start + step, rows.stop)
            target[start - rows.start : stop - rows.start].copy_(self.rows(slice(start, stop)))


@dataclass
class _Load:
    """The tensors of a checkpoint that one weight, or several, are made of, by transformers' rule."""

    rule: Any
    keys: list[tuple[str, str]]

    def results(self, target: str, plain: PreTrainedModel, files: dict[str, Path]) -> Iterator[tuple[str, _Read]]:
        """The weights by name. What is only renamed is read by rows; the rest is put together whole first."""
        if self.rule is None:
            ((key, _),) = self.keys
            yield target, _stored(files[key], key)
            return
        for key, pattern in self.keys:
            self.rule.add_tensor(target, key, pattern, _later(files[key], key))
        for name, tensor in self.rule.convert(target, model=plain, config=plain.config).items():
            tensor = tensor[0] if isinstance(tensor, list) else tensor
            yield name, _Read(tuple(tensor.shape), tensor.__getitem__)


def _loads(plain: PreTrainedModel, files: dict[str, Path]) -> tuple[dict[str, _Load], int]:
    """What each weight of the model is made of, and how many tensors have no place in it."""
    rules = get_model_conversion_mapping(plain)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    names, prefix = plain.state_dict(), plain.base_model_prefix
    ignored = [re.compile(pattern) for pattern in plain._keys_to_ignore_on_load_unexpected or ()]
    loads: dict[str, _Load] = {}
    unused = 0
    for key in sorted(files, key=_natural):
        name, pattern = rename_source_key(key, renamings, converters, prefix, names)
        if name not in names and key in names:
            name, pattern = key, None
        if name in names:
            rule = copy.deepcopy(by_pattern[pattern]) if pattern is not None else None
            loads.setdefault(name, _Load(rule, [])).keys.append((key, pattern or key))
        elif not _BUFFERS_OF_OLD.search(key) and not any(each.search(key) for each in ignored):
            unused += 1
    return loads, unused


def _files(source: Source, model_config: Any) -> list[Path]:
    """The safetensors files of a checkpoint, fetched from the hub where they are not here."""
    if source.kind == "folder":
        folder = Path(source.place)
        whole = folder / _SINGLE
        return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    revision = getattr(model_config, "_commit_hash", None) or source.revision or "main"
    options: dict[str, Any] = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    options["local_files_only"] = source.cache_only
    index = cached_file(source.place, _INDEX, **options)
    if index is not None:
        return [
            Path(path)
            for path in get_checkpoint_shard_files(source.place, index, revision=revision, local_files_only=source.cache_only)[
                0
            ]
        ]
    single = cached_file(source.place, _SINGLE, **options)
    if single is None and source.cache_only:
        what = f"the weights of {source.name} are not in the hub's cache, and the hub cannot be reached: {source.unreachable}"
        raise UserError(what, do=fill_the_cache(source))
    if single is None:
        raise UserError(f"{source.name} has no safetensors on the hub", do="Use a checkpoint with model.safetensors")
    return [Path(single)]


def _where(files: list[Path]) -> dict[str, Path]:
    """The file of each tensor."""
    found: dict[str, Path] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def _stored(path: Path, key: str) -> _Read:
    """A tensor of a file. The file is opened for each piece: what is read of an open one counts as this process's memory."""

    def rows(cut: slice) -> Tensor:
        with safe_open(path, framework="pt") as file:
            piece: Tensor = file.get_slice(key)[cut].clone()
            return piece

    with safe_open(path, framework="pt") as file:
        return _Read(tuple(file.get_slice(key).get_shape()), rows)


def _later(path: Path, key: str) -> Callable[[], Tensor]:
    """Reads a whole tensor when it is called."""

    def read() -> Tensor:
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(key).clone()
            return tensor

    return read


def _natural(key: str) -> list[tuple[bool, int, str]]:
    """Sorts expert 2 before expert 10: their order is the order in the weight."""
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in key.split(".")]


def _as_constructed(plain: PreTrainedModel) -> Iterator[tuple[Any, Any, str]]:
    """(module, owner, name with a dot behind it) in the order in which random numbers are drawn for them on one device.

    First the constructors of a transformers model's modules, owner None, then its initialisation; a model inside another one is
    constructed and initialised first.
    """
    inner = [(name, module) for name, module in plain.named_modules() if isinstance(module, PreTrainedModel)]
    passed: set[int] = set()
    for name, owner in sorted(inner, key=lambda item: -item[0].count(".") - bool(item[0])):
        prefix = f"{name}." if name else ""
        for inside, module in owner.named_modules():
            if id(module) not in passed and _draws_when_made(module):
                yield module, None, f"{prefix}{inside}."
        for inside, module in _children_first(owner):
            if id(module) not in passed:
                passed.add(id(module))
                yield module, owner, f"{prefix}{inside}." if inside else prefix


def _draws_when_made(module: nn.Module) -> bool:
    """Whether torch's own constructor draws the weights, in a class of torch or in one derived from it."""
    reset = getattr(type(module), "reset_parameters", None)
    return reset is not None and reset.__module__.startswith("torch.nn")


def _children_first(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        yield from _children_first(child, f"{name}.{key}" if name else key)
    yield name, module


class _real:
    """Gives one module of the plain model whole memory, filled with NaN; yields it by name, and takes it away at the end."""

    def __init__(self, module: nn.Module, device: torch.device, *, parameters: bool = True) -> None:
        self._module, self._device, self._parameters = module, device, parameters

    def __enter__(self) -> dict[str, Tensor]:
        self._own, self._lasting = dict(self._module._parameters), dict(self._module._buffers)
        whole: dict[str, Tensor] = {}
        for name, tensor in self._module._parameters.items():
            if tensor is not None and self._parameters:
                whole[name] = nn.Parameter(_nan_like(tensor, self._device), requires_grad=False)
                self._module._parameters[name] = whole[name]  # type: ignore[assignment]
        for name, buffer in self._module._buffers.items():
            if buffer is not None:
                whole[name] = self._module._buffers[name] = _nan_like(buffer, self._device)
        return whole

    def __exit__(self, *_: object) -> None:
        self._module._parameters.update(self._own)
        self._module._buffers.update(self._lasting)


def _nan_like(tensor: Tensor, device: torch.device) -> Tensor:
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return fresh.fill_(float("nan")) if fresh.is_floating_point() else fresh.zero_()


def _check_filled(tensor: Tensor, name: str, model: str) -> None:
    if tensor.is_floating_point() and bool(torch.isnan(tensor).any()):
        raise UserError(
            f"{model} leaves {name} to its constructor, so it cannot be made for shards",
            do="Train it on one GPU, and report it",
        )


def _check_shape(name: str, got: tuple[int, ...], wanted: torch.Size, source: Source) -> None:
    if tuple(got) != tuple(wanted):
        raise UserError(
            f"{source.name} holds {name} in another shape than the model has", got=list(got), allowed=str(list(wanted))
        )


def _places(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The live parameters for each name of the plain model: more than one where peft trains a copy. Adapters have none."""
    found: dict[str, list[nn.Parameter]] = {}
    for name, parameter in unwrap(model).named_parameters(remove_duplicate=False):
        found.setdefault(_WRAPPED.sub("", name), []).append(parameter)
    return found


def _tied(plain: PreTrainedModel) -> dict[str, list[str]]:
    """For each name of a weight all names of it, itself among them."""
    groups: dict[int, list[str]] = {}
    for name, parameter in plain.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {name: names for names in groups.values() for name in names}


def _buffers(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """The live modules, and the buffer's name there, for each buffer of the plain model."""
    found: dict[str, list[tuple[nn.Module, str]]] = {}
    for path, module in unwrap(model).named_modules():
        for name, _ in module.named_buffers(recurse=False):
            found.setdefault(_WRAPPED.sub("", f"{path}.{name}" if path else name), []).append((module, name))
    return found


def _put(parameter: Tensor, whole: Tensor) -> None:
    local(parameter.detach()).copy_(whole[rows_here(parameter)])  # type: ignore[arg-type]


def _set_buffers(places: list[tuple[nn.Module, str]], value: Tensor) -> None:
    for module, name in places:
        before = module._buffers[name]
        assert before is not None
        device = value.device if before.is_meta else before.device
        module._buffers[name] = value.detach().to(device, before.dtype, copy=True)
