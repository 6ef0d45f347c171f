"""A thread on every rank that watches the others: one that hangs or dies is named, not waited for.

Without it a rank that stands still shows after 10 to 30 minutes as a watchdog's dump of the ranks that waited. Here each rank
notes where it is (`beat`, two assignments, no network), and its thread writes the note to the board twice a second and reads
those of the others. A rank that holds the others up is named within a minute, or within three times what a layer lasts where
that is longer (8B at a million tokens on two GPUs: 80 s); if it does not move again, the run is ended. One that dies or fails
ends all others within two seconds, whatever launcher started them. One that leaves a step by `sys.exit`, or by an error that
its script catches, ends those that wait for it.

The same notes let all ranks stop at one place when a signal comes to any of them (`boundary`): each would abandon its step at a
layer of its own, and the first collective after that would never be answered.
"""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, final

from megaspan.human import format_seconds
from megaspan.world.agreement import node
from megaspan.world.board import Board
from megaspan.world.deaths import find_death, left, sign_in
from megaspan.world.failure import Failure
from megaspan.world.judge import Seen, culprits, sentence
from megaspan.world.launched import Launch
from megaspan.world.session import Session
from megaspan.world.turns import in_turn


@dataclass(frozen=True)
class Limits:
    """Seconds of the watch.

    Attributes:
        period: between two looks.
        name: silence after which a rank that is behind is named; or twice what its phase is expected to last.
        end: silence after which the run is ended; or five times what its phase is expected to last.
        left: silence after which the run is ended where another rank has left in the middle of a step.
    """

    period: float = 0.5
    name: float = 45.0
    end: float = 300.0
    left: float = 10.0


NAME_FACTOR, END_FACTOR = 2.0, 5.0
# Seconds that a rank may need until it writes for the first time: imports from a cold network disk.
START_PATIENCE = 120.0
SAYING = 5.0  # seconds that the main thread may need to say why it ends
_Result = TypeVar("_Result")


class Heartbeat:
    """This rank's beats, and the thread that watches all of them. Closed by `close`; a rank that fails just ends.

    A process has one, whatever number of trainers its script makes: each begins a session of it (`renew`).

    Args:
        started: the launch, of several ranks.
        limits: how long to be patient.
        end: ends the process with a code; os._exit, since the main thread may be inside a call that never returns.

    Attributes:
        failed: this rank ended with an error.
        meshes: torch's meshes of this process, kept for the trainers to come; see `Ranks.connect`.
    """

    def __init__(self, started: Launch, limits: Limits | None = None, end: Callable[[int], Any] = os._exit) -> None:
        self._launch, self._limits, self._end = started, limits or Limits(), end
        self._lock = threading.Lock()
        self.failed = False
        self.meshes: list[Any] = []
        self._tick = 0
        self._woke = self._looked = time.monotonic()
        self._closed = threading.Event()
        self._beat: tuple[int, str, float | None, float] = (0, "start", None, time.monotonic())
        self._board = Board(started)  # the thread's
        self._own = Board(started)  # the main thread's
        sign_in(self._own, started.rank)
        self._begin()
        self._thread = _Watch(self)
        self._thread.start()

    @property
    def stopped(self) -> bool:
        """Whether all ranks have stopped for a signal in this session."""
        return self._now.stopped

    # The main thread's side

    def beat(self, phase: str, patience: float | None = 0.0) -> None:
        """Notes that this rank is at `phase` now. All ranks must pass the same beats in the same order.

        Args:
            phase: what begins, in words: "forward layer 3".
            patience: seconds that it may take by the plan; None for any time.
        """
        self._beat = (self._beat[0] + 1, phase, patience, time.monotonic())

    def abandon(self, error: BaseException) -> None:
        """Notes that this rank leaves a step in its middle. The others wait for it in vain, unless they all do the same.

        Args:
            error: why; a script may catch it and go on.
        """
        self._abandoned = f"{self._beat[1]!r} by {type(error).__name__}" + (f" ({error})" if str(error) else "")
        self.beat("after an error", None)

    def boundary(self, signum: int | None) -> int | None:
        """A place where all ranks can stop together. All ranks must pass the same ones in the same order.

        Args:
            signum: a signal that has come to this rank, or None.

        Returns:
            The signal to stop for, here and on every rank at this same boundary, or None to go on.

        Raises:
            RuntimeError: a rank does not answer where to stop.
        """
        return self._now.boundary(signum, self._limits.end)

    def in_turn(self, what: str, first: bool, act: Callable[[], _Result]) -> _Result:
        """Runs `act` on the rank of a machine that is `first`, then on its others. It may take any time.

        Args:
            what: a name for it, used once in a session.
            first: this rank does not wait.
            act: what to do. What it raises on the first rank, the others raise too.
        """
        return in_turn(self._own, f"{self._now.name}done/{what}/{node()}", first, act)

    def renew(self, limits: Limits | None = None) -> None:
        """Leaves the session of one trainer and begins that of the next; nobody is waited for."""
        self._leave()
        self._limits = limits or self._limits
        self._begin()

    def _begin(self) -> None:
        number = self._own.count(f"joined/{self._launch.rank}")
        with self._lock:
            self._now = Session("" if number == 1 else f"{number}/")
            self._beat = (0, "start", None, time.monotonic())
            self._abandoned = ""

    def _leave(self) -> None:
        """Says that this rank is done with the session; and before, that it was in the middle of a step."""
        here, rank = self._now.name, self._launch.rank
        if self._abandoned:
            self._own.write(f"{here}midway/{rank}", self._abandoned)
        self._own.write(f"{here}left/{rank}", 0)

    def close(self, wait: float = 600.0) -> None:
        """Waits until every rank is done, so that none ends while another still needs it, and stops watching.

        A rank that died meanwhile ends this one with a sentence; one that works on alone is left alone after `wait` seconds.
        """
        if self._closed.is_set():
            return
        self.beat("end", None)
        rank, here = self._launch.rank, self._now.name
        try:
            code = left(self._own, self._launch.world_size, here).get(rank)
            self.failed = bool(code) and not self.stopped
            if code is None:
                self._leave()
            if not self.failed:
                self._own.write(f"ended/{rank}", True)
                self._wait_for_others(here, wait)
        except RuntimeError:
            pass  # the store has ended, with the rank or launcher that served it: nobody is left to wait for
        self._closed.set()
        self._thread.join(5.0)

    def _wait_for_others(self, here: str, wait: float) -> None:
        size, began = self._launch.world_size, time.monotonic()
        looks = 0
        while len(gone := left(self._own, size, here)) < size and not self._closed.is_set():
            if time.monotonic() - began > wait:
                others = ", ".join(str(rank) for rank in range(size) if rank not in gone)
                _say(f"rank {self._launch.rank} ends: it has waited {format_seconds(wait)} for rank {others} to end.")
                return
            looks += 1
            if looks % 10 == 0 and (death := find_death(self._own, size, here)):
                self._finish(1, death, self._own)
            time.sleep(0.05)

    # The thread's side

    def _watch(self) -> None:
        while not self._closed.wait(self._limits.period):
            try:
                self._look()
            except RuntimeError:
                if not self._closed.is_set() and self._beat[1] != "end":
                    self._finish(1, "the launcher, or the rank that served its store, is gone")

    def _look(self) -> None:
        rank, size = self._launch.rank, self._launch.world_size
        with self._lock:
            now, (count, phase, patience, at) = self._now, self._beat
        here = now.name
        if (wish := now.wish()) is not None:
            self._board.first(f"{here}halt", wish)
        self._tick += 1
        where, waits = location() if time.monotonic() - at > self._limits.name / 2 else ("", False)
        self._board.write(f"{here}beat/{rank}", [self._tick, count, phase, patience, now.frozen, where, waits])
        notes = self._board.read(["failure", f"{here}halt", *(f"{here}beat/{r}" for r in range(size))])
        gone = left(self._board, size, here)
        before, self._looked = self._looked, time.monotonic()
        # Who was stopped itself (Ctrl-Z, a suspended job) has seen nobody move meanwhile: it gives all of them their time anew.
        if self._looked - before > self._limits.name / 2:
            self._woke = self._looked
        if rank in gone:
            return  # this rank is on its way out, by its own account
        if "failure" in notes:
            self._finish(notes["failure"]["code"])
        if f"{here}halt" not in notes and (codes := [code for code in gone.values() if code > 128]):
            self._finish(codes[0])  # a signal ended another rank outside of all boundaries, so there is nothing to save
        if death := find_death(self._board, size, here):
            self._finish(1, death)
        if gone and patience is not None and self._looked - max(at, self._woke) > self._limits.left:
            for other, where in self._board.read(f"{here}midway/{other}" for other in gone).items():
                why = f"rank {other.rpartition('/')[2]} has left {where}, and its script went on"
                self._finish(1, f"{why}; rank {rank} waits for it in {phase!r}")
        beats = {r: notes[f"{here}beat/{r}"] for r in range(size) if f"{here}beat/{r}" in notes}
        if f"{here}halt" in notes:
            now.halt(notes[f"{here}halt"], {r: beat[4] for r, beat in beats.items()}, gone, size)
        self._judge(now, beats, gone)

    def _judge(self, session: Session, beats: dict[int, list[Any]], gone: dict[int, int]) -> None:
        now, limits, woke = self._looked, self._limits, self._woke
        for rank, note in beats.items():
            known = session.seen.get(rank)
            moved = now if known is None or known[0][1] != note[1] else known[1]
            written = now if known is None or known[0][0] != note[0] else known[2]
            session.seen[rank] = (note, moved, written)
        seen = {
            rank: Seen(note[1], note[2], note[3], now - max(moved, woke), now - max(written, woke), note[5], note[6])
            for rank, (note, moved, written) in session.seen.items()
            if rank not in gone
        }
        for rank in set(range(self._launch.world_size)) - set(session.seen) - set(gone):
            seen[rank] = Seen(-1, "start", START_PATIENCE, now - max(session.began, woke))
        speaker = min((rank for rank, each in seen.items() if each.absent < limits.name / 2), default=None)
        if ending := culprits(seen, limits.end, END_FACTOR):
            self._finish(1, sentence(ending, seen, gone) + ". The run is ended")
        named = culprits(seen, limits.name, NAME_FACTOR)
        if speaker == self._launch.rank:
            if named and named != session.named:
                _say(f"{sentence(named, seen, gone)}. The run ends after {format_seconds(limits.end)} of this.")
            if session.named and not named:
                _say(f"rank {', '.join(map(str, session.named))} moves again.")
        session.named = named

    def _finish(self, code: int, why: str = "", board: Board | None = None) -> None:
        """Ends this process; the first rank to know why says it, or the launcher of megaspan does."""
        if why:
            note = asdict(Failure(self._launch.rank, code, [why], watch=True))
            try:
                first = (board or self._board).first("failure", note)
                says = first == note and self._launch.by != "megaspan train"
                if first != note and first["rank"] == self._launch.rank and self._closed.wait(SAYING):
                    return  # the main thread has just begun to say it, and ends the process by itself
            except RuntimeError:  # nobody is there who could
                says = True
            if says:
                _say(why + ".")
        sys.stderr.flush()
        self._end(code)


@final
class _Watch(threading.Thread):
    """The thread of a heartbeat: by it, a process knows that it is watched already."""

    def __init__(self, heart: Heartbeat) -> None:
        super().__init__(target=heart._watch, name="megaspan-heartbeat", daemon=True)
        self.heart = heart


def running(started: Launch) -> Heartbeat | None:
    """The heartbeat of this process, where a trainer has begun one for this launch and it is not closed."""
    hearts = [thread.heart for thread in threading.enumerate() if isinstance(thread, _Watch)]
    return next((heart for heart in hearts if heart._launch == started and not heart._closed.is_set()), None)


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
    # While an error of the main thread is on its way out, torch's hook collects what goes to sys.stderr: it would be lost here.
    collected = type(sys.stderr) is io.StringIO
    print(f"megaspan: {text}", file=sys.__stderr__ if collected else sys.stderr, flush=True)
