"""The end of a rank, with the race of torch's threads against the end of Python forced by `toy_end.py`."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megaspan.world import threads

TOY = Path(__file__).with_name("toy_end.py")


def end(what: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(TOY), what], capture_output=True, text=True, check=False)


def test_a_rank_that_leaves_outlasts_the_threads_of_gloo():
    done = end("leave")
    assert (done.returncode, done.stdout, done.stderr) == (0, "a handler that runs after it", "")


@pytest.mark.full
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python lets such threads hang and no longer ends them")
def test_without_leaving_it_would_be_aborted():
    """The day this fails, torch has been cured, and `wait_for_threads` can go."""
    assert end("stay").returncode == -signal.SIGABRT


def test_a_thread_that_runs_is_waited_for_and_one_that_sleeps_is_not():
    asleep, stop = threading.Event(), time.monotonic() + 0.3

    def work():
        Path("/proc/thread-self/comm").write_text("pt_gloo_runloop")
        while time.monotonic() < stop:
            pass
        asleep.wait(60.0)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    time.sleep(0.05)
    assert not threads.wait_for_threads(patience=0.0)
    assert threads.wait_for_threads()
    assert time.monotonic() >= stop
    asleep.set()
    thread.join()
    assert threads.wait_for_threads()
