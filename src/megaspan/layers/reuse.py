"""Whether the memory of an incoming gradient may be written to.

A layer's backward gets dy and returns dx, of the same size: 8.6 GB each for an 8B model at 1,048,576 tokens, 0.67 GB for a 4B
model at 131,072. dx can take the place of dy if nobody else will read dy. Usually nobody does, but autograd gives one tensor to
both branches of an addition, a hook may have put it aside, and the caller of `backward` may have made it. Torch does not say so
in one place; three counts of references do together. What they are for a gradient of which the backward is the only owner is
measured here, once, on this version of torch and Python, and so is that they differ where somebody else owns it too. Where they
do not, nothing is ever reused.
"""

from __future__ import annotations

import sys
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Count: TypeAlias = tuple[int, int, int]


def owners(gradients: tuple[Tensor, ...]) -> Count:
    """References to the first gradient: of Python, of its memory, of the tensor; to be called from a backward."""
    first = gradients[0]
    memory: int = torch._C._storage_Use_Count(first.untyped_storage()._cdata)
    return sys.getrefcount(first), memory, first._use_count()  # type: ignore[attr-defined]


@final
class Reuse:
    """Knows the counts of a gradient that has one owner; they are measured when it is made."""

    def __init__(self) -> None:
        try:
            alone, shared = _alone(), _shared()
        except AttributeError:  # a torch without these counters
            alone, shared = set(), set()
        self._alone = alone if not alone & shared else set()

    @property
    def possible(self) -> bool:
        """Whether a sole owner can be told from others here."""
        return bool(self._alone)

    def allows(self, gradients: tuple[Tensor, ...]) -> bool:
        """Whether the first gradient belongs to this backward alone; to be called from it, with its `*gradients`."""
        if not self.possible or owners(gradients) not in self._alone:
            return False
        return gradients[0].is_contiguous() and gradients[0].untyped_storage().nbytes() == gradients[0].nbytes


class _Probe(torch.autograd.Function):
    """Twice its input; its backward notes the owners of what comes in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: list[Count]) -> Tensor:
        ctx.found = found
        return x * 2

    @staticmethod
    @once_differentiable  # as the layer's own is: it holds a reference too
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.found.append(owners(gradients))
        return gradients[0] * 2, None


def _start() -> Tensor:
    return torch.ones(3, requires_grad=True)


@torch.enable_grad()
def _alone() -> set[Count]:
    """Counts below another function of ours, and below torch's own operations."""
    found: list[Count] = []
    _Probe.apply(_Probe.apply(_start(), found), found).square().sum().backward()
    (_Probe.apply(_start(), found).exp() * 3).sum().backward()
    return set(found)


@torch.enable_grad()
def _shared() -> set[Count]:
    """Counts where the other branch of an addition, a hook, a view or the caller have the gradient too."""
    added: list[Count] = []
    found: list[Count] = []
    kept: list[Tensor] = []
    (_Probe.apply(_start(), added) + _Probe.apply(_start(), added)).square().sum().backward()
    hooked = _Probe.apply(_start(), found)
    hooked.register_hook(kept.append)
    hooked.square().sum().backward()
    viewed = _Probe.apply(_start(), found)
    viewed.register_hook(lambda gradient: kept.append(gradient.view(1, 3)))
    viewed.square().sum().backward()
    given = torch.ones(3)
    _Probe.apply(_start(), found).backward(given)
    # Of the two branches the first to run shares; the second may find itself alone, when the first has let go.
    return {added[0], *found}
