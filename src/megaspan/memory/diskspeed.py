"""How fast a disk is, measured as it will be used, and whether a step can hide what it moves.

A laptop's NVMe disk writes 2 GB/s, a server's 6, a cloud's network volume 0.2: 309 GB of layer inputs are between one minute
and half an hour. Which it is can only be measured, and has to be before the run: a disk that is too slow does not fail, it
makes every step longer. The measurement writes and reads real pieces with their checksums, on as many threads as the run has.

Disks with a fast cache in front (consumer NVMe) are faster for the first tens of GB than for the rest: measure with more bytes.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from megaspan.human import UserError, format_seconds
from megaspan.memory.arena import HostArena
from megaspan.memory.disk import DiskTier

MOST_STALL = 0.1
FORWARD_SHARE = 0.25
_BLOCK = 256 * 2**20


@dataclass(frozen=True)
class DiskSpeed:
    """What a disk did, checksums included, in bytes per second."""

    write_bytes_per_second: float
    read_bytes_per_second: float


def measure(folder: str | Path, *, bytes: int = 2**30, threads: int = 4, allow_network: bool = False) -> DiskSpeed:
    """Writes `bytes` to the disk of `folder` and reads them back; takes up to 256 MiB of host memory meanwhile.

    Raises:
        UserError: there is no such folder, it is no local disk, or it has no room.
    """
    size = min(bytes, _BLOCK)
    count = -(-bytes // size)
    tier, arena = DiskTier(folder, threads=threads, allow_network=allow_network), HostArena(pinned=False)
    try:
        tier.reserve([size] * count)
        block = arena.take(size).view((size,), torch.uint8)
        # Random, since some file systems pack what repeats. The same bytes each time, so all reads may go to one place.
        block.random_()
        began = time.perf_counter()
        parked = [tier.park(block) for _ in range(count)]
        _wait([each.stored() for each in parked])
        written = time.perf_counter()
        _wait([tier.recall(each, block) for each in parked])
        read = time.perf_counter()
    finally:
        tier.close()
        arena.close()
    return DiskSpeed(size * count / (written - began), size * count / (read - written))


def _wait(moves: list[Future[None]]) -> None:
    for move in moves:
        move.result()


def check_speed(
    speed: DiskSpeed, bytes_per_step: int, step_seconds: float, force: bool, *, forward_share: float = FORWARD_SHARE
) -> float:
    """Refuses a disk that would hold up a step by more than a tenth.

    Writing has the time of the forward, reading that of the backward; neither waits for the other.

    Args:
        speed: of `measure`.
        bytes_per_step: what is written in a step and read back once.
        step_seconds: of a step that waits for no disk.
        force: the user's `allow_slow_disk`.
        forward_share: of the step's seconds; attention runs once forward, and its backward is about 2.5 times that.

    Returns:
        Seconds that a step will wait for the disk.

    Raises:
        UserError: more than a tenth of the step, and not `force`.
    """
    writing = bytes_per_step / speed.write_bytes_per_second
    reading = bytes_per_step / speed.read_bytes_per_second
    stall = max(writing - step_seconds * forward_share, 0) + max(reading - step_seconds * (1 - forward_share), 0)
    if stall > MOST_STALL * step_seconds and not force:
        traffic = (
            f"{bytes_per_step / 1e9:.1f} GB to write at {speed.write_bytes_per_second / 1e9:.2f} GB/s "
            f"and to read at {speed.read_bytes_per_second / 1e9:.2f} GB/s"
        )
        raise UserError(
            f"the disk of offload_folder is too slow: a step of {format_seconds(step_seconds)} would wait "
            f"{format_seconds(stall)} more for it, {stall / step_seconds:.0%} ({traffic})",
            allowed=f"up to {MOST_STALL:.0%}",
            do="Name a folder on a faster disk, raise host_memory, lower max_length, or add allow_slow_disk: true",
            option="offload_folder",
        )
    return stall
