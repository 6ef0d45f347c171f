"""Where what layers keep lies: the best keep policy for given limits and given dials.

First what costs nothing: the last layers keep theirs on the device, as much as the gradients will take later (or another moment
takes anyway), the others on the host. Where the host is too small for that, the device is filled to its limit. Where both are,
a disk, if there is one, takes the lowest layers' (they wait longest), and otherwise inputs are given up to segments, and then
outputs.

Device and host are two pools, and a segment that runs again waits in one of them. The other one is filled first, from the
lowest layer up: what is kept there lies longest, and the pool of the segments is the emptier the longer the segments are. Which
of both it is, is tried out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from megaspan.plan.cost import Memory, staged_bytes
from megaspan.plan.facts import ModelFacts
from megaspan.plan.keep import KeepPolicy, LayerKeep, Place
from megaspan.plan.parts import Settings, bytes_of
from megaspan.plan.search import largest
from megaspan.plan.segments import EVERY, Pool, Task, Wanted, fewest_inputs, most_inputs, most_kept, tightest
from megaspan.plan.step import Step
from megaspan.plan.streamed import Phase, input_bytes, output_bytes, tile_bytes
from megaspan.plan.weights import update_part


@dataclass(frozen=True)
class Limits:
    """Bytes that a step may use on the device (0 without a GPU), on the host and on disk (0 without a folder)."""

    device: int
    host: int
    disk: int = 0

    def hold(self, used: Memory) -> bool:
        """Whether all are enough."""
        return (
            (not used.gpu or used.device_needed <= self.device)
            and used.host_bytes <= self.host
            and (used.disk_bytes <= self.disk or not used.disk_bytes)
        )


def free_policy(step: Step) -> KeepPolicy:
    """Everything is kept: of the last layers on the device, as long as that does not raise its peak; the rest on the host."""
    layers, s, outputs = step.facts.layers, step.s, step.s.streams
    if not s.checkpoint or not s.offload:
        return KeepPolicy.everything(layers, "device", outputs=outputs)
    if not s.gpu:
        return KeepPolicy.everything(layers, "host", outputs=outputs)

    def device_bytes(last: int) -> int:
        return Memory(step, _last_on_device(layers, last, outputs)).device_bytes

    bare = device_bytes(0)
    return _last_on_device(layers, largest(layers, lambda last: device_bytes(last) <= bare), outputs)


def policies(step: Step, limits: Limits, wanted: Wanted = EVERY) -> Iterator[KeepPolicy]:
    """Policies that fit, each kind of them the best: everything kept; then with a disk; then with less kept.

    Args:
        step: with its dials.
        limits: bytes there are.
        wanted: one that gives up more may be another than the best of its kind, or be left out.
    """
    layers, s = step.facts.layers, step.s
    away = Memory(step, _last_on_device(layers, 0, s.streams))
    if not (s.gpu and s.offload) or away.device_needed <= limits.device:
        free = free_policy(step)
        if limits.hold(Memory(step, free)):
            yield free
            return
    rooms = Rooms(step, limits)
    if not rooms.fits_bare:
        return
    if (whole := rooms.everything()) is not None:
        yield whole
        return
    if (disk := rooms.with_disk()) is not None:
        yield disk
    if (best := rooms.best(wanted)) is not None:
        yield best


def can_keep(step: Step, limits: Limits) -> bool:
    """Whether any policy fits. Only the two ends matter: every output is kept, or none is."""
    s, layers = step.s, step.facts.layers
    if not s.checkpoint:
        return limits.hold(Memory(step, s.policy(layers)))
    away = _last_on_device(layers, 0, s.streams)
    if s.offload and s.gpu and limits.hold(Memory(step, away)):
        return True
    rooms = Rooms(step, limits)
    return rooms.fits_bare and rooms.any_fits()


def fallback(facts: ModelFacts, s: Settings) -> KeepPolicy:
    """The policy that needs least, for a row that does not fit."""
    if not s.streams or not s.offload:
        return KeepPolicy.everything(facts.layers, "host" if s.offload else "device", outputs=False)
    one = replace(s, tokens=1)  # lengths of segments depend on the ratio of inputs to outputs, not on the row
    return tightest(facts.layers, input_bytes(facts, one), output_bytes(facts, one), "host" if s.stream_back else "device")


class Rooms:
    """What is free for what layers keep, at every moment and in every place.

    Args:
        step: with its dials.
        limits: bytes there are.

    Attributes:
        fits_bare: the step has room if layers keep nothing; nothing else may be asked where it has not.
    """

    def __init__(self, step: Step, limits: Limits) -> None:
        self.facts, self.s, self.limits, self._step = step.facts, step.s, limits, step
        layers, s = self.facts.layers, self.s
        self._limit = limits.device if s.gpu else limits.host  # for the computation
        self._here, self._stored = self._device_pool(False), self._device_pool(True)
        self._least_room = min(self._here.forward, *self._here.backward)
        self.fits_bare = self._least_room >= 0 and self._optimizer_fits()
        self._host = limits.host - bytes_of(step.on_host) if s.gpu else 0
        self._outputs = layers if s.streams else 0  # as many as there can be
        self._worth = (True,) * layers
        if self.facts.window is not None:
            self._worth = tuple((self.facts.span(layer) or s.tokens) * 2 > s.tokens for layer in range(layers))

    def everything(self) -> KeepPolicy | None:
        """All inputs and outputs, the lowest on the host as far as it goes, the others on the device."""
        return self._checked(most_inputs(self._tasks()[0], self._outputs), whole=True)

    def with_disk(self) -> KeepPolicy | None:
        """All inputs and outputs, as few as possible of them on disk."""
        host = self._host - staged_bytes(self._step)
        if not self.limits.disk or not self.s.gpu or not self.s.offload or host < 0:
            return None
        layers, task = self.facts.layers, self._tasks()[0]
        pools = (Pool.steady("host", host, layers), *task.pools[1:])
        each = task.input + (task.output if self._outputs else 0)

        def made(below: int) -> KeepPolicy | None:
            disk = Pool.steady("disk", below * each, layers)
            found = most_inputs(replace(task, pools=(disk, *pools)), self._outputs)
            return self._checked(found, whole=True)

        most = min(layers, self.limits.disk // each)
        spared = largest(most, lambda fewer: made(most - fewer) is not None)
        return made(most - spared)

    def best(self, wanted: Wanted = EVERY) -> KeepPolicy | None:
        """The most outputs, then the most inputs that fit; another or None where these are fewer than are wanted."""
        if not self.s.streams:
            return None
        found = (most_kept(task, wanted) for task in self._tasks())
        fitting = [policy for each in found if (policy := self._checked(each)) is not None]
        return max(fitting, key=lambda policy: (policy.outputs, len(policy.segments)), default=None)

    def any_fits(self) -> bool:
        """Whether any policy fits: with all outputs or with none, in the longest segments that there is room for."""
        if not self.s.streams:
            return (self.everything() or self.with_disk()) is not None
        tries = (fewest_inputs(task, outputs) for task in self._tasks() for outputs in (0, self._outputs))
        return any(self._checked(policy) for policy in tries) or self.with_disk() is not None

    def _checked(self, policy: KeepPolicy | None, *, whole: bool = False) -> KeepPolicy | None:
        """The policy if it fits by the full count too, and with `whole` runs no layer again."""
        if policy is None or (whole and policy.runs_again):
            return None
        return policy if self.limits.hold(Memory(self._step, policy)) else None

    def _tasks(self) -> list[Task]:
        """In which order pools are filled from the lowest layer up, and where segments wait: every way that makes sense."""
        step, layers, here, stored = self._step, self.facts.layers, self._here, self._stored
        # What is read in tiles may wait on the host at any time, so the output of the layer at work may too. On the device a
        # head group of it is counted with the work already.
        attended: dict[Place, int] = {"device": 0}
        if step.tiles:
            attended = {"device": step.output - tile_bytes(self.facts, self.s, "attention")[1], "host": step.output}

        def task(pools: tuple[Pool, ...], again: Place, attends: Place = "device") -> Task:
            return Task(step.input, step.output, pools, again, self._worth, attends, attended[attends])

        if not self.s.offload:
            return [task((stored,), "device")]
        if not self.s.gpu:
            # One memory. What lies there is counted for the whole step, so the room is that of the tightest moment.
            room = self._least_room
            again = tuple(min(room, each) for each in here.again)
            return [task((Pool("host", None, room, (room,) * layers, again),), "host")]
        host = Pool.steady("host", self._host, layers)
        found = []
        for place, size in attended.items():
            # With the output of the layer at work or without it: not every layer attends again.
            always_free = {here.least - size, here.least} if place == "device" else {here.least}
            found += [task((host, stored), "device", place), task((host, here), "host", place)]
            found += [task((replace(here, fill=fill), host), "host", place) for fill in sorted(always_free)]
        return found

    def _device_pool(self, stored: bool) -> Pool:
        """What the computation leaves of its own memory, where segments that run again are stored in it, or elsewhere."""
        s, step, layers = self.s, self._step, self.facts.layers
        free = step.allowed(self._limit) - bytes_of(step.always)
        pair = step.input + step.output
        # What is fetched lies on the device in any case: two layers' whole, or two tiles.
        ahead, ahead_forward = (0, 0) if step.tiles else (2, 1 if s.streams else 2)

        def fetched(phase: Phase) -> int:
            if step.tiles:
                return sum(tile_bytes(self.facts, s, phase.name))
            return pair + (pair if phase.uses_output else step.input)

        work = max(phase.bytes + fetched(phase) for phase in step.phases)
        loss = bytes_of(step.loss) + ahead_forward * pair
        # With outputs on the device the forward needs most; policies that need less are tried in `can_keep` and `policies`.
        forward = bytes_of(step.forward(KeepPolicy.everything(layers, "device")))
        again = bytes_of(step.again_in(stored, 2 if stored else 3)) if s.streams else 0
        left = [free - step.gradient(layers - index - 1).bytes for index in range(layers)]
        return Pool(
            "device",
            None,
            free - bytes_of(step.earlier) - max(loss, forward),
            tuple(room - work for room in left),
            tuple(room - again for room in left),
            ahead,
            ahead_forward,
        )

    def _optimizer_fits(self) -> bool:
        step = self._step
        after = max(update_part(self.facts, self.s).bytes, bytes_of(step.embedding))
        used = step.gradient(self.facts.layers).bytes + after + bytes_of(step.always)
        return used <= step.allowed(self._limit)


@lru_cache(maxsize=256)
def _last_on_device(layers: int, last: int, outputs: bool) -> KeepPolicy:
    """Everything is kept, of the last layers on the device, of the others on the host."""
    host, device = LayerKeep("host", "host" if outputs else None), LayerKeep("device", "device" if outputs else None)
    return KeepPolicy((host,) * (layers - last) + (device,) * last)
