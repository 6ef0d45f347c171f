"""The table of proven meshes in `docs/many-gpus.md`, made of the cases that `test_ranks.py` runs.

`python -m tests.parity.page` writes it between its marks; a test fails when the page is stale.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

from megaspan.config.parallel import AXES
from tests.parity.cases import Sizes, window_of

PAGE = Path(__file__).parents[2] / "docs" / "many-gpus.md"
BEGIN, END = "<!-- proven: written by `python -m tests.parity.page` -->", "<!-- end of proven -->"
MASKS = {
    "causal": ("llama tied", "qwen3", "granite", "olmo2"),
    "causal, experts": ("qwen3_moe",),
    "windows": ("mistral",),
    "windows and causal in turn": ("gemma3",),
    "windows and causal, capped scores": ("gemma2",),
    "windows and causal, sinks, experts": ("gpt_oss",),
}


def table() -> str:
    """Cases of each kind of mask on each mesh: windows of rows with one document each + windows with packed rows."""
    from tests.parity.test_ranks import TABLES

    kinds = {family: mask for mask, families in MASKS.items() for family in families}
    counted: Counter[tuple[str, Sizes, bool]] = Counter()
    for case in (case for cases in TABLES.values() for case in cases):
        rows, together = window_of(case)
        packed = together > 1 or any(len(row.document_lengths) > 1 for row in rows)
        counted[kinds[case["family"]], case["mesh"], packed] += 1
    lines = ["| mesh | ranks | " + " | ".join(MASKS) + " |", "|" + " --- |" * (2 + len(MASKS))]
    for mesh in dict.fromkeys(mesh for _, mesh, _ in sorted(counted, key=_order) if math.prod(mesh) > 1):
        cells = [f"{counted[mask, mesh, False]} + {counted[mask, mesh, True]}" for mask in MASKS]
        name = " × ".join(f"{axis} {size}" for axis, size in zip(AXES, mesh, strict=True) if size > 1)
        lines.append(f"| {name} | {math.prod(mesh)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _order(kind: tuple[str, Sizes, bool]) -> tuple[int, Sizes]:
    """By number of ranks, then those that split rows first."""
    return math.prod(kind[1]), kind[1]


def with_table(text: str) -> str:
    """The page with the table of now."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
