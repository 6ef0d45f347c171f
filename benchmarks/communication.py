"""What a step's communication costs: NCCL's time on the device, and how much of it runs while nothing is computed.

One more step than asked for runs under torch's profiler, on rank 0, with the device's timeline only; its seconds are not
quoted. A collective's kernel also spins while it waits for a slower rank, so imbalance counts as communication here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from megaspan.report.overlap import device_spans, overlap

_KIND = re.compile("AllGather|ReduceScatter|AllReduce|Broadcast|SendRecv|AllToAll", re.IGNORECASE)


class Profile(TrainerCallback):
    """Profiles one step and says what was seen.

    Args:
        step: its number, from 1.
        say: hears of the result.
    """

    def __init__(self, step: int, say: Any) -> None:
        self.step, self.say = step, say
        self._profile: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step + 1 == self.step:
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profile.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._profile is not None:
            torch.cuda.synchronize()
            self._profile.stop()
            self.say(communication=seen(list(self._profile.profiler.kineto_results.events())))
            self._profile = None


def seen(events: Iterable[Any]) -> dict[str, Any]:
    """Seconds of a finished profile.

    Args:
        events: `profile.profiler.kineto_results.events()`.

    Returns:
        `busy`: a collective ran; `exposed`: and nothing was computed; `copies_exposed`: a copy between host and device ran, and
        neither computation nor a collective; `idle`: nothing ran; `span`: from the first entry to the last; `kinds`: number
        and seconds of each kind of collective, and how many of those seconds nothing was computed.
    """
    collectives, rest = [], []
    for event in events:
        (collectives if "nccl" in event.name().lower() else rest).append(event)
    _, sent = device_spans(collectives)
    copies, computed = device_spans(rest)
    told = overlap(sent, computed)
    moved = overlap(copies, np.concatenate([sent, computed]))
    of_kind: dict[str, list[Any]] = {}
    for event in collectives:
        found = _KIND.search(event.name())
        of_kind.setdefault(found[0] if found else "other", []).append(event)
    kinds: dict[str, list[float]] = {}
    for name, members in of_kind.items():
        _, spans = device_spans(members)
        if len(spans):
            kinds[name] = [len(spans), float(np.diff(spans).sum()) / 1e9, overlap(spans, computed).exposed]
    whole = np.concatenate([sent, computed, copies])
    return {
        "busy": told.copying,
        "exposed": told.exposed,
        "copies_exposed": moved.exposed,
        "idle": moved.idle,
        "span": float(np.ptp(whole)) / 1e9 if len(whole) else 0.0,
        "kinds": kinds,
    }


def sentence(found: dict[str, Any], seconds: float | None) -> str:
    """The numbers of `seen` in words.

    Args:
        found: what was seen.
        seconds: of a step without the profiler; None takes the profiled one's.
    """
    whole = seconds or found["span"]
    parts = [
        f"collectives {1e3 * found['busy']:.0f} ms a step, {1e3 * found['exposed']:.0f} ms of them "
        f"({100 * found['exposed'] / whole:.2f} %) while nothing is computed"
    ]
    if found["kinds"]:
        parts.append(
            ", ".join(
                f"{count:.0f} {kind} {1e3 * took:.0f} ms, {1e3 * bare:.0f} ms of them bare"
                for kind, (count, took, bare) in found["kinds"].items()
            )
        )
    parts.append(f"copies that nothing hides {1e3 * found['copies_exposed']:.0f} ms, device idle {1e3 * found['idle']:.0f} ms")
    return "; ".join(parts)
