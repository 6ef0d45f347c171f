"""What an error says to do, in the words of where it is read: a YAML file, flags, or Python.

Remedies are written once, as a line of a YAML file: `Set gradient_checkpointing_kwargs: {offload: true} or remove it`. Who has
typed flags or called `SFTConfig` has no such line. So whoever shows the error turns what begins with an option and a colon into
a flag or an argument, and leaves all other words alone.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megaspan.human import UserError

COMMAND_LINE = "command line"  # the place of what was typed, as a file and line are that of what was read
# A name, a colon, and a value of YAML's flow style: brackets (two deep at most), quotes, or one word (131,072 is one).
_WORD = r"(?:[^\s,;(){}\[\]]|,(?=\d))*[^\s,;(){}\[\].?!:]"
_FLOW = rf"\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}}|\[(?:[^\[\]]|\[[^\[\]]*\])*\]|\"[^\"]*\"|'[^']*'|{_WORD}"
_SETTING = re.compile(rf"(?<![\w.{{-])([a-z][a-z0-9_]*): ({_FLOW})")
_REMARK = re.compile(r"(\s# .*)")


def as_flags(words: str) -> str:
    """The words with each option as a flag: `--packing false`."""
    from megaspan.config.read import yaml_value

    def flag(name: str, text: str, value: Any) -> str:
        # A text that YAML reads as itself needs the shell's quotes alone.
        plain = isinstance(value, str) and yaml_value(value) == value
        return f"--{name} {shlex.quote(value if plain else text)}"

    return _respelt(words, flag)


def as_python(words: str) -> str:
    """The words with each option as an argument of `SFTConfig`: `packing=False`."""
    return _respelt(words, lambda name, _, value: f"{name}={_literal(value)}")


@contextmanager
def for_python() -> Iterator[None]:
    """An error from here on its way to somebody's script says what to write there. The command says it in its own words."""
    try:
        yield
    except UserError as error:
        error.spell(as_python)
        raise


def for_command(error: UserError, *, file: bool) -> None:
    """Has an error speak to who typed a command line: of lines of the file where there is one, of flags elsewhere.

    Args:
        error: one, or several.
        file: a YAML file was given.
    """
    for each in getattr(error, "errors", (error,)):
        each.spell((lambda words: words) if file and not each.what.startswith(COMMAND_LINE) else as_flags)


def _respelt(words: str, put: Callable[[str, str, Any], str]) -> str:
    from megaspan.config.read import yaml_value
    from megaspan.config.schema import SFTConfig

    def one(found: re.Match[str]) -> str:
        name, text = found.groups()
        return put(name, text, yaml_value(text)) if name in SFTConfig.model_fields else found[0]

    # What stands behind a # explains a line to paste.
    parts = [_REMARK.split(line, maxsplit=1) for line in words.split("\n")]
    return "\n".join("".join([_SETTING.sub(one, line), *remark]) for line, *remark in parts)


def _literal(value: Any) -> str:
    """A value as people write it in Python, texts in double quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
