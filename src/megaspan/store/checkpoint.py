"""Checkpoints: all that a run needs to continue exactly, complete or absent.

A run at a million tokens takes hours for a few steps, on machines that can be taken away at any minute, so a checkpoint holds
everything that the next step depends on: trained weights, optimizer state with its fp32 masters and schedule, random number
states, and the trainer's own progress. The next row is a number in there: resume starts at once, without reading what was
seen (case R87).

    run/checkpoint-500/
      manifest.json         step, order of writing, identity of the run, size and CRC-32 of every file
      model.safetensors     the weights under the plain model's names; `trainable.safetensors` when some are frozen: the base of
                            a LoRA run is not written again
      state.safetensors     tensors of the optimizer and the random number states
      state.json            the rest of them, and the trainer's progress
      config.json …         settings and tokenizer: the folder can be exported on its own, and one with `model.safetensors`
                            loads in plain transformers as it is
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megaspan.human import UserError
from megaspan.layers.shards import Sharded, compute_dtype, sharded
from megaspan.store.adapter import base_of, is_adapter, is_resized, origin
from megaspan.store.folder import (
    clear_leftovers,
    damaged_files,
    new_folder,
    read_manifest,
    remove_folder,
    require_space,
    write_manifest,
)
from megaspan.store.options import another_run, differing
from megaspan.store.plain import write_settings
from megaspan.store.random_state import random_state, restore_random_state
from megaspan.store.sharded import Feed, gathered_objects, in_order, is_sharded, together, write_together
from megaspan.store.tensors import TensorFile, join_state, split_state, tensor_bytes, write_tensors

FORMAT = 1
WEIGHTS, TRAINABLE = "model.safetensors", "trainable.safetensors"
_NAME = re.compile(r"checkpoint-(\d+)")
_NAMED = 5  # of a run's checkpoints, in an error


class HasState(Protocol):
    """An optimizer, as far as a checkpoint is concerned: its state is made of dicts, lists, numbers, strings and tensors."""

    def state_dict(self) -> dict[str, Any]:
        """The whole state: moments, masters, schedule."""

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Takes back what `state_dict` gave."""


def save_checkpoint(
    run: Path | str,
    *,
    model: torch.nn.Module,
    optimizer: HasState,
    progress: Mapping[str, Any],
    keep: int | None = None,
    tokenizer: Any = None,
    identity: Mapping[str, Any] | None = None,
) -> Path:
    """Writes `run/checkpoint-<step>` and returns it; it is there complete, or not at all.

    Host memory: 64 MiB above what the model and the optimizer hold already. Of a sharded model all ranks save together, each
    parameter being its shard at that moment; the files are those of one rank, for any number of ranks to continue from.

    Args:
        run: the run folder.
        model: a transformers model, or a peft model around one.
        optimizer: its whole state is saved.
        progress: what the trainer wants back, of numbers, strings, lists and dicts; `progress["step"]` names the folder.
        keep: how many checkpoints may stay (`save_total_limit`); the oldest others are deleted once the new one is complete.
        tokenizer: saved with the settings, so that an exported checkpoint has one.
        identity: what must be the same for a resume to be exact (model commit, data fingerprint, `max_length`, seeds, …).

    Raises:
        UserError: the disk has no room; nothing was changed.
    """
    run, step = Path(run), int(progress["step"])
    whole: dict[str, Any] = {"optimizer": optimizer.state_dict(), "random": random_state()}
    shared = is_sharded(model)
    if shared:
        whole["random"], *whole["random_of_other_ranks"] = gathered_objects(whole["random"])
    state, tensors = split_state(whole, "state")
    weights = trained_tensors(model)
    target = run / f"checkpoint-{step}"

    def prepare() -> None:
        clear_leftovers(run)
        require_space(run, tensor_bytes(weights) + tensor_bytes(tensors), target.name)

    def write(feed: Feed | None = None) -> Path:
        others = [path for path in checkpoints(run) if path != target]
        with new_folder(target) as folder:
            write_settings(model, tokenizer, folder)
            weights_name = TRAINABLE if has_frozen(model) else WEIGHTS
            sums = {
                weights_name: write_tensors(folder / weights_name, weights, feed),
                "state.safetensors": write_tensors(folder / "state.safetensors", tensors, feed),
            }
            told = json.dumps({**state, "progress": split_state(dict(progress), "progress")[0]})
            (folder / "state.json").write_text(told, encoding="utf-8")
            facts = {
                "format": FORMAT,
                "step": step,
                "sequence": 1 + max((_sequence(path) for path in [*others, target]), default=0),
                "base": origin(base_of(model)),
                "identity": split_state(dict(identity or {}), "identity")[0],
            }
            write_manifest(folder, facts, sums)
        for path in others[: max(0, len(others) + 1 - keep)] if keep is not None else []:
            remove_folder(path)
        return target

    if not shared:
        prepare()
        return write()
    together(prepare)
    feed = Feed(held[name] for held in (weights, tensors) for name in in_order(held))
    return write_together(feed, lambda: write(feed))


def load_checkpoint(
    path: Path | str,
    model: torch.nn.Module,
    optimizer: HasState,
    *,
    identity: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Puts a checkpoint's state into `model`, `optimizer` and the random number generators; returns the trainer's progress.

    Everything is checked first: nothing is changed when it raises.

    Args:
        path: a checkpoint folder.
        model: the model the run started from, prepared in the same way.
        optimizer: new, for that model; asked first by its `check_state_dict`, where it has one.
        identity: compared with the one that was saved.
        options: those of this run that an identity can come from; where it differs, those that the run had otherwise are named.

    Raises:
        UserError: the checkpoint is missing, damaged, or of another model or run; it says which files or what differs.
    """
    path = Path(path)
    shared = is_sharded(model)
    # Of many ranks one reads everything to see whether it is whole; each reads its part.
    manifest = together(lambda: _undamaged(path)) if shared else _undamaged(path)
    weights = TensorFile(path / (TRAINABLE if (path / TRAINABLE).exists() else WEIGHTS))
    here = trained_tensors(model)
    saved_identity = manifest["identity"]
    current_identity = (
        json.loads(json.dumps(split_state(dict(identity), "identity")[0])) if identity is not None else saved_identity
    )
    if differences := _differences(weights, here, saved_identity, current_identity):
        raise another_run(path, differences, options or {})
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    tensors: Mapping[str, torch.Tensor] = TensorFile(path / "state.safetensors")
    if not shared and all(tensor.device.type == "cpu" for tensor in here.values()):
        # An optimizer on the CPU would keep what it is given: not pages of a file, then, that rotation is going to delete.
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    of_optimizer = join_state(state["optimizer"], tensors)
    if (check := getattr(optimizer, "check_state_dict", None)) is not None:
        check(of_optimizer)  # before the weights are those of the checkpoint
    with torch.no_grad():
        for name, tensor in here.items():
            if isinstance(tensor, Sharded):
                tensor.local.copy_(tensor.of(weights[name]))
            else:
                tensor.copy_(weights[name])
    optimizer.load_state_dict(of_optimizer)
    restore_random_state(join_state(_random_of_this_rank(state) if shared else state["random"], tensors))
    return join_state(state["progress"], {})


def _undamaged(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, all of whose files hold what was written."""
    manifest = require_checkpoint(path)
    if damaged := damaged_files(path, manifest):
        raise UserError(f"{path} is damaged: {', '.join(damaged)} changed since it was written", do=_older(path))
    return manifest


def _random_of_this_rank(state: Mapping[str, Any]) -> Any:
    """The random state of the same rank of a run of as many, else that of the first, for all alike."""
    states = [state["random"], *state.get("random_of_other_ranks", [])]
    return states[dist.get_rank()] if len(states) == dist.get_world_size() else states[0]


def require_checkpoint(path: Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint; milliseconds.

    Raises:
        UserError: there is none, it was made by transformers, or it is not complete.
    """
    manifest = read_manifest(path)
    if manifest is None:
        raise _not_a_checkpoint(path)
    return manifest


def read_identity(path: Path) -> dict[str, Any]:
    """The identity of the run that a complete checkpoint is of; milliseconds.

    Raises:
        UserError: as `require_checkpoint`.
    """
    return dict(require_checkpoint(path)["identity"])


def latest_checkpoint(run: Path | str) -> Path | None:
    """The complete checkpoint of a run that was written last; None when there is none.

    Written last, not the highest step: after a resume from an earlier checkpoint the run is where the newest one says.
    """
    return max(checkpoints(Path(run)), key=_sequence, default=None)


def checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    found = [path for path in run.glob("checkpoint-*") if _NAME.fullmatch(path.name) and read_manifest(path) is not None]
    return sorted(found, key=_sequence)


def trained_tensors(model: torch.nn.Module) -> dict[str, Any]:
    """What training changes, by the plain model's names: parameters not frozen (tied ones once), persistent buffers.

    Of a sharded parameter it is a `Sharded`, to be written in the type that is computed in: its fp32 master is optimizer state.
    """
    tensors: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            tensors[name] = sharded(parameter, dtype=compute_dtype(parameter))
    kept = model.state_dict(keep_vars=True)
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in kept}
    base = base_of(model)
    if is_adapter(model) and is_resized(base):
        embeddings = [
            layer.weight for layer in (base.get_input_embeddings(), base.get_output_embeddings()) if layer is not None
        ]
        tensors |= {
            name: sharded(part, dtype=compute_dtype(part))
            for name, part in model.named_parameters()
            if any(part is one for one in embeddings)
        }
    return tensors


def has_frozen(model: torch.nn.Module) -> bool:
    """Whether some parameters are not trained, as under LoRA."""
    return any(not parameter.requires_grad for parameter in model.parameters())


def _sequence(path: Path) -> int:
    manifest = read_manifest(path)
    return int(manifest["sequence"]) if manifest else 0


def _differences(
    saved: TensorFile, here: Mapping[str, Any], saved_identity: Mapping[str, Any], identity: Mapping[str, Any]
) -> list[str]:
    """What differs, worst first, in words; at most three weights are named."""
    weights = [f"weight {name} is not in it" for name in sorted(here.keys() - saved.keys())]
    weights += [f"weight {name} is not in this model" for name in sorted(saved.keys() - here.keys())]
    for name in sorted(saved.keys() & here.keys()):
        before, now = saved.shape(name), tuple(here[name].shape)
        if before != now:
            weights.append(f"weight {name} was {list(before)} and is {list(now)}")
    if len(weights) > 3:
        weights[3:] = [f"{len(weights) - 3} more weights differ"]
    return differing(saved_identity, identity) + weights


def _not_a_checkpoint(path: Path) -> UserError:
    if not path.is_dir():
        run = path.parent if _NAME.fullmatch(path.name) else path
        there = [checkpoint.name for checkpoint in checkpoints(run)]
        named = ", ".join(there[-_NAMED:]) + f" and {len(there) - _NAMED} older ones" * (len(there) > _NAMED)
        return UserError(f"there is no checkpoint {path}", allowed=f"complete checkpoints in {run}: {named or 'none'}")
    if (path / "trainer_state.json").exists():
        return UserError(
            f"{path} was written by transformers, not by megaspan", do="Start from its weights: model_name_or_path"
        )
    if (newest := latest_checkpoint(path)) is not None:
        return UserError(f"{path} is a run, not a checkpoint", do=f"Write resume_from_checkpoint: {newest}")
    return UserError(f"{path} is not complete: its manifest or one of its files is missing or short", do=_older(path))


def _older(path: Path) -> str:
    others = [checkpoint for checkpoint in checkpoints(path.parent) if checkpoint != path]
    return f"Resume from {others[-1]}" if others else "There is no other checkpoint beside it: start anew"
