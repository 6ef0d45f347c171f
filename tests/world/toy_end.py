"""A process that ends while threads of gloo still hold a tensor: `toy_end.py leave` or `toy_end.py stay`.

The race is forced. Two groups of two "ranks" in this one process add up a tensor while the main thread keeps the interpreter's
lock, so the threads that have added wait for it to let go of the tensor, and go on waiting until Python ends or `leave` gives
the lock up. Then an object of this module, destroyed while Python ends, gives it up for a second.
"""

import atexit
import ctypes
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

from megaspan import world
from megaspan.config import SFTConfig


class QuietHeart:
    """A heartbeat that is closed at once: nothing but the wait for the threads is tested here."""

    failed = False

    def close(self) -> None:
        pass


class Late:
    """Destroyed while Python ends. Says then which handlers ran: saying it earlier would give the lock up."""

    said = ""

    def say(self, word: str) -> None:
        self.said = word

    def __del__(self, sleep=time.sleep, write=os.write) -> None:
        write(1, self.said.encode())
        sleep(1.0)


def main(what: str) -> None:
    store, timeout = dist.HashStore(), timedelta(seconds=60)
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, timeout), range(2)))
    late = Late()
    atexit.register(late.say, "a handler that runs after it")
    if what == "leave":
        config = SFTConfig(max_length=8, use_cpu=True)
        atexit.register(world.Ranks(world.mesh(config), world.device(True), QuietHeart()).leave)
    globals()["groups"], globals()["late"] = groups, late  # alive to the end, as a model and its mesh are
    sys.setswitchinterval(60.0)  # who waits for the lock does not ask for it
    works = [group.allreduce([torch.ones(1)]) for group in groups]
    del works
    ctypes.PyDLL(None).usleep(500_000)  # PyDLL keeps the lock


if __name__ == "__main__":
    main(*sys.argv[1:])
