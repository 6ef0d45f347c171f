"""How long copies ran while nothing was computed, from the device's own timeline.

A step of an 8B model at a million tokens moves over a terabyte between device and host, 23 seconds of the link's time, and all
of it is meant to hide behind computation. Events around waits tell what the program waited for; the timeline tells what the
device did, whoever asked for it, and so also finds a copy that stalls for a reason nobody thought of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

_WAITS = re.compile("(Stream|Event|Context|Device) (Wait|Sync)")  # not work, though on the device's timeline


def device_spans(events: Iterable[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Copies between host and device, and everything else that a CUDA device did.

    Args:
        events: of a finished `torch.profiler` profile (`profile.profiler.kineto_results.events()`).

    Returns:
        Two arrays as `overlap` takes them.
    """
    copies: list[tuple[int, int]] = []
    work: list[tuple[int, int]] = []
    for event in events:
        name = event.name()
        if event.device_type().name != "CUDA" or getattr(event, "is_user_annotation", bool)() or _WAITS.match(name):
            continue
        begun = event.start_ns()
        (copies if "HtoD" in name or "DtoH" in name else work).append((begun, begun + event.duration_ns()))
    return np.array(copies, np.int64).reshape(-1, 2), np.array(work, np.int64).reshape(-1, 2)


@dataclass(frozen=True)
class Overlap:
    """Seconds of a device's timeline, from its first entry to its last.

    Attributes:
        copying: at least one copy was under way.
        exposed: a copy was, and nothing else.
        idle: neither: the device waited for the host, or for a disk.
    """

    copying: float
    exposed: float
    idle: float


def overlap(copies: np.ndarray, work: np.ndarray) -> Overlap:
    """How copies and work lie to each other.

    Args:
        copies, work: int64 [n, 2], beginnings and ends in nanoseconds, in any order, overlapping or not.
    """
    # Differences of int64 first: a clock's nanoseconds are too many for a float.
    spans = np.concatenate([copies, work])
    if not len(spans):
        return Overlap(0.0, 0.0, 0.0)
    copying, working, busy = (int(np.diff(_merged(each)).sum()) for each in (copies, work, spans))
    return Overlap(copying / 1e9, (busy - working) / 1e9, (int(spans[:, 1].max() - spans[:, 0].min()) - busy) / 1e9)


def _merged(spans: np.ndarray) -> np.ndarray:
    """The same time as spans that neither touch nor overlap, in order."""
    if not len(spans):
        return np.empty((0, 2), np.int64)
    spans = spans[np.argsort(spans[:, 0])]
    reach = np.maximum.accumulate(spans[:, 1])
    first = np.flatnonzero(np.concatenate([[True], spans[1:, 0] > reach[:-1]]))
    return np.stack([spans[first, 0], reach[np.append(first[1:], len(spans)) - 1]], axis=1)
