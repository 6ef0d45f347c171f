"""The options of a run as its folder keeps them, compared with those of a resume.

A checkpoint knows that its rows were others, by a hash of them; whoever resumes wants to know that max_length was 128k.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from megaspan.config.defaults import as_yaml
from megaspan.human import UserError

_HASH = re.compile(r"[0-9a-f]{16,}")  # of no use to anybody who reads it


def plain(value: Any) -> Any:
    """`value` in what YAML and JSON can hold: paths and types become text, tuples and sets lists."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return str(value).removeprefix("torch.")


def changed_options(run: Path, options: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Those of `options` that `config.yaml` of the run's folder has otherwise: before, now. Empty without such a file."""
    try:
        written = yaml.safe_load((run / "config.yaml").read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    if not isinstance(written, dict):
        return {}
    return {name: (written[name], now) for name, now in plain(options).items() if name in written and written[name] != now}


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What two identities of a run have otherwise, in words."""
    found = []
    for name in sorted(before.keys() | now.keys()):
        was, value = before.get(name), now.get(name)
        if was != value:
            hashes = all(isinstance(each, str) and _HASH.fullmatch(each) for each in (was, value))
            found.append(f"the {name} is not the same" if hashes else f"{name} was {was!r} and is {value!r}")
    return found


def another_run(checkpoint: Path, differences: list[str], options: Mapping[str, Any], how: str | None = None) -> UserError:
    """The refusal of a resume, with the options that the checkpoint's run had otherwise and what to write.

    Args:
        checkpoint: the folder that cannot be continued from.
        differences: what is another, in words.
        options: those of this start that a difference can come from.
        how: what makes it the same run again, where the caller knows; else the options as they were.
    """
    changed = changed_options(checkpoint.parent, options)
    told = [f"{name} was {as_yaml(before)} and is {as_yaml(now)}" for name, (before, now) in changed.items()]
    again = ", ".join(f"{name}: {as_yaml(before)}" for name, (before, _) in changed.items())
    how = how or (f"Write {again} as before" if again else "Resume with the settings of its run (config.yaml beside it)")
    return UserError(
        f"{checkpoint} was made by another run: " + "; ".join(told + differences),
        do=f"{how}, or start anew without resume_from_checkpoint and with another output_dir",
    )
