"""One device's way to host memory and back: two side streams, the pinned memory, and the event of the last copy out of it.

Stores of several kinds share one: what a layer's input leaves free an attention output may take. At a million tokens of an 8B
model in segments the inputs alone reach 11 pieces of 8 GiB and the outputs alone 6, but never at once more than 12 together.
"""

from __future__ import annotations

from typing import Any, final

import torch

from megaspan.memory.arena import HostArena
from megaspan.memory.aside import Aside


@final
class Link:
    """Not for several threads at once.

    Args:
        device: the device.
        limit: most bytes of host memory, or None.
        backend: the module with streams and events; torch.cuda or torch.cpu, for tests another.

    Attributes:
        arena: the host memory, pinned beside a GPU.
        last_out: event of the last copy to the device: memory given back may be read until then.
    """

    def __init__(self, device: torch.device, *, limit: int | None = None, backend: Any = None) -> None:
        on_gpu = device.type == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu and device.index is None else device
        self.backend = backend or torch.get_device_module(device)
        self.arena = HostArena(pinned=on_gpu, limit=limit)
        options = {"device": self.device} if on_gpu else {}
        self.to_host, self.to_device = self.backend.Stream(**options), self.backend.Stream(**options)
        self.last_out: Any = None
        self._aside: Aside | None = None

    @property
    def aside(self) -> Aside:
        """A stream beside the computing one, made when it is asked for."""
        if self._aside is None:
            self._aside = Aside(self.device, self.backend)
        return self._aside

    @property
    def stream(self) -> Any:
        """The stream that computes; inside `aside` that one."""
        return self.backend.current_stream(self.device)

    def make_room(self, count: int, size: int) -> None:
        """Gets memory for `count` slots of `size` bytes beside those that are out; waits for the device if there is too little.

        Raises:
            UserError: the host has not that much.
        """
        if size and self.arena.missing(count, size):
            # Growing may give up idle blocks, and a copy that is queued may still read or write them.
            self.backend.synchronize(self.device)
            self.arena.reserve(count, size)

    def close(self) -> None:
        """Waits for the device and frees the memory."""
        self.backend.synchronize(self.device)
        self.arena.close()
