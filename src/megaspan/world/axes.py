"""The mesh of ranks: which rows, tokens, heads and shards of the weights a rank works on.

Four axes, outermost first: `dp_replicate` (copies of the model), `dp_shard` (ranks with rows of their own that share one copy),
`cp` (ranks that share a row's tokens), `sp` (ranks that share its heads). Neighbouring ranks differ in `sp`, then in `cp`: what
talks most lies closest, inside one node while it has room. Weights are sharded over dp_shard × cp × sp, flattened to one axis
`shard`: with cp_size 8 every rank holds an eighth of the 16 bytes a parameter although all eight work on one row.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import prod
from typing import TYPE_CHECKING

from megaspan.config.parallel import AXES, OPTIONS, check_heads, resolve
from megaspan.plan.ranks import heads_of
from megaspan.world import launchfile
from megaspan.world.commands import again
from megaspan.world.gpu import gpus
from megaspan.world.launched import launch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from megaspan.config import SFTConfig

# Joined axes of the device mesh, by name.
SHARD = ("dp_shard", "cp", "sp")  # ranks that share one copy of the weights
ROW = ("cp", "sp")  # ranks that work on one row
DATA = ("dp_replicate", "dp_shard")  # ranks with rows of their own
JOINED = {"shard": SHARD, "row": ROW, "data": DATA}


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes and this rank's place on them.

    Attributes:
        dp_replicate, dp_shard, cp, sp: ranks along each axis; their product is the number of ranks.
        rank: number of this rank among all; it is its place in the mesh, read with `sp` fastest.
        local_rank: number of this rank on its node.
        nodes: machines.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    sp: int = 1
    rank: int = 0
    local_rank: int = 0
    nodes: int = 1

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Ranks along each axis, in the order of `AXES`."""
        return self.dp_replicate, self.dp_shard, self.cp, self.sp

    @property
    def ranks(self) -> int:
        """All ranks."""
        return prod(self.sizes)

    def coordinate(self, axis: str) -> int:
        """This rank's place on an axis, or on a joined one: shard, row or data."""
        places = dict(zip(AXES, _unravel(self.rank, self.sizes), strict=True))
        place = 0
        for name in JOINED.get(axis, (axis,)):
            place = place * getattr(self, name) + places[name]
        return place

    def size(self, axis: str) -> int:
        """Ranks along an axis, or along a joined one: shard, row or data."""
        return prod(getattr(self, name) for name in JOINED.get(axis, (axis,)))

    def check_heads(self, heads: int, kv_heads: int) -> None:
        """Refuses an sp_size that does not split a model's heads, once they are known.

        Raises:
            UserError: with the sizes that do.
        """
        check_heads(self.sp, heads, kv_heads, self.cp, again(launch()))

    def __str__(self) -> str:
        """As the run header says it: `8 ranks: cp_size 4 × sp_size 2`."""
        if self.ranks == 1:
            return "1 rank"
        told = " × ".join(f"{axis}_size {size}" for axis, size in zip(AXES, self.sizes, strict=True) if size > 1)
        return f"{self.ranks} ranks{f' on {self.nodes} nodes' if self.nodes > 1 else ''}: {told}"


def _unravel(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    places: list[int] = []
    for size in reversed(sizes):
        rank, place = divmod(rank, size)
        places.append(place)
    return tuple(reversed(places))


def mesh(config: SFTConfig, environ: Mapping[str, str] = os.environ) -> Mesh:
    """The mesh of this run: sizes from the options and from accelerate's file, ranks from the launcher.

    `dp_shard_size` takes what the other sizes leave when nobody gives it; beside a `parallelism_config` of accelerate's file it
    is 1 then, as accelerate reads such a file.

    Raises:
        UserError: the product of the sizes is not the number of processes, or file and options contradict each other.
    """
    launchfile.refuse_launch(environ)
    launchfile.refuse_contradictions(config, environ)
    started, in_file = launch(environ), launchfile.sizes(environ)
    given = {option: size for option, size in in_file.items() if size > 1}
    given |= {option: getattr(config, option) for option in OPTIONS if option in config.model_fields_set}
    found = [] if config.use_cpu or launchfile.wants_cpu(environ) else gpus()
    most = len(found) * started.nodes if found else None
    command = again(started, set(in_file) - config.model_fields_set)
    heads = partial(heads_of, config)
    sizes = resolve(given, started.world_size, open_shard=not in_file, most=most, again=command, heads=heads)
    return Mesh(**sizes, rank=started.rank, local_rank=started.local_rank, nodes=started.nodes)


@dataclass(frozen=True)
class DeviceAxes:
    """torch's meshes over all ranks. Joined axes are kept here, since torch will stop finding them in the mesh by name.

    Attributes:
        root: the mesh with the four axes of `AXES`.
        joined: one mesh of one axis for each name in `JOINED`.
        fsdp: what `fully_shard` takes: the axis shard, behind dp_replicate where there are several copies of the model.
    """

    root: DeviceMesh
    joined: dict[str, DeviceMesh]
    fsdp: DeviceMesh

    def group(self, axis: str) -> ProcessGroup:
        """This rank's process group along an axis, or along a joined one: shard, row or data."""
        return self.joined[axis].get_group() if axis in self.joined else self.root.get_group(axis)

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a collective along any of the axes may wait."""
        from torch.distributed.distributed_c10d import _set_pg_timeout  # private, but the only way in torch 2.11 and 2.13

        for group in {*self.root.get_all_groups(), *self.fsdp.get_all_groups(), *(self.group(axis) for axis in self.joined)}:
            _set_pg_timeout(timeout, group)


def device_axes(mesh: Mesh, device_type: str) -> DeviceAxes:
    """Makes torch's meshes; the process group must exist, and all ranks must call it.

    Args:
        mesh: the facts.
        device_type: "cuda" or "cpu".
    """
    from torch.distributed.device_mesh import init_device_mesh

    root = init_device_mesh(device_type, mesh.sizes, mesh_dim_names=AXES)
    # Private, but in torch 2.11 and 2.13 the only way to a joined axis that knows its root.
    joined = {name: root[axes]._flatten(name) for name, axes in JOINED.items()}
    fsdp = joined["shard"]
    if mesh.dp_replicate > 1:
        shape = (mesh.dp_replicate, mesh.size("shard"))
        fsdp = init_device_mesh(device_type, shape, mesh_dim_names=("dp_replicate", "shard"))
    return DeviceAxes(root, joined, fsdp)
