"""The options of a run as its folder keeps them, compared with those of a resume.

A checkpoint knows that its rows were others, by a hash of them; whoever resumes wants to know that max_length was 128k.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


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
