"""What a rank needs of other ranks' keys and values in one kind of layer, and who sends what to whom.

A full causal layer needs nearly everything of the cut documents: the first slots of all shards are gathered (of Qwen3-8B at
1,048,576 tokens 0.5 GB a head group). A window of W needs the W - 1 tokens before each piece, 2 x 127 tokens a document and
rank for gpt-oss where the gather brings a million. These halos lie on several ranks when chunks are shorter than the window.
They travel by one all-to-all with unequal shares, as long as that brings the neediest rank less than half of what the gather
would. Every rank works out the same numbers for all ranks, so all take the same collective with matching sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megaspan.attention.layout import TokenLayout
from megaspan.attention.mask import Mask
from megaspan.attention.runs import Ints, Runs, before, spread

# An all-gather sends from where the keys are; an all-to-all first copies them, once for each rank that wants them.
HALO_SHARE = 0.5


@dataclass(frozen=True, eq=False)
class Exchange:
    """One rank's part in bringing keys together. Afterwards they lie in a pool, in which `Slices.keys` points.

    With `gathered`, the pool is [cp_size * gathered]: those first slots of every rank's shard, this rank's own too. Else it is
    the padded local shard, [shard_tokens], followed by what arrived, in the order of the senders.

    Attributes:
        needed: tokens of other ranks that each rank's calls read.
        gathered: slots of every shard that are gathered by all, 0 for an all-to-all.
        pool_tokens: size of the pool.
        sends: local slots that are sent, the shares of the receivers one after the other; empty when gathered.
        send_tokens: how many of them go to each rank.
        receive_tokens: how many come from each rank.
    """

    needed: tuple[int, ...]
    gathered: int
    pool_tokens: int
    sends: Runs
    send_tokens: tuple[int, ...]
    receive_tokens: tuple[int, ...]

    @property
    def silent(self) -> bool:
        """Nobody needs anything: no rank calls a collective."""
        return not any(self.needed)


class Pool:
    """Where in one rank's pool the tokens of the row are that its calls read, and the exchange that brings them there."""

    def __init__(self, layout: TokenLayout, mask: Mask, rank: int) -> None:
        self._layout, self._order, self._firsts = layout, *layout.by_token
        self._piece_start = layout.opens[layout.pieces.document] + layout.pieces.start
        first, stop = _before_pieces(layout, mask)
        needed = np.zeros(layout.cp_size, np.int64)
        np.add.at(needed, layout.pieces.rank, stop - first)
        gather = bool(needed.any()) and int(needed.max()) > HALO_SHARE * (layout.cp_size - 1) * layout.shared_slots
        self.exchange = self._gather(needed) if gather else self._halo(needed, first, stop, rank)

    def runs(self, first: Ints, stop: Ints) -> Runs:
        """The slots of the pool in which the token ranges `first` to `stop` lie, in order."""
        _, piece, start, length = self._split(first, stop)
        return Runs(self._pool_start[piece] + start - self._piece_start[piece], length)

    def _gather(self, needed: Ints) -> Exchange:
        layout, slots, nothing = self._layout, self._layout.shared_slots, np.zeros(0, np.int64)
        self._pool_start = layout.pieces.rank * slots + layout.slots
        none = (0,) * layout.cp_size
        return Exchange(tuple(needed.tolist()), slots, layout.cp_size * slots, Runs(nothing, nothing), none, none)

    def _halo(self, needed: Ints, first: Ints, stop: Ints, rank: int) -> Exchange:
        layout, ranks = self._layout, self._layout.cp_size
        wants = np.flatnonzero(stop > first)
        want, piece, start, length = self._split(first[wants], stop[wants])
        receiver, sender = layout.pieces.rank[wants[want]], layout.pieces.rank[piece]
        slot = layout.slots[piece] + start - self._piece_start[piece]
        # One order for both ends: receiver by receiver, in it sender by sender, in it by the sender's slot.
        order = np.lexsort((slot, sender, receiver))
        receiver, sender, piece, slot, start, length = (x[order] for x in (receiver, sender, piece, slot, start, length))
        arrives, leaves = receiver == rank, sender == rank
        # Of a piece of another rank one run at most arrives, its end: no own token lies inside it, so all of its tokens are
        # before the same own pieces. The pool's place of its first token is where it would be had all of it come.
        self._pool_start = np.where(layout.pieces.rank == rank, layout.slots, 0)
        self._pool_start[piece[arrives]] = (
            layout.shard_tokens + before(length[arrives]) - (start - self._piece_start[piece])[arrives]
        )
        receive, send = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
        np.add.at(receive, sender[arrives], length[arrives])
        np.add.at(send, receiver[leaves], length[leaves])
        return Exchange(
            tuple(needed.tolist()),
            0,
            layout.shard_tokens + int(receive.sum()),
            Runs(slot[leaves], length[leaves]),
            tuple(send.tolist()),
            tuple(receive.tolist()),
        )

    def _split(self, first: Ints, stop: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Token ranges, none empty, cut at the borders of pieces: number of the range, piece, first token, tokens."""
        low = np.searchsorted(self._firsts, first, side="right") - 1
        high = np.searchsorted(self._firsts, stop, side="left")
        owner, step = spread(high - low)
        place = low[owner] + step
        ends = np.append(self._firsts[1:], self._layout.tokens)
        start = np.maximum(first[owner], self._firsts[place])
        return owner, self._order[place], start, np.minimum(stop[owner], ends[place]) - start


def _before_pieces(layout: TokenLayout, mask: Mask) -> tuple[Ints, Ints]:
    """Tokens of the row that each piece needs from other ranks: from its first query's first key, or its rank's piece before.

    First keys never fall along a document, so what lies before the earlier piece is wanted by that one, if at all.
    """
    pieces = layout.pieces
    opens = layout.opens[pieces.document]
    start, stop = opens + pieces.start, opens + pieces.stop
    order = np.lexsort((start, pieces.rank))
    previous = np.zeros_like(start)
    previous[order[1:]] = np.where(pieces.rank[order[1:]] == pieces.rank[order[:-1]], stop[order[:-1]], 0)
    return np.minimum(np.maximum(opens + mask.first_key(pieces.start), previous), start), start
