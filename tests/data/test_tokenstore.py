"""The store on disk: large offsets, soundness, writers side by side."""

from __future__ import annotations

import os
import socket
from array import array
from pathlib import Path

import numpy as np
import pytest

from megaspan.data import tokenstore
from megaspan.data.ledger import TokenLedger
from megaspan.data.rows import Rows
from megaspan.data.tokenstore import FORMAT, MASKED, Store, StoreWriter, alone, open_store


def write(cache: Path, tokens: np.ndarray, name: str = "key") -> Path:
    writer = StoreWriter(cache)
    for part in np.array_split(tokens.astype(np.uint32), 7):
        writer.append(part)
    writer.finish(array("q", [0, len(tokens)]), array("q", [0]))
    writer.commit(cache / name, {"hello": 1})
    return cache / name


@pytest.mark.parametrize("tokens", [0, 1, 2**20, 2**20 + 1, 3 * 2**20 - 1])
def test_what_was_written_is_read(tmp_path: Path, tokens: int) -> None:
    values = np.arange(tokens) * 977 % 2**32
    store = open_store(write(tmp_path, values))
    assert store is not None
    assert (store.tokens == values).all()
    assert store.rows.tolist() == [0, tokens]
    assert store.facts == {"hello": 1}
    assert not list(tmp_path.glob(".writing*"))


def test_rows_past_two_to_the_32(tmp_path: Path) -> None:
    """R81: offsets are 64-bit in memory and on disk. A sparse file stands for 17 GB of tokens."""
    far = 2**32 + 2**20 + 5
    with (tmp_path / "tokens.u32").open("wb") as file:
        file.truncate(4 * (far + 6))
        file.seek(4 * far)
        file.write(np.array([MASKED | 7, 8, 9, MASKED | 5, 6, 4], "<u4").tobytes())
    tokens = np.memmap(tmp_path / "tokens.u32", dtype="<u4", mode="r")
    starts = {"rows": array("q", [0, far, far + 6]), "segments": array("q", [0, far, far + 3])}
    for name, values in starts.items():
        np.save(tmp_path / f"{name}.npy", np.frombuffer(values, np.int64))
    rows, segments = (np.load(tmp_path / f"{name}.npy") for name in starts)
    assert rows.dtype == segments.dtype == np.int64
    ledger = TokenLedger(
        max_length=far, rows=2, documents=2, empty_documents=0, tokens_in=far + 6, added=0, added_in_front=0, trained=far + 3,
        masked=3, dropped=0, dropped_empty=0, truncated=0, unused=0, padding=0, split_documents=0, truncated_documents=0,
        dropped_documents=0, masked_rows=(), masked_row_count=0, stopped=False, sources=(),
    )  # fmt: skip
    facts = {"fingerprint": "x", "max_id": 9, "ledger": ledger.to_dict()}
    found = Rows(Store(tmp_path, tokens, rows, segments, facts), reused=True)
    assert found.lengths.tolist() == [far, 6]
    assert found[1].input_ids.tolist() == [7, 8, 9, 5, 6, 4]
    assert found[1].labels.tolist() == [-100, 8, 9, -100, 6, 4]
    assert found[1].document_lengths == (3, 3)


def test_cutting_past_two_to_the_32(tmp_path: Path) -> None:
    """R81: the same while rows are cut: positions count on from where 17 GB of tokens would have ended."""
    from megaspan.data.cutrows import Wrapped
    from megaspan.data.records import Document
    from megaspan.data.tokenise import Piece

    writer = StoreWriter(tmp_path)
    start = writer.tokens = 2**32 * 3
    cutter = Wrapped(writer, 2**31, None)
    for number in range(2):
        cutter.add(Piece(Document("here"), number, np.arange(3, 8, dtype=np.uint32), None, True, True))
    cutter.finish()
    writer.commit(tmp_path / "key", {})
    store = open_store(tmp_path / "key")
    assert store is not None
    assert store.segments.tolist() == [start, start + 5]
    assert store.rows.tolist() == [start, start + 10]


def test_a_large_file_is_checked_at_many_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenstore, "_BLOCK", 64)
    monkeypatch.setattr(tokenstore, "_CHECKED_WHOLE", 8)
    folder = write(tmp_path, np.arange(16 * 100 + 3))
    assert open_store(folder) is not None
    with (folder / "tokens.u32").open("r+b") as file:
        file.seek(4 * 1601)
        file.write(b"\1\1\1\1")
    assert open_store(folder) is None


@pytest.mark.parametrize("harm", ["missing", "index", "format", "sums", "nothing"])
def test_an_unsound_store_is_no_store(tmp_path: Path, harm: str) -> None:
    folder = write(tmp_path, np.arange(100))
    index = folder / "index.json"
    if harm == "missing":
        (folder / "rows.npy").unlink()
    elif harm == "index":
        index.write_text("{")
    elif harm == "format":
        index.write_text(index.read_text().replace(f'"format": {FORMAT}', '"format": 0'))
    elif harm == "sums":
        data = bytearray((folder / "segments.npy").read_bytes())
        data[-1] ^= 1
        (folder / "segments.npy").write_bytes(bytes(data))
    assert (open_store(folder) is not None) == (harm == "nothing")
    assert open_store(tmp_path / "none") is None


def test_a_writer_replaces_an_unsound_store(tmp_path: Path) -> None:
    folder = write(tmp_path, np.arange(100))
    (folder / "index.json").unlink()
    store = open_store(write(tmp_path, np.arange(100)))
    assert store is not None
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_what_killed_writers_left_is_swept(tmp_path: Path) -> None:
    gone, alive = 2**22 + 1, os.getpid()
    names = {pid: tmp_path / f".writing-{socket.gethostname()}-{pid}-abcd" for pid in (gone, alive)}
    fresh = tmp_path / f".writing-{socket.gethostname()}-{gone}-fresh"
    for folder in (*names.values(), fresh):
        folder.mkdir()
    for folder in names.values():
        os.utime(folder, (1, 1))
    StoreWriter(tmp_path).abandon()
    assert not names[gone].exists()
    assert names[alive].exists()
    assert fresh.exists()


def test_the_lock_says_when_it_waits(tmp_path: Path) -> None:
    import threading

    waited = []
    release = threading.Event()

    def second() -> None:
        with alone(tmp_path, "key", lambda: (waited.append(1), release.set())):
            pass

    with alone(tmp_path, "key", lambda: waited.append(2)):
        thread = threading.Thread(target=second)
        thread.start()
        assert release.wait(10)
    thread.join(10)
    assert waited == [1]


def test_without_a_lock_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    with alone(tmp_path / "not there", "key", lambda: None):
        done.append("no folder")

    def no_locks(*_: object) -> None:
        raise OSError(95, "not supported")

    monkeypatch.setattr(tokenstore.fcntl, "flock", no_locks)
    with alone(tmp_path, "key", lambda: None):
        done.append("no locks")
    with pytest.raises(KeyError), alone(tmp_path, "key", lambda: None):
        raise KeyError
    with pytest.raises(OSError, match="own"), alone(tmp_path, "key", lambda: None):
        raise OSError("own")
    assert done == ["no folder", "no locks"]
