"""Rows do not depend on how a document arrives: whole, or in the pieces of a long one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.data.cutrows import OnePerDocument, RowCutter, RowTally, Wrapped
from megaspan.data.records import Document
from megaspan.data.tokenise import Piece


class Memory:
    """A store that keeps its tokens in a list."""

    def __init__(self) -> None:
        self.parts: list[np.ndarray] = []
        self.tokens = 0
        self.arrays: tuple[list[int], list[int]] = ([], [])

    def append(self, tokens: np.ndarray) -> None:
        self.parts.append(tokens)
        self.tokens += len(tokens)

    def finish(self, rows: Any, segments: Any) -> None:
        self.arrays = rows.tolist(), segments.tolist()


def cut(kind: str, documents: list[int], max_length: int, max_rows: int | None, cuts: list[int]) -> tuple[Any, RowTally, int]:
    """Rows of documents of these lengths, each given in pieces that end at `cuts`; and how many tokens were taken."""
    store: Any = Memory()
    cutter: RowCutter = (
        Wrapped(store, max_length, max_rows) if kind == "wrapped" else OnePerDocument(store, max_length, max_rows, kind)
    )
    taken = 0
    for number, length in enumerate(documents):
        ids = np.arange(taken, taken + length, dtype=np.uint32)
        trained = ids % 5 != 0
        ends = sorted({end for end in cuts if end < length} | {length})
        for start, end in zip([0, *ends], ends, strict=False):
            first, last = start == 0, end == length
            needed = cutter.needed()
            assert needed is None or needed >= 0
            taken += end - start
            cutter.add(Piece(Document("here"), number, ids[start:end], trained[start:end], first, last))
            if cutter.full:
                break
        if cutter.full:
            break
    rows = cutter.finish()
    assert rows == len(store.arrays[0]) - 1
    assert max_rows is None or rows <= max_rows
    tokens = np.concatenate(store.parts) if store.parts else np.empty(0, np.uint32)
    return (tokens.tolist(), *store.arrays), cutter.tally, taken


@pytest.mark.parametrize("kind", ["wrapped", "split", "truncate", "drop"])
@settings(max_examples=150, deadline=None)
@given(
    documents=st.lists(st.integers(1, 40), max_size=8),
    max_length=st.integers(1, 12),
    max_rows=st.none() | st.integers(1, 6),
    cuts=st.lists(st.integers(1, 39), max_size=8),
)
def test_pieces_make_no_difference(
    kind: str, documents: list[int], max_length: int, max_rows: int | None, cuts: list[int]
) -> None:
    whole, counts, taken = cut(kind, documents, max_length, max_rows, [])
    parts, partly, taken_in_parts = cut(kind, documents, max_length, max_rows, cuts)
    assert parts == whole
    assert taken_in_parts <= taken
    if max_rows is None or kind in ("truncate", "drop"):
        assert partly == counts
    for tally, got in ((counts, taken), (partly, taken_in_parts)):
        assert tally.trained + tally.masked == len(whole[0])
        assert len(whole[0]) + tally.dropped + tally.truncated + tally.unused == got


@settings(max_examples=60, deadline=None)
@given(documents=st.lists(st.integers(1, 40), min_size=1, max_size=8), max_length=st.integers(1, 12))
def test_documents_that_are_split_or_cut_are_counted(documents: list[int], max_length: int) -> None:
    longer = sum(length > max_length for length in documents)
    assert cut("split", documents, max_length, None, [])[1].split_documents == longer
    assert cut("truncate", documents, max_length, None, [])[1].truncated_documents == longer
    assert cut("drop", documents, max_length, None, [])[1].dropped_documents == longer
    ends = np.cumsum(documents)
    crossing = sum((end - 1) // max_length > (end - length) // max_length for length, end in zip(documents, ends, strict=True))
    assert cut("wrapped", documents, max_length, None, [])[1].split_documents == crossing


def test_a_row_without_a_label_is_named(tmp_path: Path) -> None:
    tally = cut("split", [1, 2, 1], 4, None, [])[1]
    assert (tally.masked_rows, tally.masked_row_count) == ([0, 2], 2)
