"""The disk of a run: opened where the plan keeps something on it, measured and judged before the first step.

A row of 1,048,576 tokens of an 8B model that keeps everything on disk writes and reads 623 GB a step. A disk at 5 GB/s does
that beside the computation; one at 0.5 GB/s makes a step of 33 minutes one of 45, and nothing would say why.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megaspan.human import UserError, format_bytes, format_seconds
from megaspan.memory.disk import DiskTier
from megaspan.memory.diskspeed import DiskSpeed, check_speed, measure

if TYPE_CHECKING:
    from megaspan.config import SFTConfig
    from megaspan.plan.keep import KeepPolicy
    from megaspan.plan.seconds import Seconds

_MOST, _LEAST = 2**30, 2**26  # bytes of a measurement; less than 64 MiB does not tell a disk from its cache
_WAITING = "waiting for the disk"


@dataclass(eq=False)
class Disk:
    """The open disk of a model.

    Attributes:
        tier: what moves the bytes.
        row_bytes: written for the longest row, and read back once.
        speed: as measured; None where there is too little to write.
        waits: seconds that a step waits for it, None where a step's seconds or the speed are not known.
        seconds: that the measurement took.
    """

    tier: DiskTier
    row_bytes: int = 0
    speed: DiskSpeed | None = None
    waits: float | None = None
    seconds: float = 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> Disk:
        return self  # a copy of the model shares the threads and the file

    def judge(self, row_bytes: int, step: Seconds | None, allow_slow: bool) -> None:
        """Measures the disk and compares it with what a step needs.

        Args:
            row_bytes: written for the longest row, and read back once.
            step: a predicted step of that row.
            allow_slow: the user's `allow_slow_disk`.

        Raises:
            UserError: the disk would hold up the step by more than a tenth, and not `allow_slow`.
        """
        self.row_bytes = row_bytes
        if row_bytes < _LEAST:
            return
        began = time.monotonic()
        self.speed = measure(self.tier.folder, bytes=min(row_bytes, _MOST), allow_network=allow_slow)
        self.seconds = time.monotonic() - began
        if step is not None and step.total is not None:
            computing = sum(part.seconds for part in step.parts if part.name != _WAITING)
            self.waits = check_speed(self.speed, row_bytes, computing, allow_slow)

    def describe(self) -> tuple[str, str]:
        """Value and reason of the header's line, read from the open file."""
        stats = self.tier.stats()
        how = "past the page cache" if stats.direct else "written through the page cache: its file system has no O_DIRECT"
        row = f"{format_bytes(self.row_bytes)} a row, {how}"
        if self.speed is None:
            speed = "too little to measure its speed"
        else:
            write, read = self.speed.write_bytes_per_second / 1e9, self.speed.read_bytes_per_second / 1e9
            waits = "nobody knows whether a step waits for it: its seconds are not known here"
            if self.waits is not None:
                waits = f"a step waits {format_seconds(self.waits)} for it" if self.waits else "no step waits for it"
            speed = f"measured {write:.2f} GB/s written, {read:.2f} GB/s read; {waits}"
        return f"{format_bytes(stats.file_bytes)} in {self.tier.folder}", f"{row}; {speed}"


def uses_disk(keep: KeepPolicy) -> bool:
    """Whether anything waits on disk."""
    return "disk" in keep.places or (keep.again == "disk" and keep.runs_again > 0)


def open_disk(args: SFTConfig, keep: KeepPolicy) -> Disk | None:
    """Opens the disk where a policy uses one.

    Raises:
        UserError: no folder is named, or it is none on a local disk.
    """
    if not uses_disk(keep):
        return None
    if args.offload_folder is None:
        raise UserError(
            "the plan keeps on disk what neither GPU nor host can hold, and no folder is named",
            do="Name a folder on a fast local disk",
            option="offload_folder",
        )
    return Disk(DiskTier(args.offload_folder, allow_network=args.allow_slow_disk))
