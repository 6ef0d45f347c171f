"""Ctrl-C and SIGTERM in the middle of a step that lasts minutes.

At a million tokens one step takes from minutes to an hour, most of it inside one call of `backward`, where Python's main
thread cannot run a signal handler. The operating system's notice is therefore read by a thread of our own, and the step is
abandoned at the next layer boundary, on whichever thread runs it; the weights still hold the last complete step and are saved
as such. Where weights are updated inside the backward, the loop does not ask here between the first update and the last.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from types import FrameType, TracebackType
from typing import Any

# A terminal's Ctrl-C reaches a launcher and its ranks, and the launcher hands it on to the ranks once more.
ECHO_SECONDS = 2.0


class Interrupted(Exception):
    """The open step was abandoned on the user's or the scheduler's request.

    Attributes:
        signum: the signal; the process exits with 128 + signum (130 for SIGINT, 143 for SIGTERM).
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Interrupts:
    """Catches SIGINT and SIGTERM for the length of a `with` block; one more, 2 s after the first or later, ends the process.

    Outside the main thread (some notebooks and servers) signals cannot be caught, and this does nothing.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._previous[signum] = signal.signal(signum, _leave_to_the_thread)
        threading.Thread(target=self._watch, name="megaspan-signals", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._previous:
            return
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._writer.close()  # ends the thread: its read returns nothing

    def _watch(self) -> None:
        caught, first = set(self._previous), 0.0
        while notice := self._reader.recv(1):
            if notice[0] not in caught:
                continue
            if self.signum is None:
                self.signum, first = notice[0], time.monotonic()
            elif time.monotonic() - first >= ECHO_SECONDS:
                os._exit(128 + notice[0])
        self._reader.close()


def _leave_to_the_thread(signum: int, frame: FrameType | None) -> None:
    """A Python-level handler must exist, or the default action would end the process; the wake-up descriptor does the work."""
