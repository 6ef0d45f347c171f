"""A name that leads to no data: whether it is a path or a name on the hub, and what lies where it should be.

A mistyped file name that is asked of the hub costs a machine without network half a minute of retries, and then a sentence
about the hub. So what can only be a path is never asked there, and the refusal says where was looked and what is there.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable
from pathlib import Path

from megaspan.data.textfiles import PROSE, RECORDS, ending
from megaspan.human import UserError, nearest

UNPACK = ("gz", "zst", "zip", "xz", "bz2", "tar", "7z")
OTHER_RECORDS = ("csv", "tsv", "arrow", "json")
READ = "a text file, .jsonl, .ndjson or .parquet, a folder or glob of these, or owner/name on the hub"
_FREQUENT = (*RECORDS, *OTHER_RECORDS, "txt")
_ENDINGS = (*_FREQUENT, *UNPACK, *PROSE, "py")
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_SHOWN = 4


def is_path(text: str) -> bool:
    """Whether a name is a path, whatever is or is not there; all else may be a name on the hub.

    Hub names are `owner/name`, or a bare name without an ending. So a path is what begins with `.`, `/` or `~`, what has the
    ending of a data file or nearly one, what lies in a folder that exists, and any bare name with an ending.
    """
    if not _HUB_NAME.fullmatch(text):
        return True
    path = Path(text)
    if os.path.lexists(path) or ("/" not in text and path.suffix):
        return True
    known = ending(path) in _ENDINGS or nearest(ending(path), _FREQUENT) is not None
    return known or ("/" in text and path.parent.is_dir())


def nothing_there(text: str) -> UserError:
    """The error for a path that leads to nothing that can be read."""
    path = Path(text).expanduser()
    if os.path.lexists(path) and not path.is_dir():
        kind = "a link to nothing" if path.is_symlink() and not path.exists() else "a pipe or a device, not an ordinary file"
        return UserError(f"{text!r} is {kind}", allowed=READ, do="Name the file itself")
    if glob.has_magic(text):
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        return UserError(f"no file matches {text!r}{where}", do="Check the folder; ** looks into folders below")
    if not path.parent.is_dir():
        missing = path.parent
        while missing.parent != missing and not missing.parent.is_dir():
            missing = missing.parent
        what = f"there is no file or folder {text!r}: {_shown(missing.parent)} has no folder {missing.name}"
        return UserError(what, allowed=READ, do=_beside(missing, folders=True))
    do = _beside(path)
    if "/" in text and _HUB_NAME.fullmatch(text) and not path.suffix:
        do += f" For the hub's dataset of this name start where there is no folder {path.parent}"
    return UserError(f"there is no file or folder {text!r} in {_shown(path.parent)}", allowed=READ, do=do)


def not_on_the_hub(text: str, reason: str) -> UserError:
    """The error for what may have been a name on the hub."""
    close = _close(Path(text))
    return UserError(
        f"{text!r} is no file or folder in {Path.cwd()}, nor did the hub give a dataset of this name: {reason}",
        allowed=READ,
        do=f"{f'Did you mean {close} here? Else' if close else 'Check the name, or'} see HF_TOKEN and HF_HUB_OFFLINE",
    )


def not_in_the_cache(text: str, unreachable: str | None) -> UserError:
    """The error for a name that only the hub could know, which cannot be asked.

    Args:
        text: as the user wrote it.
        unreachable: why there is no connection; None where HF_HUB_OFFLINE or HF_DATASETS_OFFLINE forbids to ask.
    """
    close = _close(Path(text))
    why = f"the hub cannot be reached: {unreachable}" if unreachable else "HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set"
    fetch = f"hf download --repo-type dataset {text} --local-dir FOLDER"
    return UserError(
        f"{text!r} is no file or folder in {Path.cwd()} and no dataset in the hub's cache, and {why}",
        do=f"Did you mean {close}?"
        if close
        else f"Check the path, or make a folder to name here where there is a network: {fetch}",
    )


def _beside(path: Path, *, folders: bool = False) -> str:
    """What to type in place of `path`: the nearest name beside it, or what there is."""
    kind = "folder" if folders else "file"
    if close := _close(path, folders=folders):
        return f"Did you mean {f'the folder {close}' if folders else close}?"
    names = _names(path.parent, folders=folders)
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    there = f"There are {'the folders ' * folders}{', '.join(names[:_SHOWN])}{more}" if names else f"There is no {kind} in it"
    return f"{there}." if path.is_absolute() else f"{there}; relative paths begin where megaspan is started."


def _close(path: Path, *, folders: bool = False) -> Path | None:
    close = nearest(path.name, _names(path.parent, folders=folders), likeness=0.7)
    return path.parent / close if close else None


def _names(folder: Path, *, folders: bool = False) -> list[str]:
    try:
        inside: Iterable[Path] = list(folder.iterdir())
    except OSError:
        return []
    return sorted(path.name for path in inside if not path.name.startswith(".") and (path.is_dir() or not folders))


def _shown(folder: Path) -> Path:
    return folder if folder.is_absolute() else Path.cwd() / folder
