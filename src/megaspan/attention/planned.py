"""What a plan needs to know of a packed row's attention: the pairs of the fullest rank, counted exactly.

The planner never sees a layout, and a packed row's time is a quarter of what its length alone would say (`plan/packed.py`).
"""

from __future__ import annotations

import numpy as np

from megaspan.attention.layout import TokenLayout
from megaspan.attention.mask import Mask
from megaspan.attention.placement import WHOLE
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
    return PackedRow.of(layout.lengths.tolist(), {span: max(layout.visible_pairs(Mask(span))) for span in spans}, len(cut))
