"""Names from TRL, transformers and accelerate: the same idea, a neutral value that passes, or a refusal with its own sentence.

The table itself is data (`trl.yaml` beside this file) and is read only when a name or value of it occurs; a test walks the
fields of the libraries, so that an option added there is a decision here and never an accident.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from megaspan.config.slips import option_meant
from megaspan.human import UserError

ALIASES = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
    "streaming": "dataset_streaming",
}
PREFIX = "parallelism_config_"
# Null is the libraries' own default for these, so it means "not set" here too.
NULL_IS_UNSET = (
    "output_dir", "gradient_checkpointing", "report_to", "dp_replicate_size", "dp_shard_size", "cp_size", "sp_size",
)  # fmt: skip


@cache
def table() -> dict[str, dict[str, Any]]:
    """The sections of trl.yaml: supported, refused, values, older, launch, model_init_kwargs, …; treat it as read-only."""
    return yaml.load(files(__package__).joinpath("trl.yaml").read_text("utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def translate(options: dict[str, Any], fields: Iterable[str]) -> tuple[dict[str, Any], dict[str, str], list[UserError]]:
    """Turns what was written into options of the schema.

    Args:
        options: names and values as written.
        fields: the names of the schema.

    Returns:
        The options by the schema's names, without foreign ones at a neutral value; the names under which they were written; and
        what is refused.
    """
    fields = tuple(fields)
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    errors: list[UserError] = []
    for key, bare, given in _expanded(options, errors):
        value = given.value if isinstance(given, Enum) else given  # transformers' enumerations, from Python
        name = ALIASES.get(bare, bare)
        if name in fields:
            if value is None and name in NULL_IS_UNSET:
                continue
            if name in values and values[name] != value:
                message = f"{written[name]} and {key} are two names of one option, with different values"
                errors.append(UserError(message, do="Keep one of them", option=key))
            values[name], written[name] = value, key
        elif bare != "eval_packing" or (value is not None and value != options.get("packing", True)):
            errors += _foreign(key, bare, value, fields)
    return values, written, errors


def refuse(place: str, value: Any, entry: dict[str, Any], *, option: str) -> list[UserError]:
    """No error at a neutral value (null, the libraries' default, those listed), else the entry's own sentence."""
    if value is None or any(_same(value, neutral) for neutral in (entry.get("trl"), *entry.get("neutral", ()))):
        return []
    return [UserError(f"{place}: {entry['why'].rstrip('.')}", got=value, do=entry.get("do"), option=option)]


def _same(value: Any, neutral: Any) -> bool:
    if isinstance(value, bool) or isinstance(neutral, bool):
        return str(value).lower() == str(neutral).lower()
    return bool(value == neutral) or (isinstance(value, str) and value == str(neutral))


def _expanded(options: dict[str, Any], errors: list[UserError]) -> Iterable[tuple[str, str, Any]]:
    """Every option as (name as written, name without accelerate's prefix, value), parallelism_config taken apart."""
    for key, value in options.items():
        if key != "parallelism_config":
            yield key, key.removeprefix(PREFIX), value
        elif value is not None:
            inner = value if isinstance(value, dict) else getattr(value, "__dict__", None)
            if inner is None:
                message = "parallelism_config must be a mapping such as {cp_size: 1}"
                errors.append(UserError(message, got=value, option=key))
            # accelerate's object makes handlers by itself for sizes above 1, which are refused as such; and when all its sizes
            # are 1 they say nothing, since it fills them in.
            filled = not isinstance(value, dict) and getattr(value, "total_size", 0) == 1
            for name, size in (inner or {}).items():
                if isinstance(value, dict) or name.endswith("_backend") or (name.endswith("_size") and not filled):
                    yield key, name.removeprefix(PREFIX), size


def _foreign(key: str, bare: str, value: Any, fields: tuple[str, ...]) -> list[UserError]:
    for section in ("refused", "older", "launch"):
        if bare in table()[section]:
            return refuse(bare, value, table()[section][bare], option=key)
    do = option_meant(bare, (*fields, *ALIASES)) or "megaspan train --help lists all options"
    return [UserError(f"{bare} is not an option", do=do, option=key)]
