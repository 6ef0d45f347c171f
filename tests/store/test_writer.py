"""Several threads write one file: the bytes of one thread, and one error of any of them ends it."""

import errno
import os
import threading
import time
import zlib
from pathlib import Path

import pytest
import torch

from megaspan.human import UserError
from megaspan.store import load_checkpoint, save_checkpoint, writer
from megaspan.store.writer import STAGED, FileWriter
from tests.store.training import start, train


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(writer, "CHUNK_BYTES", 64)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("megaspan-write")]


def write(path: Path, pieces: list[torch.Tensor], lasting: bool = True) -> int:
    with FileWriter(path, threads=4) as file:
        for piece in pieces:
            given = piece if lasting else piece.clone()
            file.put(given, lasting=lasting)
            if not lasting:
                given.fill_(0)  # as the next piece that comes into the same memory
    return file.crc


@pytest.mark.parametrize("lasting", [True, False])
def test_the_file_and_its_sum_are_those_of_one_thread(tmp_path, monkeypatch, lasting):
    """The first chunks are the last ones to be written, in parts."""
    plain, turn = os.pwrite, iter(range(10**6))

    def slow(descriptor, data, offset):
        time.sleep(max(0, 0.01 - 0.002 * next(turn)))
        return plain(descriptor, bytes(data)[:50], offset)

    monkeypatch.setattr(os, "pwrite", slow)
    generator = torch.Generator().manual_seed(0)
    pieces = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in (0, 1, 63, 64, 65, 3000, 7)]
    whole = b"".join(piece.numpy().tobytes() for piece in pieces)
    assert write(tmp_path / "file", pieces, lasting) == zlib.crc32(whole)
    assert (tmp_path / "file").read_bytes() == whole
    assert threads() == []


@pytest.mark.parametrize("chunks", [1, STAGED, 40])
def test_a_disk_that_is_full_is_an_error_of_the_caller(chunks):
    with pytest.raises(OSError, match="No space left on device") as caught:
        write(Path("/dev/full"), [torch.zeros(64 * chunks, dtype=torch.uint8)], lasting=False)
    assert caught.value.errno == errno.ENOSPC
    assert threads() == []


def test_an_error_in_one_thread_leaves_no_part_of_a_checkpoint(tmp_path, monkeypatch):
    model, optimizer = start()
    train(model, optimizer, 0, 1)
    save_checkpoint(tmp_path, model=model, optimizer=optimizer, progress={"step": 1})
    plain, turn = os.pwrite, iter(range(10**6))

    def fill_up(descriptor, data, offset):
        if next(turn) == 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", fill_up)
    with pytest.raises(UserError, match=r"filled up after .* of checkpoint-2; it was removed again"):
        save_checkpoint(tmp_path, model=model, optimizer=optimizer, progress={"step": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert threads() == []
    assert load_checkpoint(tmp_path / "checkpoint-1", *start()) == {"step": 1}


def test_another_error_of_the_caller_waits_for_the_threads(tmp_path):
    def fail():
        with FileWriter(tmp_path / "file") as file:
            file.put(torch.zeros(640, dtype=torch.uint8))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert threads() == []
