"""The dials that the planner turns by itself until a row fits, valued in seconds.

What a layer keeps may wait on the device, on the host or on disk, or be computed again; fewer heads may be projected and
attended at once; what waits on the host may come back tile by tile; tiles may be smaller; gradients and optimizer states may be
on the host. Each saves memory and costs time, and which costs least depends on the length: at a million tokens an output
computed again costs 13 s and all head groups together one, at 8,192 it is the other way round. So each combination of dials
gets the best keep policy that it has room for, and of those that fit the one with the fewest predicted seconds is taken. States
are moved only where nothing fits otherwise, or where they were asked to be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megaspan.plan.cost import Memory, memory
from megaspan.plan.facts import ModelFacts
from megaspan.plan.parts import Settings
from megaspan.plan.place import Limits as Limits
from megaspan.plan.place import can_keep, fallback, policies
from megaspan.plan.search import LONGEST, largest
from megaspan.plan.seconds import relative_seconds
from megaspan.plan.states import StatePlan
from megaspan.plan.step import Step

TILES = (16_384, 8_192, 4_096)


@dataclass(frozen=True)
class Fit:
    """What was found.

    Attributes:
        settings: with all dials set; where nothing fits, the most frugal ones.
        used: its memory.
        fits: it is within the limits.
    """

    settings: Settings
    used: Memory
    fits: bool


def fit(facts: ModelFacts, s: Settings, limits: Limits, states: tuple[StatePlan, ...] = (StatePlan(),)) -> Fit:
    """The cheapest setting of the dials that fits; the most frugal one when none does.

    Args:
        facts: the model.
        s: the wishes.
        limits: bytes there are.
        states: where gradients and optimizer states may lie, the cheapest first.
    """
    for each in states:
        if (found := _cheapest(facts, replace(s, states=each), limits)) is not None:
            return _as_simple(facts, Fit(found, memory(facts, found), True), limits)
    frugal = min(_frugal(facts, s, states), key=lambda pair: missing(limits, pair[1]))
    return Fit(*frugal, False)


def missing(limits: Limits, used: Memory) -> int:
    """Bytes that are too few on device and host together."""
    device = max(0, used.device_needed - limits.device) if used.gpu else 0
    return device + max(0, used.host_bytes - limits.host)


def _frugal(facts: ModelFacts, s: Settings, states: tuple[StatePlan, ...]) -> list[tuple[Settings, Memory]]:
    """The dials that need least, for each place of the states."""
    found = []
    for each in states:
        *_, dials = _dials(facts, replace(s, states=each))
        dials = replace(dials, keep=fallback(facts, dials)) if s.checkpoint else dials
        found.append((dials, memory(facts, dials)))
    return found


def can_fit(facts: ModelFacts, s: Settings, limits: Limits, states: tuple[StatePlan, ...] = (StatePlan(),)) -> bool:
    """Whether any setting of the dials fits."""
    return any(can_keep(Step(facts, dials), limits) for dials in _frugal_dials(facts, s, states))


def longest_row(facts: ModelFacts, s: Settings, limits: Limits, states: tuple[StatePlan, ...]) -> int:
    """Most tokens for which any setting of the dials fits; 0 when not even one does.

    Setting by setting: most are out of the question as soon as one token more than the best row so far has no room with them.
    """
    long = TILES[0] * s.ranks.row + 1
    best = long if can_fit(facts, replace(s, tokens=long), limits, states) else 0
    while True:
        before = best
        for dials in _frugal_dials(facts, replace(s, tokens=best + 1), states):
            best = _longest_with(facts, dials, limits, best)
        if best == before:
            return best


def _longest_with(facts: ModelFacts, dials: Settings, limits: Limits, best: int) -> int:
    """The longest row with these dials; `best` if that is not longer."""

    def fits(tokens: int) -> bool:
        return tokens <= best or can_keep(Step(facts, replace(dials, tokens=tokens)), limits)

    return largest(LONGEST, fits) if fits(best + 1) else best


def _frugal_dials(facts: ModelFacts, s: Settings, states: tuple[StatePlan, ...]) -> Iterator[Settings]:
    """Settings of which one fits if any does: the smallest head groups, both kinds of fetches (tiles need some host memory)."""
    tiles = TILES if s.slots <= TILES[0] else TILES[-1:]  # each of them cuts a longer row, and the smallest needs least
    *_, group = _groups(facts, s)
    for each in reversed(states):
        moved = replace(s, states=each)
        for tile in reversed(tiles):
            if s.streams:
                for stream_back in reversed(_fetches(s)):
                    yield replace(moved, layer_tile=tile, kv_heads_per_call=group, stream_back=stream_back)
            else:
                yield replace(moved, layer_tile=tile, tiled_mlp=s.checkpoint and facts.experts is None)


def _dials(facts: ModelFacts, s: Settings) -> Iterator[Settings]:
    """Every setting of tiles, head groups and fetches, larger and earlier ones first."""
    if not s.streams:
        yield s
        if s.checkpoint and facts.experts is None:
            yield from (replace(s, tiled_mlp=True, layer_tile=tile) for tile in TILES if tile < s.slots)
        return
    for tile in TILES:
        for stream_back in _fetches(s):
            for group in _groups(facts, s):
                yield replace(s, layer_tile=tile, kv_heads_per_call=group, stream_back=stream_back)


def _fetches(s: Settings) -> tuple[bool, ...]:
    """Whether what waits on the host comes back whole or by tiles: both can be chosen where it is another place."""
    return (False, True) if s.offload and s.gpu else (False,)


def _groups(facts: ModelFacts, s: Settings) -> Iterator[int | None]:
    """KV heads a call and rank: all, then the next smaller divisor, so that calls have equal sizes."""
    yield None
    each = size = facts.kv_heads // s.ranks.sp
    while size > 1 and s.gpu:
        size = max(number for number in range(1, size) if each % number == 0)
        yield size


def _cheapest(facts: ModelFacts, s: Settings, limits: Limits) -> Settings | None:
    """The dials with the fewest seconds that fit; None where none do. Smaller tiles only where larger ones never fit."""
    if not s.checkpoint:
        return s if limits.hold(memory(facts, s)) else None
    best: Settings | None = None
    tile, least = 0, 0.0
    for dials in _dials(facts, s):
        if best is not None and dials.layer_tile != tile:
            break
        for policy in policies(Step(facts, dials), limits):
            made = replace(dials, keep=policy)
            seconds = relative_seconds(facts, made)
            if best is None or seconds < least:
                best, least, tile = made, seconds, dials.layer_tile
            if s.ranks.row == 1 and _nothing_given_up(facts, made):
                return best  # over ranks head groups hide the exchange of keys, so more of them may be faster
    return best


def _nothing_given_up(facts: ModelFacts, s: Settings) -> bool:
    """Everything is kept, in memory: dials that come later only cost."""
    policy = s.policy(facts.layers)
    return not policy.runs_again and (not s.streams or policy.outputs == facts.layers) and "disk" not in policy.places


def _as_simple(facts: ModelFacts, found: Fit, limits: Limits) -> Fit:
    """Gradients are used up in the backward only where that lowers the peak."""
    s = found.settings
    if s.states.gradients != "update":
        return found
    simple = replace(s, states=replace(s.states, gradients="device"))
    used = memory(facts, simple)
    same = used.device_bytes <= found.used.device_bytes and used.host_bytes <= found.used.host_bytes
    return Fit(simple, used, True) if same and limits.hold(used) else found
