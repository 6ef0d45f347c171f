"""One tensor that a layer keeps: where it is now, and what has to be known before it may be used or forgotten.

Autograd holds it in place of the tensor itself, 8.6 GB each at a million tokens of an 8B model. When a graph goes without a
backward, these go with it, on any thread and at any moment; what they held is then left for the store to sweep up.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, TypeAlias

import torch

from megaspan.memory.arena import Slot
from megaspan.memory.parking import Away

# What an input still held when its graph went: a slot, or a buffer and the event of the copy into it.
Orphan: TypeAlias = tuple[Slot | None, torch.Tensor | None, Any]


class SavedInput:
    """Stands for a layer's input in the autograd graph: `tensor` on the device (filled once `fetched` has happened), `slot` on
    the host, or `away` on the disk.

    `wanted` says that the backward is about to use `tensor`.
    """

    __slots__ = (
        "__weakref__", "away", "copied", "dtype", "fetched", "orphans", "previous", "shape", "slot", "spent", "tensor",
        "version", "wanted",
    )  # fmt: skip

    def __init__(self, source: torch.Tensor, orphans: deque[Orphan]) -> None:
        self.shape, self.dtype = source.shape, source.dtype
        self.version: int | None = source._version
        self.tensor: torch.Tensor | None = source
        self.slot: Slot | None = None
        self.away: Away | None = None
        self.copied: Any = None
        self.fetched: Any = None
        self.previous: weakref.ref[SavedInput] | None = None
        self.wanted = self.spent = False
        self.orphans = orphans

    def __del__(self) -> None:
        # Any thread, any moment: the deque's append is atomic, and the owner sweeps it when it next runs.
        if self.slot is not None or self.fetched is not None:
            self.orphans.append((self.slot, None if self.fetched is None else self.tensor, self.fetched))

    def check_there(self) -> None:
        """Raises RuntimeError where it was let go of."""
        if self.spent:
            raise RuntimeError(
                "The layer inputs of this forward are gone: its step was abandoned, or this is a second backward through it. "
                "Run the forward again before each backward, or keep all of it with gradient_checkpointing=False."
            )

    def check_unchanged(self) -> None:
        """Raises RuntimeError where the model's own tensor is no longer what was saved."""
        if self.tensor is not None and self.version is not None and self.tensor._version != self.version:
            raise RuntimeError(
                "The input of a checkpointed layer was overwritten in place before its backward; "
                "the model does `hidden_states += ...` (or the like) on it. Gradients would be wrong."
            )
