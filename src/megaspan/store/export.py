"""From a run to a folder that plain transformers loads, in one command (case R90).

The final save is copied; a run that did not get there is exported from its newest complete checkpoint: the model is built
without memory from the checkpoint's own settings, its weights are the memory-mapped file's, and it is saved as at the end of
a run. So a checkpoint needs no GPU, no base model (unless a part of it is frozen) and no host memory to speak of.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from megaspan.human import UserError
from megaspan.store.checkpoint import TRAINABLE, WEIGHTS, latest_checkpoint
from megaspan.store.folder import MANIFEST, damaged_files, new_folder, read_manifest
from megaspan.store.plain import save_model
from megaspan.store.tensors import TensorFile
from megaspan.world.quiet import bar_on_terminals_only, peft_at_work

FINAL = "model"
_OF_CHECKPOINTS = {
    WEIGHTS,
    TRAINABLE,
    MANIFEST,
    "state.safetensors",
    "state.json",
    "config.json",
    "generation_config.json",
    "adapter_config.json",
}


def export(source: Path | str, out: Path | str, *, merge: bool = False) -> Path:
    """Writes the model of a run as an ordinary folder and returns it.

    Args:
        source: a run folder (its final model, or else its newest complete checkpoint), a checkpoint, or a saved model.
        out: the folder to make.
        merge: for a LoRA run: the base with the adapter merged into it, instead of the adapter. Loads the base model.

    Raises:
        UserError: `out` is not empty, or there is nothing to export.
    """
    source, out = Path(source), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "exists and is not empty" if out.is_dir() else "is a file"
        raise UserError(f"{out} {what}; nothing was written", do="Name a new folder")
    folder = _model_in(source)
    if read_manifest(folder) is not None:
        if merge and not (folder / "adapter_config.json").exists():
            raise _nothing_to_merge(folder)
        return _export_checkpoint(folder, out, merge)
    if not (folder / "adapter_config.json").exists():
        if merge:
            raise _nothing_to_merge(folder)
        return _copy(folder, out)
    return _merge(_load_adapter(folder), folder, out) if merge else _copy(folder, out)


def _model_in(source: Path) -> Path:
    if not source.is_dir():
        raise UserError(f"there is no folder {source}", do="Name a run folder, such as the output_dir of its config")
    if read_manifest(source) is not None or any((source / name).exists() for name in ("config.json", "adapter_config.json")):
        return source
    if (source / FINAL).is_dir():
        return source / FINAL
    checkpoint = latest_checkpoint(source)
    if checkpoint is None:
        raise UserError(
            f"{source} holds neither a final model nor a complete checkpoint",
            do="Let the run save one (save_steps, save_minutes)",
        )
    return checkpoint


def _copy(folder: Path, out: Path) -> Path:
    with new_folder(out) as partial:
        shutil.copytree(folder, partial, dirs_exist_ok=True, ignore=_others_of_a_run)
    return out


def _others_of_a_run(folder: str, names: list[str]) -> list[str]:
    """What lies beside the model when it was saved into the run folder itself."""
    return [
        name
        for name in names
        if name.startswith((".", "checkpoint-")) or name in ("run.json", "config.yaml", "metrics.jsonl", "plots.png", FINAL)
    ]


def _export_checkpoint(checkpoint: Path, out: Path, merge: bool) -> Path:
    manifest = read_manifest(checkpoint) or {}
    if damaged := damaged_files(
        checkpoint, {"files": {n: e for n, e in manifest["files"].items() if not n.startswith("state.")}}
    ):
        raise UserError(
            f"{checkpoint} is damaged: {', '.join(damaged)} changed since it was written", do="Export another checkpoint"
        )
    lora = (checkpoint / "adapter_config.json").exists()
    whole = (checkpoint / WEIGHTS).exists()
    model = _build(checkpoint, manifest["base"], with_base=not whole and (merge or not lora))
    if lora:
        model = _around(model, checkpoint)
    weights = TensorFile(checkpoint / (WEIGHTS if whole else TRAINABLE))
    with torch.no_grad():
        unknown = model.load_state_dict(dict(weights), strict=False, assign=True).unexpected_keys
    if unknown:
        raise UserError(
            f"{checkpoint} does not fit its own settings: {unknown[0]} and {len(unknown) - 1} other weights have no place"
        )
    model.tie_weights()
    return _merge(model, checkpoint, out) if merge else save_model(model, None, out, companions=_tokenizer_files(checkpoint))


def _build(checkpoint: Path, origin: dict[str, str | None], *, with_base: bool) -> Any:
    """The model of a checkpoint: without weights, or with those of its base."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(checkpoint)
    config._name_or_path, config._commit_hash = origin["base_model"] or "", origin["base_commit"]
    if with_base:
        return _load_base(origin, config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=config.dtype)


def _load_base(origin: dict[str, Any], config: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    name, commit = origin["base_model"], origin["base_commit"]
    if name is None:
        raise UserError(
            "the base model of this run has no name: it was a shape or an object", do="Export the adapter, without --merge"
        )
    vocabulary = config.get_text_config().vocab_size
    config.get_text_config().vocab_size = (
        AutoConfig.from_pretrained(name, revision=commit or "main").get_text_config().vocab_size
    )
    with bar_on_terminals_only():
        base = AutoModelForCausalLM.from_pretrained(name, revision=commit or "main", config=config, dtype=config.dtype)
    if config.get_text_config().vocab_size != vocabulary:
        base.resize_token_embeddings(vocabulary, mean_resizing=False)  # the checkpoint holds all of them
    return base


def _around(base: Any, folder: Path) -> Any:
    """The base with the checkpoint's adapter around it, its weights not yet filled in."""
    from peft import LoraConfig, get_peft_model

    with peft_at_work():
        return get_peft_model(base, LoraConfig.from_pretrained(str(folder)))


def _load_adapter(folder: Path) -> Any:
    from peft import PeftModel
    from transformers import AutoConfig

    if not (folder / "megaspan.json").is_file() or not (folder / "base").is_dir():
        raise UserError(
            f"{folder} is an adapter that megaspan did not save, and says nothing of its base's rope settings",
            do="Merge it with peft's own merge_and_unload",
        )
    facts = json.loads((folder / "megaspan.json").read_text(encoding="utf-8"))
    config = AutoConfig.from_pretrained(folder / "base")
    config.get_text_config().vocab_size = facts["vocab_size"]
    base = _load_base(facts, config)
    with peft_at_work():
        return PeftModel.from_pretrained(base, str(folder))


def _merge(model: Any, folder: Path, out: Path) -> Path:
    return save_model(model.merge_and_unload(), None, out, companions=_tokenizer_files(folder))


def _tokenizer_files(folder: Path) -> list[Path]:
    known = _OF_CHECKPOINTS | {"README.md", "megaspan.json"}
    files = [path for path in folder.iterdir() if path.is_file() and path.name not in known]
    return [path for path in files if not path.name.startswith(("model", "adapter_model"))]


def _nothing_to_merge(folder: Path) -> UserError:
    return UserError(f"{folder} is a whole model: there is no adapter to merge", do="Leave --merge out")
