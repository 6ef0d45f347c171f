"""Attention of a packed row: seconds by the documents that it holds, where rows are there when the plan is made.

A row of 131,072 tokens in 64 documents has a thirtieth of the attention of one document, and takes 8.85 s of a 4B model on an
H200 where that one takes 36. What a document takes depends on its length beside its pairs: a kernel works in tiles, and of
those on the diagonal half is in vain. So the time of a pair is taken to be linear in one over the length, between 512 and
32,768 tokens, where rates were measured (docs/log.md); or, which is the same, each token costs a number of pairs beside its
own. Of several ranks the fullest counts, in each kind of layer: the others wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megaspan.plan.facts import ModelFacts

LONG = 32_768
"""From here on rates are those of one document (`plan/seconds.py`)."""
_SHORT = 512
# TFLOP/s forward and backward, of 64 documents of that length. cuDNN takes no documents.
_RATES: dict[str, tuple[float, float]] = {"flash-attn-4": (214, 192), "FlashAttention 2": (144, 138)}


@dataclass(frozen=True)
class PackedRow:
    """The documents of one row.

    Attributes:
        documents: how many there are.
        typical: tokens of a document, the mean of their logarithms by pairs.
        pairs: of each kind of layer the span (None for all tokens before) and the visible pairs of the rank that has most.
        cut: documents whose tokens lie on several ranks.
        halos: of each kind of layer with a window, on several ranks: tokens of the largest pool of keys, and of those that are
            copied from it. Each document that is cut brings halos of its own.
    """

    documents: int
    typical: float
    pairs: tuple[tuple[int | None, int], ...]
    cut: int = 0
    halos: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def of(
        cls, lengths: Sequence[int], pairs: Mapping[int | None, int], cut: int = 0, halos: tuple[tuple[int, int, int], ...] = ()
    ) -> PackedRow:
        """From the tokens of each document, and the fullest rank's pairs."""
        squares = [length**2 for length in lengths]
        mean = sum(square * math.log(length) for square, length in zip(squares, lengths, strict=True)) / sum(squares)
        return cls(len(lengths), math.exp(mean), tuple(sorted(pairs.items(), key=lambda item: item[0] or 0)), cut, halos)

    def halo(self, span: int) -> tuple[int, int]:
        """Tokens in the pool of the layers that see `span` tokens, and those copied from it; 0 where nothing travels."""
        return next(((pool, copied) for window, pool, copied in self.halos if window == span), (0, 0))

    def flops(self, facts: ModelFacts, layer: int, sp: int) -> float:
        """Of one layer's attention forward on a rank, one of `sp` that share its heads: two products for each pair."""
        return 4.0 * facts.query_width * dict(self.pairs)[facts.span(layer)] / sp


def kernel_of(kernel: str) -> str:
    """The kernel that takes documents where this one is the fastest for a row."""
    return kernel if kernel in _RATES else "FlashAttention 2"


def packed_rates(
    kernel: str, base: tuple[float, float], long: tuple[float, float], typical: float, flops: float, per_pair: float
) -> tuple[float, float]:
    """Operations a second, forward and backward, that a packed row's attention reaches.

    Args:
        kernel: of `kernel_of`.
        base: its operations a second in one document of `LONG` tokens.
        long: and in one of the typical length, where that is more.
        typical: tokens of a document.
        flops: operations of all layers' attention forward.
        per_pair: operations that one pair beside the visible ones would take, for each token and layer.
    """
    found = []
    for short, known, here in zip(_RATES[kernel], base, long, strict=True):
        # known x (1 + in_vain / LONG) = short x (1 + in_vain / _SHORT), the rate of documents without an end.
        in_vain = (known - 1e12 * short) / (1e12 * short / _SHORT - known / LONG)
        endless = here * (1 + in_vain / max(typical, LONG))
        # The mean token of a document sees half of it.
        found.append(endless * flops / (flops + per_pair * in_vain / 2))
    return found[0], found[1]
