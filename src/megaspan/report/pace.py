"""Where a run is, and how long it still takes: the numbers behind the progress bar.

A step at a million tokens lasts minutes, so the fraction done *inside* a step has to be known. It comes from layer
boundaries: a layer's backward (which first repeats its forward) takes about three times its forward, until the first finished
step tells how long a step really takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

_BACKWARD_COST = 3.0


@dataclass
class Pace:
    """The place of a run in its steps, rows and layers.

    Attributes:
        total_steps: of the whole run.
        layers: of the model.
        rows_per_step: rows that one step goes through.
        step: the step that runs now or ran last, counted from 1.
        phase: what runs: "forward", "backward", "optimizer", ….
        layer: layers of the phase that are done.
        row: the row of the step that runs, counted from 1.
        seconds: of each finished step since the start.
    """

    total_steps: int
    layers: int
    rows_per_step: int = 1
    step: int = 0
    phase: str = ""
    layer: int = 0
    row: int = 1
    clock: Callable[[], float] = time.monotonic
    seconds: list[float] = field(default_factory=list)
    _begun: float | None = None

    def begin_step(self, step: int) -> None:
        """A step begins (counted from 1)."""
        self.step, self.phase, self.layer, self.row, self._begun = step, "forward", 0, 1, self.clock()

    def enter_layer(self, phase: str, index: int) -> None:
        """A layer begins its forward or backward; backward goes from the last layer to the first."""
        if phase == "forward" and self.phase == "backward":
            self.row = min(self.row + 1, self.rows_per_step)
        self.phase = phase
        self.layer = index if phase == "forward" else self.layers - 1 - index

    def enter_phase(self, phase: str) -> None:
        """Something without layers begins."""
        self.phase, self.layer = phase, 0

    def end_step(self) -> None:
        """The step is over."""
        if self._begun is not None:
            self.seconds.append(self.clock() - self._begun)
        self._begun = None

    @property
    def step_seconds(self) -> float:
        """Seconds since the step began; 0 between steps."""
        return 0.0 if self._begun is None else self.clock() - self._begun

    @property
    def in_step(self) -> float:
        """Fraction of the running step that is done, 0 to 1."""
        if self._begun is None or self.layers == 0:
            return 0.0
        if self.phase not in ("forward", "backward"):
            return 1.0
        whole = self.layers * (1 + _BACKWARD_COST)
        done = self.layer if self.phase == "forward" else self.layers + _BACKWARD_COST * self.layer
        return min(1.0, (self.row - 1 + done / whole) / self.rows_per_step)

    @property
    def in_run(self) -> float:
        """Fraction of the run that is done, 0 to 1."""
        finished = self.step if self._begun is None else self.step - 1
        return min(1.0, (finished + self.in_step) / self.total_steps) if self.total_steps else 1.0

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds to the end of the last step; None while nothing is known.

        The first step of a start compiles and pins memory: it is left out as soon as there is another.
        """
        finished = self.step if self._begun is None else self.step - 1
        remaining = self.total_steps - finished
        known = self.seconds[1:] or self.seconds
        if known:
            recent = known[-10:]
            each = sum(recent) / len(recent)
            return max(0.0, remaining * each - min(self.step_seconds, each))
        if self.in_step < 0.02:
            return None
        return remaining * self.step_seconds / self.in_step - self.step_seconds
