"""The final save: a folder that plain transformers (or peft) loads, with everything that made the long context work.

An extension that reaches training but not the saved folder is a published defect (case R51): the served model then reads a
million positions with the frequencies of 32,768. So the folder holds the rope settings and the new `max_position_embeddings`
in its config, the new length as the tokenizer's limit, chat template and generation settings, weights in safetensors with
tied weights once (case R89). Weights go to disk shard by shard: host memory for one shard, not for the model.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from megaspan.human import UserError
from megaspan.layers.shards import compute_dtype
from megaspan.plan.rope_native import read_rope
from megaspan.store.adapter import base_of, is_adapter, save_adapter, save_adapter_settings
from megaspan.store.folder import new_folder, require_space
from megaspan.store.sharded import Feed, WholeState, in_order, is_sharded, whole_state, write_together
from megaspan.store.tensors import TensorFile, write_tensors

SHARD_SIZE = "2GB"


def save_model(
    model: Any, tokenizer: Any, out: Path | str, *, dtype: torch.dtype | None = None, companions: Sequence[Path] = ()
) -> Path:
    """Writes the model for use: complete or not at all; into a folder that holds other things, file by file.

    A peft model is saved as an adapter, by peft's own method, with the base's rope settings beside it. Of a sharded model all
    ranks call this together, and one writes the same files as if it were whole.

    Args:
        model: a transformers model or a peft model around one, prepared or not.
        tokenizer: saved with the model's length as its limit; None for a bare shape.
        out: the folder.
        dtype: of the saved weights when it is not that of the parameters (bf16 from fp32 parameters); peft weights keep theirs.
        companions: files to copy beside them, such as those of a tokenizer.

    Returns:
        `out`.

    Raises:
        UserError: no room, or settings that transformers refuses to save.
    """
    out = Path(out)
    if not is_sharded(model):
        return _into(out, saved_bytes(model, dtype), lambda folder: _write(model, tokenizer, folder, dtype, companions))
    held = whole_state(model, dtype)
    feed = Feed(held.tensors[name] for name in in_order(held.tensors))
    # The weights lie on the disk twice while they are written, and in memory not at all.
    return write_together(
        feed,
        lambda: _into(
            out,
            2 * saved_bytes(model, dtype),
            lambda folder: _write_sharded(model, held, feed, tokenizer, folder, companions),
        ),
    )


def _into(out: Path, needed: int, write: Callable[[Path], None]) -> Path:
    """Has a new folder written that takes the place of `out`, or whose files take their places in it."""
    require_space(out, needed, "the model")
    if _is_ours(out):
        with new_folder(out) as folder:
            write(folder)
        return out
    # Such as the run folder itself: `trainer.save_model(args.output_dir)` is what TRL's examples do.
    with new_folder(out / "saving") as folder:
        write(folder)
    for stale in _weight_files(out):
        stale.unlink()
    for path in (out / "saving").iterdir():
        if path.is_dir():
            shutil.rmtree(out / path.name, ignore_errors=True)
        path.replace(out / path.name)
    (out / "saving").rmdir()
    return out


def saved_bytes(model: Any, dtype: torch.dtype | None = None) -> int:
    """Bytes of the weights that `save_model` writes: all of a plain model's, the trained ones of a peft model."""
    if is_adapter(model):
        return sum(part.numel() * compute_dtype(part).itemsize for part in model.parameters() if part.requires_grad)
    return sum(part.numel() * (dtype or compute_dtype(part)).itemsize for part in model.parameters())


def write_settings(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes everything of the final save but the weights: model, generation and peft settings, tokenizer.

    Raises:
        UserError: transformers refuses to save the settings; better known before the first step than after the last.
    """
    base = base_of(model)
    config = copy.deepcopy(base.config)
    config.dtype = str(compute_dtype(next(base.parameters()))).removeprefix("torch.")
    config.architectures = [type(base).__name__]
    try:
        config.save_pretrained(folder)
        if base.can_generate():
            base.generation_config.save_pretrained(folder)
    except (ValueError, TypeError) as error:  # settings that do not go together, or that JSON has no word for
        reason = " ".join(str(error).split())
        raise UserError(
            f"transformers refuses to save this model's settings, so the run could not be saved: {reason}",
            do="Mend model.generation_config (or model.config) and start again",
        ) from error
    if is_adapter(model):
        save_adapter_settings(model, folder)
    _write_tokenizer(base, tokenizer, folder)


def _write(model: Any, tokenizer: Any, folder: Path, dtype: torch.dtype | None, companions: Sequence[Path]) -> None:
    base = base_of(model)
    if is_adapter(model):
        save_adapter(model, folder)
    else:
        with _without_bars():
            base.save_pretrained(folder, state_dict=_cast(base, dtype), max_shard_size=SHARD_SIZE)
        if dtype is not None:
            _edit(folder / "config.json", dtype=str(dtype).removeprefix("torch."))
    _write_tokenizer(base, tokenizer, folder)
    for path in companions:
        shutil.copy2(path, folder / path.name)


def _write_sharded(model: Any, held: WholeState, feed: Feed, tokenizer: Any, folder: Path, companions: Sequence[Path]) -> None:
    """Gathers the weights into a file, and has a model without memory saved with the file's tensors as its weights."""
    file = folder / ".gathered.safetensors"
    write_tensors(file, held.tensors, feed)
    weights = held.named(TensorFile(file))
    file.unlink()  # its pages stay as long as they are mapped
    if is_adapter(model):
        save_adapter(model, folder, weights)
        _write_tokenizer(base_of(model), tokenizer, folder)
        for path in companions:
            shutil.copy2(path, folder / path.name)
        return
    with torch.device("meta"):
        twin = type(model)(copy.deepcopy(model.config))
    twin.load_state_dict(weights, assign=True)
    twin.tie_weights()
    twin.generation_config = model.generation_config
    _write(twin, tokenizer, folder, None, companions)


def _write_tokenizer(base: Any, tokenizer: Any, folder: Path) -> None:
    if tokenizer is None:
        return
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # whatever a class of somebody's own does, or a file that is gone by now
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"{type(tokenizer).__name__} cannot be saved, so the run could not be saved: {type(error).__name__}: {error}",
            do="Mend the tokenizer, or load it again from its folder",
        ) from error
    length = read_rope(base.config.to_dict()).window  # more than max_position_embeddings where YaRN stands beside it
    if length:
        _edit(folder / "tokenizer_config.json", model_max_length=length)


def _edit(path: Path, **values: Any) -> None:
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(settings | values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _cast(model: Any, dtype: torch.dtype | None) -> dict[str, torch.Tensor] | None:
    """The weights in another precision, on the host; None when they are in it already. Tied weights stay one tensor."""
    if dtype is None or all(parameter.dtype == dtype for parameter in model.parameters()):
        return None
    done: dict[int, torch.Tensor] = {}
    cast = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in done:
            done[id(tensor)] = tensor.detach().to("cpu", dtype) if tensor.is_floating_point() else tensor.detach()
        cast[name] = done[id(tensor)]
    return cast


def _is_ours(out: Path) -> bool:
    """Whether `out` is absent, empty, or an earlier save of this kind and nothing else, so that it can be replaced whole."""
    if not out.exists() or not any(out.iterdir()):
        return True
    known = {
        "config.json",
        "generation_config.json",
        "adapter_config.json",
        "megaspan.json",
        "README.md",
        "base",
        "chat_template.jinja",
    }
    weights = set(_weight_files(out))
    others = [path for path in out.iterdir() if path not in weights and path.name not in known]
    return bool(weights) and all("token" in path.name or path.name in ("vocab.json", "merges.txt") for path in others)


def _weight_files(folder: Path) -> list[Path]:
    return [
        *folder.glob("model*.safetensors"),
        *folder.glob("model.safetensors.index.json"),
        *folder.glob("adapter_model.safetensors"),
    ]


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """transformers draws a bar of its own while it writes, across ours."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
