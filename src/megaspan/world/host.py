"""The host memory, locked memory and cores that this process may use.

At a million tokens the limits decide: layer inputs of Qwen3-8B are 309 GB of host memory, and a container's limit, not the
size of the machine, says whether they fit. So the limit of the control group comes before MemTotal, which on some machines
grows with use.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

_NO_LIMIT = 1 << 60  # control groups of version 1 write a number near 2**63 for "none"
# Of 125.9 GiB a process with 122.2 was killed: the kernel, the driver's tables of pinned memory (1.3 % of it) and the processes
# beside had the rest.
_OURS = 0.95


def host_limit(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> tuple[int, str]:
    """Bytes of host memory this process may use, and where the number comes from. The user's `host_memory` goes before it.

    Some of what there is stays with the system, the driver and the processes beside. MemTotal does not cap the limit of a
    control group: on some machines it grows with use. The words say which of the two is more, for nobody can know whether that
    much will be there.
    """
    size, source = _there_is(proc, groups)
    return int(size * _OURS), f"{_OURS:.0%} of {source}"


def _there_is(proc: Path, groups: Path) -> tuple[int, str]:
    """The limit of the control group, or the machine's memory, and its name."""
    limit = cgroup_limit(proc, groups)
    total = next((int(line.split()[1]) * 1024 for line in lines_of(proc / "meminfo") if line.startswith("MemTotal:")), None)
    if limit is not None:
        return limit, "the cgroup limit" + (", which is above MemTotal" if total is not None and limit > total else "")
    if total is not None:
        return total, "MemTotal"
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "physical memory"


def cgroup_limit(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The smallest memory limit of the control groups around this process, version 2 or 1; None where there is none.

    `memory.high` counts: pages that wait for the GPU or are pinned cannot be reclaimed, so a process above it all but stops.
    """
    limits: list[int] = []
    names: tuple[str, ...]
    for line in lines_of(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = groups, ("memory.max", "memory.high")
        elif "memory" in controllers.split(","):
            root, names = groups / "memory", ("memory.limit_in_bytes",)
        else:
            continue
        folder = root / path.lstrip("/")
        # A container often sees its own group as the root of the mount, while the path is the host's: look at both.
        for place in {folder, *(parent for parent in folder.parents if parent == root or root in parent.parents), root}:
            texts = ["".join(lines_of(place / name)).strip() for name in names]
            # Version 1 also says here what groups outside the container's view allow.
            texts += [
                line.split()[1] for line in lines_of(place / "memory.stat") if line.startswith("hierarchical_memory_limit ")
            ]
            limits += [int(text) for text in texts if text.isdigit() and int(text) < _NO_LIMIT]
    return min(limits, default=None)


def memlock_limit() -> int | None:
    """Bytes that this process may lock in memory, or None for no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def cores() -> int:
    """CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peak_host_bytes() -> int:
    """The most host memory that this process has held resident."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def lines_of(path: Path) -> list[str]:
    """The lines of a text file; none where it cannot be read."""
    try:
        return path.read_text("utf-8").splitlines()
    except OSError:
        return []
