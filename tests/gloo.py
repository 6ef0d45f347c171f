"""Runs test functions on several gloo processes, all cases of a world size in one group: starting one takes seconds."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.multiprocessing as mp

Case = tuple[Callable[..., None], tuple[Any, ...]]


def run_ranks(world: int, cases: Sequence[Case]) -> None:
    """Calls each `function(rank, world, *arguments)` on all ranks, in order; the first failure of any rank fails the test."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_rank, (world, port, list(cases)), nprocs=world)


def _rank(rank: int, world: int, port: int, cases: list[Case]) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    for function, arguments in cases:
        try:
            function(rank, world, *arguments)
        except BaseException:
            print(f"rank {rank} of {world}: {function.__name__}{arguments}", file=sys.stderr, flush=True)
            traceback.print_exc()
            raise
        dist.barrier()
    dist.destroy_process_group()
    # torch's threads abort one process in ten while the interpreter is being taken down, when all is done.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
