"""Rows on disk: one memory-mapped file of tokens and a few small arrays, written once, found again by what shaped them.

A million-token row is 4 MiB here and is read in a millisecond, so a restart does not tokenise again (R87: 28 hours were once
spent re-reading), and every process of a node shares the same pages. A token is a uint32: its id in the low 31 bits, and the
highest bit set where it is not trained. Offsets are 64-bit everywhere: 2³¹ tokens are only 2,048 such rows.

A store is written in a folder of its own and renamed when it is complete, so that a reader never sees half of one and two
writers do not disturb each other. The index holds the size of every file and a checksum of every 4 MiB block.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
import uuid
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

MASKED = np.uint32(2**31)
FORMAT = 2
_BLOCK = 4 * 2**20
_QUIET_SECONDS = 24 * 3600
_CHECKED_WHOLE = 64  # blocks; larger files are checked at as many places
_TOKENS, _ROWS, _SEGMENTS, _INDEX = "tokens.u32", "rows.npy", "segments.npy", "index.json"


@dataclass(frozen=True)
class Store:
    """A complete store, mapped into memory.

    Attributes:
        folder: where it lies.
        tokens: uint32 [all tokens], with the highest bit where a token is not trained.
        rows: int64 [rows + 1], where each row starts, and the end.
        segments: int64, where each document or its part in a row starts.
        facts: what the writer wrote into the index.
    """

    folder: Path
    tokens: np.ndarray
    rows: np.ndarray
    segments: np.ndarray
    facts: dict[str, Any]


class StoreWriter:
    """Writes one store; `commit` makes it visible, `abandon` leaves nothing.

    Args:
        cache: folder of all stores.
    """

    def __init__(self, cache: Path) -> None:
        _sweep(cache)
        self.folder = cache / f".writing-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.folder.mkdir(parents=True)
        self._file: BinaryIO = (self.folder / _TOKENS).open("wb")
        self._block = bytearray()
        self._blocks: list[int] = []
        self._digest = hashlib.sha256()
        self.tokens = 0

    def append(self, tokens: np.ndarray) -> None:
        """Adds uint32 tokens [T] at the end."""
        data = np.ascontiguousarray(tokens, dtype="<u4").view(np.uint8).data
        self._digest.update(data)
        self.tokens += len(tokens)
        for start in range(0, len(data), _BLOCK):
            self._block += data[start : start + _BLOCK]
            if len(self._block) >= _BLOCK:
                self._flush(_BLOCK)

    def _flush(self, size: int) -> None:
        block = bytes(self._block[:size])
        del self._block[:size]
        self._file.write(block)
        self._blocks.append(zlib.crc32(block))

    @property
    def content(self) -> str:
        """SHA-256 of the tokens so far."""
        return self._digest.hexdigest()

    def finish(self, rows: array[int], segments: array[int]) -> None:
        """Writes the rest of the tokens and the arrays: row starts with the end, and segment starts (64-bit)."""
        if self._block:
            self._flush(len(self._block))
        _close(self._file)
        for name, values in ((_ROWS, rows), (_SEGMENTS, segments)):
            starts = np.frombuffer(values, dtype=np.int64) if len(values) else np.empty(0, np.int64)
            self._digest.update(starts.tobytes())
            with (self.folder / name).open("wb") as file:
                np.save(file, starts)
                _close(file)

    def commit(self, target: Path, facts: dict[str, Any]) -> None:
        """Makes the finished store visible as `target`. Where another process was faster with the same store, theirs stays."""
        sizes = {name: (self.folder / name).stat().st_size for name in (_TOKENS, _ROWS, _SEGMENTS)}
        sums = {name: zlib.crc32((self.folder / name).read_bytes()) for name in (_ROWS, _SEGMENTS)}
        index = {"format": FORMAT, "sizes": sizes, "blocks": self._blocks, "sums": sums, "facts": facts}
        with (self.folder / _INDEX).open("wb") as file:
            file.write(json.dumps(index, indent=1).encode())
            _close(file)
        _sync_folder(self.folder)
        while True:
            try:
                self.folder.rename(target)
                break
            except OSError:
                if not target.exists():
                    raise
                if open_store(target) is not None:
                    shutil.rmtree(self.folder)
                    break
                _remove(target)
        _sync_folder(target.parent)

    def abandon(self) -> None:
        """Removes what was written."""
        with contextlib.suppress(OSError):  # a full disk refuses the last bytes once more
            self._file.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def open_store(folder: Path) -> Store | None:
    """The store in `folder`, or None when there is none, or it is not complete and sound (then it must be built again)."""
    try:
        index = json.loads((folder / _INDEX).read_bytes())
        if index["format"] != FORMAT:
            return None
        if any((folder / name).stat().st_size != size for name, size in index["sizes"].items()):
            return None
        if any(zlib.crc32((folder / name).read_bytes()) != crc for name, crc in index["sums"].items()):
            return None
        size = index["sizes"][_TOKENS]
        tokens = np.memmap(folder / _TOKENS, dtype="<u4", mode="r") if size else np.empty(0, "<u4")
        if not _sound(tokens, index["blocks"]):
            return None
        rows, segments = (
            np.load(folder / name, mmap_mode="r" if index["sizes"][name] > _BLOCK else None) for name in (_ROWS, _SEGMENTS)
        )
        return Store(folder, tokens, rows, segments, index["facts"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _sound(tokens: np.ndarray, blocks: list[int]) -> bool:
    each = _BLOCK // tokens.itemsize
    step = max(1, len(blocks) // _CHECKED_WHOLE)
    places = sorted({*range(0, len(blocks), step), len(blocks) - 1} - {-1})
    return all(zlib.crc32(tokens[place * each : (place + 1) * each].data) == blocks[place] for place in places)


@contextlib.contextmanager
def alone(cache: Path, key: str, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds the lock of one store, so that the processes of a node prepare it once; `waiting` is called before a wait.

    Where the file system has no locks or is read-only, all of them prepare it, which is slower and still right.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context((cache / f".{key}.lock").open("a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sweep(cache: Path) -> None:
    """Removes what processes of this host left when they were killed."""
    for folder in cache.glob(f".writing-{socket.gethostname()}-*"):
        pid = folder.name.rsplit("-", 2)[-2]
        with contextlib.suppress(FileNotFoundError):
            quiet = (
                time.time() - folder.stat().st_mtime > _QUIET_SECONDS
            )  # containers may share a host's name, not its processes
            if quiet and pid.isdigit() and not _runs(int(pid)):
                shutil.rmtree(folder, ignore_errors=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _remove(folder: Path) -> None:
    """Moves an unsound store aside first, so that nobody opens it half removed."""
    aside = folder.with_name(f".writing-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _close(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
