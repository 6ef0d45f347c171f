"""Work on a stream of its own, beside what the computing stream is given next.

In the backward of a row that comes back tile by tile a head group's q, k and v are made of 8.6 GB that cross the link (an 8B
layer's input at 1,048,576 tokens): 0.16 s of copies for 0.02 s of products, and attention waits. Made beside attention of the
group before, which takes seconds, they cost nothing: the link was idle then. The stream comes first (`priority`), for its
kernels would queue behind the thousands of blocks of attention's.

Memory needs no care of whoever uses it, for these reasons. Work aside begins when all is done that the computing stream was
given before it: so what it is given to write to is free, and so is what its own part of the allocator hands out again, whoever
read that. Whoever reads what was made waits for `done` first. Nothing that it reads may be let go of before that.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, final

import torch


@final
class Aside:
    """Queues what is computed inside a `with` on a stream of its own. Not for several threads at once, nor inside itself.

    Args:
        device: the device.
        backend: the module with streams and events; torch.cuda or torch.cpu, for tests another.

    Attributes:
        done: event of the end of what was queued last; None before.
    """

    def __init__(self, device: torch.device, backend: Any) -> None:
        self._device, self._backend = device, backend
        options = {"device": device, "priority": -1} if device.type == "cuda" else {}
        self._stream = backend.Stream(**options)
        self._inside: AbstractContextManager[Any] | None = None
        self.done: Any = None

    def __enter__(self) -> None:
        self._stream.wait_event(self._computing.record_event())
        self._inside = self._backend.stream(self._stream)
        self._inside.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        assert self._inside is not None
        self._inside.__exit__(kind, error, traceback)
        self._inside, self.done = None, self._stream.record_event()
        if error is not None:  # whoever catches it lets go of what was half made
            self._computing.wait_event(self.done)

    @property
    def _computing(self) -> Any:
        return self._backend.current_stream(self._device)
