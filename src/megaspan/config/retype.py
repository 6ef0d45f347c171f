"""The command line of this process, with another number of processes or other sizes of the mesh: what an error says to type.

A user who reads that three processes are needed has to find out where that is said. With the line itself there is nothing to
find out, and it is tested that it works.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import PurePath


def is_own_command(words: Sequence[str]) -> bool:
    """Whether a command line is one of the command `megaspan` (or `python -m megaspan`)."""
    program = PurePath(words[0]) if words else PurePath()
    return len(words) > 1 and (program.name == "megaspan" or program.parts[-2:] == ("megaspan", "__main__.py"))


def retyped(processes: int | None, sizes: Mapping[str, int], words: Sequence[str] | None = None) -> str:
    """What to type, or to write where this is no command line of megaspan's own.

    Args:
        processes: how many to start; None leaves that as it is.
        sizes: size options to change, by name.
        words: the command line, `sys.argv` unless given.
    """
    words = sys.argv if words is None else words
    if not is_own_command(words):
        return " and ".join(_written(processes, sizes))
    drop = {*sizes, *(["nproc"] if processes is not None else [])}
    kept = _without(words[1:], drop)
    places = next((number for number, word in enumerate(kept) if word.startswith("-")), len(kept))
    more = [] if processes is None else ["--nproc", str(processes)]
    flags = [word for option, size in sizes.items() for word in (f"--{option}", str(size))]
    return f"type {shlex.join(['megaspan', *kept[:places], *more, *kept[places:], *flags])}"


def capital(words: str) -> str:
    """The words as the beginning of a sentence."""
    return words[:1].upper() + words[1:]


def _written(processes: int | None, sizes: Mapping[str, int]) -> list[str]:
    written = [f"write {', '.join(f'{option}: {size}' for option, size in sizes.items())}"] if sizes else []
    return [f"start {processes} process{'es' if processes != 1 else ''}"] * (processes is not None and not sizes) + written


def _without(words: Sequence[str], names: set[str]) -> list[str]:
    """The words without these flags and their values; `-` and `_` are the same, as where flags are read."""
    kept: list[str] = []
    skip = False
    for word in words:
        if skip and not word.startswith("--"):
            skip = False
            continue
        name, equals, _ = word.removeprefix("--").partition("=")
        dropped = word.startswith("--") and name.replace("-", "_") in names
        skip = dropped and not equals
        if not dropped:
            kept.append(word)
    return kept
