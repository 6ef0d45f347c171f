"""What a case gave: the steps of all its ranks together, and why there are none."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from benchmarks.layouts import layout_of


@dataclass
class Outcome:
    """What one case gave.

    Attributes:
        name: of the case.
        case: what was asked for.
        steps: that all ranks have finished: seconds of the slowest, peaks of the fullest and (`…_least`) of the emptiest, host
            memory of all.
        losses, gradient_norms: as rank 0 logs them.
        facts: everything else that was said.
        failed: in a word or two what ended it.
        why: the reason.
        device: name of the GPU.
        wall_seconds: from start to end, loading and compiling included.
    """

    name: str
    case: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    failed: str | None = None
    why: str = ""
    device: str = ""
    wall_seconds: float = 0.0
    _open: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict, repr=False)

    @property
    def quoted(self) -> list[dict[str, Any]]:
        """The second and later steps: the first is short, or warms kernels up and has no optimizer state yet.

        A step under a profiler is not quoted.
        """
        return [step for step in self.steps if step["step"] > 1 and not step.get("profiled")]

    @property
    def seconds(self) -> float | None:
        """Median seconds of a quoted step."""
        return statistics.median(step["seconds"] for step in self.quoted) if self.quoted else None

    def most(self, key: str) -> int:
        """Largest value over all steps."""
        return max((step[key] for step in self.steps), default=0)

    @property
    def least_peak(self) -> int:
        """Peak of the rank that held least, over all steps."""
        return max((step.get("peak_bytes_least", step["peak_bytes"]) for step in self.steps), default=0)

    @property
    def missing(self) -> str:
        """What not all ranks have said, in words; empty where all have."""
        return "; ".join(f"step {step} came from rank {', '.join(map(str, ranks))} only" for step, ranks in self._open.items())

    def collect(self, result: dict[str, Any]) -> dict[str, Any] | None:
        """Files one result of a rank; returns the step that it completes."""
        if "failed" in result:
            self.facts.setdefault("failures", []).append(result)
            if self.failed is None or (result["failed"] == "out of memory" != self.failed):
                rank = f"rank {result['rank']}: " if "rank" in result else ""
                self.failed, self.why = result["failed"], rank + result["why"]
        elif "step" in result:
            ranks = self._open.setdefault(result["step"], {})
            ranks[result.get("rank", 0)] = result
            if len(ranks) == layout_of(self.case).ranks:
                self.steps.append(together(list(self._open.pop(result["step"]).values())))
                return self.steps[-1]
        elif "loss" in result:
            self.losses.append(result["loss"])
            self.gradient_norms.append(result["gradient_norm"])
        elif "device" in result:
            self.device = result["device"]
        else:
            self.facts |= {key: value for key, value in result.items() if key != "rank"}
        return None

    def as_dict(self) -> dict[str, Any]:
        """For the JSON file."""
        return {
            "name": self.name,
            **self.case,
            "seconds": self.seconds,
            "peak_bytes": self.most("peak_bytes"),
            "peak_bytes_least": self.least_peak,
            "reserved_bytes": self.most("reserved_bytes"),
            "host_bytes": self.most("host_bytes"),
            "steps_measured": self.steps,
            "losses": self.losses,
            "gradient_norms": self.gradient_norms,
            **self.facts,
            "failed": self.failed,
            "why": self.why,
            "wall_seconds": self.wall_seconds,
        }


def together(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One step of several ranks."""
    if len(ranks) == 1:
        return ranks[0]
    made = {key: value for key, value in ranks[0].items() if key != "rank"}
    made |= {key: max(rank[key] for rank in ranks) for key in ("seconds", "peak_bytes", "reserved_bytes")}
    return made | {
        "peak_bytes_least": min(rank["peak_bytes"] for rank in ranks),
        "host_bytes": sum(rank["host_bytes"] for rank in ranks),
    }
