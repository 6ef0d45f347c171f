"""Bytes alive on the CPU, counted storage by storage as operations make them: the yardstick of the plan's formulas."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Storages:
    """Follows storages from when they are added to their end.

    Attributes:
        now: bytes of those that are alive.
    """

    now = 0

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}

    def follow(self, tensor: torch.Tensor) -> None:
        """Adds the storage of a tensor, once."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes and size:
            self._sizes[key] = size
            self.now += size
            weakref.finalize(storage, self._end, key)

    def _end(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


class Live(Storages, TorchDispatchMode):
    """While it is entered, follows every storage from its first appearance to its end.

    Args:
        free: tensors that do not count (weights, tables).
        counted: tensors that exist already and do.
    """

    def __init__(self, free: Iterable[torch.Tensor] = (), counted: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in free}
        self._sizes |= {tensor.untyped_storage()._cdata: tensor.nbytes for tensor in counted}
        self.now = self.peak = sum(self._sizes.values())

    def restart(self) -> None:
        """The peak so far is forgotten."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.follow(tensor)
        self.peak = max(self.peak, self.now)
        return result
