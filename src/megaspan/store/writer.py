"""One file, written and summed by several threads.

SIGTERM often comes half a minute before the machine is gone, and one thread writes and sums about 1 GB/s: 14 GB of state for
each billion parameters with fp32 masters, so two billion in that time. Here a piece is copied to the host by the thread that
asks for it and then written to its place, and summed, by one of four others. The file and its sum are those of one thread.
"""

from __future__ import annotations

import os
import queue
import zlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, final

import torch
from torch import Tensor

from megaspan.store.sums import combined
from megaspan.world.host import cores

THREADS = 4
CHUNK_BYTES = 8 * 2**20  # what a thread writes at once
STAGED = 8  # chunks that are on their way through the host; 64 MiB


@final
class FileWriter:
    """Creates a file and fills it from its beginning to its end; closed at the end of a `with` block.

    Args:
        path: the file.
        threads: that write and sum; as many as there are cores, up to four, unless given.

    Attributes:
        crc: CRC-32 of the file, once the block has ended.
    """

    def __init__(self, path: Path, threads: int | None = None) -> None:
        self.crc = 0
        self._file = path.open("wb", buffering=0)
        self._pool = ThreadPoolExecutor(threads or min(THREADS, cores()), "megaspan-write")
        self._pending: deque[tuple[Future[int], int]] = deque()
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self._staged = False
        self._offset = 0

    def __enter__(self) -> FileWriter:
        return self

    def put(self, data: Tensor, *, lasting: bool = True) -> None:
        """Writes bytes behind those before.

        Args:
            data: flat, uint8, on any device.
            lasting: it stays as it is until the block ends; else it is copied before this returns.

        Raises:
            OSError: these bytes, or some before, could not be written.
        """
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            buffer = None if lasting and chunk.device.type == "cpu" else self._buffer()
            if buffer is not None:
                chunk = buffer[: len(chunk)].copy_(chunk)
            self._pending.append((self._pool.submit(self._write, chunk, self._offset, buffer), len(chunk)))
            self._offset += len(chunk)
            while len(self._pending) > STAGED:
                self._collect()

    def _buffer(self) -> Tensor:
        """A part of the staging memory that nobody writes from; a thread gives it back whatever happens to it."""
        if not self._staged:
            self._staged = True
            whole = torch.empty(STAGED * CHUNK_BYTES, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
            for part in whole.split(CHUNK_BYTES):
                self._free.put(part)
        return self._free.get()

    def _write(self, chunk: Tensor, offset: int, buffer: Tensor | None) -> int:
        try:
            array: Any = chunk.numpy()
            left = memoryview(array)
            crc = zlib.crc32(left)
            while left:
                written = os.pwrite(self._file.fileno(), left, offset)
                left, offset = left[written:], offset + written
            return crc
        finally:
            if buffer is not None:
                self._free.put(buffer)

    def _collect(self) -> None:
        future, length = self._pending.popleft()
        self.crc = combined(self.crc, future.result(), length)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Waits for all threads: nothing is written into a folder that is being removed.

        Raises:
            OSError: some bytes could not be written, where the block itself has ended well.
        """
        try:
            if error is None:
                while self._pending:
                    self._collect()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._file.close()
