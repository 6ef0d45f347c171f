"""From documents to rows: joining, splitting, masking, counting, reuse."""

from __future__ import annotations

import errno
import io
import json
import multiprocessing
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.data import prepare as prepare_module
from megaspan.human import UserError
from tests.data.given import Digits, Framing, config, ids_of, prepare, prepare_in_a_process, texts_of, trained_of
from tests.data.tokenizers_here import EOS, PAGE, fast


def test_documents_are_joined_and_the_rest_continues(tmp_path: Path) -> None:
    rows = prepare(tmp_path, ["abcdefghij", "kl", "mnopq"])
    assert texts_of(rows) == ["abcdefgh", "ij$kl$mn", "opq$"]
    assert trained_of(rows) == [".bcdefgh", ".j$.l$.n", ".pq$"]
    assert [row.document_lengths for row in rows] == [(8,), (3, 3, 2), (4,)]
    assert rows.ledger.split_documents == 2
    assert rows[-1].labels.dtype == rows[0].input_ids.dtype == np.int64


def test_labels_of_two_documents_are_one_fewer_each(tmp_path: Path) -> None:
    """R30: the first token of a document is not learnt as the continuation of the one before."""
    rows = prepare(tmp_path, [list(range(10, 22)), list(range(30, 37))], max_length=64)
    assert int((rows[0].labels != -100).sum()) == (12 - 1) + (7 - 1)
    assert rows[0].labels[12] == -100
    assert rows[0].labels[13] == 31


def test_one_document_a_row_split(tmp_path: Path) -> None:
    """R74: text is split and keeps every token; the example of the thread, [[1..5],[6,7],[8,9,10],[11]] at 4: 11 tokens."""
    documents = [[11, 12, 13, 14, 15], [16, 17], [18, 19, 20], [21]]
    rows = prepare(tmp_path, documents, max_length=4, packing=False)
    assert [row.input_ids.tolist() for row in rows] == [[11, 12, 13, 14], [15], [16, 17], [18, 19, 20], [21]]
    assert rows.ledger.row_tokens == 11
    assert rows.ledger.masked_rows == (1, 4)
    assert rows.ledger.lost == 0


@pytest.mark.parametrize(("overlong", "kept", "truncated", "dropped"), [("truncate", 10, 1, 0), ("drop", 6, 0, 5)])
def test_overlong_documents_are_counted(tmp_path: Path, overlong: str, kept: int, truncated: int, dropped: int) -> None:
    """R74, R75: whatever is lost is lost by choice and counted."""
    documents = [[11, 12, 13, 14, 15], [16, 17], [18, 19, 20], [21]]
    rows = prepare(tmp_path, documents, max_length=4, packing=False, overlong=overlong, max_lost_tokens=0.5)
    assert (rows.ledger.row_tokens, rows.ledger.truncated, rows.ledger.dropped) == (kept, truncated, dropped)
    assert rows.ledger.truncated_documents == int(overlong == "truncate")
    assert rows.ledger.dropped_documents == int(overlong == "drop")
    assert all(row.input_ids[0] in (11, 16, 18, 21) for row in rows)


@pytest.mark.parametrize(("limit", "stops"), [(0.01, True), (0.1, False), (10, True), (11, False)])
def test_more_lost_than_allowed_stops_with_a_sentence(tmp_path: Path, limit: float, stops: bool) -> None:
    """C5: a share up to 1, a count above; 11 of 111 tokens would be lost."""
    options = {"max_length": 100, "packing": False, "overlong": "truncate", "max_lost_tokens": limit}
    if not stops:
        assert prepare(tmp_path, [[5] * 111], **options).ledger.lost == 11
        return
    sentence = (
        r"overlong: truncate would lose 11 of 111 tokens \(9.91 %\), in 1 of 1 documents; the longest has 111 \(.*is 100;"
    )
    with pytest.raises(UserError, match=sentence):
        prepare(tmp_path, [[5] * 111], **options)
    assert prepare(tmp_path, [[5] * 111], **{**options, "max_lost_tokens": 11}).reused


@pytest.mark.parametrize("options", [{"packing": False}, {"packing_strategy": "bfd"}])
@pytest.mark.parametrize("limit", [0.01, 1])
def test_dropping_every_document_names_the_option_and_the_longest(
    tmp_path: Path, options: dict[str, Any], limit: float
) -> None:
    sentence = (
        r"no row at all; overlong: drop leaves out what is longer than max_length, 8 tokens, and all of it is; the longest "
        r"document has 31 \(the list, item 1\)\. Write overlong: split, .*, or max_length: 31"
    )
    with pytest.raises(UserError, match=sentence):
        prepare(tmp_path, ["a" * 20, "b" * 30], max_length=8, overlong="drop", max_lost_tokens=limit, **options)


def test_half_a_character_is_a_sentence(tmp_path: Path) -> None:
    """JSON can spell half of a surrogate pair, and every tokenizer fails on it in its own words."""
    with pytest.raises(UserError, match=r"the list, item 1 holds half a character, \\ud83d, at character 3"):
        prepare(tmp_path, ["fine", "ab\ud83d"])


def test_max_rows_stops_reading(tmp_path: Path) -> None:
    """What is not needed is neither read nor tokenised; what was read ahead is counted as unused."""
    read = []

    class Watched(list[str]):
        def __getitem__(self, index: Any) -> Any:
            read.append(index)
            return super().__getitem__(index)

    book = Watched(["x" * 50_000] * 100)
    rows = prepare(tmp_path, book, max_rows=2, max_length=1000)
    assert [len(row.input_ids) for row in rows] == [1000, 1000]
    assert rows.ledger.tokens_in + rows.ledger.added == rows.ledger.row_tokens + rows.ledger.unused
    assert rows.ledger.unused > 0
    assert "reading stopped at max_rows" in rows.ledger.table()
    assert "past it continue in the next rows, as far as max_rows lets them" in rows.ledger.table()
    assert len(read) < 110  # 100 for the identity of the list, a few for the rows


@pytest.mark.parametrize("overlong", ["split", "truncate", "drop"])
def test_max_rows_without_packing(tmp_path: Path, overlong: str) -> None:
    documents = ["abcdefghijklm", "nop", "qrstuvwxyz", "st"]
    limit = {} if overlong == "split" else {"max_lost_tokens": 1}
    rows = prepare(tmp_path, documents, packing=False, overlong=overlong, max_rows=2, **limit)
    wanted = {"split": ["abcdefgh", "ijklm$"], "truncate": ["abcdefgh", "nop$"], "drop": ["nop$", "st$"]}
    assert texts_of(rows) == wanted[overlong]


def test_max_rows_inside_a_document_that_is_split(tmp_path: Path) -> None:
    rows = prepare(tmp_path, ["abcdefghijklmnopq"], packing=False, max_rows=1)
    assert texts_of(rows) == ["abcdefgh"]
    assert rows.ledger.unused == 10


@pytest.mark.parametrize("max_length", [7, 8, 9, 16, 17])
def test_a_longer_row_never_makes_more_rows(tmp_path: Path, max_length: int) -> None:
    """R20: 3,000 documents of about half a row once gave twice as many rows at 8,193 as at 8,192."""
    documents = [[5] * length for length in (4, 3, 4, 5, 4, 4, 3) * 6]
    shorter = prepare(tmp_path, documents, max_length=max_length)
    longer = prepare(tmp_path, documents, max_length=max_length + 1)
    assert len(longer) <= len(shorter)
    assert len(shorter) == -(-sum(map(len, documents)) // max_length)


def test_padding_is_honoured_counted_and_never_passes_the_row(tmp_path: Path) -> None:
    """R22: with a budget of 64 and padding to 8, no row is longer than 64. The store itself holds no padding (R23)."""
    documents = [[5] * 15 for _ in range(9)]
    rows = prepare(tmp_path, documents, max_length=64, pad_to_multiple_of=8)
    assert [len(row.input_ids) for row in rows] == [64, 64, 8]
    assert rows.ledger.padding == 1
    assert rows[2].input_ids.tolist() == [5] * 7 + [2]
    assert rows[2].labels[-1] == -100
    assert sum(rows[2].document_lengths) == 7
    assert prepare(tmp_path, documents, max_length=64).reused
    with pytest.raises(UserError, match="never needed here"):
        prepare(tmp_path, documents, max_length=60, pad_to_multiple_of=8)


def test_empty_documents_are_skipped_and_counted(tmp_path: Path) -> None:
    """R83: "", " ", null and only special tokens; packing is as if they were not there."""
    rows = prepare(tmp_path, ["", "ab", " ", None, "$", "#$", "\n\t", "cd", [], [1, 2]])
    assert texts_of(rows) == ["ab$cd$"]
    assert rows.ledger.empty_documents == 8
    assert rows.ledger.documents == 2
    assert rows.ledger.dropped == rows.ledger.dropped_empty == 1 + 2 + 2
    assert rows.ledger.lost == 0
    assert "8 empty documents skipped" in rows.ledger.table()


def test_nothing_but_empty_documents_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no row at all; 0 documents with text, 3 empty ones"):
        prepare(tmp_path, ["", None, " "])
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_the_end_of_text_is_added_once(tmp_path: Path) -> None:
    rows = prepare(tmp_path, ["ab", "cd$"], max_length=16)
    assert texts_of(rows) == ["ab$cd$"]
    assert rows.ledger.added == 1
    assert texts_of(prepare(tmp_path, ["ab", "cd"], max_length=16, eos_id=None)) == ["abcd"]
    assert texts_of(prepare(tmp_path, ["ab", "cd"], max_length=16, eos_token="!")) == ["ab!cd!"]
    with pytest.raises(UserError, match="eos_token is not in the tokenizer's vocabulary"):
        prepare(tmp_path, ["ab"], eos_token="<none>")


def test_the_beginning_of_text_is_added_once_and_masked(tmp_path: Path) -> None:
    """Gemma and Llama: every document of text begins with it, and its first word is trained."""
    said: list[str] = []
    data = ["abc", "^de", [ord("x"), ord("y")], "fghijklm"]
    rows = prepare(tmp_path, data, Framing(), said=said)
    assert texts_of(rows) == ["^abc$^de", "$xy^fghi", "jklm$"]
    assert trained_of(rows) == [".abc$.de", "..y.fghi", ".klm$"]
    assert [row.document_lengths for row in rows] == [(5, 3), (1, 2, 5), (5,)]
    assert (rows.ledger.added, rows.ledger.added_in_front) == (5, 2)
    assert "5  beginning-of-text and end-of-text tokens" in said[-1]
    assert "data: every document of text begins with ^, as this tokenizer does it" in said


def test_a_tokenizer_that_adds_both_ends_is_not_doubled(tmp_path: Path) -> None:
    both = Framing(end=(1,))
    assert texts_of(prepare(tmp_path, ["ab", "^cd$"], both, max_length=16)) == ["^ab$^cd$"]
    assert texts_of(prepare(tmp_path, ["^ab", "b^c"], Framing((3, 3)), max_length=16)) == ["^^ab$^^b^c$"]
    rows = prepare(tmp_path, ["", "ab", "^", "$", "^$"], both)
    assert texts_of(rows) == ["^ab$"]
    assert (rows.ledger.empty_documents, rows.ledger.dropped, rows.ledger.dropped_empty) == (4, 6, 6)
    with pytest.raises(UserError, match=r"Framing ends every text with !; allowed: the end of text, \$\. Set eos_token: '!'"):
        prepare(tmp_path, ["ab"], Framing(end=(ord("!"),)))
    assert texts_of(prepare(tmp_path, ["ab"], Framing(end=(ord("!"),)), eos_token="!")) == ["^ab!"]
    assert texts_of(prepare(tmp_path, [[97, 98]], Framing(end=(ord("!"),)))) == ["ab"]


def test_the_beginning_of_text_is_in_the_key(tmp_path: Path) -> None:
    tokenizer = Framing()
    prepare(tmp_path, ["ab"], tokenizer)
    assert prepare(tmp_path, ["ab"], tokenizer).reused
    tokenizer.front = ()
    rows = prepare(tmp_path, ["ab"], tokenizer)
    assert not rows.reused
    assert texts_of(rows) == ["ab$"]


def test_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    """Rows that were cut elsewhere to exactly max_length stay rows: nothing is appended."""
    documents = [np.arange(10, 18), tuple(range(20, 28))]
    rows = prepare(tmp_path, documents)
    assert [row.input_ids.tolist() for row in rows] == [list(range(10, 18)), list(range(20, 28))]
    assert rows.ledger.added == 0


def test_masks_of_ids_are_kept(tmp_path: Path) -> None:
    records = [
        {"input_ids": [10, 11, 12, 13], "labels": [-100, -100, 12, 13]},
        {"input_ids": [20, 21, 22], "labels": [20, 21, -100]},
    ]
    rows = prepare(tmp_path, records)
    assert rows[0].labels.tolist() == [-100, -100, 12, 13, -100, 21, -100]
    assert rows.ledger.masked == 4


def test_nothing_to_train_fails_with_samples(tmp_path: Path) -> None:
    """R08, C6: a loss of 0.0 would look cheerful; three offending rows are shown instead."""
    records = [{"input_ids": [ord(letter)] * 4, "labels": [-100] * 4} for letter in "abcde"]
    with pytest.raises(UserError) as caught:
        prepare(tmp_path, records, max_length=4)
    assert "nothing to train, all 20 tokens in 5 rows are masked" in str(caught.value)
    assert "'aaaa'; 4 tokens 'bbbb'; 4 tokens 'cccc'" in str(caught.value)
    assert "dddd" not in str(caught.value)


def test_a_fully_masked_row_is_reported_by_index(tmp_path: Path) -> None:
    records = [{"input_ids": [7] * 8, "labels": [-100 if number == 3 else 7] * 8} for number in range(6)]
    rows = prepare(tmp_path, records)
    assert rows.ledger.masked_rows == (3,)
    assert "nothing to train in 1 row (index 3)" in rows.ledger.table()


def test_the_longest_document_and_what_a_limit_would_cut(tmp_path: Path) -> None:
    """R73: before the first step, per dataset: longest sample, number and share of tokens past the limit."""
    for name, lengths in (("a", (5, 20)), ("b", (3, 3))):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": "x" * length}) for length in lengths))
    said: list[str] = []
    rows = prepare(tmp_path / "cache", datasets=[{"path": str(tmp_path / f"{name}.jsonl")} for name in "ab"], said=said)
    table = "\n".join(said)
    assert rows.ledger.longest_document == 21
    assert f"a.jsonl: longest document 21 tokens ({tmp_path}/a.jsonl, line 2); 1 document longer than max_length" in table
    assert "13 tokens (48.15 %) past it continue in the next rows" in table
    assert "b.jsonl: longest document 4 tokens" in table


def test_shuffled_by_seed(tmp_path: Path) -> None:
    documents = [f"{number:03d}" for number in range(50)]
    order = texts_of(prepare(tmp_path, documents, max_length=4, shuffle_dataset=True))
    assert sorted(order) == [f"{number:03d}$" for number in range(50)]
    assert order != sorted(order)
    assert texts_of(prepare(tmp_path, documents, max_length=4, shuffle_dataset=True, seed=42)) == order
    assert texts_of(prepare(tmp_path, documents, max_length=4, shuffle_dataset=True, seed=7)) != order
    assert texts_of(prepare(tmp_path, documents, max_length=4, shuffle_dataset=True, seed=7, data_seed=42)) == order


def test_shuffled_over_several_sources(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a1"}\n\n{"text": "a2"}\n')
    (tmp_path / "b.txt").write_text("b1")
    named = [{"path": str(tmp_path / "a.jsonl")}, {"path": str(tmp_path / "b.txt")}]
    found = {
        tuple(texts_of(prepare(tmp_path / "c", datasets=named, max_length=3, shuffle_dataset=True, seed=seed)))
        for seed in range(30)
    }
    assert len(found) == 6
    assert all(sorted(rows) == ["a1$", "a2$", "b1$"] for rows in found)


def test_second_start_tokenises_nothing(tmp_path: Path) -> None:
    """R23: found by everything that shaped it, and a line says so."""
    (tmp_path / "book.txt").write_text(PAGE)
    said: list[str] = []
    options: dict[str, Any] = {"dataset_name": str(tmp_path / "book.txt"), "said": said}
    first = prepare(tmp_path / "c", None, fast(), **options)
    assert "train rows prepared in" in said[-2]
    second = prepare(tmp_path / "c", None, fast(), **options)
    assert "train rows reused in" in said[-2]
    assert said[-1] == first.ledger.table()
    long = prepare(tmp_path / "c", [PAGE * 2000], fast(), said=said)
    prepare(tmp_path / "c", [PAGE * 2000], fast(), said=said)
    assert long.ledger.tokens_in > 100_000
    assert said.count("data: long documents are tokenised in parallel pieces") == 2
    assert (first.reused, second.reused) == (False, True)
    assert first.fingerprint == second.fingerprint
    assert (ids_of(first) == ids_of(second)).all()


@pytest.mark.parametrize(
    "change",
    [{"max_length": 9}, {"packing": False}, {"max_rows": 2}, {"shuffle_dataset": True}, {"eos_token": "d"}, {"split": "test"}],
    ids=str,
)
def test_whatever_shapes_the_rows_is_in_the_key(tmp_path: Path, change: dict[str, Any]) -> None:
    for name in ("train", "test"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "book.txt").write_text(PAGE)
    prepare(tmp_path / "c", None, fast(), dataset_name=str(tmp_path / "data"))
    assert not prepare(tmp_path / "c", None, fast(), dataset_name=str(tmp_path / "data"), **change).reused


def test_the_files_and_the_tokenizer_are_in_the_key(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text(PAGE)
    before = prepare(tmp_path / "c", None, fast(), dataset_name=str(book))
    assert not prepare(tmp_path / "c", None, fast("llama3"), dataset_name=str(book)).reused
    facts = book.stat()
    book.write_text(PAGE.replace("best", "rest"))
    os.utime(book, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1_000_000))
    after = prepare(tmp_path / "c", None, fast(), dataset_name=str(book))
    assert not after.reused
    assert after.fingerprint != before.fingerprint


def test_a_list_is_known_by_its_content(tmp_path: Path) -> None:
    assert not prepare(tmp_path, ["ab", "cd"]).reused
    assert prepare(tmp_path, ["ab", "cd"]).reused
    assert not prepare(tmp_path, ["a", "bcd"]).reused
    assert not prepare(tmp_path, [[ord("a"), ord("b")], "cd"]).reused


@pytest.mark.parametrize("damage", ["cut", "flip", "index", "rows"])
def test_a_damaged_store_is_built_again(tmp_path: Path, damage: str) -> None:
    first = prepare(tmp_path, ["abcdefghij", "kl"])
    folder = tmp_path / first.fingerprint
    name = {"index": "index.json", "rows": "rows.npy"}.get(damage, "tokens.u32")
    data = bytearray((folder / name).read_bytes())
    if damage == "flip":
        data[5] ^= 1
    (folder / name).write_bytes(bytes(data if damage == "flip" else data[:-4]))
    again = prepare(tmp_path, ["abcdefghij", "kl"])
    assert not again.reused
    assert texts_of(again) == ["abcdefgh", "ij$kl$"]
    assert prepare(tmp_path, ["abcdefghij", "kl"]).reused
    assert not list(tmp_path.glob(".writing*"))


def test_an_interrupted_preparation_leaves_nothing(tmp_path: Path) -> None:
    class Broken(Digits):
        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            if "c" in text:
                raise KeyboardInterrupt
            return super().__call__(text)

    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path, ["ab", "cd"], Broken())
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_processes_prepare_the_same_rows_at_once(tmp_path: Path) -> None:
    """R82: no collective; the others wait for the first one and find its store."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=prepare_in_a_process, args=(str(tmp_path), results)) for _ in range(3)]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join()
    assert len({(fingerprint, rows, total) for fingerprint, _, rows, total in found}) == 1
    assert sorted(reused for _, reused, _, _ in found) == [False, True, True]
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1


def test_without_locks_both_writers_end_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second writer that finishes later keeps the first one's store."""
    first = prepare(tmp_path, ["abcd"])
    monkeypatch.setattr(prepare_module, "open_store", lambda folder: None)
    index = tmp_path / first.fingerprint / "index.json"
    before = index.stat().st_ino
    again = prepare(tmp_path, ["abcd"])
    assert not again.reused
    assert index.stat().st_ino == before
    assert texts_of(again) == texts_of(first)
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1


def _no_parents(mkdir: Any) -> Any:
    """`Path.mkdir` on a folder that is read-only: what is not there cannot be made."""

    def limited(path: Path, *args: Any, **options: Any) -> None:
        if ".writing" in str(path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        mkdir(path, *args, **options)

    return limited


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="rows cannot be kept in"):
        prepare(tmp_path / "file" / "cache", ["ab"])
    monkeypatch.setattr(Path, "mkdir", _no_parents(Path.mkdir))
    with pytest.raises(UserError, match=r"rows cannot be kept in .*cache: "):
        prepare(tmp_path / "cache", ["ab"])
    monkeypatch.undo()
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "file")
    said: list[str] = []
    rows = prepare(None, ["ab"], said=said, output_dir=str(tmp_path / "run"))
    assert texts_of(rows) == ["ab$"]
    assert (tmp_path / "run" / "rows" / rows.fingerprint).is_dir()
    assert "so the rows are kept in" in said[0]


def test_a_full_disk_and_a_forbidden_file_are_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megaspan.data import tokenstore

    def failing(number: int, name: str | None) -> Any:
        def append(*_: Any) -> None:
            raise OSError(number, os.strerror(number), name)

        return append

    monkeypatch.setattr(tokenstore.StoreWriter, "append", failing(errno.ENOSPC, None))
    with pytest.raises(UserError, match="is full: tokens take 4 bytes each"):
        prepare(tmp_path, ["ab"])
    monkeypatch.setattr(tokenstore.StoreWriter, "append", failing(errno.EACCES, "secret.jsonl"))
    with pytest.raises(UserError, match=r"secret\.jsonl may not be read"):
        prepare(tmp_path, ["ab"])
    monkeypatch.setattr(tokenstore.StoreWriter, "append", failing(errno.EIO, None))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        prepare(tmp_path, ["ab"])
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_disk_that_is_full_at_the_last_bytes_is_a_sentence_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be written is tried again as the file is closed; neither that error nor the folder may stay."""
    from megaspan.data import tokenstore

    real = tokenstore.StoreWriter.__init__

    def full(writer: Any, cache: Path) -> None:
        real(writer, cache)
        writer._file.close()
        writer._file = io.BufferedWriter(io.FileIO("/dev/full", "w"))

    monkeypatch.setattr(tokenstore.StoreWriter, "__init__", full)
    with pytest.raises(UserError, match="is full: tokens take 4 bytes each"):
        prepare(tmp_path, ["ab"])
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_refused_tokenizer_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="dataset_num_proc: Digits is written in Python"):
        prepare(tmp_path, ["ab"], dataset_num_proc=2)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_the_default_cache_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    rows = prepare(None, ["ab"])
    assert (tmp_path / ".cache" / "megaspan" / "rows" / rows.fingerprint / "tokens.u32").exists()


def test_held_out_data_takes_the_same_path(tmp_path: Path) -> None:
    """C11: one code path; a folder divided by split, a dataset of its own, and a plain refusal."""
    for name, text in (("train", "abc"), ("test", "xyz")):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "book.txt").write_text(text)
    named = {"dataset_name": str(tmp_path / "data")}
    assert texts_of(prepare(tmp_path / "c", **named)) == ["abc$"]
    assert texts_of(prepare(tmp_path / "c", split="test", **named)) == ["xyz$"]
    assert texts_of(prepare(tmp_path / "c", ["held out"], split="test", **named)) == ["held out", "$"]
    with pytest.raises(UserError, match="has no split 'valid'"):
        prepare(tmp_path / "c", split="test", dataset_test_split="valid", **named)
    with pytest.raises(UserError, match="files are one split"):
        prepare(tmp_path / "c", split="test", dataset_name=str(tmp_path / "data" / "train" / "book.txt"))


def test_no_data_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no data\. Set dataset_name"):
        prepare(tmp_path)


def test_rows_travel_to_another_process(tmp_path: Path) -> None:
    rows = prepare(tmp_path, ["abcdefghij", "kl"])
    copy = pickle.loads(pickle.dumps(rows))
    assert len(pickle.dumps(rows)) < 10_000
    assert texts_of(copy) == texts_of(rows)
    assert copy.ledger == rows.ledger
    with pytest.raises(IndexError):
        rows[2]


def test_unigram_entropy_in_nats(tmp_path: Path) -> None:
    rows = prepare(tmp_path, [[5, 5, 6, 7], [9, 9, 9, 9]], max_length=4)
    assert rows.unigram_entropy(0) == pytest.approx(0.5 * np.log(2) + 2 * 0.25 * np.log(4))
    assert rows.unigram_entropy(1) == 0.0


documents = st.lists(
    st.one_of(st.text("ab$#^ ", max_size=30), st.none(), st.lists(st.integers(0, 9), max_size=30)), max_size=12
)


@settings(max_examples=150, deadline=None)
@given(
    documents=documents,
    tokenizer=st.sampled_from([Digits(), Framing(), Framing(end=(1,)), Framing((3, 4)), Framing((), (1,))]),
    max_length=st.integers(1, 20),
    packing=st.booleans(),
    overlong=st.sampled_from(["split", "truncate", "drop"]),
    max_rows=st.none() | st.integers(1, 6),
    shuffle=st.booleans(),
    multiple=st.sampled_from([None, 1, 2, 5]),
)
def test_every_token_is_accounted_for(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[Any],
    tokenizer: Digits,
    max_length: int,
    packing: bool,
    overlong: str,
    max_rows: int | None,
    shuffle: bool,
    multiple: int | None,
) -> None:
    """R30, P6: for random documents and options, counted from the rows themselves."""
    folder = tmp_path_factory.mktemp("cache", numbered=True)
    options: dict[str, Any] = {} if packing else {"overlong": overlong}
    if not packing and overlong != "split":
        options["max_lost_tokens"] = 1
    if multiple:
        max_length = max_length * multiple
        options["pad_to_multiple_of"] = multiple
    options |= {"max_length": max_length, "packing": packing, "max_rows": max_rows, "shuffle_dataset": shuffle}
    try:
        rows = prepare(folder, documents, tokenizer, **options)
    except UserError:
        with pytest.raises(UserError, match=r"nothing to train|no row at all"):
            prepare(folder, documents, tokenizer, **options)
        return
    ledger = rows.ledger
    kept = [row.input_ids[: len(row.input_ids) - row.padding] for row in rows]
    lengths = [len(row) for row in kept]
    assert sum(lengths) == ledger.trained + ledger.masked == ledger.row_tokens
    assert sum(int((row.labels != -100).sum()) for row in rows) == ledger.trained
    assert sum(row.padding for row in rows) == ledger.padding
    assert ledger.tokens_in + ledger.added == ledger.row_tokens + ledger.dropped + ledger.truncated + ledger.unused
    assert all(sum(row.document_lengths) == length for row, length in zip(rows, lengths, strict=True))
    assert all(len(row.input_ids) <= max_length and (not multiple or len(row.input_ids) % multiple == 0) for row in rows)
    assert max_rows is None or len(rows) <= max_rows
    for row in rows:
        starts = np.cumsum((0, *row.document_lengths))[:-1]
        assert (row.labels[starts] == -100).all()
        others = np.setdiff1d(np.arange(sum(row.document_lengths)), starts)
        assert (row.labels[others] == row.input_ids[others]).all()
    if packing:
        assert all(length == max_length for length in lengths[:-1])
    front = list(getattr(tokenizer, "front", ()))
    special = (
        {*tokenizer.all_special_ids, *front} if any(isinstance(text, str) and text.strip() for text in documents) else set()
    )
    whole, added, in_front = [], 0, 0
    for document in documents:
        ids = tokenizer(document, add_special_tokens=False)["input_ids"] if isinstance(document, str) else document or []
        if isinstance(document, str) and document.strip():
            own = max(size for size in range(len(front) + 1) if ids[:size] == front[:size])
            end = [1] if ids[-1] != 1 else []
            added += len(front) - own + len(end)
            in_front += len(front) - own
            ids = [*front, *ids[own:], *end]
        if set(ids) - special and not (isinstance(document, str) and document.isspace()):
            whole.append(ids)
    if not shuffle and max_rows is None and (packing or overlong == "split"):
        assert np.concatenate(kept).tolist() == [token for ids in whole for token in ids]
        assert ledger.documents == len(whole)
        assert (ledger.added, ledger.added_in_front) == (added, in_front)


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="text needs a tokenizer, and the model has none"):
        prepare_module.prepare_rows(config(), None, dataset=["text"], cache_folder=tmp_path, report=lambda line: None)


def test_a_real_tokenizer_end_to_end(tmp_path: Path) -> None:
    tokenizer = fast()
    rows = prepare(tmp_path, [PAGE, PAGE * 2], tokenizer, max_length=50)
    wanted = [*tokenizer(PAGE)["input_ids"], tokenizer.eos_token_id, *tokenizer(PAGE * 2)["input_ids"], tokenizer.eos_token_id]
    assert ids_of(rows).tolist() == wanted
    assert tokenizer.decode(ids_of(rows)) == PAGE + EOS + PAGE * 2 + EOS
