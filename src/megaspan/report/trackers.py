"""TensorBoard, Weights & Biases and trackio: the same numbers as metrics.jsonl, where people look at many runs together.

A tracker is asked for by name and is there, or the run does not start: a missing package after an hour of loading and
tokenising, or a silent fall-back to none, is worse than an error in the first second. A resumed run continues its own record
in each of them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megaspan.human import UserError, missing_extra, nearest

_MODULES = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",), "trackio": ("trackio",)}
_STATE = "trackers.json"


class Tracker(Protocol):
    """One open record."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Adds numbers at a step."""

    def close(self, failed: bool) -> None:
        """Ends the record."""


def check_trackers(report_to: str | Sequence[str] | None) -> tuple[str, ...]:
    """The trackers that `report_to` names. Imports none of them; call it before anything is loaded.

    Raises:
        UserError: unknown, or not installed, with the command that installs it.
    """
    names = () if report_to is None else (report_to,) if isinstance(report_to, str) else tuple(report_to)
    names = tuple(dict.fromkeys(name.strip() for entry in names for name in entry.split(",") if name.strip()))
    if names == ("none",):
        return ()
    for name in names:
        if name == "all":
            raise UserError(
                "report_to: all means whatever happens to be installed",
                do="Name the trackers: tensorboard, wandb, trackio",
                option="report_to",
            )
        if name not in _MODULES:
            close = nearest(name, _MODULES)
            raise UserError(
                "report_to names a tracker that megaspan does not know",
                got=name,
                allowed="none, tensorboard, wandb, trackio",
                do=f"Did you mean {close}?" if close else None,
                option="report_to",
            )
        modules = _MODULES[name]
        if not any(importlib.util.find_spec(module) for module in modules):
            error = missing_extra(modules[-1])
            raise error if error else UserError(f"{modules[-1]} is not installed")
    return names


def check_run_name(report_to: str | Sequence[str] | None, run: Path, run_name: str | None) -> None:
    """Refuses another name for a resumed run where its record could not be continued under it; call it as early.

    Raises:
        UserError: trackio finds records by their names.
    """
    had = _state(run).get("name")
    if "trackio" in check_trackers(report_to) and None not in (had, run_name) and had != run_name:
        raise UserError(
            "run_name: trackio finds the record of a resumed run by its name",
            got=run_name,
            allowed=had,
            do=f"Write run_name: {had} as before, or remove it",
            option="run_name",
        )


def _state(run: Path) -> dict[str, str]:
    """What the run folder keeps of its records: the id and the name."""
    file = run / _STATE
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def start_trackers(
    report_to: str | Sequence[str] | None, run: Path, run_name: str | None, config: Mapping[str, Any], resumed_step: int
) -> list[Tracker]:
    """Opens the named trackers; a resumed run's records are continued after `resumed_step`."""
    names = check_trackers(report_to)
    if not names:
        return []
    if resumed_step:
        check_run_name(report_to, run, run_name)
    new_id = uuid.uuid4().hex[:8]
    named = {"name": run_name} if run_name else {}
    state = {"id": new_id, "name": f"{run.resolve().name}-{new_id[:4]}"} | (_state(run) if resumed_step else {}) | named
    (run / _STATE).write_text(json.dumps(state) + "\n", encoding="utf-8")
    opened: list[Tracker] = []
    for name in names:
        if name == "tensorboard":
            opened.append(_TensorBoard(run, resumed_step))
        elif name == "wandb":
            opened.append(_Wandb(run, state, config))
        else:
            opened.append(_Trackio(state, config))
    return opened


class _TensorBoard:
    """Event files in `run/tensorboard`; those after the resumed step are hidden by the new file."""

    def __init__(self, run: Path, resumed_step: int) -> None:
        options: dict[str, Any] = {"purge_step": resumed_step + 1} if resumed_step else {}
        # Files are named by the second: two starts within one would write over each other.
        options["filename_suffix"] = f".from-{resumed_step}"
        module = "torch.utils.tensorboard" if importlib.util.find_spec("tensorboard") else "tensorboardX"
        self._writer = importlib.import_module(module).SummaryWriter(str(run / "tensorboard"), **options)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()


class _Wandb:
    """Project, entity and mode are wandb's own settings; steps that are run again after a resume overwrite nothing there."""

    def __init__(self, run: Path, state: Mapping[str, str], config: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(name=state["name"], id=state["id"], resume="allow", config=dict(config), dir=str(run))
        self._run.define_metric("train/global_step")
        self._run.define_metric("*", step_metric="train/global_step", step_sync=True)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "train/global_step": step})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _Trackio:
    """A local record; `trackio show` opens it."""

    def __init__(self, state: Mapping[str, str], config: Mapping[str, Any]) -> None:
        import trackio

        with contextlib.redirect_stdout(sys.stderr):  # results only on stdout
            self._run = trackio.init(project="megaspan", name=state["name"], resume="allow", config=dict(config), embed=False)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()
