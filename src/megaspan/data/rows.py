"""Prepared rows, as training and evaluation see them: ids, labels, and where the documents begin.

A row is cut out of the mapped token store when it is asked for: 16 MiB of int64 ids and labels at a million tokens, and nothing
of size tokens × tokens (a dense mask would be 1 TiB at that length, R31). Rows do not know how they will be sharded, so one
store serves every layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megaspan.data.ledger import TokenLedger
from megaspan.data.tokenstore import MASKED, Store, open_store
from megaspan.human import UserError

IGNORED = -100


@dataclass(frozen=True)
class Row:
    """What one forward sees.

    Attributes:
        input_ids: int64 [T].
        labels: int64 [T], not shifted: the token's own id, or -100 where it is not trained (the first token of the row and of
            every document, tokens that came masked, padding).
        document_lengths: tokens of each document in the row, in order; without the padding.
        padding: tokens at the end that `pad_to_multiple_of` asked for.
        attention_lengths: tokens of each stretch of the row that attends only to itself, in order; without the padding.
            Positions begin anew in each. One, the default, for a row of joined documents, which see each other.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    document_lengths: tuple[int, ...]
    padding: int = 0
    attention_lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        tokens = sum(self.document_lengths)
        if not self.attention_lengths and tokens:
            object.__setattr__(self, "attention_lengths", (tokens,))


def join(rows: Sequence[Row]) -> Row:
    """One packed row of several, which see nothing of each other: `per_device_train_batch_size` rows in one forward.

    No row is padded to another's length. The first token of each has no label, so that none predicts the next one's; what was
    padded inside is dropped, and the last row's padding stays behind.
    """
    if not rows:
        raise ValueError("there is no row to join")
    kept = [len(row.input_ids) - (row.padding if number < len(rows) - 1 else 0) for number, row in enumerate(rows)]
    labels = np.concatenate([row.labels[:length] for row, length in zip(rows, kept, strict=True)])
    labels[np.cumsum([0, *kept[:-1]])] = IGNORED
    return Row(
        np.concatenate([row.input_ids[:length] for row, length in zip(rows, kept, strict=True)]),
        labels,
        tuple(itertools.chain.from_iterable(row.document_lengths for row in rows)),
        rows[-1].padding,
        tuple(itertools.chain.from_iterable(row.attention_lengths for row in rows)),
    )


class Rows:
    """The rows of one split. `rows[i]` is a `Row`; `len(rows)`, iteration and pickling work.

    Args:
        store: the tokens.
        reused: the store was there already.
        pad_to_multiple_of: pad every row to a multiple of this; None pads none.
        pad_id: id of padding tokens.

    Attributes:
        ledger: where every token went.
        fingerprint: hash of everything that shaped the rows (of the tokens themselves where the data has no other identity).
        reused: nothing was tokenised in this start.
        lengths: int64 [rows], tokens of each row without padding.
        max_id: the largest token id.
    """

    def __init__(self, store: Store, *, reused: bool, pad_to_multiple_of: int | None = None, pad_id: int = 0) -> None:
        self._store = store
        self._multiple = pad_to_multiple_of or 1
        self._pad_id = pad_id
        self.reused = reused
        self.fingerprint: str = store.facts["fingerprint"]
        self.max_id: int = store.facts["max_id"]
        self._separate: bool = store.facts.get("separate", False)
        self.lengths = np.diff(store.rows)
        padding = int((-self.lengths % self._multiple).sum())
        self.ledger = replace(TokenLedger.from_dict(store.facts["ledger"]), padding=padding)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def packed(self) -> bool:
        """Whether a row holds several stretches that attend only to themselves."""
        return self._separate and len(self._store.segments) > len(self)

    def heaviest(self, together: int = 1) -> list[int]:
        """The row with most attention of those that are no more than a sixteenth shorter than the longest one.

        Args:
            together: rows that run as one; of several the longest ones.
        """
        if together > 1:
            return [int(row) for row in np.argsort(-self.lengths, kind="stable")[:together]]
        work = self.lengths.astype(np.int64) ** 2
        if self._separate:
            starts = np.asarray(self._store.segments).astype(np.int64)
            squares = np.diff(np.append(starts, self._store.rows[-1])) ** 2
            work = np.add.reduceat(squares, np.searchsorted(starts, self._store.rows[:-1]))
        return [int(np.where(self.lengths >= self.lengths.max() * 15 // 16, work, 0).argmax())]

    def __getitem__(self, index: int) -> Row:
        row, starts = self._cut(index)
        masked = row >= MASKED
        ids = (row & ~MASKED).astype(np.int64)
        labels = np.where(masked, IGNORED, ids)
        padding = -len(ids) % self._multiple
        if padding:
            ids = np.pad(ids, (0, padding), constant_values=self._pad_id)
            labels = np.pad(labels, (0, padding), constant_values=IGNORED)
        lengths = tuple(np.diff(np.append(starts, len(row))).tolist())
        return Row(ids, labels, lengths, padding, lengths if self._separate else (len(row),))

    def unigram_entropy(self, index: int) -> float:
        """Entropy of the row's token frequencies in nats: the loss of a model that knows only how common each token is.

        A first loss above it says that the model reads the text worse than a table of frequencies: the sign of wrong positions.
        """
        row, _ = self._cut(index)
        _, counts = np.unique(row & ~MASKED, return_counts=True)
        share = counts / counts.sum()
        return float(-(share * np.log(share)).sum())

    def _cut(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The raw tokens of a row, and where its documents start in it."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        start, end = (int(border) for border in self._store.rows[index % len(self) :][:2])
        segments = self._store.segments
        first, last = np.searchsorted(segments, (start, end))
        return np.asarray(self._store.tokens[start:end]), np.asarray(segments[first:last]) - start

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_store": self._store.folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        store = open_store(state["_store"])
        if store is None:
            raise UserError(f"the prepared rows in {state['_store']} are gone", do="Start again to prepare them")
        self.__dict__.update(state, _store=store)
