"""A command line taken apart: what stands before the flags, the flags of the verb itself, and the options of the run.

What a verb works on comes first, because an option may take several values: in `--report_to wandb run.yaml` nobody can tell
which words belong to it. Whoever types it in another order is shown the line in this one, to paste.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaspan.config.slips import DASHES, FILES, file_meant, flag_of_others
from megaspan.human import UserError, nearest

_LIKE = 0.75  # of a flag's letters; options are told apart by `slips.option_meant`


@dataclass(frozen=True)
class Verb:
    """How a verb is called.

    Attributes:
        usage: its name, and what follows.
        places: the fewest and most words before its flags.
        own: its own flags, with the name of what follows each; empty for a switch.
        takes_options: options of the run may follow.
    """

    usage: str
    places: tuple[int, int]
    own: Mapping[str, str]
    takes_options: bool

    @property
    def name(self) -> str:
        """The word itself."""
        return self.usage.split()[0]


def take_apart(
    verb: Verb, words: Sequence[str], verbs: Collection[Verb], shapes: Callable[[], Collection[str]]
) -> tuple[list[str], dict[str, str], list[str]]:
    """What was typed behind the verb: what comes before the flags, the verb's own flags, and the options of the run.

    Args:
        verb: the verb.
        words: what was typed behind it.
        verbs: all of them, for a flag that belongs to another.
        shapes: gives the names of shapes, which are models and no files.

    Raises:
        UserError: a word or flag too many or too few, or in another order; with the line to type.
    """
    rest, places = list(words), list[str]()
    while rest and not rest[0].startswith("-"):
        places.append(rest.pop(0))
    own: dict[str, str] = {}
    flags: list[str] = []
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in verb.own:
            _known(verb, word, words, verbs)
            flags.append(word)
            continue
        if name in own:
            raise UserError(f"--{name} is given twice", do="Keep one of them")
        if not verb.own[name]:
            if equals:
                raise UserError(f"--{name} takes no value", got=value, do=f"Write --{name}")
            own[name] = ""
        else:
            own[name] = value if equals else rest.pop(0) if rest and not rest[0].startswith("--") else ""
    fewest, most = verb.places
    if most and not places and (line := _in_order(verb, words)) is not None:
        what = "the file comes" if verb.takes_options and not fewest else "what it works on comes"
        raise UserError(f"{what} before all flags of megaspan {verb.name}", do=f"Type {line}")
    if verb.takes_options and not fewest and (slip := file_meant(verb.name, places, shapes)) is not None:
        raise slip
    if not fewest <= len(places) <= most:
        count = f"{fewest} or {most}" if fewest < most else f"{most or 'no'}"
        what = f"megaspan {verb.name} takes {count} word{'s' * (most != 1)} before its flags"
        line = _in_order(verb, words) or f"megaspan {verb.usage}"
        raise UserError(what, found=" ".join(places) or "none", do=f"Type {line}")
    if not verb.takes_options and flags:  # words behind the flags
        line = _in_order(verb, words) or f"megaspan {verb.usage}"
        raise UserError(f"{' '.join(flags)} stands behind the flags of megaspan {verb.name}", do=f"Type {line}")
    return places, own, flags


def _known(verb: Verb, word: str, words: Sequence[str], verbs: Collection[Verb]) -> None:
    """Refuses a flag that can only have been meant for a verb: of another verb, misspelt, or with another dash."""
    name = word.lstrip("".join(DASHES)).partition("=")[0]
    if not word.startswith(DASHES) or not name:
        return
    if word.startswith("--") and (others := [each for each in verbs if name in each.own]):
        raise flag_of_others(name, others[0].own[name], verb.name, [each.usage for each in others])
    plain = name.lower().replace("_", "").replace("-", "")
    if len(plain) == 1:  # -n of other launchers
        close = next((each for each in verb.own if each.startswith(plain) and not word.startswith("--")), None)
    else:
        close = plain if plain in verb.own else nearest(plain, verb.own, likeness=_LIKE)
    if verb.takes_options and (close is None or _is_option(name)):
        return
    allowed = None if verb.takes_options else ", ".join(f"--{each}" for each in verb.own)
    what = f"{word.partition('=')[0]} is not a flag of megaspan {verb.name}"
    line = _in_order(verb, words, {word: [f"--{close}"] if close else []})
    do = f"Type {line or f'megaspan {verb.usage}'}" if not verb.takes_options else f"Did you mean --{close}?"
    raise UserError(what, allowed=allowed, do=do)


def _in_order(verb: Verb, words: Sequence[str], instead: Mapping[str, Sequence[str]] | None = None) -> str | None:
    """The same words with what the verb works on in front, as one line; None where they are too many or too few.

    Args:
        verb: the verb.
        words: as typed.
        instead: what stands for a word that was wrong.
    """
    rest, places, flags = list(words), list[str](), list[str]()
    file = verb.takes_options and not verb.places[0]  # other words are one more value of the flag before them
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            (places if not file or (word.endswith(FILES) and _is_there(word)) else flags).append(word)
            continue
        name, equals, _ = word.removeprefix("--").partition("=")
        flags += (instead or {}).get(word, [word])
        if equals or not rest or rest[0].startswith("-"):
            continue
        if name in verb.own:
            if verb.own[name]:
                flags.append(rest.pop(0) if rest[0].isdecimal() else verb.own[name])
        elif verb.takes_options and not _is_switch(name, rest[0]):
            flags.append("VALUE" if _is_misplaced(name, rest[0]) else rest.pop(0))
    fewest, most = verb.places
    if not max(fewest, 1) <= len(places) <= most:
        return None
    return f"megaspan {verb.name} {shlex.join(places)} {shlex.join(flags)}".rstrip()


def _is_there(word: str) -> bool:
    try:
        return Path(word).expanduser().is_file()
    except (OSError, RuntimeError):
        return False


def _is_option(name: str) -> bool:
    from megaspan.config.schema import SFTConfig  # a fifth of a second, for those who misspell alone

    plain = name.replace("-", "_")
    return plain in SFTConfig.model_fields or plain.removeprefix("no_") in SFTConfig.model_fields


def _is_switch(name: str, behind: str) -> bool:
    """Whether a flag of the run stands without a value before this word: `--packing run.yaml`."""
    from megaspan.config.schema import SFTConfig, allowed_of
    from megaspan.config.values import read_bool

    plain = name.replace("-", "_")
    if plain.startswith("no_") and plain not in SFTConfig.model_fields:
        return True
    return plain in SFTConfig.model_fields and "true" in allowed_of(plain) and read_bool(behind) is None


def _is_misplaced(name: str, behind: str) -> bool:
    """Whether the word behind a flag of the run is no value of it but a file of options: `--max_length run.yaml`."""
    from megaspan.config.schema import SFTConfig, allowed_of

    plain = name.replace("-", "_")
    if not behind.endswith(FILES) or not _is_there(behind) or plain not in SFTConfig.model_fields:
        return False
    return not any(word in allowed_of(plain) for word in ("text", "folder", "name", "mapping", "list"))
