"""One error of several ranks is said once, and ends all of them with its exit code.

Eight ranks that read the same wrong option fail eight times, and one that fails alone leaves seven waiting, whose errors
("connection closed by peer") then hide its own. So a rank that fails notes it on the board: the first is the cause and is
shown, the others end in silence. Under `megaspan train` the parent process shows it, under other launchers the rank itself; and
torchrun, whose own report of 40 lines comes behind, gets it to show there in place of a link.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from megaspan.human import UserError, UserErrors
from megaspan.world.board import Board
from megaspan.world.deaths import find_death
from megaspan.world.launched import Launch, launch

ECHO_SECONDS = 3.0  # how long a dead process may take to be gone


@dataclass(frozen=True)
class Failure:
    """What ended a run.

    Attributes:
        rank: the rank that failed first.
        code: its exit code.
        sentences: what it has to say.
        trace: its traceback, where the error is ours to mend; empty otherwise.
        watch: its watch over the others has found it, not the thread that failed.
    """

    rank: int
    code: int
    sentences: list[str]
    trace: str = ""
    watch: bool = False

    def told(self, several: bool = True) -> list[str]:
        """What is shown: of several ranks, what only one may have met begins with its number.

        A launcher's own summary names the rank whose process ended first, which waited for that one.
        """
        first, *more = self.sentences
        alone = several and self.code in (1, 3) and not first.startswith("rank ")
        return [f"rank {self.rank}: {first}" if alone else first, *more]


def report_failure(
    code: int, sentences: Sequence[str], trace: str = "", environ: Mapping[str, str] = os.environ
) -> Failure | None:
    """Notes that this rank ends with `code`; returns what this process is to say, or None where another one says it.

    A rank that was interrupted by a signal (a code above 128) is no cause that ends others; see `Heartbeat.boundary`.
    """
    started = launch(environ)
    mine = Failure(started.rank, code, list(sentences), trace)
    if started.meeting is None:
        return mine
    try:
        board = Board(started, wait=5.0)
        if code == 1 and (death := _death_behind(board, started, sentences)):
            mine = replace(mine, sentences=[death], trace="")
        board.write(f"left/{started.rank}", code)
        note = asdict(mine)
        first = board.first("interrupted" if code > 128 else "failure", note) == note
        if code > 128 and board.read(["failure"]):
            first = False
    except RuntimeError:
        return mine
    if started.by == "megaspan train":
        return None
    if first or code == 2:  # every rank meets a wrong option, and any of them may be the one whose file is shown
        _tell_launcher(mine, environ)
    return mine if first else None


def _tell_launcher(failure: Failure, environ: Mapping[str, str]) -> None:
    """Leaves it in the file from which torch's elastic agent takes the cause of a rank's end; the form is its `record`'s."""
    if path := environ.get("TORCHELASTIC_ERROR_FILE"):
        told = "\n".join(f"megaspan: {sentence}" for sentence in failure.told())
        extra = {"py_callstack": failure.trace + told, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):  # the sentence is on the screen already
            Path(path).write_text(json.dumps({"message": {"message": told, "extraInfo": extra}}), encoding="utf-8")


def _death_behind(board: Board, started: Launch, sentences: Sequence[str]) -> str | None:
    """The death of another rank, where an error of this one is only its echo."""
    until = time.monotonic() + (ECHO_SECONDS if any("by peer" in sentence for sentence in sentences) else 0.0)
    while True:  # a process that held much memory is not gone at once when its connections are
        if death := find_death(board, started.world_size):
            return death
        if time.monotonic() >= until or board.read(["failure"]):
            return None
        time.sleep(0.1)


def read_failure(meeting: tuple[str, int]) -> Failure | None:
    """The parent's side: what its ranks noted, the cause before a mere interruption; None where none had anything to say."""
    try:
        notes = Board(Launch("parent", 0, 1, 0, meeting=meeting), wait=5.0).read(["failure", "interrupted"])
    except RuntimeError:
        return None
    note = notes.get("failure") or notes.get("interrupted")
    return Failure(**note) if note else None


def exit_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A `sys.excepthook` for a rank's script: a user's error is one sentence and exit code 2, said by one rank.

    Raises:
        SystemExit: always, with the exit code; the interpreter ends with it.
    """
    code, sentences = _judge(error)
    shown = "" if code != 1 else "".join(traceback.format_exception(kind, error, trace))
    if failure := report_failure(code, sentences, shown):
        told = "\n".join(f"megaspan: {sentence}" for sentence in failure.told(launch().several))
        # Not sys.stderr: torch's own hook, around this one, collects what goes there and loses it at the exit.
        print(failure.trace + told, file=sys.__stderr__, flush=True)
    raise SystemExit(code)


def _judge(error: BaseException) -> tuple[int, list[str]]:
    notes: list[Any] = list(getattr(error, "__notes__", ()))
    if isinstance(error, UserErrors):
        return 2, [str(single) for single in error.errors]
    if isinstance(error, UserError):
        return 2, [str(error), *notes]
    signum = getattr(error, "signum", signal.SIGINT if isinstance(error, KeyboardInterrupt) else None)
    if signum is not None:
        return 128 + int(signum), [f"interrupted by {signal.Signals(signum).name}", *notes]
    memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return 3 if memory else 1, [f"{type(error).__name__}: {error}", *notes]
