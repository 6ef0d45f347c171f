"""Packed rows: whole documents put together (`bfd`), rows that were packed elsewhere, and rows joined for one forward."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.data import Row, join, show_row
from megaspan.data.cutrows import OnePerDocument, RowCutter
from megaspan.data.packed import BestFit, best_fit
from megaspan.data.records import Document
from megaspan.data.rows import IGNORED
from megaspan.data.tokenise import Piece
from megaspan.data.tokenstore import MASKED, StoreWriter, open_store
from megaspan.human import UserError
from tests.data.given import Digits, ids_of, prepare, texts_of, trained_of


def by_hand(lengths: list[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing by looking at every row; documents of each row in order."""
    rows: list[list[int]] = []
    for length, document in sorted((-length, document) for document, length in enumerate(lengths)):
        rooms = [capacity - sum(lengths[each] for each in row) for row in rows]
        fitting = [(room, number) for number, room in enumerate(rooms) if room >= -length]
        if fitting:
            rows[min(fitting)[1]].append(document)
        else:
            rows.append([document])
    return [sorted(row) for row in rows]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 70), st.data())
def test_best_fit_is_best_fit(capacity: int, data: st.DataObject) -> None:
    """Each in one row, no row too long, as full as by hand (which of equally full rows is taken may differ)."""
    lengths = data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=40))
    rows = best_fit(np.array(lengths), capacity)
    sums = np.bincount(rows, weights=lengths)
    assert sorted(sums) == sorted(sum(lengths[each] for each in row) for row in by_hand(lengths, capacity))
    assert sums.max() <= capacity
    firsts = [int(np.flatnonzero(rows == row)[0]) for row in range(rows.max() + 1)]
    assert firsts == sorted(firsts)
    assert np.array_equal(rows, best_fit(np.array(lengths), capacity))


@pytest.mark.parametrize("capacity", [8191, 8192, 8193, 16_000, 100_000, 1_048_576])
def test_limits_need_not_be_powers_of_two(capacity: int) -> None:
    """R20: 3,000 documents of about 4,096 tokens really share rows."""
    lengths = np.random.default_rng(0).integers(3_900, 4_096, 3_000)
    assert best_fit(lengths, capacity).max() + 1 <= -(-3_000 // (capacity // 4_095))


def test_hundreds_of_thousands_of_documents() -> None:
    """Seconds, not minutes; nearly no room is left."""
    lengths = np.random.default_rng(0).lognormal(6, 1.5, 200_000).astype(np.int64).clip(1, 131_072)
    started = time.process_time()
    rows = best_fit(lengths, 131_072)
    assert time.process_time() - started < 20
    assert lengths.sum() / (131_072 * (rows.max() + 1)) > 0.99


# --- bfd --------------------------------------------------------------------------------------------------------------------


def packed(folder: Path, data: Any, **options: Any) -> Any:
    return prepare(folder, data, packing_strategy="bfd", **options)


def test_whole_documents_share_rows_and_see_only_themselves(tmp_path: Path) -> None:
    rows = packed(tmp_path, ["abcde", "fg", "hijk", "l"])
    assert texts_of(rows) == ["abcde$l$", "fg$hijk$"]
    assert trained_of(rows) == [".bcde$.$", ".g$.ijk$"]
    assert [row.document_lengths for row in rows] == [row.attention_lengths for row in rows] == [(6, 2), (3, 5)]
    assert rows.ledger.split_documents == rows.ledger.lost == rows.ledger.padding == 0
    assert "2 documents, each sees only itself" in show_row(rows[0], Digits())
    joined = prepare(tmp_path, ["abcde", "fg", "hijk", "l"])
    assert [row.attention_lengths for row in joined] == [(8,), (8,)]
    assert joined.fingerprint != rows.fingerprint
    assert (rows.packed, joined.packed) == (True, False)
    assert not prepare(tmp_path, ["abcdefghijk", "fg"], packing=False).packed
    assert "sees only itself" not in show_row(joined[0], Digits())


def test_the_row_with_most_attention_is_found_without_its_tokens(tmp_path: Path) -> None:
    rows = packed(tmp_path, ["ghi", "jkl", "a", "bcdef", "m"])
    lengths = [rows[number].attention_lengths for number in range(len(rows))]
    assert sorted(lengths) == [(2,), (2, 6), (4, 4)]
    assert rows.heaviest() == [lengths.index((2, 6))] != [0]
    assert rows.heaviest(2) == [number for number in range(3) if sum(lengths[number]) == 8]
    assert prepare(tmp_path, ["abcdefghijk", "fg"], packing=False).heaviest() == [0]


def test_padding_stays_outside_of_documents(tmp_path: Path) -> None:
    row = packed(tmp_path, ["abc", "d"], pad_to_multiple_of=4)[0]
    assert (row.attention_lengths, row.padding, len(row.input_ids)) == ((4, 2), 2, 8)


@pytest.mark.parametrize(
    ("overlong", "texts", "lost"),
    [("split", ["abcdefgh", "ijk$lm$", "no$"], 0), ("truncate", ["abcdefgh", "lm$no$"], 4), ("drop", ["lm$no$"], 12)],
)
def test_documents_longer_than_a_row(tmp_path: Path, overlong: str, texts: list[str], lost: int) -> None:
    """R74: split by default, so that nothing is lost; what is lost by choice is counted, and more than allowed stops."""
    options = {} if overlong == "split" else {"overlong": overlong}
    rows = (
        packed(tmp_path, ["abcdefghijk", "lm", "no"], max_lost_tokens=50, **options)
        if lost
        else packed(tmp_path, ["abcdefghijk", "lm", "no"])
    )
    assert texts_of(rows) == texts
    assert (rows.ledger.lost, rows.ledger.row_tokens) == (lost, 18 - lost)
    assert rows.ledger.split_documents == int(overlong == "split")
    assert trained_of(rows)[0][0] == "."
    if lost:
        with pytest.raises(UserError, match=f"overlong: {overlong} would lose {lost} of 18 tokens"):
            packed(tmp_path, ["abcdefghijk", "lm", "no"], **options)


def test_max_rows_keeps_the_fullest(tmp_path: Path) -> None:
    """Reading stops where the wanted rows could be full; the rest is counted as unused."""
    rows = packed(tmp_path, ["abc", "defghi", "jklmnop", "q", "r"], max_rows=2)
    assert texts_of(rows) == ["defghi$", "jklmnop$"]
    assert (rows.ledger.unused, rows.ledger.documents, rows.ledger.stopped) == (4, 3, True)


def test_files_of_waiting_tokens_are_gone(tmp_path: Path) -> None:
    packed(tmp_path, ["abc", "d"])
    with pytest.raises(UserError, match="no row at all"):
        packed(tmp_path, [""])
    names = sorted(path.name for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith("."))
    assert names == ["index.json", "rows.npy", "segments.npy", "tokens.u32"]


KINDS = {"bfd": BestFit, "rows": OnePerDocument}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlong", ["split", "truncate", "drop"])
@settings(max_examples=40, deadline=None)
@given(
    documents=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    capacity=st.integers(1, 25),
    max_rows=st.none() | st.integers(1, 4),
    data=st.data(),
)
def test_every_token_has_one_fate(
    kind: str,
    overlong: str,
    documents: list[int],
    capacity: int,
    max_rows: int | None,
    data: st.DataObject,
    tmp_path_factory: Any,
) -> None:
    """P6, for documents that come whole or in pieces (`bfd`), and for packed records of several (both)."""
    store = StoreWriter(tmp_path_factory.getbasetemp() / "stores")
    cutter: RowCutter = KINDS[kind](store, capacity, max_rows, overlong)  # type: ignore[abstract]
    records, left = [], list(documents)
    while left:
        size = data.draw(st.integers(1, len(left))) if kind == "rows" or data.draw(st.booleans()) else 1
        records.append([left.pop(0) for _ in range(size)])
    taken = 0
    for number, lengths in enumerate(records):
        ids = np.arange(taken, taken + sum(lengths), dtype=np.uint32)
        several = len(lengths) > 1 or kind == "rows"
        document = Document("here", lengths=np.array(lengths) if several else None)
        cut = 0 if several else data.draw(st.integers(0, len(ids) - 1))
        for start, stop in ((0, cut), (cut, len(ids))):
            if stop > start:
                cutter.add(Piece(document, number, ids[start:stop], ids[start:stop] % 5 != 0, start == 0, stop == len(ids)))
        taken += len(ids)
        if cutter.full:
            break
    count = cutter.finish()
    store.commit(store.folder.parent / store.folder.name.replace(".writing", "done"), {})
    written = open_store(store.folder.parent / store.folder.name.replace(".writing", "done"))
    assert written is not None
    tally, tokens = cutter.tally, np.asarray(written.tokens)
    assert len(tokens) == tally.trained + tally.masked
    assert len(tokens) + tally.dropped + tally.truncated + tally.unused == taken
    assert count <= (max_rows or count)
    sizes = np.diff(written.rows)
    assert len(sizes) == count
    assert not count or sizes.max() <= capacity
    found = tokens & ~MASKED
    assert len(np.unique(found)) == len(found)
    # Every stretch is consecutive tokens of one document, its first one masked, and of the others those that came masked.
    opens = set(np.cumsum([0, *documents]).tolist())
    for start, stop in itertools.pairwise([*written.segments.tolist(), len(tokens)]):
        stretch = found[start:stop]
        assert np.array_equal(stretch, np.arange(stretch[0], stretch[0] + len(stretch)))
        assert not opens & set(stretch[1:].tolist())
        assert len(stretch) <= capacity
    masked = np.zeros(len(tokens), bool)
    masked[written.segments] = True
    assert np.array_equal(tokens >= MASKED, masked | (found % 5 == 0))
    whole = sum(length <= capacity for length in documents)
    kept = {int(found[start]) for start in written.segments} & opens
    if overlong == "split" and max_rows is None:
        assert len(kept) == len(documents)
        assert len(written.segments) - len(documents) == sum((length - 1) // capacity for length in documents) or kind == "rows"
        assert tally.split_documents == len(documents) - whole


# --- rows that were packed elsewhere ----------------------------------------------------------------------------------------


def records(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


IDS = [70, 71, 72, 73, 74, 75, 76]


@pytest.mark.parametrize(
    "columns", [{"position_ids": [0, 1, 2, 0, 0, 1, 2]}, {"seq_lengths": [3, 1, 3]}, {"seq_lengths": [3, 1, 3], "labels": IDS}]
)
@pytest.mark.parametrize("form", ["jsonl", "list", "parquet"])
def test_packed_records_keep_their_documents(tmp_path: Path, columns: dict[str, Any], form: str) -> None:
    record: Any = {"input_ids": IDS, **columns}
    data: Any = [record, record]
    if form == "jsonl":
        data = records(tmp_path / "d.jsonl", record, record)
    elif form == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        data = str(tmp_path / "d.parquet")
        pq.write_table(pa.Table.from_pylist([record, record]), data)
    rows = prepare(tmp_path / "c", data, packing=False)
    assert len(rows) == 2
    assert rows[1].attention_lengths == rows[1].document_lengths == (3, 1, 3)
    assert rows[1].input_ids.tolist() == IDS
    assert rows[1].labels.tolist() == [IGNORED, 71, 72, IGNORED, IGNORED, 75, 76]
    assert (rows.ledger.documents, rows.ledger.longest_document) == (6, 3)


def test_a_longer_record_is_split_between_documents(tmp_path: Path) -> None:
    data = [{"input_ids": list(range(70, 80)), "seq_lengths": [3, 2, 4, 1]}]
    rows = prepare(tmp_path, data, packing=False, max_length=6)
    assert [row.attention_lengths for row in rows] == [(3, 2), (4, 1)]
    assert np.array_equal(ids_of(rows), np.arange(70, 80))
    assert rows.ledger.split_documents == 0
    rows = prepare(tmp_path, data, packing=False, max_length=3)
    assert [row.attention_lengths for row in rows] == [(3,), (2,), (3,), (1, 1)]
    assert rows.ledger.split_documents == 1
    lost = {"packing": False, "max_length": 6, "max_lost_tokens": 100}
    rows = prepare(tmp_path, data, overlong="truncate", **lost)
    assert [row.attention_lengths for row in rows] == [(3, 2, 1)]
    assert (rows.ledger.truncated, rows.ledger.truncated_documents) == (4, 2)
    rows = prepare(tmp_path, [*data, {"input_ids": [70, 71, 72], "seq_lengths": [1, 2]}], overlong="drop", **lost)
    assert [row.attention_lengths for row in rows] == [(1, 2)]
    assert (rows.ledger.dropped, rows.ledger.dropped_documents) == (10, 4)


def test_packed_records_are_not_joined_but_packed_anew(tmp_path: Path) -> None:
    """R24: with masks the documents cannot see each other, so joining them says what it would do; `bfd` takes documents."""
    data = [{"input_ids": [70, 71, 72], "seq_lengths": [1, 2]}, {"input_ids": [80, 81, 82, 83, 84], "seq_lengths": [5]}]
    with pytest.raises(UserError, match=r"(?s)item 0 .*see each other.*packing: false.*packing_strategy: bfd"):
        prepare(tmp_path, data)
    rows = packed(tmp_path, data)
    assert [row.attention_lengths for row in rows] == [(1, 2, 5)]
    assert rows[0].input_ids.tolist() == [70, 71, 72, 80, 81, 82, 83, 84]


# --- several rows in one forward --------------------------------------------------------------------------------------------


def test_joined_rows_see_nothing_of_each_other(tmp_path: Path) -> None:
    rows = [
        Row(np.array([1, 2, 3, 0]), np.array([1, 2, 3, IGNORED]), (3,), 1),
        Row(np.array([4, 5, 6]), np.array([IGNORED, 5, 6]), (1, 2), 0, (1, 2)),
        Row(np.array([7, 8, 0, 0]), np.array([IGNORED, 8, IGNORED, IGNORED]), (1, 1), 2),
    ]
    one = join(rows)
    assert one.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 0, 0]
    assert one.labels.tolist() == [IGNORED, 2, 3, IGNORED, 5, 6, IGNORED, 8, IGNORED, IGNORED]
    assert one.document_lengths == (3, 1, 2, 1, 1)
    assert one.attention_lengths == (3, 1, 2, 2)
    assert one.padding == 2
    assert rows[0].labels.tolist() == [1, 2, 3, IGNORED]
    alone = join(rows[2:])
    assert (alone.input_ids.tolist(), alone.attention_lengths, alone.padding) == ([7, 8, 0, 0], (2,), 2)


@pytest.mark.parametrize("form", ["list", "jsonl"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_column_that_the_first_record_lacks_is_not_lost(tmp_path: Path, form: str, first: int) -> None:
    """Which record comes first decides nothing: documents of a later one would see each other, and masked tokens be trained."""
    plain = {"input_ids": [11, 12, 13, 14, 15, 16]}
    rich = plain | {"position_ids": [0, 1, 2, 0, 1, 2], "labels": [-100, 12, -100, -100, 15, 16]}
    records = [plain, rich] if first == 0 else [rich, plain]
    data: Any = records
    if form == "jsonl":
        data = str(tmp_path / "rows.jsonl")
        Path(data).write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = prepare(tmp_path / "rows", data, packing=False, max_length=16)
    found = {rows[number].attention_lengths: rows[number].labels.tolist() for number in range(2)}
    assert found == {(6,): [IGNORED, 12, 13, 14, 15, 16], (3, 3): [IGNORED, 12, IGNORED, IGNORED, 15, 16]}


def test_positions_of_one_document_are_no_packed_row(tmp_path: Path) -> None:
    record = {"input_ids": [11, 12, 13], "position_ids": [0, 1, 2]}
    assert prepare(tmp_path, [record, record], max_length=6)[0].attention_lengths[0] >= 3
    with pytest.raises(UserError, match="jump to -1 at token 0"):
        prepare(tmp_path, [record | {"position_ids": [-1, 0, 1]}], packing=False, max_length=6)
