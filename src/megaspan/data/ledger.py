"""The token ledger: where every token went, from the files to the rows.

Silent loss is the most common fault of long-context data: a default limit of 1,024 tokens, or a packer that drops what does
not fit, which once cost 99.8 % of the tokens of long code files without a word (trl#2400, #4554). So every token that was read
has exactly one fate, and the counts must add up or preparation fails:

    tokens in + added = trained + masked + dropped + truncated + unused

Padding is counted apart: it never was a token of the text.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from megaspan.human import format_tokens

_SHOWN_ROWS = 5


@dataclass
class SourceTally:
    """Counts of one source. Lengths are tokens with the beginning and the end of text that were added.

    Attributes:
        name: what the user called it.
        documents: documents that were read, without the empty ones.
        tokens: their tokens, as far as they were read.
        longest: the longest document.
        longest_place: where it is.
        overlong: documents longer than max_length.
        past: tokens of theirs that lie past max_length: what a tool that truncates would cut.
        skipped: lines about files that were left out.
    """

    name: str
    documents: int = 0
    tokens: int = 0
    longest: int = 0
    longest_place: str = ""
    overlong: int = 0
    past: int = 0
    skipped: list[str] = field(default_factory=list)

    def count(self, tokens: int, place: str, max_length: int) -> None:
        """Counts one whole document."""
        self.documents += 1
        self.tokens += tokens
        if tokens > self.longest:
            self.longest, self.longest_place = tokens, place
        if tokens > max_length:
            self.overlong += 1
            self.past += tokens - max_length


@dataclass(frozen=True)
class TokenLedger:
    """Where the tokens of one split went. Every count is of tokens unless its name says documents or rows.

    Attributes:
        max_length: tokens in a full row.
        rows: rows prepared.
        documents: documents read that hold text.
        empty_documents: skipped: null, "", only white space, or only special tokens.
        tokens_in: tokens of the documents.
        added: beginning-of-text and end-of-text tokens put around documents of text that did not bring them.
        added_in_front: the part of `added` that are beginning-of-text tokens.
        trained: tokens with a label.
        masked: tokens in rows without one: the first of every document (its beginning of text, if it has one) and of every
            row, and those that came masked.
        dropped: tokens of documents that were left out whole: only special tokens, or overlong under `overlong: drop`.
        dropped_empty: the part of `dropped` that held only special tokens.
        truncated: tokens cut from documents under `overlong: truncate`.
        unused: tokens read but beyond `max_rows`.
        padding: tokens of padding in all rows together.
        split_documents: documents that continue in another row.
        truncated_documents: documents cut short.
        dropped_documents: overlong documents left out.
        masked_rows: rows without any label, the first few by index.
        masked_row_count: how many there are.
        stopped: reading stopped at `max_rows`.
        sources: the same by source, with the longest document of each.
    """

    max_length: int
    rows: int
    documents: int
    empty_documents: int
    tokens_in: int
    added: int
    added_in_front: int
    trained: int
    masked: int
    dropped: int
    dropped_empty: int
    truncated: int
    unused: int
    padding: int
    split_documents: int
    truncated_documents: int
    dropped_documents: int
    masked_rows: tuple[int, ...]
    masked_row_count: int
    stopped: bool
    sources: tuple[SourceTally, ...]

    def __post_init__(self) -> None:
        got, gone = self.tokens_in + self.added, self.row_tokens + self.dropped + self.truncated + self.unused
        counts = [value for value in dataclasses.asdict(self).values() if isinstance(value, int)]
        if got != gone or min(counts) < 0:
            raise AssertionError(
                f"the token ledger does not balance: {got:,} tokens came in, {gone:,} are accounted for: {self}"
            )

    @property
    def row_tokens(self) -> int:
        """Tokens in the rows, padding apart."""
        return self.trained + self.masked

    @property
    def lost(self) -> int:
        """Tokens of text that no row holds although they were read for one: truncated, or in an overlong document left out."""
        return self.truncated + self.dropped - self.dropped_empty

    @property
    def longest_document(self) -> int:
        """Tokens of the longest document."""
        return max((source.longest for source in self.sources), default=0)

    @property
    def longest_place(self) -> str:
        """Where the longest document is."""
        return max(self.sources, key=lambda source: source.longest).longest_place if self.sources else ""

    def to_dict(self) -> dict[str, Any]:
        """The ledger as JSON."""
        return dataclasses.asdict(self) | {"masked_rows": list(self.masked_rows), "sources": [vars(s) for s in self.sources]}

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> TokenLedger:
        """The ledger back from its JSON."""
        sources = tuple(SourceTally(**source) for source in facts["sources"])
        return cls(**{**facts, "masked_rows": tuple(facts["masked_rows"]), "sources": sources})

    def table(self, split: str = "train") -> str:
        """The ledger as a short table of plain text."""
        total = self.tokens_in + self.added
        lines = [f"token ledger, {split}"]
        lines += [_line("", "tokens in", self.tokens_in, f"of {_many(self.documents, 'document')}{self._empty()}")]
        lines += [_line("+", "added", self.added, self._added())]
        lines += [_line("=", "trained", self.trained, _share(self.trained, total))]
        lines += [_line("+", "masked", self.masked, "first token of a document or row, and tokens that came masked")]
        dropped = f"{_many(self.dropped_documents, 'overlong document')} left out" if self.dropped_documents else ""
        lines += [_line("+", "dropped", self.dropped, dropped or ("only special tokens" if self.dropped else ""))]
        truncated = f"ends of {_many(self.truncated_documents, 'document')}" if self.truncated else ""
        lines += [_line("+", "truncated", self.truncated, truncated)]
        if self.unused or self.stopped:
            lines += [_line("+", "unused", self.unused, "read ahead; reading stopped at max_rows")]
        lines += [_line("", "padding", self.padding, "not counted above")]
        lines += [f"  {_many(self.rows, 'row')} of up to {format_tokens(self.max_length)} tokens"]
        if self.masked_row_count:
            shown = ", ".join(str(row) for row in self.masked_rows[:_SHOWN_ROWS])
            more = ", …" if self.masked_row_count > _SHOWN_ROWS else ""
            lines += [f"  nothing to train in {_many(self.masked_row_count, 'row')} (index {shown}{more})"]
        for source in self.sources:
            lines += self._source(source)
        return "\n".join(lines)

    def _added(self) -> str:
        ends = ["end-of-text"] if self.added > self.added_in_front or not self.added else []
        return f"{' and '.join(['beginning-of-text'] * bool(self.added_in_front) + ends)} tokens"

    def _empty(self) -> str:
        return f"; {_many(self.empty_documents, 'empty document')} skipped" if self.empty_documents else ""

    def _source(self, source: SourceTally) -> list[str]:
        """The line that a default limit would have made necessary: the longest sample, and what would be cut."""
        name = f"{source.name}: " if len(self.sources) > 1 else ""
        line = f"  {name}longest document {format_tokens(source.longest)} tokens ({source.longest_place})"
        if source.overlong:
            past = f"{format_tokens(source.past)} tokens ({_share(source.past, source.tokens)}) past it"
            rows = "the next rows" + ", as far as max_rows lets them" * self.stopped
            fate = "are dropped or truncated" if self.lost else f"continue in {rows}"
            line += f"; {_many(source.overlong, 'document')} longer than max_length: {past} {fate}"
        return [line, *(f"  {name}{skipped}" for skipped in source.skipped)]


def _line(sign: str, name: str, count: int, remark: str) -> str:
    return f"  {sign:1} {name:10}{format_tokens(count):>16}  {remark}".rstrip()


def _many(count: int, noun: str) -> str:
    return f"{format_tokens(count)} {noun}{'' if count == 1 else 's'}"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.2f} %"
