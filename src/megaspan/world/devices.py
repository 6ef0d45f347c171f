"""The machine that a plan is made for, and the device that this process computes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megaspan.config.retype import capital
from megaspan.human import UserError
from megaspan.plan.facts import Machine
from megaspan.world.commands import again
from megaspan.world.gpu import gpus
from megaspan.world.host import cores, host_limit
from megaspan.world.launched import launch
from megaspan.world.launchfile import refuse_launch, wants_cpu

if TYPE_CHECKING:
    import torch


def machine() -> Machine:
    """The device this process will use and the host memory it may use, without loading torch."""
    found = gpus()
    local = launch().local_rank
    gpu = found[min(local, len(found) - 1)] if found else None
    host_bytes, source = host_limit()
    return Machine(
        device_name=gpu.name if gpu else "CPU",
        device_bytes=gpu.total_bytes if gpu else 0,
        host_bytes=host_bytes,
        cores=cores(),
        host_source=source,
    )


def device(use_cpu: bool = False) -> torch.device:
    """The device of this process: the GPU with the number of its local rank, or the CPU.

    Raises:
        UserError: there is a GPU, but the installed torch cannot use it; the launcher asks for what megaspan does not do; or
            it started more processes on this machine than there are GPUs.
    """
    refuse_launch()
    import torch

    if use_cpu or wants_cpu():
        return torch.device("cpu")
    if torch.cuda.is_available():
        started, count = launch(), torch.cuda.device_count()
        if started.local_rank >= count:
            raise UserError(
                f"{started.by} started {started.local_size} processes on this machine, which has {count} "
                f"GPU{'s' if count > 1 else ''} for them: each needs one of its own",
                do=capital(again(started)(count * started.nodes, {})),
            )
        return torch.device("cuda", started.local_rank)
    if found := gpus():
        built = torch.version.cuda
        why = (
            f"is built for CUDA {built}, which driver {found[0].driver} does not run" if built else "is built for the CPU only"
        )
        raise UserError(
            f"this machine has an {found[0].name}, but the installed torch {torch.__version__} {why}",
            do="Install a torch for this driver, or add use_cpu: true",
        )
    return torch.device("cpu")
