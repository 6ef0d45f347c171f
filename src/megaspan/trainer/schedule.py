"""Which rows each optimizer step sees.

A run of million-token rows has few steps, and every one is minutes of work, so a resumed run must continue with exactly the row
that would have come next, at once: the rows of step `s` are computed from (seed, s) alone, never by replaying a sampler.
A last window that is not full is a step of its own; its loss is divided by its own tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Schedule:
    """The order of rows over a run.

    Attributes:
        rows: rows in the training data.
        rows_per_step: `per_device_train_batch_size` × `gradient_accumulation_steps` × ranks with rows of their own.
        epochs: passes over the data; ignored when `max_steps` is positive.
        max_steps: optimizer steps, or a number ≤ 0 to let `epochs` decide.
        seed: of the row order; each epoch has a permutation of its own, as in `transformers.Trainer`.
        shuffled: False keeps the order of the data (`train_sampling_strategy: sequential`).
    """

    rows: int
    rows_per_step: int
    epochs: float
    max_steps: int
    seed: int
    shuffled: bool = True

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one pass, the last possibly over fewer rows."""
        return math.ceil(self.rows / self.rows_per_step)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.max_steps if self.max_steps > 0 else math.ceil(self.epochs * self.steps_per_epoch)

    def window(self, step: int) -> tuple[int, ...]:
        """Row numbers of optimizer step `step` (counted from 0)."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng([self.seed, epoch]).permutation(self.rows) if self.shuffled else np.arange(self.rows)
        return tuple(int(row) for row in order[place * self.rows_per_step : (place + 1) * self.rows_per_step])

    def saves(self, strategy: str, save_steps: int, done: int) -> int:
        """Checkpoints that `save_strategy` plans after `done` steps; at least one, which a signal or the clock may ask for.

        Those of `save_minutes` are known to nobody before the run.
        """
        total = self.total_steps
        if strategy == "no":
            return 0
        if strategy == "epoch":
            return max(1, -(-total // self.steps_per_epoch) - done // self.steps_per_epoch)  # the end ends its epoch, too
        return max(1, -(-total // save_steps) - done // save_steps)  # transformers saves at the last step, too

    def epoch_after(self, step: int) -> float:
        """Passes over the data completed once step `step` (counted from 0) is done: 0.25 after the first of 4 rows."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return epoch + min(1.0, (place + 1) * self.rows_per_step / self.rows)
