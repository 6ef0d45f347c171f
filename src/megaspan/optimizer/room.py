"""Host memory for masters, moments and gradients: one arena, taken whole before the first step.

What lies here is never given back before the end of the run, so it is cut from one block without a gap; pinning it is timed
apart from any step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megaspan.human import UserError, format_bytes
from megaspan.memory.arena import HostArena, pages


class HostRoom:
    """Flat host tensors, zero at the start, pinned where there is a GPU.

    Args:
        sizes: (elements, type) of every tensor that `take` is going to be asked for.
        pinned: register the memory with CUDA.

    Raises:
        UserError: the machine has not so much memory, or does not allow to pin it.
    """

    def __init__(self, sizes: list[tuple[int, torch.dtype]], *, pinned: bool) -> None:
        self._arena = HostArena(pinned=pinned, purpose="the optimizer's states")
        total = sum(pages(max(count * dtype.itemsize, 1)) for count, dtype in sizes)
        try:
            if total:
                self._arena.reserve(1, total)
        except UserError as error:
            raise UserError(
                f"the optimizer needs {format_bytes(total)} of host memory for what lies there: {error.what}",
                do="Free host memory (for a container also `--ulimit memlock=-1`), set offload_optimizer: false, or set "
                "optim: adamw_8bit",
            ) from error

    @property
    def bytes(self) -> int:
        """Bytes held."""
        return self._arena.bytes

    @property
    def seconds_pinning(self) -> float:
        """Time spent getting them."""
        return self._arena.seconds_pinning

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of `count` elements."""
        return self._arena.take(max(count * dtype.itemsize, 1)).view((count,), dtype)

    def close(self) -> None:
        """Unpins and lets go of the memory; no copy may be under way."""
        self._arena.close()
