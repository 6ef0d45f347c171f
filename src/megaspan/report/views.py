"""The three places where progress is shown: a terminal, a notebook cell, anything else.

The terminal's bars are drawn by a thread four times a second from the numbers in `Pace`, so that a layer boundary costs the
training thread nothing. A notebook's cell is rewritten at most once a second. A pipe or a log file gets finished lines only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megaspan.human import fitted, format_bytes, format_seconds
from megaspan.report.entries import dict_line, reading_line
from megaspan.report.pace import Pace

Memory = Callable[[], tuple[int, int]]


class View(Protocol):
    """What every place can do."""

    def open(self) -> None:
        """Begins."""

    def close(self) -> None:
        """Ends; may be called twice."""

    def changed(self) -> None:
        """The numbers have changed."""

    def entry(self, step: int, entry: Mapping[str, float]) -> None:
        """Shows a logged entry."""

    def say(self, text: str, loud: bool) -> None:
        """Shows a line of text."""


class PlainView:
    """One line for each entry, in dict form, and nothing else."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def open(self) -> None:
        """Nothing to begin."""

    def close(self) -> None:
        """Nothing to end."""

    def changed(self) -> None:
        """A moving bar has no place in a log file."""

    def entry(self, step: int, entry: Mapping[str, float]) -> None:
        """Prints the dict."""
        print(dict_line(entry), file=self._stream, flush=True)

    def say(self, text: str, loud: bool) -> None:
        """Prints the text, `!` before it if it is loud."""
        print(f"! {text}" if loud else text, file=self._stream, flush=True)


class TerminalView:
    """Two bars at the bottom, lines scrolling above them."""

    def __init__(self, pace: Pace, memory: Memory | None, stream: TextIO) -> None:
        self._pace, self._memory = pace, memory
        self._console = Console(file=stream, highlight=False)
        # Output of the run itself stays where it was sent: only a stdout that shares the screen is kept out of the bars.
        self._live = Live(
            get_renderable=self._draw,
            console=self._console,
            refresh_per_second=4,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
        )

    def open(self) -> None:
        """Draws the bars."""
        self._live.start()

    def close(self) -> None:
        """Wipes them."""
        self._live.stop()

    def changed(self) -> None:
        """The drawing thread looks by itself."""

    def entry(self, step: int, entry: Mapping[str, float]) -> None:
        """Prints the entry above the bars."""
        self._console.print(Text(reading_line(step, entry, self._console.width)))

    def say(self, text: str, loud: bool) -> None:
        """Prints the text above the bars, red if it is loud."""
        told = fitted(f"! {text}" if loud else text, self._console.width)
        self._console.print(Text(told, style="bold red" if loud else ""), soft_wrap=True)

    def _draw(self) -> RenderableType:
        pace = self._pace
        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True, min_width=22)  # the bars do not jump when the phase has a longer name
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis")
        width = max(10, min(40, self._console.width - 75))
        run, inside = notes(pace, self._memory)
        table.add_row(Text(f"step {pace.step}/{pace.total_steps}", style="bold"), _bar(pace.in_run, width), Text(run))
        table.add_row(Text(f"  {place(pace)}"), _bar(pace.in_step, width), Text(inside, style="dim"))
        return table


class NotebookView:
    """One output cell that is rewritten: the lines so far, then the bars in text."""

    def __init__(self, pace: Pace, memory: Memory | None) -> None:
        self._pace, self._memory = pace, memory
        self._lines: list[str] = []
        self._handle: Any = None
        self._drawn = 0.0

    def open(self) -> None:
        """Makes the output."""
        from IPython.display import display

        self._handle = display({"text/plain": self._text()}, raw=True, display_id=True)

    def close(self) -> None:
        """Leaves the lines and takes the bars away."""
        if self._handle is not None:
            self._handle.update({"text/plain": "\n".join(self._lines)}, raw=True)
        self._handle = None

    def changed(self) -> None:
        """Rewrites the output, at most once a second."""
        if self._handle is not None and time.monotonic() - self._drawn > 1:
            self._drawn = time.monotonic()
            self._handle.update({"text/plain": self._text()}, raw=True)

    def entry(self, step: int, entry: Mapping[str, float]) -> None:
        """Adds the entry."""
        self._add(reading_line(step, entry))

    def say(self, text: str, loud: bool) -> None:
        """Adds the text."""
        self._add(f"! {text}" if loud else text)

    def _add(self, line: str) -> None:
        self._lines.append(line)
        if self._handle is None:
            print(line, file=sys.stderr)
        else:
            self._handle.update({"text/plain": self._text()}, raw=True)

    def _text(self) -> str:
        pace = self._pace
        run, inside = notes(pace, self._memory)
        bars = [
            f"{f'step {pace.step}/{pace.total_steps}':28} {_text_bar(pace.in_run)}  {run}",
            f"{'  ' + place(pace):28} {_text_bar(pace.in_step)}  {inside}",
        ]
        return "\n".join([*self._lines, *bars])


def in_notebook() -> bool:
    """Whether a notebook's kernel runs this process. IPython is not imported to find out: a kernel has imported it."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


def place(pace: Pace) -> str:
    """Where the step is, in words: `forward, layer 12 of 36`."""
    row = f"row {pace.row}/{pace.rows_per_step}, " if pace.rows_per_step > 1 else ""
    if pace.phase == "forward":
        return f"{row}forward {pace.layer + 1}/{pace.layers}"
    if pace.phase == "backward":
        return f"{row}backward {pace.layers - pace.layer}/{pace.layers}"
    return pace.phase or "starting"


def notes(pace: Pace, memory: Memory | None) -> tuple[str, str]:
    """What stands beside the two bars: time left and memory; seconds in the step."""
    left = pace.seconds_left
    run = [] if left is None else [f"{format_seconds(left)} left"]
    if memory is not None:
        now, peak = memory()
        run.append(f"{format_bytes(now)} now, {format_bytes(peak)} peak")
    inside = f"{format_seconds(pace.step_seconds)} in this step" if pace.step_seconds else ""
    return " · ".join(run), inside


def _bar(done: float, width: int) -> ProgressBar:
    return ProgressBar(total=1.0, completed=done, width=width, style="grey37", complete_style="cyan", finished_style="cyan")


def _text_bar(done: float, width: int = 30) -> str:
    eighths = round(done * width * 8)
    full, part = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[part] if part else "")).ljust(width, "·")
