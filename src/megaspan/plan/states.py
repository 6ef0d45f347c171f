"""Where gradients, fp32 masters and AdamW's moments lie, and what each choice costs.

Beside the weights of 8B parameters (16 GB) stand gradients (16 to 33 GB) and AdamW (33 to 98 GB): more than a GPU of 80 GB has,
before a single token. Three things bring them down. A gradient may be used up as soon as it is complete ("update", only where
the norm of all of them is not needed first); it may wait on the host until the norm is known; and moments may lie on the host
and visit the device in pieces, once a step.

The link to the host carries 53 GB/s each way (H200, measured with both directions busy), so 33 GB of moments there and back are
0.6 s of a step: nothing at a million tokens, a fifth of a step at 32,768.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Gradients = Literal["device", "host", "update"]
Moments = Literal["device", "host"]

PIECES_BYTES = 3 * 2**24  # elements of a streamed update that are on the device: three pieces of 16 Mi (optimizer/conveyor.py)
ON_THE_WAY_BYTES = 2**30  # gradients that may be on their way to the host before the computation waits


@dataclass(frozen=True)
class StatePlan:
    """Where the model's states lie.

    Attributes:
        gradients: "device": all are there at the end of the backward. "host": each goes to host memory when it is complete, is
            added to those of the window's rows before, its squared norm is summed, and one streamed pass of the optimizer
            follows. "update": its parameter is updated as soon as it is complete, in the backward of the window's last row, and
            it is dropped; only without clipping.
        moments: where AdamW's moments and the fp32 masters lie.
    """

    gradients: Gradients = "device"
    moments: Moments = "device"

    @property
    def moved(self) -> int:
        """How many of the two wait on the host."""
        return (self.gradients == "host") + (self.moments == "host")


@dataclass(frozen=True)
class Faster:
    """What it gains that states do not lie where it is simplest, although there is room.

    Attributes:
        than: where they could lie.
        seconds: that the best step with them there takes longer, on an H200.
    """

    than: StatePlan
    seconds: float


def state_plans(*, gpu: bool, clips: bool, rows: int, adapter: bool, offload_optimizer: bool | None) -> Iterator[StatePlan]:
    """The plans that are allowed, the simplest first: those that move least over the link.

    Args:
        gpu: the step runs on a GPU; elsewhere everything is in host memory and nothing can be moved.
        clips: the gradient norm is needed before any update.
        rows: of one window. The sum of several is there from the first one's backward on, so that using it up in the last
            one's would free nothing.
        adapter: only an adapter is trained: its states are small.
        offload_optimizer: the option; None lets the plan decide by what fits and by seconds.
    """
    gradients: list[Gradients] = ["device"]
    if rows == 1 and not clips:
        gradients = ["update"]  # it costs nothing and never needs more
    elif gpu and not adapter:
        gradients.append("host")  # 16 bits a parameter and row over the link; moments are 32 or more each way
    moments: list[Moments] = ["host"] if offload_optimizer and gpu else ["device"]
    if offload_optimizer is None and gpu and not adapter:
        moments.append("host")
    for there in moments:
        for where in gradients:
            yield StatePlan(where, there)
