"""The options that are mappings or lists themselves: their keys, as strict as the outer ones.

TRL hands these on to other libraries, where a misspelt key surfaces minutes later or never. Here every key is known, refused by
name, or (in `model_init_kwargs`) an override of the model's configuration, which is checked against that configuration at load.
"""

from __future__ import annotations

from typing import Any

from megaspan.config import foreign
from megaspan.config.values import read_bool
from megaspan.human import UserError, nearest, parse_tokens

ROPE_NUMBERS = (
    "factor", "rope_theta", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "low_freq_factor",
    "high_freq_factor", "partial_rotary_factor",
)  # fmt: skip
ROPE_KEYS = ("rope_type", "original_max_position_embeddings", "short_factor", "long_factor", "truncate", *ROPE_NUMBERS)
DATASET_KEYS = ("path", "name", "data_dir", "data_files", "split", "columns")


def check(values: dict[str, Any]) -> tuple[dict[str, Any], list[UserError]]:
    """Reads the nested options of `values`: the values with these in their final form, and what is wrong with them."""
    values = dict(values)
    errors: list[UserError] = []
    if isinstance(values.get("model_init_kwargs"), dict):
        values["model_init_kwargs"] = _model_init_kwargs(values["model_init_kwargs"], errors)
        _lift(values, errors)
    if isinstance(values.get("gradient_checkpointing_kwargs"), dict):
        values["gradient_checkpointing_kwargs"] = _checkpointing_kwargs(values["gradient_checkpointing_kwargs"], errors)
    if values.get("datasets") in ([], ()):  # TRL's default
        del values["datasets"]
    elif values.get("datasets") is not None:
        values["datasets"] = _datasets(values["datasets"], errors)
    return values, errors


def _lift(values: dict[str, Any], errors: list[UserError]) -> None:
    """dtype, revision and trust_remote_code have a name outside too: one value, wherever it was written."""
    inner = values["model_init_kwargs"]
    for key, outer in (("dtype", "dtype"), ("revision", "model_revision"), ("trust_remote_code", "trust_remote_code")):
        if key not in inner:
            continue
        value = inner.pop(key)
        if value is None:
            continue
        if values.get(outer) is not None and str(values[outer]).removeprefix("torch.") != str(value).removeprefix("torch."):
            message = f"model_init_kwargs: {key} is {value}, but {outer} is {values[outer]}"
            errors.append(UserError(message, do="Keep one of them", option="model_init_kwargs"))
        values[outer] = value
    if not inner:
        del values["model_init_kwargs"]


def _model_init_kwargs(given: dict[str, Any], errors: list[UserError]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    refusals = foreign.table()["model_init_kwargs"]
    for key, value in given.items():
        if key == "rope_parameters":
            kept[key] = _rope_parameters(value, errors)
        elif key in refusals:
            errors += foreign.refuse(f"model_init_kwargs: {key}", value, refusals[key], option="model_init_kwargs")
        elif not key.isidentifier():
            errors.append(UserError(f"model_init_kwargs: {key!r} is no name of an option", option="model_init_kwargs"))
        else:
            kept[key] = value
    return {key: value for key, value in kept.items() if key != "rope_parameters" or value is not None}


def _rope_parameters(given: Any, errors: list[UserError]) -> dict[str, Any] | str | None:
    if given is None or given == "auto":
        return given
    place = "model_init_kwargs: rope_parameters"
    if not isinstance(given, dict) or not given:
        allowed = "auto, or a mapping such as {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32768}"
        errors.append(UserError(f"{place} is no such mapping", got=given, allowed=allowed, option="model_init_kwargs"))
        return None
    if all(isinstance(value, dict) for value in given.values()):  # one mapping per kind of layer (sliding, full)
        return {kind: _rope_mapping(f"{place}: {kind}", value, errors) for kind, value in given.items()}
    return _rope_mapping(place, given, errors)


def _rope_mapping(place: str, given: dict[str, Any], errors: list[UserError]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in given.items():
        try:
            kept["rope_type" if key == "type" else key] = _rope_value(key, value)
        except KeyError:
            close = nearest(key, ROPE_KEYS)
            do = f"Did you mean {close}?" if close else f"It takes {', '.join(ROPE_KEYS)}"
            errors.append(UserError(f"{place} has no entry {key}", do=do, option="model_init_kwargs"))
        except (ValueError, UserError):
            allowed = "true or false" if key == "truncate" else "a text" if "type" in key else "a number"
            errors.append(UserError(f"{place}: {key} must be {allowed}", got=value, option="model_init_kwargs"))
    if given and "rope_type" not in given and "type" not in given:
        do = "Add rope_type: yarn"
        errors.append(UserError(f"{place} does not say which rope_type", do=do, option="model_init_kwargs"))
    return kept


def _rope_value(key: str, value: Any) -> Any:
    if key in ("rope_type", "type"):
        if not isinstance(value, str):
            raise ValueError
        return value
    if key == "original_max_position_embeddings":
        return parse_tokens(int(value) if isinstance(value, float) and value == int(value) else value)
    if key in ROPE_NUMBERS:
        if isinstance(value, bool) or not isinstance(value, int | float | str) or not 0 <= float(value) < float("inf"):
            raise ValueError
        return int(value) if isinstance(value, int) else float(value)
    if key in ("short_factor", "long_factor"):
        return [float(item) for item in value]
    if key == "truncate":
        if (truth := read_bool(value)) is None:
            raise ValueError
        return truth
    raise KeyError(key)


def _checkpointing_kwargs(given: dict[str, Any], errors: list[UserError]) -> dict[str, bool]:
    kept: dict[str, bool] = {}
    option = "gradient_checkpointing_kwargs"
    refusals = foreign.table()["gradient_checkpointing_kwargs"]
    for key, value in given.items():
        if key == "offload":
            if (truth := read_bool(value)) is None:
                errors.append(UserError(f"{option}: offload must be true or false", got=value, option=option))
            else:
                kept[key] = truth
        elif key in refusals:
            errors += foreign.refuse(f"{option}: {key}", value, refusals[key], option=option)
        else:
            close = nearest(key, ("offload", *refusals))
            errors.append(
                UserError(
                    f"{option} has no entry {key}", do=f"Did you mean {close}?" if close else "It takes offload", option=option
                )
            )
    return kept


def _datasets(given: Any, errors: list[UserError]) -> tuple[dict[str, Any], ...]:
    entries = list(given) if isinstance(given, list | tuple) else None
    if not entries:
        allowed = "a list of datasets, each with a path"
        errors.append(UserError(f"datasets must be {allowed}", got=given, do="Write datasets: [{path: …}]", option="datasets"))
        return ()
    return tuple(_dataset(number, entry, errors) for number, entry in enumerate(entries, start=1))


def _dataset(number: int, given: Any, errors: list[UserError]) -> dict[str, Any]:
    place = f"datasets: entry {number}"
    given = given if isinstance(given, dict) else getattr(given, "__dict__", given)  # TRL's DatasetConfig from Python
    if isinstance(given, str):
        given = {"path": given}
    if not isinstance(given, dict) or not isinstance(given.get("path"), str) or not given["path"]:
        errors.append(UserError(f"{place} has no path", got=given, do="Write {path: name, folder or file}", option="datasets"))
        return {}
    refusals = foreign.table()["datasets"]
    kept: dict[str, Any] = {
        "path": given["path"],
        "name": None,
        "data_dir": None,
        "data_files": None,
        "split": "train",
        "columns": None,
    }
    for key, value in given.items():
        if key in DATASET_KEYS:
            if not _dataset_value(key, value):
                errors.append(
                    UserError(f"{place}: {key} cannot be read", got=value, allowed=_DATASET_ALLOWED[key], option="datasets")
                )
            elif value is not None:
                kept[key] = value
        elif key in refusals:
            errors += foreign.refuse(f"{place}: {key}", value, refusals[key], option="datasets")
        else:
            close = nearest(key, DATASET_KEYS)
            do = f"Did you mean {close}?" if close else f"It takes {', '.join(DATASET_KEYS)}"
            errors.append(UserError(f"{place} has no entry {key}", do=do, option="datasets"))
    return kept


_DATASET_ALLOWED = {
    "path": "a text", "name": "a text", "data_dir": "a text", "split": "a text", "columns": "a list of names",
    "data_files": "a text, a list of texts or a mapping of splits to texts",
}  # fmt: skip


def _dataset_value(key: str, value: Any) -> bool:
    if value is None:
        return key != "path"
    if key == "columns":
        return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
    if key == "data_files":
        return isinstance(value, str | list | tuple | dict)
    return isinstance(value, str)
