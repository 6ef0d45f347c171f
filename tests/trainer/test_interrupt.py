"""Signals in the middle of a step."""

import os
import signal
import time
from pathlib import Path

import pytest

from megaspan.trainer.interrupt import ECHO_SECONDS, Interrupts
from tests.gloo import forked


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_handlers_come_back(signum):
    before = signal.getsignal(signum)
    with Interrupts() as interrupts:
        assert interrupts.signum is None
        os.kill(os.getpid(), signum)
        deadline = time.monotonic() + 5
        while interrupts.signum is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert interrupts.signum == signum
    assert signal.getsignal(signum) is before


def busy(ready: Path) -> None:
    """One long call after another."""
    with Interrupts():
        ready.touch()
        time.sleep(30)
        time.sleep(30)


def test_a_later_signal_ends_the_process_even_while_the_main_thread_is_busy_outside_python(tmp_path):
    """The main thread holds still in one long call, as in `backward`: only a thread of our own can hear it."""
    ready = tmp_path / "ready"
    process = forked(busy, ready)
    assert process.pid is not None
    limit = time.monotonic() + 60
    while not ready.exists() and time.monotonic() < limit:
        time.sleep(0.01)
    for wait in (0.5, ECHO_SECONDS):  # the second one is the echo of the first: a terminal and a launcher both send Ctrl-C
        os.kill(process.pid, signal.SIGTERM)
        time.sleep(wait)
        assert process.is_alive()
    os.kill(process.pid, signal.SIGTERM)
    process.join(10)
    assert process.exitcode == 143


def test_nothing_is_caught_outside_the_main_thread():
    """Notebooks and servers may train on another thread, where Python allows no handlers."""
    import threading

    outcome = []

    def run():
        with Interrupts() as interrupts:
            assert interrupts.signum is None
            outcome.append("trained")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert outcome == ["trained"]
