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


def find_death(board: Board, size: int, session: str = "") -> str | None:
    """A sentence on a rank of this machine that is gone without a word; None where there is none."""
    who = board.read(f"who/{rank}" for rank in range(size))
    for rank in range(size):
        process: dict[str, Any] | None = who.get(f"who/{rank}")
        if process is None or process["node"] != node() or _alive(process["pid"]) or rank in left(board, size, session):
            continue
        beat = f"{session}beat/{rank}"
        note = board.read([beat]).get(beat)
        if note is None and board.read([f"ended/{rank}"]):
            return f"rank {rank} has ended, and this one waits for a trainer that it did not make"
        phase = "start" if note is None else note[2]
        return f"rank {rank} died in {phase!r} without a word (a crash, or killed as for lack of host memory)"
    return None


def left(board: Board, size: int, session: str = "") -> dict[int, int]:
    """The ranks that have ended, with their exit codes, and those that are done with this session, with 0.

    A process may join several times, one trainer after the other: each is a session, and an exit code ends all of them.
    """
    keys = {rank: (f"{session}left/{rank}", f"left/{rank}") for rank in range(size)}
    notes = board.read({key for both in keys.values() for key in both})
    found: dict[int, int] = {}
    for rank, (here, anywhere) in keys.items():
        if code := notes.get(anywhere):
            found[rank] = code
        elif here in notes:
            found[rank] = notes[here]
    return found


def _alive(pid: int) -> bool:
    """Whether a process of this machine runs; one that has ended and waits to be collected does not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except (OSError, IndexError):  # not ours to signal, or no /proc
        return True
    return state not in ("Z", "X")
