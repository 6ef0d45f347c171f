"""Ranks whose machines differ keep the same things in the same places, and find out where they would not (two gloo ranks)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from megaspan import world
from megaspan.human import UserError
from megaspan.plan import Machine
from megaspan.trainer import setup
from tests.gloo import run_ranks
from tests.trainer.support import documents, model_folder, trainer

__all__ = ["model_folder"]

GIB = 2**30
PROOF = "megaspan.layers.streamed.prove_family"


def launched(rank: int, world_size: int) -> None:
    names = ("RANK", "LOCAL_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ |= dict.fromkeys(names[0], str(rank)) | dict.fromkeys(names[1], str(world_size))


def all_plan_for_the_least(rank: int, size: int, folder: Path, out: Path) -> None:
    """Host memory and the disk's free space are those of the rank that has least."""
    launched(rank, size)
    asked: list[dict[str, Any]] = []
    own = setup.choose

    def choose(*given: Any, **options: Any) -> Any:
        asked.append(options)
        return own(*given, **options)

    machine = Machine("CPU", 0, (40 - 8 * rank) * GIB, 4, "MemTotal")
    with (
        patch.object(world, "machine", lambda: machine),
        patch.object(shutil, "disk_usage", lambda place: SimpleNamespace(free=(7 + rank) * GIB)),
        patch.object(setup, "choose", choose),
        patch(PROOF, lambda *_: None),
    ):
        run = trainer(folder, out, documents([40, 30]), use_cpu=True, cp_size=2, max_steps=1, offload_folder=str(out))
    assert run._job.plan.host_limit == 32 * GIB // 2
    assert [options["disk_room"] for options in asked] == [7 * GIB]
    run._job.ranks.heart.close()


def layers_that_stream_on_one_rank_alone(rank: int, size: int, folder: Path, out: Path) -> None:
    """Its heads would be waited for by nobody; both say so before the first step."""
    launched(rank, size)
    with (
        patch(PROOF, lambda *_: "its kernel is another" if rank else None),
        pytest.raises(UserError, match=r"which layers stream differs between ranks: rank 1 has 0 of 2 .*, rank 0 has 2 of 2"),
    ):
        trainer(folder, out, documents([40, 30]), use_cpu=True, cp_size=2, max_steps=1)


def test_two_ranks_on_different_machines(tmp_path: Path, model_folder: Path) -> None:
    run_ranks(2, [(each, (model_folder, tmp_path)) for each in (all_plan_for_the_least, layers_that_stream_on_one_rank_alone)])
