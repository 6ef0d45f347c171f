"""A file without a name on a local disk, read and written in whole pages past the page cache.

309 GB of layer inputs that passed through the page cache would be copied once more by the processor, and count as memory of the
container while they lie there: the memory that the disk was to save. So the file is opened with O_DIRECT where the file system
has it; elsewhere each piece is written through and dropped from the cache.

The file's name is taken away as soon as it is open. The kernel then frees its blocks when the process ends, however it ends;
SIGKILL leaves nothing behind. Names that are found all the same are from a machine that died within that moment.

Source: open(2) on alignment and fork, posix_fallocate(3).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megaspan.human import UserError, format_bytes
from megaspan.memory.arena import PAGE
from megaspan.plan.localdisk import refuse_kind

PREFIX, SUFFIX = "megaspan-kept-", ".part"
FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


def remove_leftovers(folder: Path) -> int:
    """Removes files of runs that died before they could take the name away; returns how many there were."""
    found = 0
    for path in folder.glob(f"{PREFIX}*{SUFFIX}"):
        # A run that starts at this moment has its file open: it loses the name a moment early, and nothing else.
        with contextlib.suppress(OSError):
            path.unlink()
            found += 1
    return found


class DiskFile:
    """`size` bytes on the disk of `folder`; pieces may be read and written by several threads at once.

    Attributes:
        name: what the file was called, for messages.
        direct: the page cache is passed by.

    Raises:
        UserError: the folder is missing, not writable, in memory or on another machine.
    """

    def __init__(self, folder: Path, *, allow_network: bool = False) -> None:
        if not folder.is_dir():
            raise UserError(
                f"offload_folder {folder} is not a folder",
                do=f"Make it with: mkdir -p {folder}, or name another on a fast local disk",
                option="offload_folder",
            )
        refuse_kind(folder, allow_network=allow_network)
        remove_leftovers(folder)
        try:
            self._fd, name = tempfile.mkstemp(SUFFIX, PREFIX, folder)
        except OSError as error:
            do = "Free space on it" if error.errno in FULL else "Make it writable, or name another folder"
            raise UserError(f"offload_folder {folder}: {error.strerror}", do=do, option="offload_folder") from error
        self.folder, self.name, self.size = folder, name, 0
        self._buffers = threading.local()
        with contextlib.suppress(FileNotFoundError):  # another run may have swept it away
            os.unlink(name)
        self.direct = self._go_direct()

    def _go_direct(self) -> bool:
        """Turns O_DIRECT on where a write of one page then still works."""
        if not hasattr(os, "O_DIRECT"):
            return False
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.pwritev(self._fd, [mmap.mmap(-1, PAGE)], 0)
        except OSError as error:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            if error.errno not in (*_REFUSED, *FULL):
                raise
            return False
        return True

    @property
    def closed(self) -> bool:
        """The file is gone."""
        return self._fd < 0

    def free(self) -> int:
        """Bytes that this user may still write to the file system."""
        state = os.fstatvfs(self._fd)
        return state.f_bavail * state.f_frsize

    def extend(self, more: int) -> None:
        """Gets `more` bytes of the disk, before anything is written there.

        Raises:
            UserError: it has not as many.
        """
        free = self.free()
        try:
            if more > free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._allocate(more)
        except OSError as error:
            os.ftruncate(self._fd, self.size)  # what a failed allocation got before it failed
            if error.errno not in FULL:
                raise
            quota = ", and a quota allows less" if more <= free else ""
            held = f" beside the {format_bytes(self.size)} it holds" if self.size else ""
            raise UserError(
                f"offload_folder {self.folder} must hold {format_bytes(more)}{held}, but its file system has "
                f"{format_bytes(free)} free{quota}",
                do="Free space there, name a folder on a larger disk, raise host_memory, or lower max_length",
                option="offload_folder",
            ) from error
        self.size += more

    def shrink(self) -> None:
        """Gives the disk back. No move may be under way."""
        os.ftruncate(self._fd, 0)
        self.size = 0

    def _allocate(self, more: int) -> None:
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._fd, self.size, more)
                return
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
        os.ftruncate(self._fd, self.size + more)

    def write(self, piece: torch.Tensor, offset: int) -> None:
        """Writes `piece` (uint8, host memory) at `offset`, where a page begins; the rest of its last page is overwritten."""
        data = piece.numpy()
        if not self.direct:
            self._whole(os.pwritev, data, offset)
            os.fdatasync(self._fd)  # only clean pages can be dropped
            self._uncache(offset, len(data))
        elif _aligned(piece):
            self._whole(os.pwritev, data, offset)
        else:
            buffer = self._buffer(len(data))
            buffer[: len(data)] = data
            self._whole(os.pwritev, buffer, offset)

    def read(self, piece: torch.Tensor, offset: int) -> None:
        """Fills `piece` (uint8, host memory) from `offset`."""
        data = piece.numpy()
        if not self.direct or _aligned(piece):
            self._whole(os.preadv, data, offset)
        else:
            buffer = self._buffer(len(data))
            self._whole(os.preadv, buffer, offset)
            data[:] = buffer[: len(data)]
        if not self.direct:
            self._uncache(offset, len(data))

    def _whole(self, move: Callable[[int, list[Any], int], int], data: Any, offset: int) -> None:
        """The kernel may move less than it was asked for; direct moves then go on from the last whole page."""
        done, view = 0, memoryview(data)
        while done < len(view):
            reached = done + move(self._fd, [view[done:]], offset + done)
            if self.direct and reached < len(view):
                reached -= reached % PAGE
            if reached <= done:
                raise OSError(errno.EIO, f"the file ends at byte {offset + done:,}")
            done = reached

    def _uncache(self, offset: int, size: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_DONTNEED)

    def _buffer(self, size: int) -> Any:
        """Whole pages of this thread's own, for bytes that do not lie on pages. Shared memory, which a fork leaves in place."""
        rounded = -(-size // PAGE) * PAGE
        held: torch.Tensor | None = getattr(self._buffers, "held", None)
        if held is None or held.numel() < rounded:
            held = self._buffers.held = torch.frombuffer(mmap.mmap(-1, rounded), dtype=torch.uint8)
        return held[:rounded].numpy()

    def close(self) -> None:
        """Frees the file's place on the disk. No move may be under way."""
        if not self.closed:
            os.close(self._fd)
            self._fd = -1


def _aligned(piece: torch.Tensor) -> bool:
    return piece.data_ptr() % PAGE == 0 and piece.numel() % PAGE == 0
