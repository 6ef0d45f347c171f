"""Threads that take tasks by rank, then in order of arrival.

A layer input of 8.6 GB is cut into 16-MiB pieces, and each thread checks and moves one at a time: one thread alone gets neither
a checksum nor a fast disk beyond a few GB/s. Python's lock is released in both.

The threads are daemons and hold no reference to the owner of the tasks, so a run that ends in an error does not wait for
gigabytes that nobody wants any more.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable


class Workers:
    """`count` threads; a task of a lower rank goes first. A task must not raise, and must not wait for another one."""

    def __init__(self, count: int, name: str) -> None:
        self._queue = _Queue()
        self._threads = [
            threading.Thread(target=_work, args=(self._queue,), name=f"{name}-{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def do(self, task: Callable[[], None], rank: int = 0) -> None:
        """Queues a task; dropped without a word after `close`."""
        self._queue.put(rank, task)

    def close(self, timeout: float | None = None) -> None:
        """Forgets what is queued and ends the threads, each after its present task."""
        self._queue.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout)


class _Queue:
    def __init__(self) -> None:
        self._tasks: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._open = True

    def put(self, rank: int, task: Callable[[], None]) -> None:
        with self._changed:
            if self._open:
                heapq.heappush(self._tasks, (rank, next(self._numbers), task))
                self._changed.notify()

    def get(self) -> Callable[[], None] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._tasks or not self._open)
            return heapq.heappop(self._tasks)[2] if self._open else None

    def close(self) -> None:
        with self._changed:
            self._open = False
            self._tasks.clear()
            self._changed.notify_all()


def _work(queue: _Queue) -> None:
    while (task := queue.get()) is not None:
        task()
        del task  # a thread that waits for its next task keeps no tensor of the last one alive
