"""What a row's layers cost, in visible pairs: the measure by which ranks are balanced.

Ranks wait for each other in every layer (its keys come from all of them), so the slowest rank of each kind of layer counts, not
the slowest of the sum. A token's linear layers cost as much as thousands of pairs: weights of a layer / (2 H D), 3,800 for
Qwen3-0.6B, 12,000 for 4B. So a window of 1,024 may be unevenly shared where half of a full layer's pairs may not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from megaspan.attention.mask import Mask
from megaspan.attention.runs import Ints


@dataclass(frozen=True)
class Work:
    """The layers that work on a row.

    Attributes:
        layers: how many there are of each kind.
        token_pairs: pairs that cost as much as one token's linear layers; 0 to look at attention alone.
    """

    layers: Mapping[Mask, int] = field(default_factory=lambda: {Mask(): 1})
    token_pairs: int = 4096

    def pairs_before(self, position: Ints) -> Ints:
        """Pairs of all layers whose query is before each position of a document."""
        start, pairs = np.zeros_like(position), np.zeros_like(position)
        for mask, count in self.layers.items():
            pairs += count * mask.visible_pairs(start, position)
        return pairs

    def balance(self, rank: Ints, start: Ints, stop: Ints, cp_size: int) -> float:
        """Mean over largest work of the ranks: 1 is best, 1/cp_size is all on one rank.

        Work is counted layer by layer with the tokens' share, and once more as the sum of all layers' pairs, so that attention
        is balanced where `token_pairs` is an overestimate; the worse of the two counts.

        Args:
            rank: of each piece of a document.
            start: first position of each piece.
            stop: end of each piece.
            cp_size: ranks.
        """
        tokens = self.token_pairs * (stop - start)
        mean = most = 0
        all_pairs = np.zeros_like(tokens)
        for mask, count in self.layers.items():
            pairs = mask.visible_pairs(start, stop)
            by_rank = sum_by(rank, pairs + tokens, cp_size)
            mean, most = mean + count * sum(by_rank), most + count * max(by_rank)
            all_pairs += count * pairs
        by_rank = sum_by(rank, all_pairs, cp_size)
        return min(mean / most, sum(by_rank) / max(by_rank)) / cp_size


def sum_by(rank: Ints, amounts: Ints, cp_size: int) -> list[int]:
    """Exact sum of the amounts of each rank."""
    sums = np.zeros(cp_size, np.int64)
    np.add.at(sums, rank, amounts)
    return sums.tolist()
