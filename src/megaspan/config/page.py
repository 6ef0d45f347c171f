"""The documentation page "Coming from TRL", made from the tables, so that it cannot fall behind them.

`python -m megaspan.config.page > docs/coming-from-trl.md` writes it; a test fails when the file is stale.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable
from typing import Any

from pydantic_core import PydanticUndefined

from megaspan.config import foreign
from megaspan.config.defaults import as_yaml, shown
from megaspan.config.schema import GROUPS, SFTConfig, allowed_of

HEAD = """\
# Coming from TRL

<!-- Written by `python -m megaspan.config.page`; change src/megaspan/config/ and run it again. -->

A YAML file written for `trl sft` either runs here or is refused key by key, each with its own sentence. Option names are those
of TRL's `SFTConfig`, `ModelConfig` and `ScriptArguments`, of transformers' `TrainingArguments` and of accelerate's
`ParallelismConfig`. Each of theirs is below: supported, or refused unless it holds its default (or null), which asks for
nothing and passes. No option is accepted and then ignored.

## Defaults that differ

The run header prints those that a run uses without having set them.
"""
NLL = """
`loss_type: nll` is the plain loss with all logits here. TRL 1.15 and later mean the chunked loss by that name; here that is
`chunked_nll`, the default. `max_length: null` (no limit) does not exist.

Of records with `input_ids` the columns `labels`, `completion_mask` and `assistant_masks` all count: a token is trained where
each of them says so. TRL leaves `completion_mask` out unless `completion_only_loss` is true, and reads no mask beside `labels`.

## Supported with the same name
"""
ALIASES = """
`activation_checkpointing` and `activation_checkpointing_kwargs` are accepted as names of `gradient_checkpointing` and
`gradient_checkpointing_kwargs`, `streaming` as a name of `dataset_streaming`, `parallelism_config: {cp_size: 1}` and
`parallelism_config_cp_size` as names of `cp_size` and its siblings, `eval_packing` where it equals `packing`.

## Options that TRL does not have
"""


def page() -> str:
    """The whole page, as Markdown."""
    table = foreign.table()
    options = ("option", "default", "legal values", "what it does")
    values = (
        (f"`{name}: {value}`", entry["why"], entry["do"])
        for name, entries in table["values"].items()
        for value, entry in entries.items()
    )
    lines = [
        HEAD,
        *_rows(("option", "TRL", "here", "meaning"), _differing()),
        NLL,
        *_rows(options, _supported()),
        ALIASES,
        *_rows(options, _own()),
        "",
        "## Refused",
        "",
        *_rows(("option", "passes at", "why", "instead"), _refused(table["refused"])),
        "",
        "### Values",
        "",
        *_rows(("value", "why", "instead"), values),
        "",
        *_section("Entries of `model_init_kwargs`", table["model_init_kwargs"]),
        "Any other entry overrides that entry of the model's configuration.",
        "",
        *_section("Entries of `gradient_checkpointing_kwargs`", table["gradient_checkpointing_kwargs"]),
        *_section("Entries of a dataset in `datasets`", table["datasets"]),
        *_section("Older names", table["older"]),
        *_section("Keys of accelerate's launch file", table["launch"]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _differing() -> Iterable[tuple[str, ...]]:
    for name, entry in (foreign.table()["supported"] | foreign.table()["own"]).items():
        if "differs" in entry:
            default = SFTConfig.model_fields[name].default
            ours = "none" if default is PydanticUndefined else shown(name, default)
            yield f"`{name}`", as_yaml(entry["trl"]), ours, entry["differs"]


def _supported() -> Iterable[tuple[str, ...]]:
    return (_option(name) for name in SFTConfig.model_fields if name in foreign.table()["supported"])


def _own() -> Iterable[tuple[str, ...]]:
    return (_option(name) for name in SFTConfig.model_fields if name not in foreign.table()["supported"])


def _option(name: str) -> tuple[str, ...]:
    field = SFTConfig.model_fields[name]
    default = "required" if field.default is PydanticUndefined else as_yaml(field.default)
    return f"`{name}`", default, allowed_of(name), field.description or ""


def _refused(entries: dict[str, dict[str, Any]]) -> Iterable[tuple[str, ...]]:
    for name, entry in entries.items():
        neutral = [value for value in (entry.get("trl"), *entry.get("neutral", ())) if value is not None]
        yield f"`{name}`", ", ".join(["null", *(f"`{as_yaml(value)}`" for value in neutral)]), entry["why"], entry["do"]


def _section(title: str, entries: dict[str, dict[str, Any]]) -> list[str]:
    return [f"### {title}", "", *_rows(("name", "passes at", "why", "instead"), _refused(entries)), ""]


def _rows(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells)]


def options_help(width: int) -> list[str]:
    """The lines of `--help` for the options of a run, wrapped to `width` characters."""
    lines = ["Options of a run, in the file as `name: value`, here as --name value (- and _ are the same):"]
    starts = {first: title for title, first in GROUPS}
    for name, option in SFTConfig.model_fields.items():
        if name in starts:
            lines += ["", starts[name]]
        default = "required" if option.is_required() else f"default {as_yaml(option.default)}"
        text = f"{option.description} ({default}; {allowed_of(name)})"
        lines += [f"  --{name}", *textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)]
    return lines


if __name__ == "__main__":
    sys.stdout.write(page())
