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

from megaspan.plan.cost import Memory, Step, attends_on, memory, staged_bytes, waiting_parts
from megaspan.plan.facts import ModelFacts
from megaspan.plan.keep import KeepPolicy, LayerKeep, Place
from megaspan.plan.parts import Settings
from megaspan.plan.search import largest
from megaspan.plan.segments import Pool, Task, fewest_inputs, held_bytes, most_inputs, most_kept, tightest
from megaspan.plan.streamed import input_bytes, output_bytes, tile_bytes
from megaspan.plan.weights import gradient_part, update_part


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


def free_policy(facts: ModelFacts, s: Settings) -> KeepPolicy:
    """Everything is kept: of the last layers on the device, as long as that does not raise its peak; the rest on the host."""
    layers, outputs = facts.layers, s.streams
    if not s.checkpoint or not s.offload:
        return KeepPolicy.everything(layers, "device", outputs=outputs)
    if not s.gpu:
        return KeepPolicy.everything(layers, "host", outputs=outputs)

    def last(number: int) -> KeepPolicy:
        return _split(layers, layers - number, "host", "device", outputs)

    bare = memory(facts, replace(s, keep=last(0))).device_bytes
    free = largest(layers, lambda number: memory(facts, replace(s, keep=last(number))).device_bytes <= bare)
    return last(free)


def policies(facts: ModelFacts, s: Settings, limits: Limits) -> Iterator[KeepPolicy]:
    """Policies that fit, each kind of them the best: everything kept; then with a disk; then with less kept."""
    if s.checkpoint:
        free = free_policy(facts, s)
        if limits.hold(memory(facts, replace(s, keep=free))):
            yield free
            return
        rooms = Rooms(facts, s, limits)
        if not rooms.fits_bare:
            return
        if (whole := rooms.everything()) is not None:
            yield whole
            return
        if (disk := rooms.with_disk()) is not None:
            yield disk
        if (best := rooms.best()) is not None:
            yield best


def can_keep(facts: ModelFacts, s: Settings, limits: Limits) -> bool:
    """Whether any policy fits. Only the two ends matter: every output is kept, or none is."""
    away = KeepPolicy.everything(facts.layers, "host", outputs=s.streams)
    if s.checkpoint and s.offload and s.gpu and limits.hold(memory(facts, replace(s, keep=away))):
        return True
    return Rooms(facts, s, limits).any_fits() if s.checkpoint else limits.hold(memory(facts, s))


def fallback(facts: ModelFacts, s: Settings) -> KeepPolicy:
    """The policy that needs least, for a row that does not fit."""
    if not s.streams or not s.offload:
        return KeepPolicy.everything(facts.layers, "host" if s.offload else "device", outputs=False)
    one = replace(s, tokens=1)  # lengths of segments depend on the ratio of inputs to outputs, not on the row
    return tightest(facts.layers, input_bytes(facts, one), output_bytes(facts, one), attends_on(s))


class Rooms:
    """What is free for what layers keep, at every moment and in every place.

    Args:
        facts: the model.
        s: the levers; its own policy does not matter.
        limits: bytes there are.
    """

    def __init__(self, facts: ModelFacts, s: Settings, limits: Limits) -> None:
        self.facts, self.s, self.limits = facts, s, limits
        # With outputs on the device the forward needs most; those of `can_keep` and `policies` that need less are tried there.
        self._step = Step(facts, replace(s, keep=KeepPolicy.everything(facts.layers, "device")))
        self._here = self._device_pool()
        self._least_room = min(self._here.forward, *self._here.backward)
        self.fits_bare = self._least_room >= 0 and self._optimizer_fits()
        waiting = waiting_parts(facts, replace(s, keep=KeepPolicy.everything(facts.layers, "device")))
        self._host = limits.host - sum(part.bytes for part in waiting if part.place == "host") if s.gpu else 0
        if facts.window is None:
            self._worth = (True,) * facts.layers
        else:
            self._worth = tuple((facts.span(layer) or s.tokens) * 2 > s.tokens for layer in range(facts.layers))

    def everything(self) -> KeepPolicy | None:
        """All inputs and outputs, the lowest on the host as far as it goes, the others on the device."""
        return self._checked(most_inputs(self._tasks()[0], self._outputs), whole=True)

    def with_disk(self) -> KeepPolicy | None:
        """All inputs and outputs, as few as possible of them on disk."""
        if not self.limits.disk or not self.s.gpu or not self.s.offload or not self.fits_bare:
            return None
        layers, task = self.facts.layers, self._tasks()[0]
        host = self._host - staged_bytes(self.facts, self.s)
        if host < 0:
            return None
        pools = (Pool.steady("host", host, layers), *task.pools[1:])
        each = task.input + (task.output if self._outputs else 0)

        def made(below: int) -> KeepPolicy | None:
            disk = Pool.steady("disk", below * each, layers)
            found = most_inputs(replace(task, pools=(disk, *pools)), self._outputs)
            return self._checked(found, whole=True)

        most = min(layers, self.limits.disk // each)
        spared = largest(most, lambda fewer: made(most - fewer) is not None)
        return made(most - spared)

    def best(self) -> KeepPolicy | None:
        """The most outputs, then the most inputs that fit."""
        if not self.s.streams:
            return None
        found = [self._checked(most_kept(task)) for task in self._tasks()]
        whole = [self._checked(most_inputs(task, self._outputs)) for task in self._tasks()]
        fitting = [policy for policy in (*found, *whole) if policy is not None]
        return max(fitting, key=lambda policy: (policy.outputs, len(policy.segments)), default=None)

    def any_fits(self) -> bool:
        """Whether any policy fits."""
        if not self.fits_bare:
            return False
        ends = [end for end in {0, self._outputs} if self._least(end) <= self._room]
        if not self.s.streams:
            return (self.everything() or self.with_disk()) is not None
        if any(self._checked(fewest_inputs(task, end)) for task in self._tasks() for end in ends):
            return True
        return self.with_disk() is not None

    @property
    def _room(self) -> int:
        """More than all pools ever have."""
        spare = 3 * (self._step.input + self._step.output)
        return self._host + max(self._here.forward, *self._here.backward, *self._here.again) + spare

    def _least(self, outputs: int) -> int:
        """Fewer bytes than any policy with so many outputs (all or none) needs at its worst moment."""
        step, layers = self._step, self.facts.layers
        if outputs or not step.output:
            return step.input + outputs * step.output if self.s.streams else layers * step.input
        one = replace(self.s, tokens=1)
        x, out = input_bytes(self.facts, one), output_bytes(self.facts, one)
        return self.s.slots * (max(held_bytes(tightest(layers, x, out, None), x, out, "host")) - 1)

    @property
    def _outputs(self) -> int:
        return self.facts.layers if self.s.streams else 0

    def _checked(self, policy: KeepPolicy | None, *, whole: bool = False) -> KeepPolicy | None:
        """The policy if it fits by the full count too, and with `whole` runs no layer again."""
        if policy is None or (whole and policy.runs_again):
            return None
        return policy if self.limits.hold(memory(self.facts, replace(self.s, keep=policy))) else None

    def _tasks(self) -> list[Task]:
        """The order in which pools are filled, and where segments wait, in every way that makes sense."""
        step, s, layers = self._step, self.s, self.facts.layers
        if not self.fits_bare:
            return [Task(step.input, step.output, (Pool.steady("device", -1, layers),), "device", self._worth)]
        if not s.gpu or not s.offload:
            # One pool; on a CPU with offload it is called host, and the parts there are counted for the whole step.
            place: Place = "host" if s.offload else "device"
            one = self._here
            if place == "host":
                room = self._least_room
                again = tuple(min(room, each) for each in one.again)
                one = Pool("host", None, room, (room,) * layers, again)
            return [Task(step.input, step.output, (one,), place, self._worth)]
        host = Pool.steady("host", self._host, layers)
        stays = replace(self._here, fill=self._here.least)
        make = [((host, self._here), "device"), ((host, self._here), "host"), ((stays, host), "host")]
        return [Task(step.input, step.output, pools, again, self._worth, attends_on(s)) for pools, again in make]  # type: ignore[arg-type]

    def _device_pool(self) -> Pool:
        """What the computation leaves of its own memory."""
        facts, s, step = self.facts, self.s, self._step
        limit = self.limits.device if s.gpu else self.limits.host
        free = step.allowed(limit) - sum(part.bytes for part in step.always)
        layers, pair = facts.layers, step.input + step.output
        tiles = s.stream_back and s.streams
        # What is fetched lies on the device in any case: two layers' whole, or two tiles.
        ahead, ahead_forward = (0, 0) if tiles else (2, 1 if s.streams else 2)

        def fetched(name: str, uses: bool) -> int:
            if tiles:
                return sum(tile_bytes(facts, s, name))
            return pair + (pair if uses else step.input)

        gradients = [gradient_part(facts, s, done).bytes for done in range(layers)]
        work = max(phase.bytes + fetched(phase.name, phase.uses_output) for phase in step.phases)
        loss = sum(part.bytes for part in step.loss) + ahead_forward * pair
        forward = sum(part.bytes for part in step.forward)
        again = sum(part.bytes for part in step.again)
        return Pool(
            "device",
            None,
            free - sum(part.bytes for part in step.earlier) - max(loss, forward),
            tuple(free - work - gradients[layers - index - 1] for index in range(layers)),
            tuple(free - again - gradients[layers - index - 1] for index in range(layers)),
            ahead,
            ahead_forward,
        )

    def _optimizer_fits(self) -> bool:
        s, step = self.s, self._step
        after = max(update_part(self.facts, s).bytes, sum(part.bytes for part in step.embedding))
        used = gradient_part(self.facts, s, self.facts.layers).bytes + after
        used += sum(part.bytes for part in step.always)
        return used <= step.allowed(self.limits.device if s.gpu else self.limits.host)


def _split(layers: int, at: int, below: Place, above: Place, outputs: bool) -> KeepPolicy:
    """Layers under `at` keep theirs at one place, the others at another."""

    def keep(place: Place) -> LayerKeep:
        return LayerKeep(place, place if outputs else None)

    return KeepPolicy((keep(below),) * at + (keep(above),) * (layers - at))
