"""Runs a module that starts ranks, and ends with its parent: `python start.py torch.distributed.run …`.

Launchers put their ranks into sessions of their own, where no signal to a group reaches them. Where launcher and ranks each
end with their parent, a benchmark that is killed leaves nothing behind on a GPU. They are killed, not asked: a trainer that is
asked leaves a checkpoint of 115 GB first.
"""

from __future__ import annotations

import ctypes
import runpy
import signal
import sys


def end_with_parent() -> None:
    """Makes Linux kill this process when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # 1 is PR_SET_PDEATHSIG


if __name__ == "__main__":
    end_with_parent()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
