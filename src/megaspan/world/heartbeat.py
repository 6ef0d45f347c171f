"""A thread on every rank that watches the others: one that hangs or dies is named, not waited for.

Without it a rank that stands still shows after 10 to 30 minutes as a watchdog's dump of the ranks that waited. Here each rank
notes where it is (`beat`, two assignments, no network), and its thread writes the note to the board twice a second and reads
those of the others. A rank that holds the others up is named within a minute and, if it does not move again, the run is ended;
one that dies or fails ends all others within two seconds, whatever launcher started them.

The same notes let all ranks stop at one place when a signal comes to any of them (`boundary`): each would abandon its step at a
layer of its own, and the first collective after that would never be answered.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megaspan.human import format_seconds
from megaspan.world.agreement import node
from megaspan.world.board import Board
from megaspan.world.deaths import find_death, left, sign_in
from megaspan.world.judge import Seen, culprits, sentence
from megaspan.world.launched import Launch


@dataclass(frozen=True)
class Limits:
    """Seconds of the watch.

    Attributes:
        period: between two looks.
        name: silence after which a rank that is behind is named; or twice what its phase is expected to last.
        end: silence after which the run is ended; or five times what its phase is expected to last.
    """

    period: float = 0.5
    name: float = 45.0
    end: float = 300.0


NAME_FACTOR, END_FACTOR = 2.0, 5.0
# Seconds that a rank may need until it writes for the first time: imports from a cold network disk.
START_PATIENCE = 120.0
_Result = TypeVar("_Result")


class Heartbeat:
    """This rank's beats, and the thread that watches all of them. Closed by `close`; a rank that fails just ends.

    A script may train twice, with a heartbeat each: what they write is told apart by a number that every rank counts alike.

    Args:
        started: the launch, of several ranks.
        limits: how long to be patient.
        end: ends the process with a code; os._exit, since the main thread may be inside a call that never returns.
    """

    def __init__(self, started: Launch, limits: Limits | None = None, end: Callable[[int], Any] = os._exit) -> None:
        self._launch, self._limits, self._end = started, limits or Limits(), end
        self._lock = threading.Lock()
        self._beat: tuple[int, str, float | None, float] = (0, "start", None, time.monotonic())
        self._boundaries = 0  # places to stop at that this rank has passed
        self._wish: int | None = None  # a signal that this rank wants to stop for
        self._signal: int | None = None  # the signal that all stop for
        self._frozen: int | None = None  # boundaries passed when this rank learnt of it
        self._target = 0  # the boundary to stop at
        self._agreed = threading.Event()
        self.stopped = False  # all ranks stop for a signal
        self.failed = False  # this rank ended with an error
        self._seen: dict[int, tuple[list[Any], float, float]] = {}  # rank: note, when it moved last, when it was written last
        self._named: list[int] = []
        self._began = time.monotonic()
        self._tick = 0
        self._closed = threading.Event()
        self._board = Board(started)
        sign_in(self._board, started.rank)
        number = self._board.count(f"joined/{started.rank}")
        self._session = "" if number == 1 else f"{number}/"
        self._thread = threading.Thread(target=self._watch, name="megaspan-heartbeat", daemon=True)
        self._thread.start()

    # The main thread's side

    def beat(self, phase: str, patience: float | None = 0.0) -> None:
        """Notes that this rank is at `phase` now. All ranks must pass the same beats in the same order.

        Args:
            phase: what begins, in words: "forward layer 3".
            patience: seconds that it may take by the plan; None for any time.
        """
        self._beat = (self._beat[0] + 1, phase, patience, time.monotonic())

    def boundary(self, signum: int | None) -> int | None:
        """A place where all ranks can stop together. All ranks must pass the same ones in the same order.

        Args:
            signum: a signal that has come to this rank, or None.

        Returns:
            The signal to stop for, here and on every rank at this same boundary, or None to go on.
        """
        with self._lock:
            self._boundaries += 1
            here = self._boundaries
            if signum is not None and self._wish is None:
                self._wish = signum
            if self._frozen is None:
                return None
        self._agreed.wait()  # the other threads answer within two looks; a process that has died ends this one meanwhile
        if here < self._target:
            return None
        self.stopped = True
        return self._signal

    def in_turn(self, what: str, first: bool, act: Callable[[], _Result]) -> _Result:
        """Runs `act` on the rank of a machine that is `first`, then on its others. It may take any time.

        Args:
            what: a name for it, used once.
            first: this rank does not wait.
            act: what to do.
        """
        board, key = Board(self._launch), f"{self._session}done/{what}/{node()}"
        if first:
            result = act()
            board.write(key, True)
            return result
        while key not in board.read([key]):
            time.sleep(0.05)
        return act()

    def close(self, wait: float = 600.0) -> None:
        """Waits until every rank is done, so that none ends while another still needs it, and stops watching."""
        if self._closed.is_set():
            return
        self.beat("end", None)
        rank, size = self._launch.rank, self._launch.world_size
        try:
            board = Board(self._launch, wait=5.0)
            code = left(board, size, self._session).get(rank)
            if code is None:
                board.write(f"{self._session}left/{rank}", 0)
            self.failed = bool(code) and not self.stopped
            if not self.failed:
                until = time.monotonic() + wait
                while len(left(board, size, self._session)) < size and time.monotonic() < until:
                    time.sleep(0.05)
        except RuntimeError:
            pass  # the store has ended, with the rank or launcher that served it: nobody is left to wait for
        self._closed.set()
        self._thread.join(5.0)

    # The thread's side

    def _watch(self) -> None:
        while not self._closed.wait(self._limits.period):
            try:
                self._look()
            except RuntimeError:
                if not self._closed.is_set() and self._beat[1] != "end":
                    self._finish(1, "the launcher, or the rank that served its store, is gone")

    def _look(self) -> None:
        rank, size, here = self._launch.rank, self._launch.world_size, self._session
        with self._lock:
            if self._wish is not None and self._signal is None:
                self._board.first(f"{here}halt", self._wish)
            frozen = self._frozen
        self._tick += 1
        count, phase, patience, at = self._beat
        where, waits = location() if time.monotonic() - at > self._limits.name / 2 else ("", False)
        self._board.write(f"{here}beat/{rank}", [self._tick, count, phase, patience, frozen, where, waits])
        notes = self._board.read(["failure", f"{here}halt", *(f"{here}beat/{r}" for r in range(size))])
        gone = left(self._board, size, here)
        if rank in gone:
            return  # this rank is on its way out, by its own account
        if "failure" in notes:
            self._finish(notes["failure"]["code"])
        if f"{here}halt" not in notes and (codes := [code for code in gone.values() if code > 128]):
            self._finish(codes[0])  # a signal ended another rank outside of all boundaries, so there is nothing to save
        if death := find_death(self._board, size, here):
            self._finish(1, death)
        beats = {r: notes[f"{here}beat/{r}"] for r in range(size) if f"{here}beat/{r}" in notes}
        if f"{here}halt" in notes:
            self._halt(notes[f"{here}halt"], beats)
        self._judge(beats, gone)

    def _halt(self, signum: int, beats: dict[int, list[Any]]) -> None:
        with self._lock:
            if self._frozen is None:
                self._signal, self._frozen = signum, self._boundaries
        places = [beat[4] for beat in beats.values() if beat[4] is not None]
        if len(places) == self._launch.world_size and not self._agreed.is_set():
            self._target = max(places) + 1
            self._agreed.set()

    def _judge(self, beats: dict[int, list[Any]], gone: dict[int, int]) -> None:
        now, limits = time.monotonic(), self._limits
        for rank, note in beats.items():
            known = self._seen.get(rank)
            moved = now if known is None or known[0][1] != note[1] else known[1]
            written = now if known is None or known[0][0] != note[0] else known[2]
            self._seen[rank] = (note, moved, written)
        seen = {
            rank: Seen(note[1], note[2], note[3], now - moved, now - written, note[5], note[6])
            for rank, (note, moved, written) in self._seen.items()
            if rank not in gone
        }
        for rank in set(range(self._launch.world_size)) - set(self._seen) - set(gone):
            seen[rank] = Seen(-1, "start", START_PATIENCE, now - self._began)
        speaker = min((rank for rank, each in seen.items() if each.absent < limits.name / 2), default=None)
        if ending := culprits(seen, limits.end, END_FACTOR):
            self._finish(1, sentence(ending, seen) + ". The run is ended")
        named = culprits(seen, limits.name, NAME_FACTOR)
        if speaker == self._launch.rank:
            if named and named != self._named:
                _say(f"{sentence(named, seen)}. The run ends after {format_seconds(limits.end)} of this.")
            if self._named and not named:
                _say(f"rank {', '.join(map(str, self._named))} moves again.")
        self._named = named

    def _finish(self, code: int, why: str = "") -> None:
        """Ends this process; the first rank to know why says it, or the launcher of megaspan does."""
        if why:
            note = {"rank": self._launch.rank, "code": code, "sentences": [why], "trace": ""}
            try:
                says = self._board.first("failure", note) == note and self._launch.by != "megaspan train"
            except RuntimeError:  # nobody is there who could
                says = True
            if says:
                _say(why + ".")
        sys.stderr.flush()
        self._end(code)


def location() -> tuple[str, bool]:
    """The line outside torch that the main thread is at, and whether it is inside a collective."""
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    waits = False
    while frame is not None:
        path = frame.f_code.co_filename
        if "/torch/" not in path:
            return f"{Path(path).name}:{frame.f_lineno} in {frame.f_code.co_name}", waits
        waits = waits or "/torch/distributed/" in path
        frame = frame.f_back
    return "", waits


def _say(text: str) -> None:
    print(f"megaspan: {text}", file=sys.stderr, flush=True)
