"""The run folder: what was run, on what, from what, so that anybody can repeat it and a stranger can be told what happened.

run/
  config.yaml          every option as it was resolved; `megaspan train run/config.yaml` repeats the run
  run.json             versions, code commit, model and data fingerprints, seeds, machine; one entry a start, resumes included
  metrics.jsonl        one line a logged step
  checkpoint-<step>/   complete or absent
  model/               the final save
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from megaspan.human import UserError
from megaspan.store.checkpoint import checkpoints, latest_checkpoint, require_checkpoint
from megaspan.store.export import FINAL
from megaspan.store.folder import clear_leftovers
from megaspan.store.options import plain

_PACKAGES = ("megaspan", "torch", "transformers", "accelerate", "peft", "datasets", "safetensors", "numpy", "flash-attn-4")
_NEWEST = ("latest", "last", "newest", "auto")  # what people type for it


@contextlib.contextmanager
def lock_run(run: Path | str) -> Iterator[None]:
    """Keeps a run folder to one process for the length of a `with` block; the folder is made if absent.

    Two starts of one file (a job that is requeued while its first copy still runs) would clear away each other's open saves.
    The lock is on the folder itself, so it leaves no file, and ends with the process however that ends.

    Raises:
        UserError: another trainer, of this process or another, is at work there.
    """
    run = Path(run)
    _make(run)
    folder = os.open(run, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                raise UserError(
                    f"another run is at work in {run}", do="Wait for it, stop it, or choose another output_dir"
                ) from None
            # Disks that know no locks (some network disks) are used as they are.
        yield
    finally:
        os.close(folder)


def open_run(run: Path | str, resume: bool | str | Path | None = None) -> Path | None:
    """Readies a run folder and returns the checkpoint to resume from, or None for a new run.

    Clears away what a killed save left. Call it before anything is loaded.

    Args:
        run: the folder; made if absent.
        resume: True for the newest complete checkpoint, a checkpoint's path, or None or False for a new run.

    Raises:
        UserError: a resume without a complete checkpoint, or a new run in another's folder, whose checkpoints it would rotate
            away.
    """
    run = Path(run)
    _make(run)
    clear_leftovers(run)
    if (checkpoint := checkpoint_of(run, resume)) is not None:
        return checkpoint
    newest = latest_checkpoint(run)
    if newest is not None or (run / FINAL).exists():
        found = [path.name for path in checkpoints(run)] + [FINAL] * (run / FINAL).exists()
        raise UserError(
            f"{run} already holds a run ({', '.join(found[-3:])}), which a new one would overwrite",
            do="Type --resume_from_checkpoint true to continue it, choose another output_dir, or delete the folder",
        )
    return None


def checkpoint_of(run: Path | str, resume: bool | str | Path | None) -> Path | None:
    """The checkpoint that `resume_from_checkpoint` means; None for a new run. Changes nothing; milliseconds.

    Raises:
        UserError: there is none, or it is not complete.
    """
    run = Path(run)
    if isinstance(resume, str) and not Path(resume).exists() and resume.lower() in _NEWEST:
        raise UserError(
            "resume_from_checkpoint is true or a folder",
            got=resume,
            do=f"Write resume_from_checkpoint: true for the newest checkpoint of {run}",
        )
    if isinstance(resume, str | Path):
        require_checkpoint(Path(resume))
        return Path(resume)
    if not resume:
        return None
    if (newest := latest_checkpoint(run)) is not None:
        return newest
    if (run / FINAL).exists():
        plain_model = not (run / FINAL / "adapter_config.json").exists()
        raise UserError(
            f"{run} holds a finished run that has kept no checkpoint, so the state of its optimizer is gone",
            do=f"Train its weights on as a new run: model_name_or_path: {run / FINAL} with another output_dir"
            if plain_model
            else "Start anew with another output_dir, and with save_strategy: steps, which keeps the last step",
        )
    raise UserError(
        f"nothing to resume: {run} holds no complete checkpoint", do="Leave resume_from_checkpoint out to start anew"
    )


def check_place(run: Path | str) -> None:
    """Refuses a run folder that nothing can be written to, without making it: the first save comes after hours.

    Raises:
        UserError: a file is in the way, or the folder may not be written to.
    """
    run = Path(run)
    try:
        place = next(path for path in (run.absolute(), *run.absolute().parents) if path.exists())
        reason = None if os.access(place, os.W_OK | os.X_OK) else f"{place} may not be written to"
        reason = reason if place.is_dir() else f"{place} is a file"
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
    if reason is not None:
        raise UserError(f"the run folder {run} cannot be used: {reason}", do="Choose another output_dir", option="output_dir")


def _make(run: Path) -> None:
    check_place(run)
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the run folder {run} cannot be made: {error.strerror}", do="Choose another output_dir") from error


def write_run_facts(run: Path | str, *, config: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Writes `config.yaml` and adds this start to `run.json`.

    Args:
        run: the run folder.
        config: every option with its value, as the user may write it in a file.
        facts: what only the caller knows: model name, commit or fingerprint, data fingerprint and ledger, seeds, machine, plan,
            the checkpoint resumed from. Python versions, packages, code commit and command line are added here.
    """
    run = Path(run)
    run.mkdir(parents=True, exist_ok=True)
    version = _software()["packages"].get("megaspan", "(from its source folder)")
    text = yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True, width=120)
    _replace(
        run / "config.yaml", f"# Every option as megaspan {version} resolved it. To repeat: megaspan train config.yaml\n{text}"
    )
    start = {"time": _now(), "command": sys.argv, **_software(), **plain(facts)}
    starts = read_run_facts(run).get("starts", [])
    _replace(run / "run.json", json.dumps({"format": 1, "starts": [*starts, start]}, indent=1, ensure_ascii=False) + "\n")


def read_run_facts(run: Path | str) -> dict[str, Any]:
    """What `run.json` holds: `starts`, oldest first; an empty dict where there is none."""
    path = Path(run) / "run.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _software() -> dict[str, Any]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"python": platform.python_version(), "system": platform.platform(), "packages": versions, "commit": _code_commit()}


def _code_commit() -> str | None:
    """Commit that the running megaspan was installed from, with `+changes` if its files differ; None for a released wheel."""
    try:
        source = json.loads(importlib.metadata.distribution("megaspan").read_text("direct_url.json") or "{}")
        if commit := source.get("vcs_info", {}).get("commit_id"):
            return str(commit)
        here = Path(__file__).parent
        commit = _git(here, "rev-parse", "HEAD")
        if not _git(here, "ls-files", "--", Path(__file__).name):
            return None  # installed into somebody else's repository
        return commit + ("+changes" if _git(here, "status", "--porcelain", "--", str(here.parent)) else "")
    except (OSError, ValueError, subprocess.SubprocessError, importlib.metadata.PackageNotFoundError):
        return None


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _replace(path: Path, text: str) -> None:
    """Writes a file in one step: a reader, or a kill, sees the old text or the new one."""
    partial = path.with_name(f".{path.name}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
