"""P1 over several ranks: loss, sums and every gradient of a window are those of plain transformers in one process.

A table of all pairs of settings, all cases of a number of ranks in one process group. What runs, and against what, is in
`ranks.py`. `docs/many-gpus.md` names the masks and meshes that run here.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megaspan.attention.context import RowContext
from megaspan.attention.gather import Gather
from megaspan.layers.balance import Balance
from megaspan.trainer.share import Share, trained_tokens
from tests.gloo import run_ranks
from tests.parity import ranks
from tests.parity.pairwise import Case, cross, pairwise
from tests.parity.ranks import EIGHT, FACTORS, FOUR, TWO, check, check_masters, failure, window_of

# What two ranks have shown of layers that work token by token, and of caps, need not be shown on every mesh of four.
FEWER = {"family": ("llama tied", "gemma3", "gpt_oss", "qwen3_moe"), "rows": ("prime", "short", "packed", "singles")}
PLAIN: Case = {
    "family": "qwen3", "rows": "plain", "labels": "all", "path": "streamed", "window": "two", "trains": "all"
}  # fmt: skip
TABLES: dict[int, list[Case]] = {
    2: pairwise({"mesh": TWO} | FACTORS),
    4: pairwise({"mesh": FOUR} | FACTORS | FEWER),
}


def masters(meshes: Any) -> list[Case]:
    return [PLAIN | {"mesh": mesh, "rows": "prime", "path": "segments"} for mesh in meshes]


def nothing_trained(rank: int, world: int) -> None:
    """A window without a label anywhere: every rank runs its rows, and no gradient is anything but zero."""
    case = PLAIN | {"mesh": TWO[0] if world == 2 else FOUR[3], "labels": "none in one", "window": "one"}
    with patch.dict(ranks.ROWS, {"plain": ((1,) * 13, (9,))}):
        assert sum(trained_tokens(row) for row in window_of(case)[0]) == 0
        check(rank, world, [case])


@contextmanager
def local_positions() -> Any:
    """Tokens of a shard are counted from its start."""
    with patch.object(RowContext, "positions", property(lambda self: torch.arange(self.slots))):
        yield


@contextmanager
def labels_moved_in_the_shard() -> Any:
    """The last token of a shard is trained by none, others by whatever lies next to them."""
    right = Share.inputs

    def inputs(self: Share, row: Any) -> dict[str, Any]:
        found = right(self, row)
        labels = found["megaspan_row"].shard(row.labels, -100)
        found["shift_labels"] = torch.from_numpy(labels).roll(-1)[None]
        return found

    with patch.object(Share, "inputs", inputs):
        yield


@contextmanager
def summed_twice() -> Any:
    """Gradients of keys and values that come home over cp are counted twice."""
    right = Gather.take_home
    with patch.object(Gather, "take_home", lambda self, d_pool: right(self, 2 * d_pool)):
        yield


@contextmanager
def means_over_ranks() -> Any:
    """Gradients of ranks are averaged, as FSDP2 would by itself."""
    from torch.distributed.fsdp import FSDPModule

    with (
        patch.object(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None),
        patch.object(FSDPModule, "set_force_sum_reduction_for_comms", lambda self, wish: None),
    ):
        yield


@contextmanager
def balanced_alone() -> Any:
    """Each rank's experts are balanced by its own tokens."""
    with patch.object(Balance, "over_row", lambda self, number: number.detach().clone()):
        yield


@contextmanager
def seeds_of_forwards() -> Any:
    """Dropout by a rank's own count of forwards, and not by the row."""
    with patch("megaspan.trainer.step.row_seed", lambda seed, step, row: 5):
        yield


FAULTS = (
    (local_positions, {"mesh": TWO[1]}),
    (local_positions, {"mesh": TWO[2], "family": "gemma3", "path": "whole"}),
    (labels_moved_in_the_shard, {"mesh": TWO[1]}),
    (labels_moved_in_the_shard, {"mesh": TWO[2], "rows": "packed"}),
    (summed_twice, {"mesh": TWO[1], "trains": "lora"}),
    (means_over_ranks, {"mesh": TWO[0]}),
    (means_over_ranks, {"mesh": TWO[2]}),
    (balanced_alone, {"mesh": TWO[1], "family": "qwen3_moe"}),
    (seeds_of_forwards, {"mesh": TWO[0], "trains": "lora"}),
)


def faults_are_noticed(rank: int, world: int) -> None:
    for fault, changes in FAULTS:
        with ExitStack() as broken:
            broken.enter_context(fault())
            assert failure(PLAIN | changes, rank) is not None, f"{fault.__name__} passes, {changes}"


def test_two_ranks() -> None:
    run_ranks(2, [(check, (TABLES[2],)), (check_masters, (masters(TWO),)), (nothing_trained, ()), (faults_are_noticed, ())])


def test_four_ranks() -> None:
    run_ranks(4, [(check, (TABLES[4],)), (check_masters, (masters(FOUR[2:4]),)), (nothing_trained, ())])


@pytest.mark.full
@pytest.mark.parametrize("meshes", [TWO, FOUR, EIGHT], ids=["2", "4", "8"])
def test_other_tables(meshes: Any) -> None:
    """Two more tables of all pairs."""
    for seed in (1, 2):
        run_ranks(
            math.prod(meshes[0]), [(check, (pairwise({"mesh": meshes} | FACTORS, seed),)), (check_masters, (masters(meshes),))]
        )


@pytest.mark.full
@pytest.mark.parametrize("mesh", [*TWO, *FOUR], ids=str)
def test_every_family_on_every_kind_of_row_and_layer(mesh: Any) -> None:
    crossed = cross({"mesh": (mesh,)} | {name: FACTORS[name] for name in ("family", "rows", "path")})
    run_ranks(math.prod(mesh), [(check, ([PLAIN | case for case in crossed],))])
