"""metrics.jsonl: every logged number of a run, one JSON object a line, always.

Each line is written and flushed at once, so that a killed run has lost nothing. A resumed run continues the file where its
checkpoint stands: entries of steps that are going to be run again are dropped, so no step is ever there twice. The last line
of a run that was killed while it wrote is dropped as well if it is torn.

    {"step": 1, "time": 1760000000.0, "loss": 4.311, "grad_norm": 29.25, "learning_rate": 2e-05, "num_tokens": 1048576.0, …}
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from megaspan.human import UserError
from megaspan.report.trackers import Tracker, start_trackers

FILE = "metrics.jsonl"


class Metrics:
    """Writes a run's numbers to its folder and to the trackers that were asked for. Use as a context manager.

    Names are those of transformers and TRL where the thing is the same: loss, grad_norm, learning_rate, num_tokens, epoch,
    mean_token_accuracy, entropy, eval_…; then tokens_per_second, model_tflops, step_seconds, peak_device_bytes and
    peak_host_bytes.

    Args:
        run: the run folder.
        report_to: "none", or one or several of "tensorboard", "wandb" and "trackio".
        run_name: the run's name in the trackers.
        config: the options, for the trackers.
        resumed_step: the step of the checkpoint that the run continues from; 0 for a new run: an older file is kept as
            `metrics.1.jsonl`, `metrics.2.jsonl`, ….
        quiet: writes nothing at all: every rank but the first.

    Raises:
        UserError: a tracker is unknown or not installed.
    """

    def __init__(
        self,
        run: Path | str,
        report_to: str | Sequence[str] | None = "none",
        run_name: str | None = None,
        config: Mapping[str, Any] | None = None,
        *,
        resumed_step: int = 0,
        quiet: bool = False,
    ) -> None:
        self._trackers: list[Tracker] = []
        self._file: TextIO | None = None
        if quiet:
            return
        run = Path(run)
        run.mkdir(parents=True, exist_ok=True)
        self._trackers = start_trackers(report_to, run, run_name, config or {}, resumed_step)
        path = run / FILE
        if resumed_step:
            _cut(path, resumed_step)
        elif path.exists() and path.stat().st_size:
            path.rename(_free_name(path))
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(failed=error is not None)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes one entry. Numbers that JSON has no word for become null, and their names are listed under `not_finite`.

        Raises:
            UserError: the disk takes no more.
        """
        if self._file is None:
            return
        entry: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        odd = [name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
        entry |= {name: None if name in odd else value for name, value in values.items()}
        if odd:
            entry["not_finite"] = {name: str(values[name]) for name in odd}
        try:
            self._file.write(json.dumps(entry, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"{self._file.name} cannot be written at step {step}: {error.strerror}",
                do="Make room there, then go on from the newest checkpoint with resume_from_checkpoint: true",
            ) from error
        numbers = {_tracked_name(name): value for name, value in values.items() if isinstance(value, int | float)}
        for tracker in self._trackers:
            tracker.log(step, numbers)

    def close(self, *, failed: bool = False) -> None:
        """Closes the file and the trackers, all of them whichever fails. Harmless when called twice."""
        with contextlib.ExitStack() as stack:
            for tracker in self._trackers:
                stack.callback(tracker.close, failed)
            self._trackers = []
            if self._file is not None:
                stack.callback(self._close_file)

    def _close_file(self) -> None:
        with contextlib.suppress(OSError):  # a full disk was told of when the entry was written
            if self._file is not None:
                self._file.close()


def read_metrics(run: Path | str) -> list[dict[str, Any]]:
    """All entries of a run in order; an empty list if there are none. A torn last line is left out."""
    return _read(Path(run) / FILE)


def _read(path: Path) -> list[dict[str, Any]]:
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return entries


def _cut(path: Path, step: int) -> None:
    """Drops entries after `step` and a torn line, in one step: the old file or the new one is there at any time."""
    kept = [json.dumps(entry) for entry in _read(path) if entry.get("step", 0) <= step]
    partial = path.with_name(f".{path.name}")
    partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    partial.replace(path)


def _free_name(path: Path) -> Path:
    number = 1
    while (other := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return other


def _tracked_name(name: str) -> str:
    """As transformers names them in trackers, so that runs can be laid over each other: `train/loss`, `eval/loss`."""
    return f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"
