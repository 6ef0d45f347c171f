"""This rank among the others, from its start to its end.

`join` comes first and needs nothing from the others but their launcher's store, so that what takes long before the first
collective (tokenising, which one rank does while the others wait for its lock) can neither time out nor hang unseen (case R82);
`connect` makes the process group when the weights are about to be read. For a process on its own everything here does nothing.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from megaspan.world.axes import DeviceAxes, Mesh, device_axes, mesh
from megaspan.world.devices import device
from megaspan.world.failure import exit_once
from megaspan.world.heartbeat import Heartbeat, Limits, running
from megaspan.world.launched import launch
from megaspan.world.threads import wait_for_threads

if TYPE_CHECKING:
    import torch

    from megaspan.config import SFTConfig

# The heartbeat names and ends what hangs. This is for the case that it is itself at fault, and must outlast the longest wait
# that is right: a rank that saves alone, a layer of eight million tokens.
COLLECTIVE_TIMEOUT = timedelta(hours=2)

_Result = TypeVar("_Result")
CONNECT_PATIENCE = 60.0  # seconds that the first contact of many nodes may take


@dataclass(frozen=True)
class Ranks:
    """This process and its place; made by `join`.

    Attributes:
        mesh: sizes of the axes and the place of this rank.
        device: what it computes on.
        heart: the watch over the other ranks; None where there are none.
    """

    mesh: Mesh
    device: torch.device
    heart: Heartbeat | None = None

    @property
    def speaks(self) -> bool:
        """Whether header, progress and result are this rank's to show."""
        return self.mesh.rank == 0

    def beat(self, phase: str, patience: float | None = 0.0) -> None:
        """Notes where this rank is; see `Heartbeat.beat`. Costs under a microsecond."""
        if self.heart is not None:
            self.heart.beat(phase, patience)

    def abandon(self, error: BaseException) -> None:
        """Notes that this rank leaves a step in its middle; see `Heartbeat.abandon`."""
        if self.heart is not None:
            self.heart.abandon(error)

    def boundary(self, signum: int | None) -> int | None:
        """The signal to stop for at this place, on all ranks or on none; see `Heartbeat.boundary`."""
        return signum if self.heart is None else self.heart.boundary(signum)

    def in_turn(self, what: str, act: Callable[[], _Result]) -> _Result:
        """Runs `act` on the first rank of each machine, then on the others, which find on its disk what the first has made.

        Args:
            what: a name for it, used once.
            act: what to do; it may take any time.
        """
        if self.heart is None:
            return act()
        self.beat(what, None)
        return self.heart.in_turn(what, self.mesh.local_rank == 0, act)

    def connect(self) -> DeviceAxes | None:
        """Makes the process group (gloo for the host, nccl for the GPUs) and torch's meshes; None for one process.

        A process group that the script has made already is used as it is.
        """
        if self.mesh.ranks == 1:
            return None
        import torch
        import torch.distributed as dist

        assert self.heart is not None
        self.beat("connect", CONNECT_PATIENCE)
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.set_device(self.device)
        ours = not dist.is_initialized()
        if ours:
            # An attention kernel queues thousands of blocks. A collective of equal rank gets its turn behind the last of
            # them, so that keys meant to come behind attention came after it; torch reads this when it makes a group.
            os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                timeout=COLLECTIVE_TIMEOUT,
                device_id=self.device if cuda else None,
            )
        # Made once for a layout: each group has threads and sockets, on a GPU also buffers, to the end of the process.
        world, layout = dist.group.WORLD, (self.mesh.sizes, self.device.type)
        made = next((axes for group, known, axes in self.heart.meshes if group is world and known == layout), None)
        if made is None:
            made = device_axes(self.mesh, self.device.type)
            if ours:  # torch gives groups along an axis its own timeout, 10 or 30 minutes
                made.set_timeout(COLLECTIVE_TIMEOUT)
            self.heart.meshes.append((world, layout, made))
        self.beat("connected", None)
        return made

    def leave(self) -> None:
        """Waits until all ranks are done, then ends watch and process group. Runs by itself at the end of the process."""
        if self.heart is None:
            return
        self.heart.close()
        import torch.distributed as dist

        if dist.is_initialized() and not self.heart.failed:
            dist.destroy_process_group()
        wait_for_threads()


def join(config: SFTConfig, limits: Limits | None = None) -> Ranks:
    """Finds this rank's place and starts the watch over the others, or its next session. The first thing that a run does.

    Raises:
        UserError: sizes, launcher and machine do not go together.
    """
    started = launch()
    if started.several:
        sys.excepthook = exit_once
    here, place = device(config.use_cpu), mesh(config)
    if not started.several:
        return Ranks(place, here)
    if (heart := running(started)) is not None:
        heart.renew(limits)
        return Ranks(place, here, heart)
    ranks = Ranks(place, here, Heartbeat(started, limits))
    atexit.register(ranks.leave)
    return ranks
