"""Which token of a row lies on which cp rank, in which slot: one layout a row, used by every layer, the loss and the labels.

Each rank holds a shard: its pieces of documents that are cut over all ranks first (front chunks, then back chunks), then its
whole documents. So the keys that other ranks want are the first slots of every shard, and a kernel call's queries are
neighbours. A layout of 1,048,576 tokens in 10,000 documents is made in some 20 ms, from lengths alone and in integers, hence
identically on every rank and without a word between them. Nothing is as long as the row until `token_index` is asked for.

Shards differ by a few tokens, collectives want equal ones: every shard is padded at its end to `shard_tokens` (the longest,
rounded up to a multiple of sp_size). A padding slot is no query and nobody's key; its label is -100. A rank may hold nothing
but padding (a row shorter than the ranks are many) and still joins every collective.

How the executor uses this file, `slices.py` and `exchange.py`, a layer and head group at a time, the next group's exchange
running meanwhile (heads are split over sp ranks before, by `ulysses.py`):

    layout = lay_out(document_lengths, cp_size, sp_size=sp_size, work=Work({Mask(): 6, Mask(window=1024): 30}))
    ids, labels = layout.shard(ids, rank), layout.shard(labels, rank, fill=-100)      # labels are shifted before
    plan = plan_slices(layout, mask, rank)                                            # once a row and kind of layer
    pool = plan.exchange: all-gather of the first `gathered` slots, or local slots followed by what all-to-all brings
    keys = pool[plan.keys.index()], or a view of the pool if plan.keys.single
    for call in plan.calls:                                                           # at most three, local ones first
        if call.among is not None: keys = keys[call.among.index()]                    # the last call: no other wants the rest
        segments = Segments.of(call.query_lengths, call.key_lengths, device)
        kernel(q[call.queries], (k if call.local else keys)[call.keys], segments, call.window)
    backward: the calls' dK, dV are summed in fp32 into a buffer like `keys` (two calls may share keys), that one with
    `index_add_` into a pool, and the pool comes home by reduce-scatter, or by the reverse all-to-all and `index_add_` at
    `exchange.sends`. A call's dK, dV on local keys are added at home.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megaspan.attention.mask import Mask
from megaspan.attention.placement import WHOLE, Pieces, place
from megaspan.attention.runs import Ints, Runs, before
from megaspan.attention.work import Work

MOST_TOKENS = 2**27  # visible pairs of a thousand layers stay below 2**63


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """Where the tokens of one row are.

    Attributes:
        lengths: tokens of each document, in the order of the row.
        cp_size: ranks that split the tokens.
        sp_size: ranks that split each shard before heads are exchanged; `shard_tokens` is a multiple of it.
        pieces: what lies where, in the order of ranks and slots.
    """

    lengths: Ints
    cp_size: int
    sp_size: int
    pieces: Pieces

    @cached_property
    def tokens(self) -> int:
        """Tokens of the row."""
        return int(self.lengths.sum())

    @cached_property
    def shard_lengths(self) -> tuple[int, ...]:
        """Tokens of each rank, without padding."""
        return tuple(self.pieces.tokens_by_rank(self.cp_size))

    @cached_property
    def shard_tokens(self) -> int:
        """Slots of every shard, padding included."""
        return -(-max(self.shard_lengths) // self.sp_size) * self.sp_size

    @property
    def padding(self) -> int:
        """Padding slots of all ranks together."""
        return self.cp_size * self.shard_tokens - self.tokens

    @cached_property
    def shared_slots(self) -> int:
        """Slots from the start of each shard in which tokens of cut documents lie, on the rank that has most of them."""
        cut = self.pieces[self.pieces.part != WHOLE]
        return max(cut.tokens_by_rank(self.cp_size))

    @cached_property
    def opens(self) -> Ints:
        """First token of each document, in the row."""
        return before(self.lengths)

    @cached_property
    def slots(self) -> Ints:
        """First slot of each piece, on its rank."""
        ends = before(self.pieces.stop - self.pieces.start)
        return ends - before(np.array(self.shard_lengths, np.int64))[self.pieces.rank]

    def of_rank(self, rank: int) -> slice:
        """Where a rank's pieces are among all pieces."""
        first, last = np.searchsorted(self.pieces.rank, [rank, rank + 1])
        return slice(int(first), int(last))

    def token_runs(self, rank: int) -> Runs:
        """Tokens of the row in the order of a rank's slots; the slots after them are padding."""
        mine = self.of_rank(rank)
        pieces = self.pieces[mine]
        return Runs(self.opens[pieces.document] + pieces.start, pieces.stop - pieces.start).merged()

    def token_index(self, rank: int) -> Ints:
        """Token of the row in each slot of a rank, [shard_tokens], -1 for padding."""
        return self._padded(self.token_runs(rank).index(), -1)

    def positions(self, rank: int) -> Ints:
        """Position in its document of the token in each slot, [shard_tokens], 0 for padding."""
        pieces = self.pieces[self.of_rank(rank)]
        return self._padded(Runs(pieces.start, pieces.stop - pieces.start).index(), 0)

    @cached_property
    def by_token(self) -> tuple[Ints, Ints]:
        """The pieces in the order of the row, and the first token of each in that order."""
        starts = self.opens[self.pieces.document] + self.pieces.start
        order = np.argsort(starts)
        return order, starts[order]

    def shard(self, row: np.ndarray, rank: int, fill: int | float = 0) -> np.ndarray:
        """A rank's shard [shard_tokens, ...] of something that the row has for each token, [tokens, ...].

        Args:
            row: one element a token.
            rank: cp rank.
            fill: what stands in padding slots: -100 for labels.
        """
        if len(row) != self.tokens:
            raise ValueError(f"{len(row)} elements for a row of {self.tokens} tokens")
        shard = np.full((self.shard_tokens, *row.shape[1:]), fill, row.dtype)
        slot = 0
        for start, length in self.token_runs(rank):
            shard[slot : slot + length] = row[start : start + length]
            slot += length
        return shard

    def unshard(self, shards: Sequence[np.ndarray]) -> np.ndarray:
        """The row [tokens, ...] from the shards of all ranks, padded or not."""
        row = np.empty((self.tokens, *shards[0].shape[1:]), shards[0].dtype)
        for rank, shard in enumerate(shards):
            slot = 0
            for start, length in self.token_runs(rank):
                row[start : start + length] = shard[slot : slot + length]
                slot += length
        return row

    def part(self, sp_rank: int) -> slice:
        """The slots of a shard that one sp rank holds outside attention."""
        share = self.shard_tokens // self.sp_size
        return slice(sp_rank * share, (sp_rank + 1) * share)

    def visible_pairs(self, mask: Mask) -> tuple[int, ...]:
        """Pairs of a query and a key it sees, of each rank's queries, exact; their sum is the row's."""
        return tuple(self.pieces.pairs_by_rank(mask, self.cp_size))

    def balance(self, work: Work) -> float:
        """Mean over largest work of the ranks, which wait for each other in every layer."""
        return self.pieces.balance(work, self.cp_size)

    def _padded(self, values: Ints, fill: int) -> Ints:
        return np.concatenate([values, np.full(self.shard_tokens - len(values), fill, np.int64)])


def lay_out(documents: Sequence[int] | Ints, cp_size: int, *, sp_size: int = 1, work: Work | None = None) -> TokenLayout:
    """The layout of a row.

    Args:
        documents: tokens of each document in the row; one for a plain row. Any length, shorter than the ranks are many too.
        cp_size: ranks that split tokens.
        sp_size: ranks that split heads.
        work: the layers that the ranks are balanced for; full causal ones by default.

    Raises:
        ValueError: a document without tokens, a size below 1, a row whose pairs 64 bits cannot count.
    """
    lengths = np.array(documents, np.int64)
    if lengths.ndim != 1 or not len(lengths) or lengths.min() < 1:
        raise ValueError("a row is one or more documents, each of at least one token")
    if cp_size < 1 or sp_size < 1:
        raise ValueError(f"cp_size and sp_size are at least 1, not {cp_size} and {sp_size}")
    if lengths.sum() > MOST_TOKENS:
        raise ValueError(f"a row of {lengths.sum():,} tokens; work is counted exactly up to {MOST_TOKENS:,}")
    return TokenLayout(lengths, cp_size, sp_size, place(lengths, cp_size, work or Work()))


def document_lengths(positions: np.ndarray) -> Ints:
    """Lengths of a row's documents from its position ids [tokens]: one begins wherever they do not count on by one.

    Args:
        positions: of the whole row, before it is sharded: a shard's own positions jump where no document begins.
    """
    begins = np.flatnonzero(np.diff(positions) != 1) + 1
    return np.diff(np.concatenate([[0], begins, [len(positions)]])).astype(np.int64)
