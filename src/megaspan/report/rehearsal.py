"""The result of a rehearsal: each number beside the plan's, and whether the step fits.

The planner's formulas and the allocator meet here. A difference is a fact about the formulas; whether it fits is a fact about
the machine.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from megaspan.human import format_bytes, format_seconds, format_tokens
from megaspan.plan import Plan


@dataclass(frozen=True)
class Figure:
    """One number of a rehearsal beside the plan's.

    Attributes:
        name: what it is.
        unit: "bytes", "seconds" or "count".
        planned: by the plan, None where it says nothing.
        rehearsed: as it came, None where it could not be had.
        allowance: of `planned`, what is set aside in a round number; less than planned by no more than that says nothing.
    """

    name: str
    unit: str
    planned: float | None
    rehearsed: float | None
    allowance: float = 0.0

    @property
    def difference(self) -> float | None:
        """Rehearsed above planned, in percent of the plan; None where there is none that says anything."""
        if not self.planned or self.rehearsed is None or 0 <= self.planned - self.rehearsed < self.allowance:
            return None
        return 100 * (self.rehearsed / self.planned - 1)


@dataclass(frozen=True)
class Rehearsal:
    """What a rehearsal found.

    Attributes:
        model: name of the model.
        tokens: tokens of the measured row.
        device: the GPU's name, or CPU.
        kernel: the attention kernel whose allocations were made.
        fits: the step ran, within the limits of device and host.
        failed_at: the moment at which memory ran out.
        why: what the allocator said then.
        peak_at: the moment of the device's peak, empty without a GPU.
        do: what to turn where it does not fit.
        figures: the numbers.
        notes: how to read them.
        plan: what was rehearsed.
    """

    model: str
    tokens: int
    device: str
    kernel: str
    fits: bool
    failed_at: str | None
    why: str | None
    peak_at: str
    do: str | None
    figures: tuple[Figure, ...]
    notes: tuple[str, ...]
    plan: Plan

    def figure(self, name: str) -> Figure | None:
        """A number by its name."""
        return next((figure for figure in self.figures if figure.name == name), None)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values; the plan by its own `as_dict`."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        own["figures"] = [dataclasses.asdict(figure) | {"difference": figure.difference} for figure in self.figures]
        return own | {"notes": list(self.notes), "plan": self.plan.as_dict()}

    def as_plan(self) -> dict[str, Any]:
        """What `megaspan plan --json` prints: the plan, with all of this as its `rehearsal`, and whether the step fits."""
        own = self.as_dict()
        return own.pop("plan") | {"fits": self.fits, "rehearsal": own}

    def render(self) -> str:
        """A table and the answer in the last lines."""
        kernel = f", {self.kernel} skipped" if self.kernel else ""
        lines = [f"rehearsal: {self.model}, a row of {format_tokens(self.tokens)} tokens on {self.device}{kernel}", ""]
        rows: list[tuple[str, ...]] = [("", "planned", "rehearsed", "difference")] if self.figures else []
        for figure in self.figures:
            difference = "" if figure.difference is None else f"{figure.difference:+.1f} %"
            rows.append(
                (figure.name, *(_written(each, figure.unit) for each in (figure.planned, figure.rehearsed)), difference)
            )
        widths = [max(len(row[column]) for row in rows) for column in range(4)] if rows else []
        for name, *numbers in rows:
            cells = (text.rjust(width) for text, width in zip(numbers, widths[1:], strict=True))
            lines.append("  ".join([name.ljust(widths[0]), *cells]).rstrip())
        lines += [""] * bool(rows) + [f"· {note}" for note in self.notes]
        if self.peak_at:
            lines.append(f"· the device's peak came in the {self.peak_at}; the plan expects it in the {self.plan.peak}")
        if self.fits:
            return "\n".join([*lines, "", "fits"])
        what = f": memory ran out in the {self.failed_at}" if self.failed_at else ""
        lines = lines if lines[-1] else lines[:-1]
        return "\n".join([*lines, "", f"DOES NOT FIT{what}", *[text for text in (self.why, self.do) if text]])


def _written(number: float | None, unit: str) -> str:
    if number is None:
        return "–"
    return format_bytes(number) if unit == "bytes" else format_seconds(number) if unit == "seconds" else f"{number:,.0f}"
