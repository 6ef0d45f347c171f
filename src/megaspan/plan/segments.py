"""Graded segments: which layers keep their input and output when there is not room for all, as pure arithmetic on bytes.

Inputs and outputs of 36 layers of an 8B model at a million tokens are 623 GB. The backward goes from the top layer down, and
what a layer kept is free again when its backward is over. So what is computed again (a segment, from the input of its lowest
layer) finds the more room the lower it lies, and low segments can be long: of lengths 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1 from the
bottom, no more than 11 inputs or outputs of 36 layers wait at any time, and a twelfth, the output of the layer at work: 103 GB
in place of 309 for the inputs alone.

While a segment is worked on there are: kept inputs and outputs up to its last layer, the other inputs of the segment, and
outputs of its layers that have not kept theirs. The last one's output is not stored with them: nothing comes between its
attention and its use. It is on the device, or, where that reads the host tile by tile, on the host meanwhile (`attends_on`).

Keeping an output saves an attention forward (13 s of a layer at a million tokens), keeping an input the token-wise rest of a
layer (1.2 s), for about as many bytes. So the most outputs are wanted first, then the most inputs. Which outputs: those of the
top layers, whose bytes are free again first. How long the segments: from the bottom, each as long as its room allows. Both are
optimal where memory is one pool and all outputs are worth the same (tests search all policies of small models); with a pool
each for device and host, the orders in which they can be filled are tried out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megaspan.plan.keep import KeepPolicy, LayerKeep, Place
from megaspan.plan.search import largest


@dataclass(frozen=True)
class Pool:
    """One place with its room in bytes, beside everything that is not ours to choose.

    Attributes:
        place: its name.
        fill: what is kept goes here up to this much before the next pool is used; None for no end.
        forward: room for all that is kept, at the end of the forward.
        backward: room in the backward of each layer.
        again: room while a segment is run again, by its lowest layer.
        ahead: so many layers, the one at work and those above `work - ahead`, are counted with the work already: they are
            on the device then, wherever they are kept.
        ahead_forward: the same at the end of the forward.
    """

    place: Place
    fill: int | None
    forward: int
    backward: tuple[int, ...]
    again: tuple[int, ...]
    ahead: int = 0
    ahead_forward: int = 0

    @classmethod
    def steady(cls, place: Place, size: int, layers: int) -> Pool:
        """A pool that always has the same room."""
        return cls(place, size, size, (size,) * layers, (size,) * layers)

    @property
    def least(self) -> int:
        """Room that is there all the time."""
        return min(self.forward, *self.backward, *self.again)


@dataclass(frozen=True)
class Task:
    """What has to be kept of a row, and the room there is.

    Attributes:
        input, output: bytes of one layer's input, and of attention's output with its log-sum-exp.
        pools: in the order in which they are filled, from the lowest layer up; the last one takes the rest.
        again: the pool where a segment that is run again waits.
        attends: the place where the output of a layer that attends again waits while its backward uses it.
        attended: bytes that it takes there, beside what is counted with the layer's work already.
        worth: for each layer whether its output is wanted before others': attention over a window is cheap to repeat.
    """

    input: int
    output: int
    pools: tuple[Pool, ...]
    again: Place
    worth: tuple[bool, ...]
    attends: Place = "device"
    attended: int = 0

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.worth)

    @property
    def wanted(self) -> list[int]:
        """Layers in the order in which their outputs are kept: those of worth first, the top ones first."""
        return sorted(range(self.layers), key=lambda layer: (not self.worth[layer], -layer))


@dataclass(frozen=True)
class Wanted:
    """What a policy may give up to be of use: a search that has found one already looks for none that takes longer.

    Attributes:
        spare: seconds that giving up may cost.
        output, input: what one costs at least, of the layer where it costs least.
    """

    spare: float = math.inf
    output: float = 0.0
    input: float = 0.0

    def least_outputs(self, layers: int) -> int:
        """The fewest outputs that are of use."""
        return 0 if self.spare == math.inf or self.output <= 0 else max(0, layers - int(self.spare / self.output))

    def least_inputs(self, layers: int, outputs: int) -> int:
        """The fewest inputs that are of use with so many outputs."""
        if self.spare == math.inf or self.input <= 0:
            return 0
        return max(0, layers - int(max(0.0, self.spare - (layers - outputs) * self.output) / self.input))


EVERY = Wanted()


def most_kept(task: Task, wanted: Wanted = EVERY) -> KeepPolicy | None:
    """The policy that keeps the most outputs and then the most inputs; None where nothing fits.

    Args:
        task: what has to be kept, and the room.
        wanted: with fewer outputs it is None, and with fewer inputs it may be any with that many outputs.
    """
    least_outputs = wanted.least_outputs(task.layers)

    def fits(outputs: int) -> bool:
        return fewest_inputs(task, outputs) is not None

    if not fits(least_outputs):
        return None
    best = least_outputs + largest(task.layers - least_outputs, lambda more: more == 0 or fits(least_outputs + more))
    return most_inputs(task, best, wanted)


def fewest_inputs(task: Task, outputs: int) -> KeepPolicy | None:
    """The policy with this many outputs and the fewest, longest segments; None where nothing fits.

    Segments as long as they can be from the bottom up reach higher than any others, and keep fewer inputs meanwhile: if these
    do not reach the top, none do.
    """
    wanted = set(task.wanted[:outputs])
    return _Walk(task, [layer in wanted for layer in range(task.layers)]).run()


def most_inputs(task: Task, outputs: int, wanted: Wanted = EVERY) -> KeepPolicy | None:
    """The policy with this many outputs that runs the fewest layers again, or any where it has fewer inputs than are wanted.

    None where nothing fits.
    """
    fewest = fewest_inputs(task, outputs)
    if fewest is None:
        return None
    first = set(task.wanted[:outputs])
    kept = [layer in first for layer in range(task.layers)]
    pair = task.input + task.output
    room = sum(min(pool.forward + pool.ahead_forward * pair, pool.backward[-1] + pool.ahead * pair) for pool in task.pools)
    most = min(task.layers, (room - outputs * task.output) // task.input)
    least = max(len(fewest.segments), wanted.least_inputs(task.layers, outputs) - 1)
    tries = (_Walk(task, kept, count).run() for count in range(most, least, -1))
    return next((made for made in tries if made is not None), fewest)


@lru_cache(maxsize=64)
def tightest(layers: int, input: int, output: int, attends: Place) -> KeepPolicy:
    """The policy without outputs that needs the least of one pool, called host."""
    attended = output if attends == "host" else 0

    def made(size: int) -> KeepPolicy | None:
        pools = (Pool.steady("host", size, layers),)
        return fewest_inputs(Task(input, output, pools, "host", (True,) * layers, attends, attended), 0)

    top = layers * (input + output)
    spared = largest(top, lambda less: made(top - less) is not None)
    return made(top - spared) or KeepPolicy.everything(layers, "host", outputs=False)


class _Walk:
    """One attempt: segments from the bottom up, each as long as it can be.

    Args:
        task: what has to be kept, and the room.
        kept: for each layer whether it keeps its output.
        count: so many segments, each leaving at least one layer to every one above; None for as few as there can be.
    """

    def __init__(self, task: Task, kept: Sequence[bool], count: int | None = None) -> None:
        self.task, self.kept, self.count = task, kept, count
        self._places: list[LayerKeep] = []
        # Bytes that the lowest n layers keep in each pool, n = 0, 1, …
        self._below: list[list[int]] = [[0] for _ in task.pools]

    def run(self) -> KeepPolicy | None:
        """The policy, or None."""
        start, total, number = 0, self.task.layers, 0
        while start < total:
            number += 1
            end = self._longest(start, total if self.count is None else total - (self.count - number))
            if end == start:
                return None
            start = end
        for pool, below in zip(self.task.pools, self._below, strict=True):
            if below[max(0, total - pool.ahead_forward)] > pool.forward:
                return None
        return self._exchanged(KeepPolicy(tuple(self._places), self.task.again, self.task.attends))

    def _longest(self, start: int, top: int) -> int:
        """Adds layers `start` … as long as they fit, not past `top`; returns the first layer that was not added."""
        for layer in range(start, top):
            self._add(layer, layer == start)
            if not self._fits(start, layer + 1):
                self._places.pop()
                for below in self._below:
                    below.pop()
                return layer
        return top

    def _add(self, layer: int, starts: bool) -> None:
        now = [below[-1] for below in self._below]
        wanted = [self.task.input if starts else None, self.task.output if self.kept[layer] else None]
        places: list[Place | None] = []
        for size in wanted:
            where = None if size is None else self._choose(now, size)
            places.append(None if where is None else self.task.pools[where].place)
            if where is not None and size is not None:
                now[where] += size
        self._places.append(LayerKeep(*places))
        for below, size in zip(self._below, now, strict=True):
            below.append(size)

    def _choose(self, now: Sequence[int], size: int) -> int:
        last = len(now) - 1
        for number, pool in enumerate(self.task.pools):
            if number == last or pool.fill is None or now[number] + size <= pool.fill:
                return number
        raise AssertionError("the last pool takes everything")

    def _fits(self, start: int, end: int) -> bool:
        """Whether the segment start … end-1 can be worked on.

        The room of its lowest layer is taken for all of it; but what its last layer attends is gone when the next one begins.
        """
        alone, keeps_last = end == start + 1, self._keeps_last(start, end)
        for pool, below in zip(self.task.pools, self._below, strict=True):
            here = pool.place == self.task.again and not alone
            counted = max(0, end - pool.ahead)
            stored = self._stored(start, counted, end) if here and counted > start else 0
            attended = self.task.attended if pool.place == self.task.attends and not keeps_last else 0
            if below[counted] + stored > pool.backward[start] or below[counted] + stored + attended > pool.backward[end - 1]:
                return False
            if not alone and below[end] + (self._stored(start, end, end) if here else 0) > pool.again[start]:
                return False
        return True

    def _stored(self, start: int, counted: int, end: int) -> int:
        """Bytes that layers start … counted-1 of a segment store when it is run again."""
        outputs = sum(not kept for kept in self.kept[start : min(counted, end - 1)])
        if counted == end and self.kept[end - 1] and not self._keeps_last(start, end):
            outputs -= 1  # see _exchanged
        return (counted - start - 1) * self.task.input + outputs * self.task.output

    def _keeps_last(self, start: int, end: int) -> bool:
        """Whether the last layer of a segment keeps its output, after `_exchanged`."""
        return self.kept[end - 1] and self._like(start, end) is None

    def _like(self, start: int, end: int) -> int | None:
        """The highest layer of a segment that has not kept its output, beside its last, and is as much worth."""
        worth = self.task.worth
        return next(
            (layer for layer in reversed(range(start, end - 1)) if not self.kept[layer] and worth[layer] == worth[end - 1]),
            None,
        )

    def _exchanged(self, policy: KeepPolicy) -> KeepPolicy:
        """A segment's last layer stores no output anyway: if it keeps one and another of the segment does not, these change."""
        layers = list(policy.layers)
        for segment in policy.segments:
            last = segment[-1]
            other = self._like(segment.start, segment.stop) if self.kept[last] else None
            if other is not None:
                layers[other] = replace(layers[other], output=layers[last].output)
                layers[last] = replace(layers[last], output=None)
        return replace(policy, layers=tuple(layers))


def held_bytes(policy: KeepPolicy, input: int, output: int, place: Place) -> Iterator[int]:
    """What waits at one place at each moment that matters: the end of the forward, then each segment from the top down.

    Args:
        policy: what is kept where.
        input, output: bytes of one of each.
        place: which place; what the layer at work has on the device is left to its work.
    """
    below = policy.below[place]
    yield below[-1][0] * input + below[-1][1] * output
    for segment in reversed(policy.segments):
        inputs, outputs = below[segment.stop]
        again = policy.stored_again(segment) if policy.again == place else (0, 0)
        attends = place == policy.attends != "device" and policy.layers[segment[-1]].output is None
        yield (inputs + again[0]) * input + (outputs + again[1] + attends) * output
