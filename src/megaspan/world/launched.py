"""How this process was started: alone, by `megaspan train`, by torchrun or by accelerate launch, and as which of how many.

All three launchers end in torch's elastic agent, which tells a rank by environment variables its number and where ranks meet.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

OWN_ROLE = "megaspan"  # the role under which `megaspan train` starts its ranks


@dataclass(frozen=True)
class Launch:
    """How this process was started.

    Attributes:
        by: megaspan train, torchrun, accelerate launch, or python.
        rank: number of this process among all.
        world_size: number of processes.
        local_rank: number of this process on its node.
        local_size: processes on this node.
        meeting: host and port of the store that all ranks can reach; None for a process on its own.
        serves: this rank must serve that store itself (no agent does).
        attempt: how often the launcher has started these ranks before.
    """

    by: str
    rank: int
    world_size: int
    local_rank: int
    local_size: int = 1
    meeting: tuple[str, int] | None = None
    serves: bool = False
    attempt: int = 0

    @property
    def nodes(self) -> int:
        """Machines, as far as the launcher's numbers tell."""
        return -(-self.world_size // self.local_size)

    @property
    def several(self) -> bool:
        """Whether there is another rank."""
        return self.world_size > 1


def launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """How this process was started."""
    rank, size, local, attempt = (
        int(environ.get(name) or default)
        for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("TORCHELASTIC_RESTART_COUNT", 0))
    )
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    return Launch(
        by=_launcher(environ),
        rank=rank,
        world_size=size,
        local_rank=local,
        local_size=int(environ.get("LOCAL_WORLD_SIZE") or size),
        meeting=(host, int(port)) if host and port and size > 1 else None,
        serves=size > 1 and rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        attempt=attempt,
    )


def _launcher(environ: Mapping[str, str]) -> str:
    if environ.get("ROLE_NAME") == OWN_ROLE and "RANK" in environ:
        return "megaspan train"
    if "ACCELERATE_MIXED_PRECISION" in environ:  # always set by accelerate launch, and by nobody else
        return "accelerate launch"
    return "torchrun" if "RANK" in environ else "python"


def share_cores(processes: int, cores: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Gives each of `processes` children its share of the cores, unless the user has said how many threads to use.

    Without it each of 8 ranks starts a thread for every core, and they wait for each other's spinning threads.
    """
    environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))


def follow_parent() -> None:
    """Makes Linux send this process SIGTERM when its parent dies, so that `kill -9` leaves no rank behind on a GPU."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # 1 is PR_SET_PDEATHSIG
