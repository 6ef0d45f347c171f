"""Folders that are complete or absent.

A checkpoint of an 8B model with fp32 masters is 115 GB and takes a minute to write; runs are killed, and disks fill up, in
that minute. So a folder is written beside its place under a name that nobody reads, forced to disk, given a manifest (size
and CRC-32 of every file) as its last file, and renamed: one atomic operation. What a killed run leaves behind is ignored by
every reader and cleared away by the next writer. The manifest is what proves, at resume, that the disk still holds what was
written.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megaspan.human import UserError, format_bytes
from megaspan.store.sums import file_sums
from megaspan.world.host import cores

MANIFEST = "manifest.json"
_PARTIAL, _OLD = ".partial-", ".old-"
SPARE_BYTES = 64 * 2**20
"""What stays free when a save is begun: settings, tokenizer and metrics want room too."""


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yields an empty folder to write into; it takes the place of `target` when the block ends without an exception.

    An existing `target` is replaced. If the block fails, nothing is left and `target` is as it was.

    Raises:
        UserError: the folder cannot be made, or the disk filled up.
    """
    partial = target.with_name(_PARTIAL + target.name)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    except OSError as error:
        raise UserError(
            f"cannot write to {target.parent}: {error.strerror}", do="Choose another output_dir (or OUT)"
        ) from error
    try:
        yield partial
        _to_disk(partial)
    except BaseException as error:
        written = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
        shutil.rmtree(partial, ignore_errors=True)
        if _disk_is_full(error):
            raise UserError(
                f"the disk of {target.parent} filled up after {format_bytes(written)} of {target.name}; it was removed again "
                "and what was there before is intact",
                do="Make room there, lower save_total_limit, or choose another output_dir; then resume",
            ) from error
        raise
    old = target.with_name(_OLD + target.name)
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    partial.rename(target)
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_folder(target: Path) -> None:
    """Deletes a folder so that a kill in the middle does not leave half of it under its name."""
    old = target.with_name(_OLD + target.name)
    shutil.rmtree(old, ignore_errors=True)
    target.rename(old)
    shutil.rmtree(old, ignore_errors=True)


def clear_leftovers(parent: Path) -> None:
    """Clears away what a killed writer left; a folder that was set aside for a new one that never came is put back."""
    for old in parent.glob(f"{_OLD}*"):
        target = old.with_name(old.name.removeprefix(_OLD))
        if not target.exists() and read_manifest(old) is not None:
            old.rename(target)
        else:
            shutil.rmtree(old, ignore_errors=True)
    for partial in parent.glob(f"{_PARTIAL}*"):
        shutil.rmtree(partial, ignore_errors=True)


def write_manifest(folder: Path, facts: Mapping[str, Any], sums: Mapping[str, int]) -> None:
    """Writes the manifest: `facts`, and the size and CRC-32 of every file; `sums` holds those that are known already."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {}
    for path in files:
        name = path.relative_to(folder).as_posix()
        entries[name] = {"bytes": path.stat().st_size, "crc32": sums[name] if name in sums else file_sums([path], 1)[0]}
    (folder / MANIFEST).write_text(json.dumps({**facts, "files": entries}, indent=1), encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a complete folder, or None: no manifest, or a file is missing or has another size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        whole = all((folder / name).stat().st_size == entry["bytes"] for name, entry in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest if whole else None


def damaged_files(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Names of files whose content is not what was written. Reads everything once, several parts at a time."""
    files = manifest["files"]
    sums = file_sums([folder / name for name in files], min(8, cores()))
    return [name for name, crc in zip(files, sums, strict=True) if crc != files[name]["crc32"]]


def free_bytes(folder: Path) -> int:
    """Bytes that may still be written to the disk that holds `folder` (which need not exist yet)."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def require_space(folder: Path, needed: int, what: str) -> None:
    """Checks for room before a byte is written.

    Raises:
        UserError: less than `needed` bytes and a little more are free.
    """
    free = free_bytes(folder)
    if free < needed + SPARE_BYTES:
        raise UserError(
            f"no room for {what} in {folder}: it takes {format_bytes(needed)}, and {format_bytes(free)} are free",
            do="Make room there, lower save_total_limit, or choose another output_dir",
        )


def _to_disk(folder: Path) -> None:
    """Forces files and folders to the disk: after a power cut a renamed folder must not hold empty files."""
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _disk_is_full(error: BaseException) -> bool:
    """Also true for writers that hide the system's error number (safetensors)."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error)
