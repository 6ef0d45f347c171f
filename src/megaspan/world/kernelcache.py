"""Attention kernels that are compiled once for a machine, and not at each start.

FlashAttention 4 is compiled for a model's heads when it is first called. On a fresh H200 machine the layers of the 4B shape
were prepared in 28 s and the first step took 12 s; the next process, which found compiled kernels, took 10 and 4. It can keep
them on disk, by a hash of its sources and of what each is compiled for, but does so only where it is asked to before it is
imported. It reads and writes them under locks and gives up after 15 s where a file system has none, so a lock is tried first.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import MutableMapping
from pathlib import Path

SWITCH, PLACE = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


def keep_kernels(environ: MutableMapping[str, str] = os.environ, folder: Path | None = None) -> str:
    """Asks for it, unless the user has said what he wants; returns what then holds, in words.

    Args:
        environ: of this process.
        folder: for the kernels; by default `~/.cache/megaspan/kernels`.
    """
    if environ.get(SWITCH) == "1" and PLACE in environ:
        return f"kept in {environ[PLACE]}"  # by this process already, or by the user
    if SWITCH in environ:
        return f"{'kept' if environ[SWITCH] == '1' else 'not kept'} (your own {SWITCH}={environ[SWITCH]})"
    try:
        folder = Path(environ.get(PLACE) or folder or Path.home() / ".cache" / "megaspan" / "kernels").absolute()
        folder.mkdir(parents=True, exist_ok=True)
        _lock(folder / "lock")
    except (OSError, RuntimeError) as error:  # no home, not ours to write, full, or no locks
        return f"not kept: {error}"
    environ[SWITCH] = "1"
    environ.setdefault(PLACE, str(folder))
    return f"kept in {environ[PLACE]}"


def _lock(file: Path) -> None:
    """Takes a lock, beside others that take it, and gives it back.

    Raises:
        OSError: there are none.
    """
    place = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(place, fcntl.LOCK_SH | fcntl.LOCK_NB)
    finally:
        os.close(place)
