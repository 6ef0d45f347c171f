"""Where a model comes from: a folder, the hub, or a shape without weights.

Settled, and refused, from file names and `config.json` alone, so that a wrong name or a pickled checkpoint costs no gigabyte
of download. Weights are read from safetensors only: a `.bin` file is a pickle, which runs whatever program its author put in.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PretrainedConfig

from megaspan.human import UserError, nearest
from megaspan.model.kinds import check_class, check_config
from megaspan.plan.facts import no_way_to_the_hub, shape_names

if TYPE_CHECKING:
    from megaspan.config import SFTConfig

_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.npz")


@dataclass(frozen=True)
class Source:
    """A model that exists.

    Attributes:
        name: as the user wrote it.
        place: what transformers is given: a folder, a hub name or a `config.json`.
        kind: `folder` and `hub` have weights; a `shape` has none and gets random ones.
        revision: branch, tag or commit on the hub, None elsewhere.
        unreachable: why the hub cannot be reached, where that is so: then its cache alone is read, or each file that is not
            there would be asked for 24 s long.
    """

    name: str
    place: str
    kind: Literal["folder", "hub", "shape"]
    revision: str | None = None
    unreachable: str | None = None

    @property
    def cache_only(self) -> bool:
        """Whether the hub's cache is all there is."""
        return self.unreachable is not None


def find_source(config: SFTConfig) -> Source:
    """What `model_name_or_path` means.

    Raises:
        UserError: it is missing, does not exist, or holds weights in another format than safetensors.
    """
    name = config.model_name_or_path
    if not name:
        raise UserError(
            "there is no model to train",
            do=f"Set model_name_or_path to a hub name, a folder, or one of the shapes {', '.join(shape_names())}",
        )
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix != ".json":
            raise UserError(
                f"{name} is a file",
                allowed="a folder with config.json and *.safetensors, or a config.json alone",
                do=f"Name the folder that it lies in: {path.parent}",
            )
        return Source(name, str(path), "shape")
    if path.is_dir():
        return _folder(name, path)
    if name in shape_names():
        return Source(name, str(resources.files("megaspan.plan") / "shapes" / f"{name}.json"), "shape")
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        raise UserError(
            f"the model folder {name} does not exist",
            do=f"Did you mean {beside}?"
            if (beside := _folder_beside(path))
            else "Check the path; relative ones begin where you are",
        )
    if "/" not in name and (close := nearest(name, shape_names())):
        raise UserError(
            f"{name} is neither a folder nor a shape", do=f"Did you mean {close}? A hub name has the form owner/{name}"
        )
    return Source(name, name, "hub", config.model_revision, no_way_to_the_hub(name, config.model_revision))


def read_config(source: Source, *, trust_remote_code: bool) -> PretrainedConfig:
    """The model's configuration, of a kind that can be trained.

    Raises:
        UserError: it cannot be read, or the model is of another kind.
    """
    try:
        config = AutoConfig.from_pretrained(
            source.place,
            revision=source.revision or "main",
            trust_remote_code=trust_remote_code,
            local_files_only=source.cache_only,
        )
    except (OSError, ValueError, KeyError, AttributeError, TypeError, StrictDataclassError) as error:
        raise unreadable(source, error) from error
    check_config(config.to_dict(), source.name)
    if not trust_remote_code:
        check_class(config, source.name)
    return config


def apply_overrides(config: PretrainedConfig, overrides: dict[str, Any]) -> None:
    """Replace entries of a model's configuration, in place.

    Raises:
        UserError: it has no such entry, or the model cannot be built with the value.
    """
    known = set(config.to_dict()) | set(config.attribute_map)
    for key, value in overrides.items():
        if key not in known:
            close = nearest(key, sorted(known))
            raise UserError(
                f"model_init_kwargs: {key} is no entry of a {config.model_type} configuration",
                do=f"Did you mean {close}?" if close else None,
            )
        try:
            setattr(config, key, value)
        except (TypeError, ValueError, StrictDataclassError) as error:
            what, do = f"model_init_kwargs: {key} cannot have this value", f"Leave {key} out to take the model's own"
            raise UserError(what, got=value, do=do) from error
    layers, types = getattr(config, "num_hidden_layers", None), getattr(config, "layer_types", None)
    if isinstance(layers, int) and types and len(types) > layers and "layer_types" not in overrides:
        config.layer_types = list(types[:layers])  # fewer layers are the first ones
    try:
        config.validate()
    except StrictDataclassError as error:
        words = " ".join(line.strip() for line in str(error).splitlines()[1:]) or str(error)
        raise UserError(
            f"model_init_kwargs: {', '.join(overrides)} do not go together with the model: {words}",
            do="Correct them, or leave them out",
        ) from error


def commit_of(source: Source, config: PretrainedConfig) -> str:
    """What identifies the weights: the hub's commit, or a hash of a folder's config, index and file sizes."""
    commit = getattr(config, "_commit_hash", None)
    if source.kind == "hub" and commit:
        return str(commit)
    digest = hashlib.sha256()
    place = Path(source.place)
    files = [place] if place.is_file() else sorted(place.glob("*.safetensors")) + sorted(place.glob("*.json"))
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        if path.name in ("config.json", "model.safetensors.index.json") or path == place:
            digest.update(path.read_bytes())
    return f"sha256:{digest.hexdigest()[:24]}"


def unreadable(source: Source, error: Exception) -> UserError:
    """The sentence for whatever transformers or the hub raised: its own first line, which names token, network or file."""
    if source.cache_only and isinstance(error, OSError):
        return UserError(
            f"the files of {source.name} are not all in the hub's cache, and the hub cannot be reached: {source.unreachable}",
            do=fill_the_cache(source),
        )
    return UserError(
        f"the model {source.name} cannot be loaded: {first_line(error)}",
        do="Gated or private: `hf auth login`. Without network: HF_HUB_OFFLINE=1 and a cached model, or a local folder"
        if source.kind == "hub"
        else None,
    )


def fill_the_cache(source: Source) -> str:
    """What to type where there is no network."""
    revision = f" --revision {source.revision}" if source.revision else ""
    return f"Name a model folder, or fill the cache where there is a network: hf download {source.name}{revision}"


def first_line(error: Exception) -> str:
    """The first line of an error's text, without a full stop; with the next one where it ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    end = next((number for number, line in enumerate(lines) if not line.endswith(":")), 0)
    return " ".join(lines[: end + 1]).rstrip(".")


def _folder_beside(path: Path) -> Path | None:
    """A folder of nearly the same name."""
    names = [each.name for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
    close = nearest(path.name, names, likeness=0.7)
    return path.parent / close if close else None


def _undamaged(file: Path) -> None:
    """Reads the header of a weight file, which says how long the whole is: a copy that was cut off is found in a moment."""
    try:
        with safe_open(file, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is damaged or cut off: {first_line(error)}", do="Copy or download it again") from error


def _folder(name: str, path: Path) -> Source:
    if not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            raise UserError(
                f"{name} holds a LoRA adapter, not a model",
                do="Name the base model here, or merge the adapter first (megaspan export RUN OUT --merge)",
            )
        raise UserError(
            f"{name} has no config.json, so it is not a model folder",
            do="Name the folder that holds config.json and *.safetensors",
        )
    if files := sorted(path.glob("*.safetensors")):
        for file in files:
            _undamaged(file)
        return Source(name, str(path), "folder")
    others = sorted({file.suffix for pattern in _OTHER_FORMATS for file in path.glob(pattern)})
    if others:
        raise UserError(
            f"{name} has weights as {', '.join(others)} only",
            allowed="safetensors: a pickle can run any program when it is opened",
            do="Convert it once, in a place you trust: model.save_pretrained(...) writes safetensors",
        )
    return Source(name, str(path / "config.json"), "shape")
