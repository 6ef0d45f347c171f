"""The dials that the planner turns by itself until a row fits, valued in seconds.

What a layer keeps may wait on the device, on the host or on disk, or be computed again; fewer heads may be projected and
attended at once; what waits on the host may come back tile by tile, with or without the next heads made of it ahead; tiles may
be smaller; gradients and optimizer states may be on the host. Each saves memory and costs time, and which costs least depends
on the length: at a million tokens an output computed again costs 13 s and all head groups together one, at 8,192 it is the
other way round. So each combination of dials gets the best keep policy that it has room for, and of those that fit the one with
the fewest predicted seconds is taken. States are one of the dials, but for a step that is hardly faster they stay where it is
simplest (`WORTH`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megaspan.plan.cost import Memory, memory
from megaspan.plan.facts import ModelFacts
from megaspan.plan.keep import KeepPolicy, LayerKeep
from megaspan.plan.parts import Settings
from megaspan.plan.place import Limits as Limits
from megaspan.plan.place import can_keep, fallback, policies
from megaspan.plan.search import LONGEST, largest
from megaspan.plan.seconds import relative_seconds
from megaspan.plan.segments import EVERY, Wanted
from megaspan.plan.states import Faster, StatePlan
from megaspan.plan.step import Step
from megaspan.plan.streamed import projects_ahead

TILES = (16_384, 8_192, 4_096)
# Part of a step that it has to be faster for states to lie elsewhere than where it is simplest. Predicted steps were off by
# half a percent where they were measured (docs/log.md), and a link of half an H200's rate doubles what moved states cost.
WORTH = 0.01


@dataclass(frozen=True)
class Fit:
    """What was found.

    Attributes:
        settings: with all dials set; where nothing fits, the most frugal ones.
        used: its memory.
        fits: it is within the limits.
        faster: what that gains, where the states could lie more simply; None where they do, or have no room there.
    """

    settings: Settings
    used: Memory
    fits: bool
    faster: Faster | None = None


def fit(facts: ModelFacts, s: Settings, limits: Limits, states: tuple[StatePlan, ...] = (StatePlan(),)) -> Fit:
    """The setting of the dials and the states that fits with the fewest seconds; the most frugal one when none does.

    Args:
        facts: the model.
        s: the wishes.
        limits: bytes there are.
        states: where gradients and optimizer states may lie, the simplest first. A later one is taken only where a step is
            faster by `WORTH` of it.
    """
    best: tuple[Settings, float] | None = None
    simplest = math.inf, StatePlan()
    for each in states:
        moved, below, tile = replace(s, states=each), math.inf, 0
        if best is not None:
            below, tile = (1 - WORTH) * best[1], best[0].layer_tile
            if _floor(facts, moved) >= below:
                continue
        if (found := _cheapest(facts, moved, limits, below, tile)) is not None:
            simplest = simplest if best else (found[1], each)
            best = found
    if best is not None:
        gained = None if best[0].states == simplest[1] else Faster(simplest[1], simplest[0] - best[1])
        return _as_simple(facts, Fit(best[0], memory(facts, best[0]), True, gained), limits)
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
                dials = replace(s, layer_tile=tile, kv_heads_per_call=group, stream_back=stream_back)
                if projects_ahead(facts, ahead := replace(dials, project_ahead=True)):
                    yield ahead
                yield dials


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


def _cheapest(facts: ModelFacts, s: Settings, limits: Limits, below: float, smallest: int) -> tuple[Settings, float] | None:
    """The dials with the fewest seconds that fit, and these.

    Smaller tiles only where larger ones never fit. What could not win even with everything kept is not looked at.

    Args:
        facts: the model.
        s: the wishes.
        limits: bytes there are.
        below: what takes as long is not wanted: None where all do.
        smallest: no smaller tiles; those that were large enough with less room on the device.
    """
    if not s.checkpoint:
        seconds = relative_seconds(facts, s)
        return (s, seconds) if seconds < below and limits.hold(memory(facts, s)) else None
    best: tuple[Settings, float] | None = None
    tile, least = 0, below
    for dials in _dials(facts, s):
        if dials.layer_tile < smallest or (tile and dials.layer_tile != tile):
            break
        wanted = _wanted(facts, dials, least)
        if wanted.spare <= 0:
            continue
        for policy in policies(Step(facts, dials), limits, wanted):
            made, tile = replace(dials, keep=policy), dials.layer_tile
            seconds = relative_seconds(facts, made)
            if seconds < least:
                best, least = (made, seconds), seconds
            if s.ranks.row == 1 and _nothing_given_up(facts, made):
                return best  # over ranks head groups hide the exchange of keys, so more of them may be faster
    return best


def _floor(facts: ModelFacts, s: Settings) -> float:
    """Seconds that no setting of the dials is below, whether or not it fits."""
    first, *others = _dials(facts, s)
    same = [dials for dials in others if dials.layer_tile == first.layer_tile]  # smaller tiles take longer
    return min(_with_everything(facts, dials) for dials in (first, *same))


def _wanted(facts: ModelFacts, dials: Settings, below: float) -> Wanted:
    """What a step may give up that shall take less than `below`."""
    if below == math.inf:
        return EVERY
    everything, layers = _with_everything(facts, dials), range(facts.layers)
    if everything >= below or not dials.streams:
        return Wanted(below - everything)

    def costs(output: int | None, input: int | None) -> float:
        """Of one layer's output, or input, that is given up."""
        kept = [LayerKeep(None if layer == input else "device", None if layer == output else "device") for layer in layers]
        return relative_seconds(facts, replace(dials, keep=KeepPolicy(tuple(kept), "device"))) - everything

    # The cheapest: attention over the shortest window, and the layer below with the least work.
    attends = min(layers, key=lambda layer: facts.span(layer) or dials.tokens)
    above = min(layers[1:], key=lambda layer: facts.linear_parameters(layer - 1), default=None)
    return Wanted(below - everything, costs(attends, None), 0.0 if above is None else costs(None, above))


def _with_everything(facts: ModelFacts, dials: Settings) -> float:
    """Seconds with everything kept on the device, where nothing is computed again or waited for."""
    return relative_seconds(facts, replace(dials, keep=KeepPolicy.everything(facts.layers, "device", outputs=dials.streams)))


def _nothing_given_up(facts: ModelFacts, s: Settings) -> bool:
    """Everything is kept, in memory, and no copy of it is waited for: dials that come later only cost."""
    policy = s.policy(facts.layers)
    if s.stream_back and not s.project_ahead:
        return False
    return not policy.runs_again and (not s.streams or policy.outputs == facts.layers) and "disk" not in policy.places


def _as_simple(facts: ModelFacts, found: Fit, limits: Limits) -> Fit:
    """Gradients are used up in the backward only where that lowers the peak."""
    s = found.settings
    if s.states.gradients != "update":
        return found
    simple = replace(s, states=replace(s.states, gradients="device"))
    used = memory(facts, simple)
    same = used.device_bytes <= found.used.device_bytes and used.host_bytes <= found.used.host_bytes
    return replace(found, settings=simple, used=used) if same and limits.hold(used) else found
