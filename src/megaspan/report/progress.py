"""The progress of a run: a bar over steps and one inside the step on a terminal, one plain line a step everywhere else.

A step at a million tokens lasts from minutes to an hour. A bar that only moves between steps looks like a hang, and people
kill runs that look like hangs, so the second bar moves with every layer of the forward and of the backward. In log files and
pipes there is exactly one line for each logged entry, in the dict form that people parse already. Everything goes to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TextIO

from megaspan.report.pace import Pace
from megaspan.report.views import NotebookView, PlainView, TerminalView, View, in_notebook


class Progress:
    """Shows where a run is. Use as a context manager: the bar goes away, the lines stay.

    Args:
        total_steps: of the whole run.
        layers: of the model, for the bar inside a step.
        enabled: False (`disable_tqdm`) shows lines only.
        first_step: steps done before this start, for a resumed run.
        rows_per_step: rows that one step goes through.
        quiet: shows nothing at all: every rank but the first.
        memory: gives (bytes in use, peak bytes) of the device, for the bar; called a few times a second.
        stream: where to write; stderr.
    """

    def __init__(
        self,
        total_steps: int,
        layers: int,
        enabled: bool = True,
        *,
        first_step: int = 0,
        rows_per_step: int = 1,
        quiet: bool = False,
        memory: Callable[[], tuple[int, int]] | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self._pace = Pace(total_steps, layers, rows_per_step, step=first_step)
        stream = stream or sys.stderr
        self._view: View | None
        if quiet:
            self._view = None
        elif enabled and stream.isatty():
            self._view = TerminalView(self._pace, memory, stream)
        elif enabled and in_notebook():
            self._view = NotebookView(self._pace, memory)
        else:
            self._view = PlainView(stream)

    def __enter__(self) -> Progress:
        if self._view:
            self._view.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Takes the bar away. Harmless when called twice."""
        if self._view:
            self._view.close()

    def begin_step(self, step: int) -> None:
        """Step `step`, counted from 1, begins."""
        self._pace.end_step()
        self._pace.begin_step(step)
        self._changed()

    def layer(self, phase: str, index: int) -> None:
        """Layer `index` begins its "forward" or "backward". Cheap, and safe on any thread."""
        self._pace.enter_layer(phase, index)
        self._changed()

    def phase(self, name: str) -> None:
        """Something without layers begins: "loss", "optimizer", "saving checkpoint-500", …"""
        self._pace.enter_phase(name)
        self._changed()

    def log(self, step: int, entry: Mapping[str, float]) -> None:
        """Prints the line of a logged entry."""
        if "loss" in entry:
            self._pace.end_step()
        if self._view:
            self._view.entry(step, entry)

    def say(self, text: str, *, loud: bool = True) -> None:
        """Prints a line that must not be missed (`loud`), or one that may."""
        if self._view:
            self._view.say(text, loud)

    def _changed(self) -> None:
        if self._view:
            self._view.changed()
