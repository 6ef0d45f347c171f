"""What a plan needs to know of a packed row's attention: the pairs of the fullest rank, counted exactly.

The planner never sees a layout, and a packed row's time is a quarter of what its length alone would say (`plan/packed.py`).
"""

from __future__ import annotations

import numpy as np

from megaspan.attention.layout import TokenLayout
from megaspan.attention.mask import Mask
from megaspan.attention.placement import WHOLE
from megaspan.attention.slices import plan_slices
from megaspan.plan.facts import ModelFacts
from megaspan.plan.packed import PackedRow


def packed_row(layout: TokenLayout, facts: ModelFacts) -> PackedRow:
    """The documents of a row as they lie, for `plan.choose`.

    Args:
        layout: of the row.
        facts: the model, whose windows count.
    """
    spans = {facts.span(layer) for layer in range(facts.layers)}
    cut = np.unique(layout.pieces.document[layout.pieces.part != WHOLE])
    windows = sorted(span for span in spans if span is not None) if layout.cp_size > 1 else []
    pairs = {span: max(layout.visible_pairs(Mask(span))) for span in spans}
    return PackedRow.of(layout.lengths.tolist(), pairs, len(cut), tuple((span, *_halo(layout, span)) for span in windows))


def _halo(layout: TokenLayout, span: int) -> tuple[int, int]:
    """Tokens of the largest pool of any rank, and of the most keys that one copies from it."""
    found = [plan_slices(layout, Mask(span), rank) for rank in range(layout.cp_size)]
    return max(each.exchange.pool_tokens for each in found), max(each.keys.total for each in found)
