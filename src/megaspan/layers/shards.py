"""What a rank holds of a tensor that FSDP2 has cut into shards, without the machinery that cuts it.

A sharded parameter is a DTensor: rows 0 … c−1 lie on the first rank of its group, the next c on the second, where c is the
number of rows over the number of ranks, rounded up; the last ranks may hold fewer rows, or none. So the ranks' parts, one after
the other, are the whole tensor in memory order: checkpoints written by any number of ranks are the same file, and a rank finds
its part in one by arithmetic. Optimizer, checkpoints and model loading all need to know no more than that.

Source of the cut: `torch.chunk` along the first dimension, as in torch.distributed.fsdp.fully_shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

_COMPUTE = "megaspan_compute_dtype"


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds: the tensor itself, or the local rows of a sharded one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rows_of(total: int, ranks: int, rank: int) -> slice:
    """The rows that a rank holds of a tensor of `total` rows."""
    size = -(-total // ranks)
    return slice(min(rank * size, total), min((rank + 1) * size, total))


def shard_group(mesh: Any) -> Any:
    """The process group over whose ranks parameters are cut: the last axis of the mesh."""
    return mesh.get_group(mesh.ndim - 1)


def shard_ranks(tensor: Tensor, *, alone: bool = False) -> Any:
    """The process group that a parameter is cut over, None where it is whole; a group of one counts where `alone`."""
    if not isinstance(tensor, DTensor):
        return None
    group = shard_group(tensor.device_mesh)
    return group if alone or group.size() > 1 else None


def rows_here(tensor: DTensor) -> slice:
    """The rows of a sharded tensor that this rank holds."""
    group = shard_group(tensor.device_mesh)
    return rows_of(tensor.shape[0], group.size(), group.rank())


def as_sharded(local_rows: Tensor, whole: Tensor, mesh: Any) -> DTensor:
    """A DTensor from this rank's rows of a tensor that looks like `whole`, which may be on the meta device."""
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    return DTensor.from_local(
        local_rows, mesh, placements, run_check=False, shape=whole.shape, stride=tuple(_contiguous(whole.shape))
    )


def compute_dtype(parameter: Tensor) -> torch.dtype:
    """The type that a parameter is multiplied in: its own, unless it is the fp32 master of weights gathered in bf16."""
    return getattr(parameter, _COMPUTE, parameter.dtype)


def computes_in(parameter: Tensor, dtype: torch.dtype) -> None:
    """Notes on a sharded parameter in which type it is gathered."""
    setattr(parameter, _COMPUTE, dtype)


def is_master(parameter: Tensor) -> bool:
    """Whether a sharded parameter is the fp32 master of what is computed with."""
    return isinstance(parameter, DTensor) and compute_dtype(parameter) != parameter.dtype


@contextmanager
def gathered(layer: Any) -> Iterator[None]:
    """Inside, the weights of an FSDP2 unit are whole, as in its forward; nothing happens to any other module.

    All ranks enter it together.
    """
    unit = hasattr(layer, "unshard")
    if unit:
        layer.unshard()
    try:
        yield
    finally:
        if unit:
            layer.reshard()


def all_gather(whole: Tensor, mine: Tensor, group: Any) -> None:
    """Every rank's `mine`, one behind the other, into `whole`; both contiguous."""
    # torch 2.13 has renamed both collectives, and warns of the names that 2.11 has.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, mine, group=group)


def reduce_scatter(mine: Tensor, whole: Tensor, group: Any) -> None:
    """The sum of every rank's `whole`, this rank's part of it into `mine`; both contiguous."""
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    reduce(mine, whole, group=group)


@dataclass(frozen=True, eq=False)
class Sharded:
    """This rank's part of a tensor that is to be written, or was read, as a whole.

    Attributes:
        local: this rank's elements, on any device.
        shape: of the whole.
        counts: elements that each rank of the group holds, in the order in which they make up the whole.
        group: the ranks.
        dtype: of the whole where it is written.
    """

    local: Tensor
    shape: tuple[int, ...]
    counts: tuple[int, ...]
    group: Any
    dtype: torch.dtype

    @property
    def part(self) -> slice:
        """Where this rank's elements lie in the whole, flat."""
        start = sum(self.counts[: self.group.rank()])
        return slice(start, start + self.counts[self.group.rank()])

    def of(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor, in the shape of `local`; a view where `whole` is contiguous."""
        return whole.reshape(-1)[self.part].view(self.local.shape)


def sharded(parameter: Tensor, held: Tensor | None = None, *, dtype: torch.dtype | None = None, span: int = 1) -> Any:
    """`held` as this rank's part of something cut like `parameter`; `held` itself where the parameter is not cut.

    Args:
        parameter: decides the cut.
        held: a moment or master of it, for one value a weight of the parameter's shape; None: the parameter's own rows.
        dtype: to be written in; None: as it is.
        span: weights that share one value of `held`, which is then flat. It divides the weights of a row.
    """
    if not isinstance(parameter, DTensor):
        return parameter.detach() if held is None else held
    held = local(parameter.detach()) if held is None else held
    group, shape = shard_group(parameter.device_mesh), tuple(parameter.shape)
    row = torch.Size(shape[1:]).numel()
    rows = (rows_of(shape[0], group.size(), rank) for rank in range(group.size()))
    counts = tuple((each.stop - each.start) * row // span for each in rows)
    return Sharded(held, shape if span == 1 else (sum(counts),), counts, group, dtype or held.dtype)


def _contiguous(shape: torch.Size) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]
