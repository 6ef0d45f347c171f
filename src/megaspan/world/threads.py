"""The last wait of a rank: until torch's own threads hold nothing of Python any more.

A thread of gloo lets go of a collective's tensors after it has told the waiting main thread that the sum is there, and takes
the interpreter's lock for it. If Python has begun to end by then, Python ends the thread by unwinding its stack, C++ does not
allow that there ("terminate called without an active exception"), and a run that was complete ends with exit code 134. Under
load that was one process in ten. `destroy_process_group` does not help: it drops names, and the threads live as long as any
mesh or model does. Autograd's threads, which GPUs have, can do the same with the last graph. Known as pytorch issue 190489,
open in torch 2.13; the cure there would be a check for an interpreter that ends in `PyInterpreter.cpp`.

So nothing is ended here by force: exit code and the handlers of others stay as they are.
"""

from __future__ import annotations

import time
from pathlib import Path

from megaspan.world.host import lines_of

THREADS = ("pt_gloo_runloop", "pt_autograd")  # as torch names them
PAUSE = 0.02  # seconds; longer than a thread sleeps until it asks for the interpreter's lock again (5 ms)


def wait_for_threads(patience: float = 10.0) -> bool:
    """Waits until every thread that may hold tensors waits for work; nothing may be given to them afterwards.

    Such a thread sleeps, and has not been woken through a whole pause in which the interpreter's lock was free: then it does
    not wait for that lock. One that other processes keep from running counts as running, so load only makes this longer.

    Args:
        patience: seconds after which the process ends all the same. A collective that hangs does not use them: it sleeps.

    Returns:
        Whether all of them wait.
    """
    until = time.monotonic() + patience
    before = _switches()
    while before != {}:
        if time.monotonic() > until:
            return False
        time.sleep(PAUSE)
        now = _switches()
        if now is not None and now == before:
            return True
        before = now
    return True


def _switches(tasks: Path = Path("/proc/self/task")) -> dict[str, tuple[str | None, str | None]] | None:
    """How often each of the threads has gone to sleep and was interrupted so far; None while one of them runs."""
    found = {}
    for task in tasks.glob("*"):
        lines = dict(line.partition(":\t")[::2] for line in lines_of(task / "status"))
        if lines.get("Name", "").startswith(THREADS):
            if not lines.get("State", "").startswith("S"):
                return None
            found[task.name] = lines.get("voluntary_ctxt_switches"), lines.get("nonvoluntary_ctxt_switches")
    return found
