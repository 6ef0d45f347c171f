"""What `docs/many-gpus.md` says of cp, sp and the proven meshes, made of the code and of the cases that `test_ranks.py` runs.

`python -m tests.parity.page` writes the table of cases between its marks, and of the table of cp against sp the rows of
`FACTS`; a test fails when the page is stale.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import torch

from megaspan.attention.choose import KERNELS
from megaspan.attention.flash4 import Flash4
from megaspan.attention.kernel import Case as KernelCase
from megaspan.attention.layout import lay_out
from megaspan.attention.mask import Mask
from megaspan.attention.segments import Segments
from megaspan.attention.slices import Call, plan_slices
from megaspan.config.parallel import AXES, legal_sp
from tests.parity.cases import Sizes, window_of
from tests.parity.pairwise import Case

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
        counted[kinds[case["family"]], case["mesh"], _packed(case)] += 1
    lines = ["| mesh | ranks | " + " | ".join(MASKS) + " |", "|" + " --- |" * (2 + len(MASKS))]
    for mesh in dict.fromkeys(mesh for _, mesh, _ in sorted(counted, key=_order) if math.prod(mesh) > 1):
        cells = [f"{counted[mask, mesh, False]} + {counted[mask, mesh, True]}" for mask in MASKS]
        name = " × ".join(f"{axis} {size}" for axis, size in zip(AXES, mesh, strict=True) if size > 1)
        lines.append(f"| {name} | {math.prod(mesh)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _order(kind: tuple[str, Sizes, bool]) -> tuple[int, Sizes]:
    """By number of ranks, then those that split rows first."""
    return math.prod(kind[1]), kind[1]


HEADS = ((8, 2), (28, 4), (12, 12), (32, 8))
FEATURES: dict[str, Callable[[Case], bool]] = {
    "causal": lambda case: "causal" in _mask(case),
    "windows": lambda case: "windows" in _mask(case),
    "sinks": lambda case: "sinks" in _mask(case),
    "soft caps": lambda case: "capped" in _mask(case),
    "packed documents": lambda case: _packed(case),
}
SPLIT = {"cp": (True, False), "sp": (False, True), "both": (True, True)}  # whether tokens, and heads, are shared


def legal_degrees() -> list[str]:
    """Sizes, with those of some heads; cp's are tried on a row of a prime number of tokens."""
    for cp in range(1, 33):
        layout = lay_out([97], cp)
        held = [token for rank in range(cp) for token in layout.token_index(rank).tolist() if token >= 0]
        assert sorted(held) == list(range(97))
    some = "; ".join(f"{', '.join(map(str, legal_sp(*heads)))} of {heads[0]} and {heads[1]}" for heads in HEADS)
    sp = f"divisors of the query heads that divide the KV heads or are a multiple of them: {some}"
    return ["any", sp, "any × those"]


def masks() -> list[str]:
    """What the cases of each kind of mesh hold."""
    from tests.parity.test_ranks import TABLES

    cases = [case for table in TABLES.values() for case in table]
    found = []
    for split in SPLIT.values():
        here = [case for case in cases if (case["mesh"][2] > 1, case["mesh"][3] > 1) == split]
        found.append(", ".join(name for name, holds in FEATURES.items() if any(map(holds, here))))
    return _same(found)


def kernels() -> list[str]:
    """Those that take every call of a causal row of one document, bf16, heads of 128, on a Hopper where all are installed."""
    row, found = Mask(), []
    for tokens, heads in SPLIT.values():
        layout = lay_out([4096], 4 if tokens else 1, sp_size=2 if heads else 1)
        calls = [call for rank in range(layout.cp_size) for call in plan_slices(layout, row, rank).calls]
        with patch.object(Flash4, "installed", lambda self: True), patch("torch.backends.cudnn.is_available", lambda: True):
            found.append(", ".join(each.name for each in KERNELS if not any(each.refusal(_case_of(call)) for call in calls)))
    return _same(found)


FACTS: dict[str, Callable[[], list[str]]] = {"legal degrees": legal_degrees, "masks": masks, "kernels": kernels}
"""Rows of the table of cp against sp, each with what makes its cells: cp's, sp's, and both's."""


def _case_of(call: Call) -> KernelCase:
    segments = Segments.of(call.query_lengths, call.key_lengths, "cpu")
    lengths = int(sum(call.query_lengths)), int(segments.most_keys)
    return KernelCase("cuda", (9, 0), torch.bfloat16, 128, *lengths, segments=len(segments), causal=segments.causal)


def _same(cells: Sequence[str]) -> list[str]:
    """`the same` where all are, `as cp` where both together have what cp has."""
    cp, sp, both = cells
    return [cp, "the same", "the same"] if cp == sp == both else [cp, sp, "as cp" if both == cp else both]


def _mask(case: Case) -> str:
    return next(mask for mask, families in MASKS.items() if case["family"] in families)


def _packed(case: Case) -> bool:
    rows, together = window_of(case)
    return together > 1 or any(len(row.document_lengths) > 1 for row in rows)


def with_facts(text: str) -> str:
    """The page with the rows of `FACTS` of now."""
    for name, cells in FACTS.items():
        text, count = re.subn(rf"^\| {name} \|.*$", f"| {name} | {' | '.join(cells())} |", text, flags=re.MULTILINE)
        assert count == 1, name
    return text


def with_table(text: str) -> str:
    """The page with the table of now."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(with_facts(with_table(PAGE.read_text("utf-8"))), "utf-8")
