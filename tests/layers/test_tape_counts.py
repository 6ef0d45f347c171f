"""What the plan says lies on the device and on the host at each moment of a step, and what the tape holds there, byte by byte.

A rehearsal once found what nothing on the CPU had: layers that ran again brought every kept output to the device whole.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megaspan.attention import install as install_attention
from megaspan.layers.dials import LayerPlan
from megaspan.layers.streamed import Streaming
from megaspan.memory.arena import pages
from megaspan.plan import cost
from megaspan.plan.cost import Memory
from megaspan.plan.facts import ModelFacts
from megaspan.plan.keep import KeepPolicy, LayerKeep
from megaspan.plan.parts import Settings, bytes_of
from megaspan.plan.place import Limits, policies
from megaspan.plan.segments import held_bytes
from megaspan.plan.step import Step
from tests.layers.watched import Moment, Watched, watched
from tests.models import batch, tiny

TOKENS, KV_HEADS = 64, 4


@functools.cache
def toy(layers: int):
    """A model, for one policy after the other, and what the plan knows of it."""
    torch.set_num_threads(1)
    model = tiny("qwen3", layers=layers, num_attention_heads=8, num_key_value_heads=KV_HEADS)
    install_attention(model)
    return model, ModelFacts.from_config(model.config.to_dict())


def dialled(facts: ModelFacts, tile: int, heads: int | None, back: bool, ahead: bool) -> Settings:
    dials = {"layer_tile": tile, "kv_heads_per_call": heads, "stream_back": back, "project_ahead": ahead}
    return Settings(TOKENS, True, 4, False, True, True, True, 16, streamed=True, **dials)


def ran(layers: int, s: Settings, policy: KeepPolicy) -> Watched:
    """One step of it."""
    model, _ = toy(layers)
    tiles = LayerPlan(s.layer_tile, s.kv_heads_per_call, s.stream_back, project_ahead=s.project_ahead)
    streaming = Streaming(tiles, policy)
    streaming.install(model, prove=False)
    with watched(streaming) as found:
        loss_begins = model.lm_head.register_forward_pre_hook(lambda *_: found.enter(Moment("loss", 0)))
        try:
            model(**batch(TOKENS), use_cache=False).loss.backward()
        finally:
            loss_begins.remove()
            streaming.remove()
    assert found.now == 0, "something holds what the step has kept"
    return found


def planned(step: Step, policy: KeepPolicy, at: Moment) -> int:
    """What the plan counts of inputs and outputs on the device at a moment."""
    total, here, s = len(policy.layers), policy.below["device"], step.s
    tiles = step.output * min(2 * s.layer_tile, TOKENS) // TOKENS
    leaving = max(tiles, round(step.output * min(1.0, 2 * (s.kv_heads_per_call or KV_HEADS) / KV_HEADS)))

    def size(pair: tuple[int, int]) -> int:
        return pair[0] * step.input + pair[1] * step.output

    if at.name == "forward":  # beside x of the layer, of the one before or y, and the embedding
        leaves = step.tiles and all(keep.output == "host" for keep in policy.layers)
        return size(here[at.layer]) + 3 * step.input + (leaving if leaves else step.output)
    if at.name == "loss":
        return size(here[total]) + bytes_of(cost._flying(step, policy))
    if at.name == "again":
        segment = policy.segment_of[at.of]
        stored, whole = cost._stored(step, policy, segment, segment.stop), policy.layers[segment.start].input == "device"
        if policy.again == "device":
            work = tiles + step.input * (len(segment) == 2 and not whole)
        else:
            work = (leaving if step.tiles else step.output) + step.input * (2 - (len(segment) == 2 and whole))
        return size(here[segment.stop]) + size(stored) + work
    # A layer that attends again does so before its gradients are there: the phase of attention has all that it needs.
    phase = next(phase for phase in step.phases if phase.name == at.name.replace("attends", "attention"))
    stored = cost._stored(step, policy, policy.segment_of[at.layer], at.layer + 1, phase)
    return size(cost._on_device(policy, at.layer, phase)) + size(stored) + step.fetched(phase, policy, at.layer)


def loose(step: Step, policy: KeepPolicy, at: Moment) -> int:
    """By how much the plan may be above the truth: where it is an upper bound, and why.

    * Forwards, first and second: x, y, O and what is on its way to the host are counted together, and not there together.
    * A layer that attends again does so before its gradients are there, and is counted with the phase of attention.
    * Tiles of O are counted with their log-sum-exp, which is read with a head group in the phase of attention.
    * Tiles of x are gone when that group's O is read.
    * Of a layer whose input is on the device no head group is projected ahead.
    """
    tile = min(2 * step.s.layer_tile, TOKENS)
    if at.name in ("forward", "again", "attends"):
        return 4 * (step.input + step.output)
    if step.tiles and at.name == "MLP":
        return (step.output - 2 * step.input) * tile // TOKENS
    here = (policy.layers[at.layer].input or policy.again) == "device"
    ahead = step.s.project_ahead and here and step.output * (step.s.kv_heads_per_call or KV_HEADS) // KV_HEADS
    return step.input * tile // TOKENS + ahead if step.tiles and at.name == "attention" else 0


kept = st.builds(LayerKeep, st.sampled_from(["host", "device", None]), st.sampled_from(["host", "device", None]))
first = st.builds(LayerKeep, st.sampled_from(["host", "device"]), st.sampled_from(["host", "device", None]))
places = st.sampled_from(["host", "device"])


dials = {
    "tile": st.sampled_from([8, 16, 64]),
    "heads": st.sampled_from([None, 1, 2]),
    "back": st.booleans(),
    "ahead": st.booleans(),
}


def check(step: Step, policy: KeepPolicy) -> None:
    """A step with this policy holds what the plan counts, at every moment on the device and on the host."""
    found = ran(len(policy.layers), step.s, policy)
    for at, live in found.device.items():
        if at.name != "between":
            plan = planned(step, policy, at)
            told = f"{at}: {live / step.input:.3f} inputs on the device, {plan / step.input:.3f} planned"
            assert live <= plan, told
            assert live >= plan - loose(step, policy, at), told
    # The arena hands out whole pages.
    groups = KV_HEADS // (step.s.kv_heads_per_call or KV_HEADS)
    out, sums = 2 * step.input // groups, (step.output - 2 * step.input) // groups
    first, *after = held_bytes(policy, step.input, groups * (pages(out) + pages(sums)), "host")
    held = dict(zip(reversed(policy.segments), after, strict=True))
    for at, live in found.host.items():
        if at.name != "between":
            layer = at.of if at.name == "again" else at.layer
            assert live <= (first if at.name in ("forward", "loss") else held[policy.segment_of[layer]]), at
    if step.tiles:  # otherwise the plan is above the truth by what has come back whole, a layer ahead
        assert max(found.host.values()) == max(first, *after)


@settings(max_examples=20, deadline=None)
@given(
    policy=st.builds(
        lambda start, rest, again, attends: KeepPolicy((start, *rest), again, attends),
        first,
        st.lists(kept, min_size=4, max_size=7),
        places,
        places,
    ),
    **dials,
)
@example(  # a second run without attention sends input after input to the host
    policy=KeepPolicy((LayerKeep("host", "host"), *[LayerKeep(None, "host")] * 7)), tile=8, heads=None, back=True, ahead=False
)
@example(  # two head groups of O at once
    policy=KeepPolicy((LayerKeep("host", "host"),) * 5), tile=8, heads=1, back=True, ahead=True
)
def test_the_tape_holds_what_the_plan_counts(policy, tile, heads, back, ahead):
    facts = toy(len(policy.layers))[1]
    check(Step(facts, dialled(facts, tile, heads, back, ahead)), policy)


@settings(max_examples=12, deadline=None)
@given(layers=st.integers(5, 8), device=st.integers(0, 12), host=st.integers(2, 10), **dials)
def test_so_it_does_with_the_policies_that_users_get(layers, device, host, tile, heads, back, ahead):
    """Those that the planner makes for a GPU and a host with room for so many inputs, beside what a step needs anyway."""
    facts = toy(layers)[1]
    # With next to nothing trained: a toy's gradients are larger than all that its layers keep.
    step = Step(facts, replace(dialled(facts, tile, heads, back, ahead), adapter=8 * layers))
    bare = Memory(step, KeepPolicy.everything(layers, "host"))
    limits = Limits(bare.device_needed + device * step.input, bytes_of(step.on_host) + host * step.input)
    for policy in itertools.islice(policies(step, limits), 1):
        check(step, policy)
