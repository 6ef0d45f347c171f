"""Ranks that died without a word: by a crash in a library, or by the kernel for lack of memory.

Their peers see "connection reset by peer" or nothing at all. Each rank says on the board who it is, and whether it is on its
way out, so every rank of the same machine can see that a process is gone that has not said goodbye.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megaspan.world.agreement import node
from megaspan.world.board import Board


def sign_in(board: Board, rank: int) -> None:
    """Says which process a rank is. A rank that ends by its own will writes `left/RANK` with its exit code."""
    board.write(f"who/{rank}", {"pid": os.getpid(), "node": node()})


def find_death(board: Board, size: int) -> str | None:
    """A sentence on a rank of this machine that is gone without a word; None where there is none."""
    notes = board.read(f"{kind}/{rank}" for kind in ("left", "who") for rank in range(size))
    for rank in range(size):
        who: dict[str, Any] | None = notes.get(f"who/{rank}")
        if who is None or f"left/{rank}" in notes or who["node"] != node() or _alive(who["pid"]):
            continue
        last = board.read([f"left/{rank}", f"beat/{rank}"])
        if f"left/{rank}" not in last:  # it may have said so since
            phase = last[f"beat/{rank}"][2] if f"beat/{rank}" in last else "start"
            return f"rank {rank} died in {phase!r} without a word (a crash, or killed as for lack of host memory)"
    return None


def _alive(pid: int) -> bool:
    """Whether a process of this machine runs; one that has ended and waits to be collected does not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except (OSError, IndexError):  # not ours to signal, or no /proc
        return True
    return state not in ("Z", "X")
