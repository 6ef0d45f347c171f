"""The page on many GPUs: its table is of the cases that run, and its formulas are the bytes that travel."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megaspan.data import Row
from megaspan.model import prepare
from megaspan.trainer.share import Share
from megaspan.world.axes import Mesh, device_axes
from tests.gloo import run_ranks
from tests.layers.test_streamed_ranks import by_hand
from tests.model.support import settings
from tests.models import HEAD_DIM, HEADS, KV_HEADS, VOCAB, tiny
from tests.parity.page import FACTS, PAGE, with_table

LAYERS, TOKENS = 3, 32
MATHS = str.maketrans({"·": "*", "−": "-"})


def formulas() -> dict[str, str]:
    """Bytes by cp, by sp up to G and by sp above it, in Python's words."""
    lines = re.findall(r"^\| bytes a rank receives.*$", PAGE.read_text("utf-8"), re.MULTILINE)
    found = [text.translate(MATHS).replace("²", "**2") for line in lines for text in re.findall(r"`([^`]+·[^`]+)`", line)]
    return dict(zip(("cp", "sp", "sp above G"), found, strict=True))


def received(group: Any, step: Any) -> int:
    """Bytes that this rank receives from others of a group while `step` runs."""
    count = 0

    def gathered(right: Any) -> Any:
        def run(out: Any, mine: Any, *rest: Any, **options: Any) -> Any:
            nonlocal count
            if options.get("group") is group:
                count += out.nbytes - mine.nbytes
            return right(out, mine, *rest, **options)

        return run

    def exchanged(out: Any, mine: Any, *rest: Any, **options: Any) -> Any:
        nonlocal count
        if options.get("group") is group:
            assert not rest, "the formula is of equal parts"
            count += out.nbytes - out.nbytes // dist.get_world_size(group)
        return right_exchange(out, mine, *rest, **options)

    right_exchange = dist.all_to_all_single
    with ExitStack() as patches:
        for name in ("all_gather_single", "all_gather_into_tensor"):
            if hasattr(dist, name):
                patches.enter_context(patch.object(dist, name, gathered(getattr(dist, name))))
        patches.enter_context(patch.object(dist, "all_to_all_single", exchanged))
        step()
    return count


def bytes_are_the_formula(rank: int, world: int, heads: int | None) -> None:
    for name, formula in formulas().items():
        axis, kv_heads = name[:2], 1 if name == "sp above G" else KV_HEADS
        mesh = Mesh(**{axis: world}, rank=rank)
        axes = device_axes(mesh, "cpu")
        model: Any = tiny("qwen3", layers=LAYERS, dtype=torch.bfloat16, num_key_value_heads=kv_heads)
        prepare(model, settings(**{f"{axis}_size": world}), by_hand("device", heads=heads))
        share = Share.of(model, torch.device("cpu"), mesh, axes)
        ids = np.random.default_rng(0).integers(VOCAB, size=TOKENS)
        inputs = share.inputs(Row(ids, ids.copy(), (TOKENS,)))
        found = received(axes.group(axis), lambda: model(**inputs, num_items_in_batch=TOKENS - 1).loss.backward())  # noqa: B023
        letters = {"T": TOKENS, "H": HEADS, "G": kv_heads, "D": HEAD_DIM, "b": 2, "s": 4, axis: world}
        assert found == LAYERS * eval(formula, {}, letters), f"{name}: {found} bytes, {formula}"


def test_the_formulas_are_the_bytes_that_travel() -> None:
    run_ranks(2, [(bytes_are_the_formula, (None,)), (bytes_are_the_formula, (1,))])


@pytest.mark.parametrize("name", FACTS)
def test_a_row_of_cp_against_sp_is_what_the_code_and_the_cases_say(name: str) -> None:
    line = f"| {name} | {' | '.join(FACTS[name]())} |"
    assert line in PAGE.read_text("utf-8").splitlines(), f"run python -m tests.parity.page, or paste\n{line}"


def test_the_table_is_of_the_cases_that_run() -> None:
    text = PAGE.read_text("utf-8")
    assert text == with_table(text), "run python -m tests.parity.page"


@pytest.mark.parametrize("formula", formulas().values(), ids=formulas())
def test_one_rank_receives_nothing(formula: str) -> None:
    letters = {"T": TOKENS, "H": HEADS, "G": KV_HEADS, "D": HEAD_DIM, "b": 2, "s": 4, "cp": 1, "sp": 1}
    assert eval(formula, {}, letters) == 0
