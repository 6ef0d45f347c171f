"""`packing_strategy: bfd`: whole documents put together into rows, each seeing only itself.

Joining without masks (`wrapped`) fills every row and cuts documents where a row ends. Here documents stay whole: sorted by
length, each goes into the fullest row that still has room for it (best-fit decreasing), over the whole data set and not batch
by batch. Nothing is discarded: of a document longer than a row, full rows are cut off and the rest is packed like a document
(or what else `overlong` says). Rows are ordered by their first document and hold their documents in the order of the data, so
that the order of training stays the data's and not that of lengths.

A place is found in a map of two levels of bits instead of a search over rows: 300,000 documents take a second. Tokens wait in a
file beside the store until all lengths are known (4 bytes each).

Sources: best-fit decreasing for sequences, Ding et al. 2024, "Fewer Truncations Improve Language Modeling", arXiv 2404.10830.
The name is TRL's, whose `bfd` cuts off what does not fit a row.
"""

from __future__ import annotations

from array import array
from typing import BinaryIO

import numpy as np
from typing_extensions import override

from megaspan.data.cutrows import RowCutter
from megaspan.data.tokenise import Piece
from megaspan.data.tokenstore import MASKED, StoreWriter

_WAITING = "waiting.u32"


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Which row each document goes into by best-fit decreasing: int64 [documents], rows numbered by their first document.

    Args:
        lengths: int64 [documents], each from 1 to `capacity`; of equal ones the first comes first.
        capacity: tokens of a row.
    """
    order, rooms = np.argsort(-lengths, kind="stable"), _Rooms(capacity)
    found: list[int] = []
    rows = 0
    for length in lengths[order].tolist():
        place = rooms.take(length)
        if place is None:
            place, rows = (capacity, rows), rows + 1
        room, row = place
        found.append(row)
        rooms.put(room - length, row)
    by_document = np.empty(len(lengths), np.int64)
    by_document[order] = found
    _, first, number = np.unique(by_document, return_index=True, return_inverse=True)
    ranks = np.empty(rows, np.int64)
    ranks[np.argsort(first)] = np.arange(rows)
    return ranks[number]


class _Rooms:
    """Rows by the room that is left in them; finds the least that is enough."""

    def __init__(self, capacity: int) -> None:
        self._shift = (capacity.bit_length() + 1) // 2
        self._groups = [0] * ((capacity >> self._shift) + 1)  # a bit for each room in use
        self._used = 0  # a bit for each group that has one
        self._rows: dict[int, list[int]] = {}

    def put(self, room: int, row: int) -> None:
        """A row with so much room; a full one is forgotten."""
        if not room:
            return
        rows = self._rows.setdefault(room, [])
        if not rows:
            group = room >> self._shift
            self._groups[group] |= 1 << (room - (group << self._shift))
            self._used |= 1 << group
        rows.append(row)

    def take(self, length: int) -> tuple[int, int] | None:
        """Takes out a row with the least room of at least `length`: its room and the row, or None."""
        group = length >> self._shift
        here = self._groups[group] >> (length - (group << self._shift))
        if here:
            room = length + _lowest(here)
        else:
            above = self._used >> (group + 1)
            if not above:
                return None
            group += 1 + _lowest(above)
            room = (group << self._shift) + _lowest(self._groups[group])
        rows = self._rows[room]
        row = rows.pop()
        if not rows:
            self._groups[group] ^= 1 << (room - (group << self._shift))
            if not self._groups[group]:
                self._used ^= 1 << group
        return room, row


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


class BestFit(RowCutter):
    """Packs whole documents into rows once all of them are there.

    With `max_rows` it reads as many tokens as those rows could hold, and keeps the fullest.

    Args:
        overlong: what happens to a document longer than `max_length`: split, truncate or drop.
    """

    def __init__(self, store: StoreWriter, max_length: int, max_rows: int | None, overlong: str) -> None:
        super().__init__(store, max_length, max_rows)
        self._overlong = overlong
        self._file: BinaryIO = (store.folder / _WAITING).open("wb")
        self._starts: array[int] = array("q")  # of each part in the file
        self._lengths: array[int] = array("q")
        self._waiting = self._taken = 0  # tokens in the file; those of parts
        self._open = self._seen = 0  # where the open document begins in the file; its tokens

    @override
    def needed(self) -> int | None:
        return None if self._max_rows is None else max(0, self._max_rows * self._length - self._taken)

    @override
    def add(self, piece: Piece) -> None:
        raw = piece.ids if piece.trained is None else np.where(piece.trained, piece.ids, piece.ids | MASKED)
        self._file.write(np.ascontiguousarray(raw, "<u4").tobytes())
        if piece.first:
            self._open, self._seen = self._waiting, 0
        self._waiting += len(raw)
        self._seen += len(raw)
        if not piece.last:
            return
        lengths = [self._seen] if piece.document.lengths is None else piece.document.lengths.tolist()
        at = self._open
        for length in lengths:
            self._document(at, length)
            at += length
        self.full = self.needed() == 0

    def _document(self, start: int, length: int) -> None:
        """A whole document that lies in the file."""
        if length > self._length and self._overlong == "drop":
            self.tally.dropped += length
            self.tally.dropped_documents += 1
            return
        if length > self._length and self._overlong == "truncate":
            self.tally.truncated += length - self._length
            self.tally.truncated_documents += 1
            length = self._length
        self.tally.split_documents += int(length > self._length)
        for at in range(0, length, self._length):
            self._starts.append(start + at)
            self._lengths.append(min(self._length, length - at))
            self._taken += self._lengths[-1]

    @override
    def finish(self) -> int:
        self._file.close()
        path = self._store.folder / _WAITING
        if len(self._lengths):
            self._pack(np.memmap(path, dtype="<u4", mode="r"), np.frombuffer(self._lengths, np.int64))
        path.unlink()
        return super().finish()

    def _pack(self, waiting: np.ndarray, lengths: np.ndarray) -> None:
        rows, starts = best_fit(lengths, self._length), np.frombuffer(self._starts, np.int64)
        sizes = np.bincount(rows, weights=lengths).astype(np.int64)
        kept = np.arange(len(sizes))
        if self._max_rows is not None and len(sizes) > self._max_rows:
            kept = np.sort(np.argsort(-sizes, kind="stable")[: self._max_rows])
            self.tally.unused += int(sizes.sum() - sizes[kept].sum())
            self.full = True
        order = np.argsort(rows, kind="stable")
        ends = np.cumsum(np.bincount(rows))
        for row in kept.tolist():
            parts = order[ends[row - 1] if row else 0 : ends[row]]
            spans = zip(starts[parts].tolist(), lengths[parts].tolist(), strict=True)
            raw = np.concatenate([waiting[start : start + length] for start, length in spans])
            begins = np.cumsum(lengths[parts]) - lengths[parts]
            self._put_row(raw & ~MASKED, raw < MASKED, begins)
