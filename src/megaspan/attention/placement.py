"""Which rank works on which piece of which document: the choice behind a token layout.

Equal runs of a row of 1,048,576 tokens over 8 ranks leave the last one with 1.9 times the mean work of attention when the row
is one document, and some rank with more than 4 times when it is many. Long documents are therefore cut into 2 x cp chunks
each, of which a rank gets one from the front and its mirror image from the back (zig-zag): equal tokens and equal work, but
every rank wants their keys. Short documents stay whole on one rank, where they need nobody. They are dealt longest first, cp
at a time, the longest of each round to the rank with the least so far: ranks get documents of like lengths, which balances
tokens and every kind of layer together. As few documents as possible are cut: more only while the balance is not reached.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np

from megaspan.attention.mask import Mask
from megaspan.attention.runs import Ints, before
from megaspan.attention.work import Work, sum_by

# A rank's pieces of a part are worked on in one kernel call: two pieces of one document share keys, so they are in two parts.
FRONT, BACK, WHOLE = 0, 1, 2
ENOUGH = 0.995  # balance of work, and of tokens, at which no further document is cut


@dataclass(frozen=True, eq=False)
class Pieces:
    """Runs of one document's tokens that lie together on one rank, none empty. All arrays have one element a piece.

    Attributes:
        document: number of the document.
        start: first token, as a position in the document.
        stop: end.
        rank: the cp rank.
        part: FRONT or BACK of a cut document, or WHOLE.
    """

    document: Ints
    start: Ints
    stop: Ints
    rank: Ints
    part: Ints

    def sorted(self) -> Pieces:
        """By rank, part, document and position: the order in which they lie in a rank's shard."""
        return self[np.lexsort((self.start, self.document, self.part, self.rank))]

    def tokens_by_rank(self, cp_size: int) -> list[int]:
        """Tokens of each rank."""
        return sum_by(self.rank, self.stop - self.start, cp_size)

    def pairs_by_rank(self, mask: Mask, cp_size: int) -> list[int]:
        """Visible pairs of each rank's queries, exact."""
        return sum_by(self.rank, mask.visible_pairs(self.start, self.stop), cp_size)

    def balance(self, work: Work, cp_size: int) -> float:
        """See `Work.balance`."""
        return work.balance(self.rank, self.start, self.stop, cp_size)

    def __getitem__(self, chosen: Ints | slice | np.ndarray) -> Pieces:
        return Pieces(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def __len__(self) -> int:
        return len(self.document)


def place(lengths: Ints, cp_size: int, work: Work) -> Pieces:
    """The pieces of a row, sorted: of all candidates with nearly equal tokens the first that is balanced enough, or the best.

    Args:
        lengths: tokens of each document, all positive.
        cp_size: ranks.
        work: what is balanced.
    """
    if cp_size == 1:
        return _whole(np.arange(len(lengths)), lengths, np.zeros_like(lengths)).sorted()
    even = -(-int(lengths.sum()) // cp_size)
    best, best_balance = None, 0.0
    for pieces in _candidates(lengths, cp_size, work, even):
        if max(pieces.tokens_by_rank(cp_size)) > even / ENOUGH:
            continue
        if (found := pieces.balance(work, cp_size)) > best_balance:
            best, best_balance = pieces, found
        if found >= ENOUGH:
            break
    assert best is not None  # the last candidate's tokens are equal
    return best.sorted()


def contiguous(lengths: Ints, cp_size: int) -> Pieces:
    """Equal runs of the row: what a layout is never worse than."""
    stops, total = np.cumsum(lengths), int(lengths.sum())
    edges = np.arange(1, cp_size + 1) * total // cp_size
    ends = np.union1d(stops, edges[edges > 0])
    starts = np.concatenate([[0], ends[:-1]])
    document = np.searchsorted(stops, starts, side="right")
    opens = (stops - lengths)[document]
    # Two cut pieces on one rank are of two documents here, so all of them can be in one part.
    part = np.where(ends - starts == lengths[document], WHOLE, FRONT)
    return Pieces(document, starts - opens, ends - opens, np.searchsorted(edges, starts, side="right"), part)


def _candidates(lengths: Ints, cp_size: int, work: Work, even: int) -> Iterator[Pieces]:
    """Ever more documents cut, longest first. If not enough: all cut, one kind of layer weighing more; then equal runs."""
    order = np.argsort(-lengths, kind="stable")
    costs = _costs(lengths[order], work)
    for cut in _how_many_to_cut(lengths[order], cp_size, even):
        longest, others = order[:cut], order[cut:]
        whole = _whole(others, lengths[others], _deal(costs[cut:], cp_size))
        yield _join(_zigzag(longest, lengths[longest], cp_size, work), whole)
    # A cut is balanced in the sum of the layers. Ranks wait for each other in every layer, so another weight can do better.
    for mask, count in work.layers.items() if len(work.layers) > 1 else ():
        for layers in ({**work.layers, mask: 2 * count}, {mask: 1}):
            yield _zigzag(order, lengths[order], cp_size, replace(work, layers=layers))
    yield contiguous(lengths, cp_size)


def _how_many_to_cut(lengths: Ints, cp_size: int, even: int) -> Iterator[int]:
    """Rising numbers of longest documents: what no rank can hold whole, then so that whole rounds are left to deal."""
    count = len(lengths)
    least = int((lengths > even).sum())
    yield least
    rounds, step = (count - least) // cp_size, 1
    if count - rounds * cp_size > least:
        yield count - rounds * cp_size
    while rounds > 0:
        rounds, step = max(0, rounds - step), 2 * step
        yield count - rounds * cp_size


def _costs(lengths: Ints, work: Work) -> list[int]:
    """Share of the row's tokens plus share of its pairs, of each document, as integers on one scale."""
    tokens, pairs = lengths.tolist(), work.pairs_before(lengths).tolist()
    all_tokens, all_pairs = sum(tokens), sum(pairs)
    return [mine * all_pairs + mine_too * all_tokens for mine, mine_too in zip(tokens, pairs, strict=True)]


def _deal(costs: list[int], cp_size: int) -> Ints:
    """A rank for each, in rounds of cp_size: the first of each round to the rank with the least so far."""
    loads, ranks = [0] * cp_size, []
    for first in range(0, len(costs), cp_size):
        by_load = sorted(range(cp_size), key=loads.__getitem__)
        for rank, cost in zip(by_load, costs[first : first + cp_size], strict=False):
            loads[rank] += cost
            ranks.append(rank)
    return np.array(ranks, np.int64)


def _zigzag(documents: Ints, lengths: Ints, cp_size: int, work: Work) -> Pieces:
    """Each document in 2 x cp_size chunks, the i-th and the i-th last on one rank.

    Ranks hold equal tokens but for one, over all documents together: they take turns with tokens that are left over. How many
    of its tokens a rank has in front is set so that its work is the mean of what is left: half of them where work grows with
    the position, fewer for the first ranks where a window stops it growing. The last rank's chunks are neighbours, hence one
    FRONT.
    """
    if not len(documents):
        return _whole(documents, lengths, lengths)
    # The ranks also take turns in being first: what rounding leaves of imbalance does not add up on one.
    rank = (np.arange(cp_size) + np.arange(len(documents))[:, None]) % cp_size
    rest = lengths % cp_size
    tokens = (lengths // cp_size)[:, None] + ((rank - before(rest)[:, None]) % cp_size < rest[:, None])
    front, opens, ends = np.zeros_like(tokens), np.zeros_like(lengths), lengths
    for pair in range(cp_size):
        many = tokens[:, pair]
        done, all_of_it = work.pairs_before(opens), work.pairs_before(ends)
        # pairs(opens .. opens + front) + pairs(ends - many + front .. ends) >= mean, the largest front for which that holds
        enough = (all_of_it - done) // (cp_size - pair) + done - all_of_it
        low, high = np.zeros_like(many), many.copy()
        for _ in range(int(many.max()).bit_length()):
            middle = (low + high + 1) // 2
            heavy = work.pairs_before(opens + middle) - work.pairs_before(ends - many + middle) >= enough
            low, high = np.where(heavy, middle, low), np.where(heavy, high, middle - 1)
        front[:, pair] = low
        opens, ends = opens + low, ends - (many - low)
    chunks = np.concatenate([front, (tokens - front)[:, ::-1]], 1)
    stop = np.cumsum(chunks, 1)
    pieces = Pieces(
        np.repeat(documents, 2 * cp_size),
        (stop - chunks).ravel(),
        stop.ravel(),
        np.concatenate([rank, rank[:, ::-1]], 1).ravel(),
        np.tile(np.repeat([FRONT, BACK], cp_size), len(documents)),
    )
    return pieces[pieces.stop > pieces.start]


def _whole(documents: Ints, lengths: Ints, ranks: Ints) -> Pieces:
    return Pieces(documents, np.zeros_like(lengths), lengths, ranks, np.full_like(lengths, WHOLE))


def _join(*parts: Pieces) -> Pieces:
    return Pieces(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Pieces)))
