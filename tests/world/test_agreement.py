"""Ranks that decide from the same numbers."""

from __future__ import annotations

import math
import os
import socket

import pytest

from megaspan import world
from megaspan.human import UserError
from megaspan.plan.facts import Machine
from megaspan.world import agreement

GIB = 2**30


def test_one_process_agrees_with_itself():
    machine = Machine("CPU", 0, 7 * GIB, 3, "MemTotal")
    assert world.agree(machine) is machine
    world.same_everywhere("the plan", "abc")
    assert (world.summed([1, 2.5]), world.largest([3])) == ([1, 2.5], [3])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(rank: int, port: int, size: int) -> None:
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=size)
    # Rank 1 has the smaller GPU, rank 0 the smaller host.
    mine = Machine(f"GPU {rank}", (80 - 40 * rank) * GIB, (64 + 100 * rank) * GIB, 16 - rank, f"limit of {rank}")
    assert world.agree(mine) == Machine("GPU 1", 40 * GIB, 32 * GIB, 7, "limit of 0, for each of 2 ranks", 2)
    assert world.summed([1, 0.1 * (rank + 1), -rank]) == [2.0, math.fsum([0.1, 0.2]), -1.0]
    assert world.largest([rank, -rank]) == [1.0, 0.0]
    agreement.node = lambda: f"node {rank}"
    assert world.agree(mine) == Machine("GPU 1", 40 * GIB, 64 * GIB, 15, "limit of 0")
    for digest in ("", "abc", "a" * 300, "Größe"):
        world.same_everywhere("the plan", digest)
    for digest, words in (
        (f"{rank} way", r"the plan differs between ranks: rank 1 has 1 way, rank 0 has 0 way"),
        ("abcdef"[: 3 + rank], r"rank 1 has abcd, rank 0 has abc;"),
    ):
        with pytest.raises(UserError, match=words):
            world.same_everywhere("the plan", digest)
    dist.destroy_process_group()


def test_ranks_that_see_different_memory_agree():
    """Two ranks that plan from their own numbers run different sequences of collectives, and hang. On one node and on two."""
    import torch.multiprocessing as mp

    mp.spawn(_rank, (_free_port(), 2), nprocs=2)


@pytest.mark.parametrize(
    ("said", "odd"),
    [
        ("aab", "rank 2 has b, rank 0 has a"),
        ("baa", "rank 0 has b, rank 1 has a"),
        ("abcdefg", "rank 4 has e, …, rank 0 has a"),
    ],
)
def test_the_rank_that_differs_is_named(monkeypatch, said, odd):
    import torch.distributed as dist

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: len(said))
    monkeypatch.setattr(agreement, "_everywhere", lambda text: list(said))
    with pytest.raises(UserError, match=odd):
        world.same_everywhere("the order of gathers", "x")
