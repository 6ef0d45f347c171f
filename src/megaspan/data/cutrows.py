"""Pieces of documents → rows in a store: joined until a row is full, or one document a row. (Packed: `packed.py`.)

`packing_strategy: wrapped` fills every row to `max_length`: the rest of a document continues in the next row, so no token is
lost, and only the last row is shorter. Without packing a document has its own row; a longer one is split into rows, truncated
or dropped, each counted. A record that holds several documents, packed elsewhere, is a row as it is; a longer one is split
between documents. In every case the first token of a document and of a row gets no label: nothing before it in its row
says what it should be (R30). Where documents begin with a beginning-of-text token that is the one, and their first word is
trained.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from typing_extensions import override

from megaspan.data.tokenise import Piece
from megaspan.data.tokenstore import MASKED, StoreWriter
from megaspan.human import UserError

_SHOWN_ROWS = 20


@dataclass
class RowTally:
    """Counts of tokens and rows while they are cut; the ledger's names."""

    trained: int = 0
    masked: int = 0
    dropped: int = 0
    truncated: int = 0
    unused: int = 0
    split_documents: int = 0
    truncated_documents: int = 0
    dropped_documents: int = 0
    masked_rows: list[int] = field(default_factory=list)
    masked_row_count: int = 0
    max_id: int = -1


class RowCutter(ABC):
    """Cuts a stream of pieces into rows.

    Args:
        store: where the rows go.
        max_length: tokens in a full row.
        max_rows: rows wanted; None is all.

    Attributes:
        full: all wanted rows are there; no further piece may be added.
        tally: what happened to the tokens so far.
    """

    def __init__(self, store: StoreWriter, max_length: int, max_rows: int | None) -> None:
        self._store = store
        self._length = max_length
        self._max_rows = max_rows
        self._rows: array[int] = array("q")
        self._segments: array[int] = array("q")
        self._open_trained = 0  # tokens trained in the newest row
        self.full = False
        self.tally = RowTally()

    @abstractmethod
    def add(self, piece: Piece) -> None:
        """Takes the next piece."""

    @abstractmethod
    def needed(self) -> int | None:
        """At most so many further tokens will be used; None when all will."""

    def finish(self) -> int:
        """Closes the last row and the store's arrays; the number of rows."""
        rows = len(self._rows)
        if rows:
            self._close_row()
        self._rows.append(self._store.tokens)
        self._store.finish(self._rows, self._segments)
        return rows

    def _close_row(self) -> None:
        if not self._open_trained:
            self.tally.masked_row_count += 1
            if len(self.tally.masked_rows) < _SHOWN_ROWS:
                self.tally.masked_rows.append(len(self._rows) - 1)
        self._open_trained = 0

    def _put(self, ids: np.ndarray, trained: np.ndarray | None, begins: bool, row_starts: np.ndarray) -> None:
        """Writes tokens of one document.

        Args:
            ids: uint32 [T].
            trained: bool [T] or None.
            begins: the document starts here.
            row_starts: int64, positions in `ids` where a new row starts, ascending.
        """
        if not len(ids):
            return
        mask = np.zeros(len(ids), bool) if trained is None else ~trained
        mask[row_starts] = True
        borders = row_starts
        if begins and 0 not in row_starts[:1]:
            mask[0] = True
            borders = np.append(0, row_starts)
        at = self._store.tokens
        self._segments.frombytes((borders.astype(np.int64) + at).tobytes())
        bounds = [*row_starts.tolist(), len(ids)]
        self._open_trained += bounds[0] - int(np.count_nonzero(mask[: bounds[0]]))
        for start, end in pairwise(bounds):
            if len(self._rows):
                self._close_row()
            self._rows.append(at + start)
            self._open_trained = end - start - int(np.count_nonzero(mask[start:end]))
        self._append(ids, mask)

    def _put_row(self, ids: np.ndarray, trained: np.ndarray | None, begins: np.ndarray) -> None:
        """Writes a whole row of documents.

        Args:
            ids: uint32 [T].
            trained: bool [T] or None.
            begins: int64, where its documents begin, ascending; 0 first.
        """
        mask = np.zeros(len(ids), bool) if trained is None else ~trained
        mask[begins] = True
        at = self._store.tokens
        self._segments.frombytes((begins.astype(np.int64) + at).tobytes())
        if len(self._rows):
            self._close_row()
        self._rows.append(at)
        self._open_trained = self._append(ids, mask)

    def _append(self, ids: np.ndarray, mask: np.ndarray) -> int:
        """Counts and stores tokens; how many of them are trained."""
        masked = int(np.count_nonzero(mask))
        self.tally.masked += masked
        self.tally.trained += len(ids) - masked
        self.tally.max_id = max(self.tally.max_id, int(ids.max()))
        self._store.append(np.where(mask, ids | MASKED, ids))
        return len(ids) - masked


class Wrapped(RowCutter):
    """Joins documents until a row is full and continues in the next one."""

    _crossed = False  # the open document lies in more than one row

    @override
    def needed(self) -> int | None:
        return None if self._max_rows is None else self._max_rows * self._length - self._store.tokens

    @override
    def add(self, piece: Piece) -> None:
        if piece.document.lengths is not None:
            raise UserError(
                f"{piece.document.place} is a row of documents that was packed elsewhere; joined, they would see each other",
                found="packing_strategy: wrapped",
                do="Paste one of these:\n  packing: false            # rows stay as they are, documents see only themselves\n"
                "  packing_strategy: bfd     # the documents are packed anew\n"
                "  columns: [input_ids]      # in datasets: joined without masks",
            )
        room = self.needed()
        taken = len(piece.ids) if room is None else min(room, len(piece.ids))
        starts = np.arange(-self._store.tokens % self._length, taken, self._length, dtype=np.int64)
        self._crossed = self._crossed and not piece.first
        if not self._crossed and (starts > 0 if piece.first else starts >= 0).any():
            self._crossed = True
            self.tally.split_documents += 1
        self._put(piece.ids[:taken], None if piece.trained is None else piece.trained[:taken], piece.first, starts)
        self.tally.unused += len(piece.ids) - taken
        self.full = self.needed() == 0


class OnePerDocument(RowCutter):
    """Gives every document its own row, or rows.

    Args:
        overlong: what happens to a document longer than `max_length`: split, truncate or drop.
    """

    def __init__(self, store: StoreWriter, max_length: int, max_rows: int | None, overlong: str) -> None:
        super().__init__(store, max_length, max_rows)
        self._overlong = overlong
        self._seen = 0  # tokens of the open document
        self._held: list[Piece] = []  # the open document under `drop`, never more than one row of it

    @override
    def needed(self) -> int | None:
        if self._max_rows is None:
            return None
        return (self._max_rows - len(self._rows)) * self._length + -self._seen % self._length

    @override
    def add(self, piece: Piece) -> None:
        if piece.document.lengths is not None:
            self._packed(piece, piece.document.lengths)
            return
        if piece.first:
            self._seen = 0
        if self._overlong == "split":
            self._split(piece)
        elif self._overlong == "truncate":
            self._truncate(piece)
        else:
            self._drop(piece)
        done = self._max_rows is not None and len(self._rows) == self._max_rows
        self.full = done and (piece.last or (self._overlong == "split" and self._seen % self._length == 0))

    def _packed(self, piece: Piece, lengths: np.ndarray) -> None:
        """A row of documents that was packed elsewhere: as it is where it fits, else by the rules for overlong documents."""
        total, self._seen = len(piece.ids), 0
        if total > self._length and self._overlong == "drop":
            self.tally.dropped += total
            self.tally.dropped_documents += len(lengths)
            return
        if total > self._length and self._overlong == "truncate":
            ends = np.cumsum(lengths)
            self.tally.truncated += total - self._length
            self.tally.truncated_documents += int((ends > self._length).sum())
            lengths = np.minimum(lengths, np.maximum(self._length - (ends - lengths), 0))
            lengths = lengths[lengths > 0]
        self.tally.split_documents += int((lengths > self._length).sum())
        start = 0
        for row in _rows_of(lengths.tolist(), self._length):
            part = slice(start, start + sum(row))
            start = part.stop
            if len(self._rows) == self._max_rows:
                self.tally.unused += sum(row)
                continue
            begins = np.cumsum([0, *row[:-1]])
            self._put_row(piece.ids[part], None if piece.trained is None else piece.trained[part], begins)
        self.full = len(self._rows) == self._max_rows

    def _split(self, piece: Piece) -> None:
        room = self.needed()
        taken = len(piece.ids) if room is None else min(room, len(piece.ids))
        starts = np.arange(-self._seen % self._length, taken, self._length, dtype=np.int64)
        if self._seen <= self._length < self._seen + taken:
            self.tally.split_documents += 1
        self._write(piece, taken, starts)
        self._seen += taken
        self.tally.unused += len(piece.ids) - taken

    def _truncate(self, piece: Piece) -> None:
        taken = min(len(piece.ids), max(0, self._length - self._seen))
        self._write(piece, taken, np.zeros(int(piece.first), np.int64))
        if self._seen <= self._length < self._seen + len(piece.ids):
            self.tally.truncated_documents += 1
        self._seen += len(piece.ids)
        self.tally.truncated += len(piece.ids) - taken

    def _drop(self, piece: Piece) -> None:
        self._seen += len(piece.ids)
        if self._seen <= self._length:
            self._held.append(piece)
            if piece.last:
                for held in self._held:
                    self._write(held, len(held.ids), np.zeros(int(held.first), np.int64))
                self._held.clear()
            return
        self.tally.dropped += len(piece.ids) + sum(len(held.ids) for held in self._held)
        self._held.clear()
        self.tally.dropped_documents += int(piece.last)

    def _write(self, piece: Piece, taken: int, starts: np.ndarray) -> None:
        self._put(piece.ids[:taken], None if piece.trained is None else piece.trained[:taken], piece.first, starts)


def _rows_of(lengths: list[int], capacity: int) -> list[list[int]]:
    """Documents in their order, in as few rows as that allows; one longer than a row begins a row and fills what it can."""
    rows: list[list[int]] = []
    room = 0
    for length in lengths:
        if length > room or not rows:
            rows.append([])
            room = capacity
        while length > room:
            rows[-1].append(room)
            rows.append([])
            length, room = length - room, capacity
        rows[-1].append(length)
        room -= length
    return rows
