"""Gradients that wait on the host until the clipping factor is known.

Clipping needs the norm of all gradients before the first update, so all of them must be somewhere: 33 GB in fp32 for 8B
parameters. Each goes to the host the moment it is complete, beside the backward of the layer below, and its device memory is
free when it has arrived. Its fp32 sum of squares is taken on the way.

A window of several rows keeps its sum on the host: when a later row's gradient comes, the sum so far comes to the device in
pieces, is added to it there, and the new sum goes back: 8 bytes a parameter and row over the link, 1.3 s for 8B parameters, and
still no second gradient on the device. The addition is the one that autograd would have made, so no bit differs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from megaspan.layers.shards import shard_ranks
from megaspan.optimizer.conveyor import Conveyor, Task, pieces
from megaspan.optimizer.trained import Trained


def norm_of(gradient: Tensor) -> Tensor:
    """L2 norm, a scalar on the gradient's device; squares are summed in fp32 (fp64 for fp64)."""
    return torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))


def total_norm(norms: Sequence[tuple[Trained, Tensor]], device: torch.device) -> Tensor:
    """The norm of several gradients together, a scalar; of shards over all ranks that hold one.

    Args:
        norms: parameters, each with the norm of its gradient, of a sharded one with that of this rank's part.
        device: of the parameters.
    """
    whole = [norm for trained, norm in norms if shard_ranks(trained.parameter) is None]
    parts = [norm for trained, norm in norms if shard_ranks(trained.parameter) is not None]
    group = next((group for trained, _ in norms if (group := shard_ranks(trained.parameter)) is not None), None)
    if group is None:
        return _together([*whole, *parts]) if norms else torch.zeros((), device=device)
    square = _together(parts).square()
    dist.all_reduce(square, group=group)
    return _together([*whole, square.sqrt()])


def on_any_rank(names: Collection[str], trained: Mapping[str, Trained]) -> list[str]:
    """Names that some rank has among its own, in the order of `trained`, the same on all ranks; all have to call it.

    Args:
        names: of parameters, found in this rank's parts.
        trained: all parameters.
    """
    group = next((group for each in trained.values() if (group := shard_ranks(each.parameter)) is not None), None)
    held = torch.tensor([name in names for name in trained], dtype=torch.int32)
    if group is not None:
        held = held.to(next(iter(trained.values())).weight.device)
        dist.all_reduce(held, op=dist.ReduceOp.MAX, group=group)
    return [name for name, there in zip(trained, held.tolist(), strict=True) if there]


def _together(norms: list[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(norms))


@final
class HostGradients:
    """Moves gradients to the host and adds to those that are there."""

    def __init__(self, conveyor: Conveyor) -> None:
        self._conveyor = conveyor

    def take(self, trained: Trained, *, last: bool) -> Tensor | None:
        """Moves a parameter's gradient, with what was gathered before, to the host; returns its norm on the last row."""
        gradient = self.add(trained)
        trained.parameter.grad = None
        norm = norm_of(gradient) if last else None
        assert trained.gathered is not None
        self._conveyor.send(gradient.contiguous().view(-1), trained.gathered)
        trained.has_gathered = True
        return norm

    def add(self, trained: Trained) -> Tensor:
        """Adds what was gathered to the gradient on the device, in place, and returns that."""
        gradient = trained.gradient
        assert gradient is not None
        if trained.has_gathered:
            flat = gradient.view(-1)
            self._conveyor.run(_addition(trained, flat, cut) for cut in pieces(flat.numel()))
            trained.has_gathered = False
        return gradient

    def norm(self, trained: Trained) -> Tensor:
        """Norm of a gathered gradient, brought to the device whole: summed in pieces it would be another number."""
        assert trained.gathered is not None
        norms: list[Tensor] = []

        def work(gradient: Tensor) -> None:
            norms.append(norm_of(gradient.view(trained.weight.shape)))

        self._conveyor.run([Task([trained.gathered], work)])
        return norms[0]


def _addition(trained: Trained, flat: Tensor, cut: slice) -> Task:
    assert trained.gathered is not None

    def work(before: Tensor) -> None:
        flat[cut].add_(before)

    return Task([trained.gathered[cut]], work)
