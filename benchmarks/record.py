"""Results as they come, one JSON object a line, so that a run that is killed leaves what it has measured."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.compare import environment
from benchmarks.outcome import Outcome
from benchmarks.running import run_case, run_command


class Record:
    """Prints every result and, with a file, appends it there; the first line says what was measured on.

    Args:
        file: of JSON lines, or None.
        about: what the command was asked for.
    """

    def __init__(self, file: Path | None, **about: Any) -> None:
        self._file = file
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        self.write(begun=time.strftime("%Y-%m-%d %H:%M:%S"), device=device, versions=environment(), **about)

    def write(self, **result: Any) -> None:
        """One line."""
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result, default=str) + "\n")
        if stderr := (result.get("outcome") or {}).get("stderr"):
            result["outcome"] = result["outcome"] | {"stderr": stderr if self._file is None else "in the file"}
        print(json.dumps(result, default=str), flush=True)

    def case(self, name: str, case: dict[str, Any], timeout: float) -> Outcome:
        """Runs a case in its own process; its steps are written as they come, its outcome at the end."""

        def heard(result: dict[str, Any]) -> None:
            if "step" in result:
                self.write(case=name, tokens=case["tokens"], layers=case["layers"], **result)

        outcome = run_case(name, case, timeout, heard)
        self.write(outcome=outcome.as_dict())
        return outcome

    def command(self, name: str, words: Sequence[str], timeout: float) -> Outcome:
        """Runs a Python module; what it says is shown as it comes, and is in the outcome."""
        outcome = run_command(name, words, timeout, lambda line: print(line, end="", flush=True))
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"outcome": outcome.as_dict()}, default=str) + "\n")
        return outcome


def option(text: str) -> tuple[str, Any]:
    """An option of megaspan's configuration as NAME=VALUE, the value as in its file."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=VALUE")
    return name.replace("-", "_"), yaml.safe_load(value)


def wants_a_gpu(name: str, tiny: bool) -> bool:
    """Says so where there is no GPU and none but a toy run makes sense."""
    if tiny or torch.cuda.is_available():
        return False
    print(f"benchmarks.{name}: there is no GPU here; --tiny tries the code on the CPU", file=sys.stderr)
    return True
