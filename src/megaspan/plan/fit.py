"""The dials that the planner turns by itself until a row fits, in order of what each costs.

What a layer keeps (input, attention output) may wait on the device or on the host; its output may be computed again; the
attention's backward may take fewer heads a call; tiles may be smaller. Each step down saves memory and costs time: recomputing
one output at a million tokens costs 13 s and saves 8.7 GB, a head group a call costs next to nothing on long rows, small tiles
a few percent. So the first combination that fits is taken, the cheapest first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megaspan.plan.cost import Memory, memory, waiting_parts
from megaspan.plan.facts import ModelFacts
from megaspan.plan.parts import Settings
from megaspan.plan.search import largest

TILES = (16_384, 8_192, 4_096)


@dataclass(frozen=True)
class Limits:
    """Bytes that a step may use on the device (0 without a GPU) and on the host."""

    device: int
    host: int

    def hold(self, used: Memory) -> bool:
        """Whether both are enough."""
        return (not used.gpu or used.device_bytes <= self.device) and used.host_bytes <= self.host


def fit(facts: ModelFacts, s: Settings, limits: Limits) -> tuple[Settings, Memory]:
    """The cheapest setting of the dials that fits; the most frugal one when none does."""
    frugal = s
    for dials in _dials(facts, s):
        frugal = _place_frugally(facts, dials, limits)
        if limits.hold(memory(facts, frugal)):
            made = _place(facts, dials, limits)
            return made, memory(facts, made)
    return frugal, memory(facts, frugal)


def can_fit(facts: ModelFacts, s: Settings, limits: Limits) -> bool:
    """Whether any setting of the dials fits: of head groups the smallest is the most frugal, of tiles any may be."""
    dials = list(_dials(facts, s))
    return any(limits.hold(memory(facts, _place_frugally(facts, each, limits))) for each in dials[-len(TILES) :])


def _dials(facts: ModelFacts, s: Settings) -> Iterator[Settings]:
    if not (s.checkpoint and s.streamed):
        yield s
        return
    group: int | None = None
    size = facts.kv_heads
    while True:
        for tile in TILES:
            yield replace(s, layer_tile=tile, kv_heads_per_call=group)
        if size == 1 or not s.gpu:
            return
        # The next smaller divisor: calls of equal size.
        size = max(number for number in range(1, size) if facts.kv_heads % number == 0)
        group = size


def _place_frugally(facts: ModelFacts, s: Settings, limits: Limits) -> Settings:
    """No attention output is kept, and as little on the device as the host allows."""
    if not (s.checkpoint and s.gpu and s.offload):
        return s
    layers = facts.layers

    def waits(moved: int) -> int:
        return sum(part.bytes for part in waiting_parts(facts, replace(s, keep_on_device=layers - moved)))

    return replace(s, keep_on_device=layers - largest(layers, lambda moved: waits(moved) <= limits.host))


def _place(facts: ModelFacts, s: Settings, limits: Limits) -> Settings:
    """How many of the last layers keep their attention output, and how many keep what they keep on the device.

    What the last layers keep is wanted first, when no gradients exist yet: as much as the gradients will take later is free on
    the device. Where the host does not hold the rest, outputs are given up first, then more stays on the device.
    """
    if not s.checkpoint:
        return s
    layers = facts.layers
    wished = layers if s.streamed else 0

    def used(stay: int, outputs: int) -> Memory:
        return memory(facts, replace(s, keep_on_device=stay, keep_outputs=outputs))

    if not (s.gpu and s.offload):
        return replace(s, keep_outputs=largest(wished, lambda number: limits.hold(used(0, number))))

    def free(outputs: int) -> int:
        bare = used(0, outputs).device_bytes
        return largest(layers, lambda number: used(number, outputs).device_bytes <= bare)

    outputs = largest(wished, lambda number: limits.hold(used(free(number), number)))
    stay = free(outputs)
    if not limits.hold(used(stay, outputs)):
        stay = _place_frugally(facts, s, limits).keep_on_device
        outputs = largest(wished, lambda number: limits.hold(used(stay, number)))
    return replace(s, keep_on_device=stay, keep_outputs=outputs)
