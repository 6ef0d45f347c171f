"""The training loop: forward and backward over a window's rows, one clip, one update, one line.

A step at a million tokens lasts minutes to an hour, so everything around it is made for long steps: the progress bar moves by
layers, a signal abandons the open step at the next layer and leaves a complete checkpoint of the last one, checkpoints come
by minutes (`save_minutes`) as well as by steps, and an update that has begun is always finished, so that no half-updated
weights are ever saved. Where parameters are updated in the backward (`StatePlan.gradients`: "update") that means the rest of
the backward: a signal before the first update abandons the step, one after it waits for the step's end.

Of several ranks all run this loop alike: they pass the same layers, stop at the same one, and what a clock or a callback of one
of them decides (a checkpoint, the end) is decided for all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaspan import world
from megaspan.config import SFTConfig
from megaspan.optimizer import NonFiniteGradient, Optimizer
from megaspan.report import Metrics, Progress
from megaspan.store import random_state, restore_random_state
from megaspan.trainer.callbacks import Callbacks
from megaspan.trainer.interrupt import Interrupted, Interrupts
from megaspan.trainer.job import Job
from megaspan.trainer.patience import FIRST_FORWARD
from megaspan.trainer.schedule import Schedule
from megaspan.trainer.step import Accumulator, Sums


@dataclass
class Loop:
    """One call of `train`: from the step that the state stands at to the last.

    Attributes:
        evaluate: measures the held-out rows and returns named values; calls what it is given before each of them.
        save: writes a complete checkpoint of the state as it stands and returns its path.
        unlogged: totals since the last log line, part of a checkpoint.
    """

    args: SFTConfig
    job: Job
    optimizer: Optimizer
    callbacks: Callbacks
    schedule: Schedule
    metrics: Metrics
    progress: Progress
    interrupts: Interrupts
    evaluate: Callable[[Callable[[int], None]], dict[str, float]]
    save: Callable[[], Path]
    unlogged: Sums

    def run(self) -> None:
        """Trains; on a signal, saves the last complete step and raises `Interrupted`."""
        state, steps_per_epoch = self.callbacks.state, self.schedule.steps_per_epoch
        self._all = Sums()
        self._lengths: list[int] = []
        self._begun_at = state.global_step
        self._where = ""
        self._seconds: list[float] = []  # of the steps since the last log line, with nothing that was done between them
        self._saved_at = time.monotonic()
        self._checkpoint: tuple[int, Path] | None = None  # the step that was saved last by this call, and where
        self._drawn_before: dict[str, Any] | None = None  # random states when the open step began
        self._accumulator = Accumulator(self.job.model, self.job.share, self.args.seed)
        self.job.watch_layers(self._layer)
        self.job.model.train()
        self.optimizer.zero_grad()  # of a call that failed, of another trainer, or the model's own
        self.callbacks.control.should_training_stop = False
        self.callbacks.call("on_train_begin")
        try:
            while state.global_step < self.schedule.total_steps and not self.callbacks.control.should_training_stop:
                self._drawn_before = random_state()
                if state.global_step % steps_per_epoch == 0:
                    self.callbacks.call("on_epoch_begin")
                self.callbacks.begin_step()
                begun, known = time.monotonic(), len(self._lengths)
                self._step(state.global_step)
                self._seconds.append(time.monotonic() - begun)
                self.job.learn(self._lengths[known:], self._seconds[-1])
                self._drawn_before = None
                self.job.ranks.beat(f"after step {state.global_step}", None)  # callbacks and saves take any time
                self.callbacks.call("on_step_end")
                if state.global_step % steps_per_epoch == 0 or self.callbacks.control.should_training_stop:
                    self.callbacks.call("on_epoch_end")  # as in transformers also for an epoch that the end cuts off
                self._log_evaluate_save()
                self._check()  # a signal that waited for an update must not wait for the next step's first layer
        except Interrupted as interrupted:
            self.job.ranks.beat("the step is abandoned", None)
            self.job.discard_step()
            self.optimizer.zero_grad()
            if self._drawn_before is not None:  # the resumed step must draw the dropout masks that the abandoned one has drawn
                restore_random_state(self._drawn_before)
            path = self._save()
            interrupted.add_note(f"{path} is complete; --resume_from_checkpoint true continues from step {state.global_step}")
            raise
        except BaseException as error:
            self.job.ranks.abandon(error)
            if self.optimizer.updating:
                error.add_note("an update had begun: the weights are between two steps and are not saved")
            raise
        finally:
            self.job.watch_layers(None)
            self.optimizer.close()
        self.callbacks.call("on_train_end")

    @property
    def mean_loss(self) -> float:
        """Loss per trained token over this call of `train`, nats."""
        return self._all.means().get("loss", math.nan)

    def _step(self, step: int) -> None:
        """Optimizer step `step`, counted from 0."""
        self.job.reset_peaks()
        self.progress.begin_step(step + 1)
        self._where = f"step {step + 1} "
        self._beat("begins")
        rows = [self.job.rows[number] for number in self.schedule.window(step)]
        self._waiting = False
        self._learning_rate = self.optimizer.learning_rate
        try:
            self._accumulator.backward(rows, step, self.optimizer.last_row)
            sums = self._accumulator.sums()
            if not self.optimizer.updating:
                self._check()
            self.progress.phase("optimizer")
            self._beat("optimizer", self.job.patience.row)  # states on a disk may take as long as a forward
            self.callbacks.call("on_pre_optimizer_step")
            self._norm = self._update(sums, step)
        except NonFiniteGradient as error:
            raise RuntimeError(
                f"step {step + 1}: {error}. The last checkpoint is intact. Try a smaller learning_rate; look at rows "
                f"{self.schedule.window(step)}."
            ) from error
        self.callbacks.call("on_optimizer_step")
        self.optimizer.zero_grad()
        self.job.synchronize()
        self.unlogged.add(sums)
        self._all.add(sums)
        self._lengths += [length for row in rows for length in self.job.share.stretches(row)]
        state = self.callbacks.state
        state.global_step, state.epoch = step + 1, self.schedule.epoch_after(step)
        state.num_input_tokens_seen += sums.tokens
        if step == 0 and sums.trained:
            warning = self.job.judge_first_loss(sums.loss / sums.trained, self.schedule.window(step))
            if warning:
                self.progress.say(warning)

    def _update(self, sums: Sums, step: int) -> float:
        """Clips and updates; returns the gradient norm before clipping. A step without a trained token changes nothing."""
        if sums.trained == 0:
            self.progress.say(f"step {step + 1}: no token of its rows is trained (all labels are -100): nothing was updated")
            self.optimizer.skip()
            return 0.0
        norm = self.optimizer.clip(self.args.max_grad_norm)
        if not math.isfinite(norm):
            self.progress.say(f"step {step + 1}: loss {sums.loss / sums.trained:.4g}, gradient norm {norm}")
        self.optimizer.step()
        return norm

    def _log_evaluate_save(self) -> None:
        control, state = self.callbacks.control, self.callbacks.state
        save_is_due = self._agree(self._save_is_due())
        if control.should_log:
            entry = self.unlogged.means() | {
                "grad_norm": self._norm,
                "learning_rate": self._learning_rate,
                "num_tokens": float(state.num_input_tokens_seen),
                "epoch": round(state.epoch, 4),
            }
            entry |= self.job.speed(self._lengths, self._seconds)
            self._log(entry)
            self.unlogged.clear()
            self._lengths, self._seconds = [], []
        if control.should_evaluate:
            self._log(self.evaluate(self._evaluation_row) | {"epoch": round(state.epoch, 4)})
            self.job.ranks.beat(f"after evaluation after step {state.global_step}", None)
        if control.should_save or save_is_due:
            self._save()
            self.callbacks.call("on_save")
            self._saved_at = time.monotonic()
        self._agree(False)

    def _agree(self, wish: bool) -> bool:
        """Has what callbacks of any rank want done on all; returns rank 0's `wish`, since clocks differ."""
        control, mine = self.callbacks.control, wish and self.job.ranks.speaks
        names = ("should_log", "should_evaluate", "should_save", "should_training_stop")
        *wanted, wish = (bool(flag) for flag in world.largest([*(getattr(control, name) for name in names), mine]))
        for name, value in zip(names, wanted, strict=True):
            setattr(control, name, value)
        return wish

    def _save(self) -> Path:
        """The checkpoint of the last complete step; written unless it is there, since at 8B it is 115 GB."""
        step = self.callbacks.state.global_step
        if self._checkpoint is None or self._checkpoint[0] != step:
            self.progress.phase("saving")
            self.job.ranks.beat(f"saving step {step}", None)
            self._checkpoint = (step, self.save())
        return self._checkpoint[1]

    def _save_is_due(self) -> bool:
        """`save_minutes` have gone by since the last checkpoint."""
        minutes = self.args.save_minutes
        return self.args.save_strategy != "no" and minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes

    def _log(self, entry: dict[str, float]) -> None:
        state = self.callbacks.state
        state.log_history.append(entry | {"step": state.global_step})
        self.metrics.log(state.global_step, entry)
        self.progress.log(state.global_step, entry)
        self.callbacks.call("on_log", logs=entry)

    def _layer(self, phase: str, index: int) -> None:
        """At every layer boundary of a step, on whichever thread runs it."""
        self.optimizer.settle()
        self._beat(f"{phase} layer {index}")
        if not self.optimizer.updating:
            self._check()
        elif self.interrupts.signum is not None and not self._waiting:
            self._waiting = True
            self.progress.say(
                "a signal came while weights are being updated: this step is finished and saved first; the next signal ends "
                "the process, and the last checkpoint stays"
            )
        self.progress.layer(phase, index)

    def _evaluation_row(self, number: int) -> None:
        """Before each row of an evaluation: many of them last as long as many steps."""
        self.job.ranks.beat(f"evaluation after step {self.callbacks.state.global_step} row {number + 1}", self.job.patience.row)
        self._check()

    def _beat(self, phase: str, patience: float | None = None) -> None:
        """Notes where this rank is, and how long it may stay there before the others wonder: by default as long as a layer."""
        first = FIRST_FORWARD if self.callbacks.state.global_step == self._begun_at else 0.0
        self.job.ranks.beat(self._where + phase, (patience or self.job.patience.layer) + first)

    def _check(self) -> None:
        """Raises `Interrupted` where all ranks stop for a signal that has come to any of them."""
        signum = self.job.ranks.boundary(self.interrupts.signum)
        if signum is not None:
            raise Interrupted(signum)
