"""The command `megaspan` with a toy in place of the trainer, whose ranks do what `run_name` says."""

import os
import signal
import sys
import time
import types

from megaspan import cli, launch, world
from megaspan.human import UserError


def run(config):
    what = config.run_name
    ranks = world.join(config, world.Limits(period=0.1, name=1.0, end=2.5))
    axes = ranks.connect()
    print(f"header of rank {ranks.mesh.rank}", file=sys.stderr, flush=True)
    print("a library talks")
    ranks.beat("backward layer 5")
    if what == "wrong":
        raise UserError("a wrong thing", do="Right it")
    if ranks.mesh.rank == 1:
        if what == "fault":
            raise ValueError("a fault of ours")
        if what == "killed":
            print("last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    if axes is None:
        return {"mesh": str(ranks.mesh)}
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(1))
    if what == "long":
        wait_for_a_signal(ranks, config.output_dir)
    return {"mesh": str(ranks.mesh), "rank": ranks.mesh.rank, "pid": os.getpid()}


def wait_for_a_signal(ranks, folder: str) -> None:
    """Steps with a collective each, of different speed, until a signal; then a checkpoint, rank 1's being the slower one."""
    import torch
    import torch.distributed as dist

    came = []
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda number, frame: came.append(number))
    print("in the loop", file=sys.stderr, flush=True)
    for step in range(10_000):
        ranks.beat(f"layer {step}")
        if stop := ranks.boundary(came[0] if came else None):
            time.sleep(ranks.mesh.rank)
            with open(f"{folder}/{ranks.mesh.rank}.txt", "w") as file:
                file.write(str(step))
            interrupted = KeyboardInterrupt()
            interrupted.signum = stop
            interrupted.add_note("a checkpoint is complete")
            raise interrupted
        time.sleep(0.01 * (1 + ranks.mesh.rank))
        dist.all_reduce(torch.zeros(1))


if __name__ == "__main__":
    trainer = types.ModuleType("megaspan.trainer")
    trainer.run = run
    sys.modules["megaspan.trainer"] = trainer
    start = launch.run
    launch.run = lambda words, count: start(words, count, program=(__file__,))
    sys.exit(cli.main())
