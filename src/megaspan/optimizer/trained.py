"""What is known of each trained parameter: its master, its moments, how often it was stepped, and where these lie.

Masters and moments are 12 bytes a parameter with fp32 masters: 98 GB for 8B parameters, more than such a GPU has, so they may
lie in pinned host memory. There they are flat views of one arena; on the device they have the parameter's shape.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megaspan.layers.shards import is_master, local, sharded

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Entry:
    """One moment of a parameter: its shape and type, and how many weights share one value of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    span: int = 1

    @property
    def count(self) -> int:
        """Values."""
        return torch.Size(self.shape).numel()

    @property
    def bytes(self) -> int:
        """Bytes of all values."""
        return self.count * self.dtype.itemsize


@dataclass(eq=False)
class Trained:
    """A trained parameter with its state.

    Attributes:
        name, parameter: as in `named_parameters`.
        decay: factor of the weight decay, 0 for biases and norms.
        tied: it is used under more than one name, so one backward may bring several gradients.
        embedding: it is the table of an embedding.
        step: updates so far, fp32 scalar.
        master: fp32 copy that the update works on; None where that is the parameter itself.
        moments: by name; on the device they are made at the first update.
        stepped: the moments hold something.
        on_host: master and moments lie in host memory, flat.
        gathered: host memory for the gradient, flat; None where gradients stay on the device.
        has_gathered: and it holds a gradient now.
    """

    name: str
    parameter: torch.nn.Parameter
    decay: float
    tied: bool
    embedding: bool
    step: Tensor
    master: Tensor | None = None
    moments: dict[str, Tensor] = field(default_factory=dict)
    stepped: bool = False
    on_host: bool = False
    gathered: Tensor | None = None
    has_gathered: bool = False

    @property
    def weight(self) -> Tensor:
        """The local part of the parameter."""
        return local(self.parameter.detach())

    @property
    def gradient(self) -> Tensor | None:
        """The local part of the gradient on the device."""
        return None if self.parameter.grad is None else local(self.parameter.grad)

    @property
    def is_master(self) -> bool:
        """The parameter is a shard in fp32, of weights that are gathered in half precision: its own master."""
        return is_master(self.parameter)

    @property
    def target_dtype(self) -> torch.dtype:
        """Type of what AdamW works on."""
        return self.parameter.dtype if self.master is None else self.master.dtype

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Type in which its gradients are summed."""
        return getattr(self.parameter, "grad_dtype", None) or self.parameter.dtype

    def shaped(self, tensor: Tensor) -> Tensor:
        """A master or a moment in the parameter's shape, where it has a value for each weight."""
        weight = self.weight
        return tensor.view(weight.shape) if tensor.numel() == weight.numel() else tensor

    def whole_shape(self, entry: Entry) -> tuple[int, ...]:
        """The shape of a whole moment."""
        return tuple(self.parameter.shape) if entry.span == 1 else (-(-self.parameter.numel() // entry.span),)

    def whole(self, tensor: Tensor, span: int = 1) -> Any:
        """What a checkpoint holds of a master or a moment: itself, or this rank's part of the whole one.

        Args:
            tensor: local.
            span: weights that share one of its values.
        """
        return sharded(self.parameter, self.shaped(tensor) if span == 1 else tensor, span=span)


@dataclass
class Part:
    """A parameter or a piece of one, all on the device: what one call of the arithmetic works on."""

    weight: Tensor
    gradient: Tensor
    moments: dict[str, Tensor]
    step: Tensor


class Rule(ABC):
    """The arithmetic of an update; it knows nothing of where state lies.

    Attributes:
        steps_on_device: the count of updates is a tensor beside the weight; else on the CPU.
        heeds: `update` takes a flag on the device, and changes nothing where it is 1.
    """

    steps_on_device: bool
    heeds: bool

    @abstractmethod
    def entries(self, trained: Trained) -> dict[str, Entry]:
        """The moments of a parameter."""

    @abstractmethod
    def update(self, parts: Sequence[Part], *, rate: float, decay: float, stop: Tensor | None = None) -> None:
        """Updates weights, moments and steps in place.

        Args:
            parts: whole parameters, or pieces that begin at a multiple of every entry's span.
            rate: the learning rate.
            decay: factor of the weight decay.
            stop: fp32 scalar on the device; 1 means that nothing is changed. Only where `heeds`.
        """
