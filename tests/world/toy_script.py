"""A user's script with a toy in place of the trainer: `toy_script.py WHAT [option=value …]`, under torchrun or accelerate."""

import os
import signal
import sys
import threading
import time

from megaspan import world
from megaspan.config import SFTConfig
from megaspan.human import UserError


def main(what: str, *words: str) -> None:
    options = {name: int(value) for name, _, value in (word.partition("=") for word in words)}
    config = SFTConfig(max_length=8, use_cpu=what != "gpu", **options)
    ranks = world.join(config, world.Limits(period=0.1, name=1.0, end=2.5))
    axes = ranks.connect()
    os.write(1, f"{world.launch().by}: {ranks.mesh}, rank {ranks.mesh.rank}\n".encode())  # one write: lines stay whole
    if axes is None:
        return
    import torch
    import torch.distributed as dist

    ranks.beat("forward layer 5")
    if what == "wrong":
        raise UserError("a wrong thing", do="Right it")
    if ranks.mesh.rank == 1:
        if what == "broken":
            raise RuntimeError("a broken thing")
        if what == "sleep":
            time.sleep(60)
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))  # on the host, whatever the ranks compute on
    total = torch.ones(1, device=ranks.device)
    for axis in ("row", "data", "shard", "cp"):
        dist.all_reduce(total, group=axes.group(axis))
    again = world.join(config, world.Limits(period=0.1, name=1.0, end=2.5))  # as a second trainer does
    assert again.heart is ranks.heart
    assert again.connect() is axes
    assert sum(thread.name == "megaspan-heartbeat" for thread in threading.enumerate()) == 1
    again.beat("forward layer 6")
    os.write(1, f"all {total.item():g}\n".encode())
    if what == "gpu":
        first = axes.group("row")._get_backend(ranks.device).options.is_high_priority_stream
        os.write(1, f"before attention {first}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
