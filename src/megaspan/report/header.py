"""The run header: what will really run, line by line, each with its reason.

Options that are accepted, printed and not applied are the most reported fault of long-context training (cases R93, R94), so
the header shows values read back from the live run, why each was chosen, and marks the lines that can spoil a result or cost
a lot of time.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from megaspan.human import terminal_width

_VALUE_WIDTH = 34
_LONGEST_WORD = 48  # of a path the beginning and the end say enough; the whole of it is in config.yaml and run.json
_GAP = "  "


@dataclass(frozen=True)
class Line:
    """One line of the header.

    Attributes:
        label: what it is about, a word or two; lines that follow with the same label are printed without it.
        value: what was measured or chosen; anything with a `str`.
        reason: why, or what goes with it.
        loud: marked, for what can spoil the result or is much slower than it could be.
    """

    label: str
    value: Any
    reason: str = ""
    loud: bool = False


def print_header(lines: Iterable[Line], *, title: str | None = None, file: TextIO | None = None) -> None:
    """Prints the lines as one aligned block, on stderr unless `file` is given.

    On a terminal long reasons wrap under their column; elsewhere a line stays one line, which grep finds. Of a word that would
    burst its column, a path for one, the middle is left out.
    """
    file = file or sys.stderr
    console = Console(file=file, highlight=False, soft_wrap=True)
    width = terminal_width(file)
    block = [Text(title, style="bold")] if title else []
    console.print(Text("\n").join([*block, *render(list(lines), width)]))  # at once: a notebook makes an output of every print


def render(lines: list[Line], width: int | None) -> list[Text]:
    """The block as styled text, at most `width` columns wide; None for one line each."""
    label_width = max((len(line.label) for line in lines), default=0)
    indent = " " * (2 + label_width + len(_GAP))
    room = max((width or 0) - len(indent), 20)
    longest = min(_LONGEST_WORD, room - 2) if width else _LONGEST_WORD
    value_width = min(_VALUE_WIDTH, max((len(_shortened(line.value, longest)) for line in lines), default=0))
    block, previous = [], None
    for line in lines:
        label = "" if width and line.label == previous and not line.loud else line.label
        previous = line.label
        text = Text()
        text.append("! " if line.loud else "  ", style="bold red" if line.loud else "")
        text.append(label.ljust(label_width) + _GAP, style="bold red" if line.loud else "cyan")
        value, reason = _shortened(line.value, longest), _shortened(line.reason, longest)
        style = "bold red" if line.loud else "bold"
        if width is None:
            text.append(value.ljust(value_width) if reason else value, style=style)
            text.append(f"{_GAP}{reason}" if reason else "")
        else:
            reason_column = value_width + len(_GAP)
            beside = len(value) <= value_width and room - reason_column >= 40
            for number, piece in enumerate(_wrapped(value, room) or [""]):
                text.append(("\n" + indent if number else "") + piece, style=style)
            if reason and beside:
                pieces = _wrapped(reason, room - reason_column)
                text.append(" " * (reason_column - len(value)) + pieces[0], style="red" if line.loud else "dim")
                for piece in pieces[1:]:
                    text.append("\n" + indent + " " * reason_column + piece, style="red" if line.loud else "dim")
            elif reason:
                for piece in _wrapped(reason, room - 2):
                    text.append("\n" + indent + "  " + piece, style="red" if line.loud else "dim")
        block.append(text)
    return block


def _shortened(text: Any, longest: int) -> str:
    """`text` in one line, without the middles of words of more than `longest` letters."""
    tail = longest * 2 // 3

    def word(found: re.Match[str]) -> str:
        return f"{found[0][: longest - tail - 1]}…{found[0][-tail:]}"

    return re.sub(rf"\S{{{longest + 1},}}", word, str(text).replace("\n", " "))


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)
