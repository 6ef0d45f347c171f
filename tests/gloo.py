"""Runs test functions on several gloo processes, all cases of a world size in one group.

A process that imports torch, transformers and peft by itself takes 9 s of a core before it does anything, eight of them half a
minute of two cores. So one server a test process imports them once, and ranks are forks of it: it runs nothing but imports, has
one thread, and has started no device.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
import torch.multiprocessing as mp

Case = tuple[Callable[..., None], tuple[Any, ...]]

IMPORTS = ("torch.distributed.fsdp", "megaspan.model", "megaspan.trainer.sft", "peft", "pytest", "hypothesis")
FAMILIES = ("gemma2", "gemma3", "gpt_oss", "granite", "llama", "mistral", "olmo2", "qwen3", "qwen3_moe")


def run_ranks(world: int, cases: Sequence[Case], *, seconds: float = 60, limit: float = 270, fresh: bool = False) -> None:
    """Calls each `function(rank, world, *arguments)` on all ranks, in order; the first failure of any rank fails the test.

    Args:
        world: number of ranks.
        cases: functions of a module, and their arguments.
        seconds: that a rank waits for another one.
        limit: seconds after which a rank that has not ended shows where each of its threads is, and ends: below pytest's limit,
            which would show where the test waits.
        fresh: ranks are no forks: they read the environment at their start, as malloc does; each imports for 9 s.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    preload()
    arguments = (world, port, list(cases), seconds, limit, dict(os.environ))
    mp.start_processes(_rank, arguments, nprocs=world, start_method="spawn" if fresh else "forkserver")


def preload() -> None:
    """Says what the server imports, which is settled before the first rank asks for it; it is the server of this process."""
    models = [f"transformers.models.{family}.modeling_{family}" for family in FAMILIES]
    multiprocessing.set_forkserver_preload([*IMPORTS, *models])


def forked(function: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """Starts a process that calls a module's function and ends with it: a fork of the server, without imports."""
    preload()
    process = multiprocessing.get_context("forkserver").Process(target=function, args=arguments)
    process.start()
    return process


def _rank(rank: int, world: int, port: int, cases: list[Case], seconds: float, limit: float, environ: dict[str, str]) -> None:
    import torch.distributed as dist

    faulthandler.dump_traceback_later(limit, exit=True)
    torch.set_num_threads(1)
    os.environ.clear()  # it is the server's, of the first test
    os.environ |= environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=seconds))
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
