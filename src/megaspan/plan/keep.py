"""What each layer keeps from the forward for its backward, and where.

At a million tokens of an 8B model the input of one layer is 8.6 GB and attention's output 8.7 GB, for 36 layers 623 GB. Each of
the 72 waits on the device, on the host or on disk, or is computed again. The policy says which; `place.py` chooses it, the
layers follow it.

A layer that has not kept its input belongs to the segment that begins at the nearest layer below that has: the segment is run
forward once more in the backward, from that input. Source: Chen et al. 2016, arXiv 1604.06174.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Place = Literal["device", "host", "disk"]
PLACES: tuple[Place, ...] = ("device", "host", "disk")


@dataclass(frozen=True)
class LayerKeep:
    """What one layer keeps.

    Attributes:
        input: where its input waits; None: it is computed again from the nearest earlier layer that keeps its own.
        output: where attention's output and log-sum-exp wait; None: attention runs forward again in the backward.
    """

    input: Place | None
    output: Place | None


@dataclass(frozen=True)
class Kind:
    """A run of layers that keep the same: its first and last layer, counted from 0, and what they keep."""

    first: int
    last: int
    keep: LayerKeep


@dataclass(frozen=True)
class KeepPolicy:
    """What all layers keep, layer 0 first.

    Attributes:
        layers: one entry a layer; the first keeps its input.
        again: where inputs and outputs of a segment that is run again wait for their backward.
        attends: where the output of a layer that attends again in its own backward waits while that uses it.

    Raises:
        ValueError: no layers, a place that is none, or a first layer without its input.
    """

    layers: tuple[LayerKeep, ...]
    again: Place = "host"
    attends: Place = "device"

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a keep policy needs at least one layer")
        named = [
            self.again,
            self.attends,
            *(place for layer in self.layers for place in (layer.input, layer.output) if place is not None),
        ]
        if wrong := sorted({str(place) for place in named} - set(PLACES)):
            raise ValueError(f"{wrong[0]!r} is no place; places are {', '.join(PLACES)}")
        if self.layers[0].input is None:
            raise ValueError("layer 0 must keep its input: there is no layer before it to compute it from")

    @classmethod
    def everything(cls, layers: int, place: Place, *, outputs: bool = True) -> KeepPolicy:
        """Every layer keeps its input, and with `outputs` attention's output, at one place."""
        return cls((LayerKeep(place, place if outputs else None),) * layers)

    @cached_property
    def segments(self) -> tuple[range, ...]:
        """Runs of layers that begin with a kept input, the lowest first; one layer each where nothing is run again."""
        starts = [index for index, layer in enumerate(self.layers) if layer.input is not None]
        return tuple(range(*pair) for pair in itertools.pairwise([*starts, len(self.layers)]))

    @cached_property
    def segment_of(self) -> tuple[range, ...]:
        """The segment of each layer."""
        return tuple(segment for segment in self.segments for _ in segment)

    @property
    def runs_again(self) -> int:
        """Layers that run forward once more so that another one gets its input: all of a segment but its last."""
        return len(self.layers) - len(self.segments)

    @property
    def given_up(self) -> int:
        """Inputs and outputs that are kept nowhere."""
        return self.runs_again + len(self.layers) - self.outputs

    @cached_property
    def outputs(self) -> int:
        """Layers that keep attention's output."""
        return sum(layer.output is not None for layer in self.layers)

    @property
    def keep_on_device(self) -> int:
        """The last layers that keep all they keep on the device."""
        here = (layer.input == "device" and layer.output in ("device", None) for layer in reversed(self.layers))
        return len(list(itertools.takewhile(bool, here)))

    @property
    def keep_outputs(self) -> int:
        """The last layers that keep attention's output, without a gap."""
        return len(list(itertools.takewhile(lambda layer: layer.output is not None, reversed(self.layers))))

    @cached_property
    def places(self) -> frozenset[Place]:
        """Where anything is kept."""
        return frozenset(place for layer in self.layers for place in (layer.input, layer.output) if place is not None)

    @cached_property
    def below(self) -> dict[Place, tuple[tuple[int, int], ...]]:
        """For each place and each number of lowest layers, from 0 to all: how many inputs and outputs of theirs it holds."""
        found: dict[Place, tuple[tuple[int, int], ...]] = {}
        for place in PLACES:
            counts = [(0, 0)]
            for layer in self.layers:
                inputs, outputs = counts[-1]
                counts.append((inputs + (layer.input == place), outputs + (layer.output == place)))
            found[place] = tuple(counts)
        return found

    def stored_again(self, segment: range) -> tuple[int, int]:
        """Inputs and outputs that wait at `again` once a segment was run again.

        Its last layer adds no output: nothing comes after it before its own backward, which attends itself (`attends`).
        """
        return len(segment) - 1, sum(self.layers[index].output is None for index in segment[:-1])

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """Runs of equal layers, the lowest first."""
        found, first = [], 0
        for keep, group in itertools.groupby(self.layers):
            count = len(list(group))
            found.append(Kind(first, first + count - 1, keep))
            first += count
        return tuple(found)
