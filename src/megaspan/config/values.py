"""What the value of an option may be: types that read what people type, each with the words for its error.

A type here is an ordinary annotation with two additions: a reader (`"1M"` becomes 1,048,576) and an `Allowed` text, from which
the error sentence, `megaspan train --help` and the documentation are made, so that the three cannot disagree.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BeforeValidator

from megaspan.human import UserError, parse_bytes, parse_tokens

TRACKERS = ("tensorboard", "wandb", "trackio")


@dataclass(frozen=True)
class Allowed:
    """The legal values in words, to follow "must be"."""

    text: str


def _number(low: float | None, high: float | None, *, whole: bool, open_low: bool, open_high: bool) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        try:
            number = float(value.replace("_", "").replace(",", "") if isinstance(value, str) else value)
        except OverflowError:  # an integer of more than 308 digits
            raise ValueError from None
        if not abs(number) < float("inf") or (whole and number != int(number)):
            raise ValueError
        if low is not None and (number <= low if open_low else number < low):
            raise ValueError
        if high is not None and (number >= high if open_high else number > high):
            raise ValueError
        return int(number) if whole else number

    return read


def _size(parse: Callable[[int | str], int]) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        try:
            size = parse(int(value) if isinstance(value, float) and value.is_integer() else value)
        except UserError as error:
            raise ValueError from error
        if size <= 0:
            raise ValueError
        return size

    return read


def _text(value: Any) -> str:
    # Floats are left out: a commit such as 12e4567 read as a number would come back as other text.
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value.strip() or "\0" in value:  # no path and no name can hold a zero byte
        raise ValueError
    return value


def _dtype(value: Any) -> str:
    name = str(value).removeprefix("torch.")  # torch.bfloat16 itself may be given from Python
    if name not in ("bfloat16", "float32"):
        raise ValueError
    return name


def _strategy(value: Any) -> Any:
    return "no" if value is False else value  # `save_strategy: no` is a boolean to an older YAML reader


def _optim(value: Any) -> Any:
    return "adamw_8bit" if value == "adamw_bnb_8bit" else value  # transformers has both names for one optimizer


def _names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    if not isinstance(value, list | tuple) or not value or not all(isinstance(name, str) and name for name in value):
        raise ValueError
    return tuple(value)


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError
    return dict(value)


def _lost(value: Any) -> float:
    if isinstance(value, str):
        try:
            return float(parse_tokens(value))
        except UserError:
            pass  # 0.5 as text
    number: float = _number(0, None, whole=False, open_low=False, open_high=False)(value)
    return number


def _step_limit(value: Any) -> int:
    number: int = _number(-1, None, whole=True, open_low=False, open_high=False)(value)
    if number == 0:
        raise ValueError
    return number


def _padding(value: Any) -> int | None:
    if value is None or value in ("auto", "none"):
        return None  # TRL's "auto" pads on one kind of machine only, which megaspan does not run on
    number: int = _number(1, None, whole=True, open_low=False, open_high=False)(value)
    return number


def _warmup(value: Any) -> float:
    number: float = _number(0, None, whole=False, open_low=False, open_high=False)(value)
    if number >= 1 and number != int(number):
        raise ValueError
    return number


def _memory(value: Any) -> int:
    size: int = _size(parse_bytes)(value)
    if size < 2**20:  # 80, where 80GiB was meant
        raise ValueError
    return size


def _whole(low: int) -> BeforeValidator:
    return BeforeValidator(_number(low, None, whole=True, open_low=False, open_high=False))


def _between(low: float | None, high: float | None, *, open_low: bool = False, open_high: bool = False) -> BeforeValidator:
    return BeforeValidator(_number(low, high, whole=False, open_low=open_low, open_high=open_high))


Tokens = Annotated[int, BeforeValidator(_size(parse_tokens)), Allowed("a number of tokens such as 131072, 128k or 1M")]
Bytes = Annotated[int, BeforeValidator(_memory), Allowed("a size from 1MiB, such as 80GiB, 64GB or 512MiB")]
Count = Annotated[int, _whole(1), Allowed("a whole number of at least 1")]
Whole = Annotated[int, _whole(0), Allowed("a whole number of at least 0")]
Steps = Annotated[int, _whole(1), Allowed("a whole number of steps, at least 1 (a share of the run is not read here)")]
Positive = Annotated[float, _between(0, None, open_low=True), Allowed("a number above 0")]
NotNegative = Annotated[float, _between(0, None), Allowed("a number of at least 0")]
Share = Annotated[float, _between(0, 1, open_high=True), Allowed("a number from 0 up to, but not including, 1")]
Warmup = Annotated[float, BeforeValidator(_warmup), Allowed("a whole number of steps, or a share of all steps below 1")]
StepLimit = Annotated[int, BeforeValidator(_step_limit), Allowed("a whole number of at least 1, or -1 for none")]
Lost = Annotated[float, BeforeValidator(_lost), Allowed("a share from 0 to 1, or a number of tokens above 1")]
Padding = Annotated[int | None, BeforeValidator(_padding), Allowed("a whole number of at least 1, or auto")]
Resume = Annotated[bool | str, Allowed("true or a checkpoint folder")]
Text = Annotated[str, BeforeValidator(_text), Allowed("a text")]
Folder = Annotated[str, BeforeValidator(_text), Allowed("a folder")]
Names = Annotated[tuple[str, ...], BeforeValidator(_names), Allowed("a name or a list of names")]
Datasets = Annotated[tuple[dict[str, Any], ...], Allowed("a list of datasets, each with a path")]
Mapping = Annotated[dict[str, Any], BeforeValidator(_mapping), Allowed("a mapping of names to values")]
Dtype = Annotated[Literal["bfloat16", "float32"], BeforeValidator(_dtype), Allowed("bfloat16 or float32")]
Optim = Annotated[Literal["adamw_torch_fused", "adamw_torch", "adamw_8bit"], BeforeValidator(_optim)]
Strategy = Annotated[Literal["no", "steps", "epoch"], BeforeValidator(_strategy)]


def _trackers(value: Any) -> str | tuple[str, ...]:
    if value in ("none", [], ["none"], ()) or value is False:
        return "none"
    names = _names(value)
    if not set(names) <= set(TRACKERS):
        raise ValueError
    return names


Trackers = Annotated[
    Literal["none"] | tuple[str, ...],
    BeforeValidator(_trackers),
    Allowed("none, or one or more of tensorboard, wandb, trackio"),
]


_ONE_SIZE = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([a-z%]*)", re.IGNORECASE)
_PAIR = re.compile(r"(\w+)\s*[=:]\s*([\w.]+)")
_LARGEST_GIB = 9_999  # a bare number above it is the MiB of nvidia-smi, 81559 for one
_WORDS = {"thousand": "k", "kilo": "k", "mil": "M", "mio": "M", "million": "M", "mega": "M", "billion": "G"}


def value_meant(allowed: str, value: Any) -> str | None:
    """What was probably meant by a wrong size, number of tokens, share or mapping; None where nothing is seen.

    A bare number for memory is GiB (80 for 80GiB): bytes are too many digits to be typed by hand.

    Args:
        allowed: the legal values, as `allowed_text` says them.
        value: what was given; two words behind a flag (80 GiB) come as a list.
    """
    if allowed.startswith("a mapping"):
        pairs = re.findall(_PAIR, value) if isinstance(value, str) else []
        return f"{{{', '.join(f'{key}: {word}' for key, word in pairs)}}}" if pairs else None
    given = "".join(map(str, value)) if isinstance(value, list) else str(value)
    found = _ONE_SIZE.fullmatch(given.strip())
    if isinstance(value, bool) or found is None or not found[1].strip("0.,_"):
        return None
    number, unit = found[1], found[2].lower()
    letter = _WORDS.get(unit, unit[:1].upper() if unit[:1] in ("k", "m", "g", "t") else "")
    if allowed.startswith("a size"):
        plain = float(number.replace(",", "").replace("_", ""))
        if unit in ("", "b"):
            return None if plain >= 2**20 else f"{plain:g}GiB" if plain <= _LARGEST_GIB else f"{plain:.0f}MiB"
        return f"{number}{letter}{'B' if unit == letter.lower() + 'b' else 'iB'}" if letter else None
    if allowed.startswith("a number of tokens"):
        letter = letter.replace("T", "").replace("K", "k")  # 128 tokens
        wrong = float(number) != int(float(number)) if "." in number else False
        return None if wrong and not letter else f"{number}{letter}"
    if unit == "%" and "from 0" in allowed:
        return f"{float(number.replace(',', '')) / 100:g}"
    return None


def read_bool(value: Any) -> bool | None:
    """A truth value inside a mapping, where no schema reads it: true/false and their YAML spellings; None for anything else."""
    if isinstance(value, bool):
        return value
    return {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}.get(str(value).lower())


def allowed_text(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """The legal values of an annotation (and the metadata that pydantic split off it), in words that follow "must be"."""
    texts = [item.text for item in metadata if isinstance(item, Allowed)]
    return " or ".join(texts or _allowed_parts(annotation))


def _allowed_parts(annotation: Any) -> list[str]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        texts = [item.text for item in arguments[1:] if isinstance(item, Allowed)]
        return texts or _allowed_parts(arguments[0])
    if origin in (Union, types.UnionType):
        return [text for argument in arguments for text in _allowed_parts(argument)]
    if origin is Literal:
        return [", ".join(str(choice) for choice in arguments[:-1]) + " or " * (len(arguments) > 1) + str(arguments[-1])]
    if annotation is bool:
        return ["true or false"]
    if annotation is type(None):
        return ["null"]
    return [getattr(annotation, "__name__", str(annotation))]
