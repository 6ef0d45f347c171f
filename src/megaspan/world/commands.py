"""What to type for another number of processes, by the launcher that started these and with the script's own name."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Container, Mapping
from typing import Any

from megaspan.config.parallel import Again
from megaspan.config.retype import is_own_command, retyped
from megaspan.world.dropped import launch_file_name
from megaspan.world.launched import Launch


def again(started: Launch, in_file: Container[str] = ()) -> Again:
    """What to type for a number of processes, or to write for other sizes.

    Args:
        started: how these processes were started.
        in_file: size options that accelerate's launch file gives.
    """

    def words(processes: int | None, sizes: Mapping[str, int]) -> str:
        if is_own_command(sys.argv):
            # A rank of our own launcher was started without the flag that says how many.
            own = started.world_size if started.by == "megaspan train" else None
            return retyped(processes or own, sizes)
        if not sizes:
            return f"type {_launcher(started, processes or 1)} {script()}"
        names = {option: f"parallelism_config_{option}" if option in in_file else option for option in sizes}
        return f"write {', '.join(f'{names[option]}: {size}' for option, size in sizes.items())}"

    return words


def script(main: Any = None) -> str:
    """The script of this process and its arguments, as they were typed; `-m NAME` for a module."""
    spec = getattr(main or sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name:
        name = ["-m", spec.name.removesuffix(".__main__")]
    else:
        # A notebook has no script that could be started twice.
        name = [sys.argv[0] if sys.argv and sys.argv[0].endswith(".py") and os.path.exists(sys.argv[0]) else "script.py"]
        if name == ["script.py"] != sys.argv[:1]:
            return name[0]
    return shlex.join([*name, *sys.argv[1:]])


def _launcher(started: Launch, processes: int) -> str:
    if started.by == "accelerate launch":
        return f"accelerate launch --config_file {launch_file_name() or 'FSDP2.yaml'} --num_processes {processes}"
    if started.nodes > 1 and processes % started.nodes == 0:
        return f"torchrun --nnodes {started.nodes} --nproc-per-node {processes // started.nodes}"
    return f"torchrun --nproc-per-node {processes}"
