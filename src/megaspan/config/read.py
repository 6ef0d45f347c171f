"""A YAML file and flags become one `SFTConfig`.

Flags and file share one schema and one notation: `--max_length 1M` is the line `max_length: 1M`. YAML is read by its 1.2 rules
where those matter (`no` stays a word, `2e-5` is a number), a key written twice is an error, and every error says its line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megaspan.config import foreign
from megaspan.config.checks import WithoutEffect
from megaspan.config.schema import SFTConfig, allowed_of
from megaspan.config.slips import DASHES
from megaspan.config.spelling import COMMAND_LINE
from megaspan.human import UserError, UserErrors

# Pairs that exclude each other: what is typed replaces what the file has of the other.
_RIVALS = (("dataset_name", "datasets"), ("warmup_steps", "warmup_ratio"))
_NUMBER = re.compile(r"-?[0-9.].*")


class _NoValue(UserError):
    """A flag that says nothing."""


class _Loader(yaml.SafeLoader):
    """Safe YAML with the plain scalars of version 1.2."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  (shadows the 1.1 rules of the base class)


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
    ("float", r"[-+]?(?:[0-9][0-9_]*\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]{1,2}|[-+]?\.(?:inf|nan)",
     "-+0123456789."),
    ("merge", r"<<", "<"),
):  # fmt: skip
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), list(_first))


def load_config(path: str | Path | None, flags: Sequence[str] = ()) -> SFTConfig:
    """Reads a YAML file, then flags over it.

    Args:
        path: a YAML file of options, or None for flags alone.
        flags: `--name value`, `--name=value`, `--name` (true) or `--no-name` (false); `-` and `_` are the same. What a flag
            makes idle in the file is left out.

    Raises:
        UserErrors: every mistake of file and flags, each with its line or flag.
    """
    errors: list[UserError] = []
    places: dict[str, str] = {}
    written = _read_file(Path(path), places, errors) if path is not None else {}
    typed = _read_flags(flags, places, errors)
    for one, other in (*_RIVALS, *(pair[::-1] for pair in _RIVALS)):
        if one in typed and other not in typed:
            written.pop(other, None)
    config, found = _checked(written | typed)
    # `--max_steps 5` over a file with num_train_epochs: the flag is meant, and what it makes idle in the file goes.
    idle = {error.option for error in found if isinstance(error, WithoutEffect) and set(error.others) & typed.keys()}
    if idle - typed.keys():
        config, found = _checked({name: value for name, value in (written | typed).items() if name not in idle - typed.keys()})
    told = {error.option for error in errors if isinstance(error, _NoValue)}  # and so missing: that is said already
    errors += [
        error.at(places[error.option]) if error.option in places else error for error in found if error.option not in told
    ]
    if errors or config is None:
        raise UserErrors(errors)
    return config


def _checked(options: dict[str, Any]) -> tuple[SFTConfig | None, tuple[UserError, ...]]:
    try:
        return SFTConfig(**options), ()
    except UserErrors as found:
        return None, found.errors


def _read_file(path: Path, places: dict[str, str], errors: list[UserError]) -> dict[str, Any]:
    try:
        text = path.read_text("utf-8-sig")
    except FileNotFoundError:
        raise UserErrors([UserError(f"there is no file {path}", do="Give the path of a YAML file of options")]) from None
    except IsADirectoryError:
        raise UserErrors([UserError(f"{path} is a folder", do="Give the path of a YAML file of options")]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserErrors(
            [UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}")]
        ) from None
    try:
        return _read_text(path, text, places, errors)
    except RecursionError:  # brackets in brackets, or an anchor that holds itself: no option is like that
        raise UserErrors([UserError(f"{path} is nested too deeply, or an anchor in it holds itself")]) from None


def _read_text(path: Path, text: str, places: dict[str, str], errors: list[UserError]) -> dict[str, Any]:
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
    except yaml.YAMLError as error:
        raise UserErrors([_syntax_error(path, error)]) from None
    if root is None:
        raise UserErrors([UserError(f"{path} is empty", do="It needs at least max_length")])
    if not isinstance(root, yaml.MappingNode):
        raise UserErrors(
            [UserError(f"{path} is not a mapping of options to values", do="Write lines such as max_length: 128k")]
        )
    _duplicates(path, root, errors)
    try:
        loader.flatten_mapping(root)  # `<<: *base`
    except yaml.YAMLError as error:
        raise UserErrors([*errors, _syntax_error(path, error)]) from None
    options: dict[str, Any] = {}
    for key_node, value_node in root.value:
        if not isinstance(key_node, yaml.ScalarNode):
            place = f"{path} line {key_node.start_mark.line + 1}"
            errors.append(UserError(f"{place}: this key is no name of an option", do="Write lines such as max_length: 128k"))
            continue
        key = str(key_node.value).replace("-", "_")
        try:
            options[key] = loader.construct_object(value_node, deep=True)
        except (yaml.YAMLError, ValueError) as error:
            raise UserErrors([*errors, _syntax_error(path, error)]) from None
        places.setdefault(key, f"{path} line {key_node.start_mark.line + 1}")
    return options


def _duplicates(path: Path, node: yaml.Node, errors: list[UserError]) -> None:
    """A key written twice in one mapping: YAML readers silently keep the last."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _duplicates(path, item, errors)
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            key, line = str(key_node.value).replace("-", "_"), key_node.start_mark.line + 1
            if key in seen and key != "<<":
                message = f"{path} line {line}: {key} is already on line {seen[key]}"
                errors.append(UserError(message, do="Keep one of them", option=key))
            seen[key] = line
            _duplicates(path, value_node, errors)


def _syntax_error(path: Path, error: Exception) -> UserError:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    place = f"{path} line {mark.line + 1}, column {mark.column + 1}" if mark is not None else str(path)
    do = "A value that holds a colon, a brace or a # needs quotes"
    if "'\\t'" in problem:
        problem, do = "there is a tab at the beginning", "Indent with spaces"
    elif "another document" in problem:
        problem, do = "a second document begins", "Remove the line ---: one file holds the options of one run"
    elif "constructor" in problem:
        problem, do = "it holds a tag that names a type", "Remove what begins with an exclamation mark: values are plain here"
    return UserError(f"{place}: this is not YAML: {problem}", do=do)


def _read_flags(flags: Sequence[str], places: dict[str, str], errors: list[UserError]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    position = 0
    while position < len(flags):
        flag = flags[position]
        position += 1
        if not flag.startswith("--") or not flag[2:].partition("=")[0]:
            meant = flag.lstrip("".join(DASHES))
            typed = flag.startswith(DASHES) and meant.partition("=")[0].replace("-", "_") in SFTConfig.model_fields
            do = f"Write --{meant}" if typed else "Write --name value; the file comes before all flags"
            errors.append(_NoValue(f"{flag!r} is not a flag", do=do, option=meant.replace("-", "_") if typed else None))
            while position < len(flags) and not flags[position].startswith(DASHES):
                position += 1  # its value, of which nothing is to be said
            continue
        name, equals, text = flag[2:].partition("=")
        key = name.replace("-", "_")
        texts = [text] if equals else []
        while not equals and position < len(flags) and not _is_flag(flags[position]):
            texts.append(flags[position])
            position += 1
        negated = key.removeprefix("no_")
        if not texts and key != negated and (negated in SFTConfig.model_fields or negated in foreign.ALIASES):
            key, value = negated, False
        elif not texts and key in SFTConfig.model_fields and "true" not in allowed_of(key):
            errors.append(_NoValue(f"--{name} needs a value", allowed=allowed_of(key), do=f"Write --{name} value", option=key))
            continue
        else:
            value = _flag_value(key, texts)
        if key in options:
            errors.append(UserError(f"--{name} is given twice", do="Keep one of them", option=key))
        options[key] = value
        places[key] = COMMAND_LINE
    return options


def _is_flag(text: str) -> bool:
    return text.startswith("-") and not _NUMBER.fullmatch(text)


def _flag_value(key: str, texts: list[str]) -> Any:
    """What a flag says: nothing is true, one word is a YAML value, several are a list."""
    if not texts:
        return True
    values = [yaml_value(text) for text in texts]
    if len(values) > 1:
        return values
    if key in SFTConfig.model_fields and "a text" in allowed_of(key) and texts[0] not in ("null", "~"):
        return values[0] if isinstance(values[0], str) else texts[0]  # --eos_token '[EOS]' is no list
    return values[0]


def yaml_value(text: str) -> Any:
    """A value as a line of the file has it; what is no YAML is a text."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
