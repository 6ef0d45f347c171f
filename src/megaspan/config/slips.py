"""What was probably meant by a command line that is wrong, so that the sentence can end with what to type instead.

A model's name where the file belongs, a flag of another verb, a hyphen too few or a dash that a web page made of two: each is
typed by people who know other tools, and "is not an option" sends them to a list of a hundred.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from pathlib import Path

from megaspan.human import UserError, nearest

DASHES = ("-", "–", "—")  # what documents and chats make of hyphens
FILES = (".yaml", ".yml")
_DATA = (".txt", ".md", ".jsonl", ".ndjson", ".parquet", ".csv")
_SHOWN = 3
# What other tools call it, where no word of ours is like it.
_ELSEWHERE = {
    "model": "model_name_or_path", "model_path": "model_name_or_path", "data": "dataset_name", "dataset": "dataset_name",
    "train_file": "dataset_name", "lr": "learning_rate", "output": "output_dir", "out": "output_dir", "rank": "lora_r",
    "context_length": "max_length", "sequence_length": "max_length", "nproc_per_node": "nproc", "num_processes": "nproc",
}  # fmt: skip
_NOT_YET = {
    "report": "A run's plots.png and metrics.jsonl, in its folder, hold what there is so far",
    "check": "This version is proven by its tests; megaspan plan CONFIG.yaml tries what it does not know of a model",
}


def option_meant(name: str, names: Collection[str]) -> str | None:
    """`Did you mean …?` for a name that is no option: the nearest of `names`, or those that have all of its words in them."""
    if name in _ELSEWHERE:
        return f"Did you mean {_ELSEWHERE[name]}?"
    words, close = set(name.split("_")), nearest(name, names)
    holding = [each for each in names if words <= set(each.split("_"))]
    if 0 < len(holding) <= _SHOWN and (len(words) > 1 or not close):  # batch_size is nearer to cp_size by its letters
        return f"Did you mean {' or '.join(holding)}?"
    return f"Did you mean {close}?" if close else None


def verb_meant(words: Sequence[str], verbs: Collection[str]) -> str:
    """What to type instead of a command line that begins with no verb."""
    first = words[0]
    if first.startswith(DASHES) or first.endswith(FILES):
        verb = next((word for word in words if word in verbs), "train")
        files = [word for before, word in pairwise(["", *words]) if word.endswith(FILES) and not before.startswith("--")]
        rest = [word for word in words if word != verb and word not in files]
        return f"The verb comes first, then the file: megaspan {shlex.join([verb, *files, *rest])}"
    close = nearest(first, verbs)
    return _NOT_YET.get(first) or (f"Did you mean megaspan {close}?" if close else "megaspan --help lists them")


def flag_of_others(name: str, value: str, verb: str, usages: Sequence[str]) -> UserError:
    """The error for a flag of other verbs.

    Args:
        name: the flag, without hyphens.
        value: the name of what follows it, empty for a switch.
        verb: where it was given.
        usages: how the verbs that have it are called, without `megaspan`.
    """
    owners = " and ".join(f"megaspan {usage.split()[0]}" for usage in usages)
    typed = usages[0].replace(" [--name value …]", "").replace("[", "").replace("]", "")
    if f"--{name}" not in typed:
        typed += f" --{name} {value}".rstrip()
    return UserError(f"--{name} is a flag of {owners}, not of megaspan {verb}", do=f"Leave it out, or type megaspan {typed}")


def file_meant(verb: str, words: Sequence[str], shapes: Callable[[], Collection[str]]) -> UserError | None:
    """What is wrong with the words before the flags of a verb that takes a YAML file there; None where nothing is seen.

    Args:
        verb: the verb.
        words: what stands before the flags.
        shapes: gives the names of shapes, which are models.
    """
    for word in words:
        try:
            path = Path(word).expanduser()
            there = path.exists()
        except (OSError, RuntimeError):  # longer than a name can be, a home of nobody, a folder that is closed
            continue
        if there and not path.is_dir():
            if path.suffix in _DATA:
                what = f"{word} is text to train on, and megaspan {verb} takes a YAML file of options here"
                return UserError(what, do=f"Type megaspan {verb} CONFIG.yaml --dataset_name {shlex.quote(word)}")
            continue
        if word.startswith(DASHES):
            return UserError(
                f"{word!r} begins with a dash and not with two hyphens", do=f"Write --{word.lstrip(''.join(DASHES))}"
            )
        if "=" in word:
            return UserError(f"{word!r} is not a flag", do=f"Write --{word}")
        if (path / "config.json").is_file() or word in shapes() or _like_a_hub_name(word):
            what = f"{word} is a model, and megaspan {verb} takes a YAML file of options here"
            data = "" if verb == "plan" else " --dataset_name TEXT"
            return UserError(what, do=f"Type megaspan {verb} --model_name_or_path {shlex.quote(word)} --max_length 128k{data}")
        if (path / "config.yaml").is_file():
            return UserError(f"{word} is a folder", do=f"Did you mean {path / 'config.yaml'}?")
        if close := _close_file(path):
            return UserError(f"there is no file {word}", do=f"Did you mean {close}?")
    return None


def _like_a_hub_name(word: str) -> bool:
    """Whether it is `owner/name` and no path to somewhere here."""
    path = Path(word)
    return (
        word.count("/") == 1 and path.suffix not in FILES and not word.startswith((".", "/", "~")) and not path.parent.exists()
    )


def _close_file(path: Path) -> Path | None:
    """A YAML file beside `path` of nearly its name."""
    if path.is_dir() or not path.parent.is_dir():
        return None
    names = [each.name for each in path.parent.iterdir() if each.suffix in FILES and each.is_file()]
    close = f"{path.stem}.yaml" if f"{path.stem}.yaml" in names else nearest(path.name, names, likeness=0.7)
    return path.parent / close if close else None
