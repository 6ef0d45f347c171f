"""One preparation of rows: read, tokenise, cut, store, and account for every token.

Tokens go to disk as they come: at most one document, one batch of text and one block of the store are in memory, so a corpus of
any size is prepared on any machine. What cannot be trained on stops here, before a model is loaded.
"""

from __future__ import annotations

import errno
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megaspan.data.cutrows import OnePerDocument, RowCutter, Wrapped
from megaspan.data.ledger import SourceTally, TokenLedger
from megaspan.data.packed import BestFit
from megaspan.data.readers import Source
from megaspan.data.records import Document
from megaspan.data.tokenise import Piece, Tokeniser
from megaspan.data.tokenstore import MASKED, Store, StoreWriter, open_store
from megaspan.human import UserError, format_tokens

if TYPE_CHECKING:
    from megaspan.config import SFTConfig

_PROGRESS_SECONDS = 10.0
_SAMPLES = 3
_SAMPLE_TOKENS = 24


@dataclass(frozen=True)
class Preparation:
    """One preparation: everything that it needs, and `run`."""

    config: SFTConfig
    tokenizer: Any | None
    eos_id: int | None
    sources: list[Source]
    cache: Path
    report: Callable[[str], None]

    def run(self, key: str | None) -> Store:
        """Reads, tokenises, cuts and stores; the complete store. Without a key the content is the name."""
        tokeniser = Tokeniser(self.tokenizer, self.eos_id, self.config.dataset_num_proc)
        try:
            writer = StoreWriter(self.cache)
        except OSError as error:
            raise UserError(f"rows cannot be kept in {self.cache}: {error.strerror}") from error
        try:
            cutter = self._cutter(writer)
            counts = self._feed(tokeniser, cutter)
            rows = cutter.finish()
            ledger = self._ledger(cutter, counts, rows)
            described = json.dumps([writer.content, ledger.to_dict()])
            fingerprint = key or hashlib.sha256(described.encode()).hexdigest()[:32]
            self._check_trained(writer, ledger)
            target = self.cache / fingerprint
            writer.commit(
                target,
                {
                    "fingerprint": fingerprint,
                    "max_id": cutter.tally.max_id,
                    "separate": not isinstance(cutter, Wrapped),
                    "notes": tokeniser.notes,
                    "ledger": ledger.to_dict(),
                },
            )
        except OSError as error:
            writer.abandon()
            if isinstance(error, PermissionError):
                raise UserError(f"{error.filename} may not be read", do="Check its permissions") from error
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(
                f"the disk of {self.cache} is full: tokens take 4 bytes each", do="Free some space there"
            ) from error
        except BaseException:
            writer.abandon()
            raise
        finally:
            tokeniser.close()
        store = open_store(target)
        if store is None:
            raise UserError(f"the rows written to {target} cannot be read back", do="Check that disk")
        return store

    def _cutter(self, writer: StoreWriter) -> RowCutter:
        config = self.config
        if config.packing and config.packing_strategy == "bfd":
            return BestFit(writer, config.max_length, config.max_rows, config.overlong)
        if config.packing:
            return Wrapped(writer, config.max_length, config.max_rows)
        return OnePerDocument(writer, config.max_length, config.max_rows, config.overlong)

    def _feed(self, tokeniser: Tokeniser, cutter: RowCutter) -> Counts:
        """Every piece goes to the cutter, until it is full; what was read is counted."""
        counts = Counts(self.config.max_length, [SourceTally(source.name) for source in self.sources])
        spoken = time.monotonic()
        for piece in tokeniser.pieces(self._documents(), cutter.needed):
            if counts.take(piece, tokeniser.special_ids):
                cutter.add(piece)
            if cutter.full:
                break
            if time.monotonic() - spoken > _PROGRESS_SECONDS:
                spoken = time.monotonic()
                self.report(f"data: {format_tokens(counts.tokens_in)} tokens so far, document {counts.documents + 1:,}")
        counts.close()
        return counts

    def _documents(self) -> Iterator[Document]:
        if not self.config.shuffle_dataset:
            for number, source in enumerate(self.sources):
                for document in source.documents():
                    yield replace(document, source=number)
            return
        sizes = [source.count() or 0 for source in self.sources]
        ends = np.cumsum(sizes)
        for index in np.random.default_rng(order_seed(self.config)).permutation(sum(sizes)).tolist():
            number = int(np.searchsorted(ends, index, side="right"))
            found = self.sources[number].document(index - int(ends[number]) + sizes[number])
            if found is not None:
                yield replace(found, source=number)

    def _ledger(self, cutter: RowCutter, counts: Counts, rows: int) -> TokenLedger:
        for tally, source in zip(counts.sources, self.sources, strict=True):
            tally.skipped = source.skipped.lines()
        cut = cutter.tally
        return TokenLedger(
            max_length=self.config.max_length,
            rows=rows,
            documents=counts.documents,
            empty_documents=counts.empty,
            tokens_in=counts.tokens_in,
            added=counts.in_front + counts.at_end,
            added_in_front=counts.in_front,
            trained=cut.trained,
            masked=cut.masked,
            dropped=cut.dropped + counts.dropped,
            dropped_empty=counts.dropped,
            truncated=cut.truncated,
            unused=cut.unused,
            padding=0,
            split_documents=cut.split_documents,
            truncated_documents=cut.truncated_documents,
            dropped_documents=cut.dropped_documents,
            masked_rows=tuple(cut.masked_rows),
            masked_row_count=cut.masked_row_count,
            stopped=cutter.full,
            sources=tuple(counts.sources),
        )

    def _check_trained(self, writer: StoreWriter, ledger: TokenLedger) -> None:
        """A run in which nothing can be learnt would print a cheerful loss of 0 (R08)."""
        if ledger.trained:
            return
        names = ", ".join(source.name for source in self.sources)
        if not ledger.row_tokens:
            if ledger.dropped_documents:
                longest = ledger.longest_document
                longer = f", or max_length: {longest}" if longest > self.config.max_length else ""  # rows packed elsewhere: no
                raise UserError(
                    f"{names}: no row at all; overlong: {self.config.overlong} leaves out what is longer than max_length, "
                    f"{self.config.max_length:,} tokens, and all of it is; the longest document has {longest:,} "
                    f"({ledger.longest_place})",
                    do=f"Write overlong: split, which keeps all of it, overlong: truncate{longer}",
                )
            left_out = "; ".join(line for source in ledger.sources for line in source.skipped)
            raise UserError(
                f"{names}: no row at all; {ledger.documents:,} documents with text, {ledger.empty_documents:,} empty ones"
                + (f"; {left_out}" if left_out else ""),
                allowed="text with at least one token that is no white space",
                do="Check that the data holds text",
            )
        rows = np.load(writer.folder / "rows.npy")
        tokens = np.memmap(writer.folder / "tokens.u32", dtype="<u4", mode="r")
        samples = [self._sample(tokens[start:end]) for start, end in pairwise(rows[: _SAMPLES + 1])]
        raise UserError(
            f"{names}: nothing to train, all {ledger.row_tokens:,} tokens in {ledger.rows:,} rows are masked; "
            f"for example {'; '.join(samples)}",
            do="Check the labels or masks of the data; the first token of a document and of a row is never trained",
        )

    def _sample(self, row: np.ndarray) -> str:
        ids = [int(token) for token in row[:_SAMPLE_TOKENS] & ~MASKED]
        shown = repr(self.tokenizer.decode(ids)) if self.tokenizer is not None else str(ids)
        return f"{len(row):,} tokens {shown}{' …' if len(row) > _SAMPLE_TOKENS else ''}"


class Counts:
    """What was read, before it is cut: by source, and in all."""

    def __init__(self, max_length: int, sources: list[SourceTally]) -> None:
        self._length = max_length
        self.sources = sources
        self.empty = self.tokens_in = self.in_front = self.at_end = self.dropped = 0
        self._open: Document | None = None
        self._seen = 0

    @property
    def documents(self) -> int:
        """Documents read so far, without the empty ones."""
        return sum(source.documents for source in self.sources)

    def take(self, piece: Piece, special: frozenset[int]) -> bool:
        """Counts a piece; False when it is a whole document that holds nothing to learn."""
        tokens = len(piece.ids)
        self.tokens_in += tokens - piece.in_front - piece.at_end
        self.in_front += piece.in_front
        self.at_end += piece.at_end
        if piece.first and piece.last and _only(piece.ids, special):
            self.empty += 1
            self.dropped += tokens
            return False
        if piece.document.lengths is not None:
            for length in piece.document.lengths.tolist():
                self.sources[piece.document.source].count(length, piece.document.place, self._length)
            return True
        if piece.first:
            self._open, self._seen = piece.document, 0
        self._seen += tokens
        if piece.last:
            self.close()
        return True

    def close(self) -> None:
        """Counts the open document, as far as it was read."""
        if self._open is not None:
            self.sources[self._open.source].count(self._seen, self._open.place, self._length)
        self._open = None


def _only(ids: np.ndarray, special: frozenset[int]) -> bool:
    if not len(ids):
        return True
    return int(ids[0]) in special and bool(np.isin(ids, np.fromiter(special, np.int64, len(special))).all())


def order_seed(config: SFTConfig) -> int:
    """Seed of the order of the documents."""
    return config.seed if config.data_seed is None else config.data_seed


def check_lost(config: SFTConfig, ledger: TokenLedger) -> None:
    """Nothing is lost silently: more than `max_lost_tokens` stops (a share up to 1, a count above)."""
    total = ledger.tokens_in + ledger.added
    limit = config.max_lost_tokens
    allowed = limit * total if limit <= 1 else limit
    if ledger.lost <= allowed:
        return
    documents = ledger.truncated_documents + ledger.dropped_documents
    raise UserError(
        f"overlong: {config.overlong} would lose {ledger.lost:,} of {total:,} tokens ({100 * ledger.lost / total:.2f} %), in "
        f"{documents:,} of {ledger.documents:,} documents; the longest has {ledger.longest_document:,} "
        f"({ledger.longest_place}), max_length is {config.max_length:,}",
        allowed=f"max_lost_tokens, {f'{100 * limit:g} %' if limit <= 1 else f'{limit:,.0f} tokens'}",
        do=f"Write overlong: split, max_length: {ledger.longest_document}, or max_lost_tokens: {ledger.lost}",
    )
