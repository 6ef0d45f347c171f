"""The search: states are a dial by seconds, and stay where it is simplest unless a step is faster by a hundredth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.config import SFTConfig
from megaspan.plan import Machine, Plan, model_facts, plan_command
from megaspan.plan.fit import WORTH, Fit, Limits, fit
from megaspan.plan.parts import Settings
from megaspan.plan.ranks import RankSizes
from megaspan.plan.seconds import relative_seconds
from megaspan.plan.states import StatePlan, state_plans
from megaspan.plan.step import Step

GIB = 2**30
H200 = Machine("NVIDIA H200", 141 * GIB, 480 * GIB, 16)
LONG = Settings(1 << 18, True, 2, False, True, True, True, 2048, streamed=True)
DEVICE, GRADIENTS, MOMENTS, BOTH = (StatePlan(*pair) for pair in (
    ("device", "device"), ("host", "device"), ("device", "host"), ("host", "host"),
))  # fmt: skip
ALL = (DEVICE, GRADIENTS, MOMENTS, BOTH)


def plan(limit: int, host: int, model: str = "qwen3-4b", tokens: int = 1 << 18, **options: Any) -> Plan:
    options = {"dtype": "bfloat16", "model_init_kwargs": {"rope_parameters": "auto"}} | options
    sizes = {"max_length": tokens, "memory_limit": limit * GIB, "host_memory": host * GIB}
    return plan_command(SFTConfig(model_name_or_path=model, **sizes, **options), H200)


def seconds(found: Fit, model: str = "qwen3-4b") -> float:
    return relative_seconds(model_facts(model), found.settings)


def test_moments_move_where_their_room_makes_a_step_faster() -> None:
    """4B at 262,144 tokens in 32 GiB: with moments there too, what waits on the host comes in tiles for each head group."""
    facts, limits = model_facts("qwen3-4b"), Limits(32 * GIB, 120 * GIB)
    chosen, here = fit(facts, LONG, limits, ALL), fit(facts, LONG, limits, (GRADIENTS,))
    assert here.fits, "nobody is forced"
    assert chosen.settings.states == MOMENTS
    assert (chosen.settings.stream_back, here.settings.stream_back) == (False, True)
    assert limits.hold(chosen.used)
    assert seconds(chosen) == min(seconds(found) for each in ALL if (found := fit(facts, LONG, limits, (each,))).fits)
    assert chosen.faster is not None
    assert chosen.faster.than == GRADIENTS
    assert chosen.faster.seconds == pytest.approx(seconds(here) - seconds(chosen))
    assert chosen.faster.seconds > 0.03 * seconds(here)
    made = plan(32, 120)
    assert made.states == MOMENTS
    (reason,) = [reason for reason in made.reasons if "AdamW" in reason]
    assert reason.startswith("AdamW's moments lie on the host and pass the device in pieces, 0.3 s each way: ")
    words = "s a step faster on an H200 than with them on the device, and gradients on the host, as layers have more room"
    assert reason.endswith(words)
    assert next(lever for lever in made.levers if lever.name == "optimizer on the host").on
    assert made.next_lever is not None
    assert "offload_optimizer" not in made.next_lever.do
    unclipped = plan(32, 120, max_grad_norm=0)
    assert unclipped.states.moments == "host"
    assert any("H200 than with them on the device, as layers" in reason for reason in unclipped.reasons)


def test_states_stay_where_a_step_is_hardly_faster() -> None:
    """In 44 GiB the tiles are whole with more calls of attention, and moving moments would gain a quarter of a percent."""
    facts, limits = model_facts("qwen3-4b"), Limits(44 * GIB, 128 * GIB)
    chosen, away = fit(facts, LONG, limits, ALL), fit(facts, LONG, limits, (MOMENTS,))
    assert 0 < seconds(chosen) - seconds(away) < WORTH * seconds(chosen)
    assert chosen.settings.states == DEVICE
    assert chosen.faster is None
    assert plan(44, 128).states == DEVICE


def test_the_option_is_obeyed_whatever_is_faster() -> None:
    here = plan(32, 120, offload_optimizer=False)
    assert here.fits
    assert here.states == GRADIENTS
    assert plan(44, 128, offload_optimizer=True).states == MOMENTS
    assert plan(141, 240, offload_optimizer=True).states == MOMENTS
    asked = plan(32, 120, offload_optimizer=True)
    assert any("AdamW" in reason for reason in asked.reasons)
    assert not any("step faster" in reason or "step is faster" in reason for reason in asked.reasons), "it was asked for"


def test_host_memory_that_moments_take_is_not_the_layers() -> None:
    """With 60 GiB of host memory layers would lose on the host what they gain on the device."""
    facts, limits = model_facts("qwen3-4b"), Limits(60 * GIB, 60 * GIB)
    chosen, away = fit(facts, LONG, limits, ALL), fit(facts, LONG, limits, (MOMENTS,))
    assert chosen.settings.states == DEVICE
    assert away.settings.policy(36).outputs <= chosen.settings.policy(36).outputs
    assert away.fits


def test_gradients_move_for_seconds_too_and_ranks_move_theirs() -> None:
    made = plan(24, 480, cp_size=2)
    assert made.states == GRADIENTS
    (reason,) = [reason for reason in made.reasons if "the norm of all" in reason]
    assert "a step faster on an H200 than with them on the device" in reason
    assert plan(24, 480, tokens=1 << 19, cp_size=2).states == MOMENTS


def test_of_other_rates_no_seconds_are_said() -> None:
    made = plan(62, 240, dtype=None, bf16=False)
    moved = [reason for reason in made.reasons if "a step is faster than with" in reason]
    assert len(moved) == 1
    assert "H200" not in moved[0]


def test_states_that_cannot_win_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for everything on the device no second place is searched: a plan's time is what it was."""
    made: list[Settings] = []
    own = Step.__init__
    monkeypatch.setattr(Step, "__init__", lambda self, facts, s: (made.append(s), own(self, facts, s))[1])
    facts = model_facts("qwen3-4b")
    assert fit(facts, LONG, Limits(100 * GIB, 240 * GIB), ALL).fits
    assert {s.states for s in made} == {DEVICE}
    made.clear()
    fit(facts, replace(LONG, checkpoint=False, tokens=4096), Limits(141 * GIB, 240 * GIB), ALL)
    assert {s.states for s in made} == {DEVICE}


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(4096, 1 << 21),
    device=st.integers(6, 60),
    host=st.integers(8, 200),
    disk=st.sampled_from([0, 300]),
    sizes=st.builds(RankSizes, st.just(1), st.just(1), st.sampled_from([1, 2, 8]), st.sampled_from([1, 2])),
    streamed=st.booleans(),
    clips=st.booleans(),
    windows=st.booleans(),
)
def test_no_state_that_was_left_out_is_faster(
    tokens: int, device: int, host: int, disk: int, sizes: RankSizes, streamed: bool, clips: bool, windows: bool
) -> None:
    """What the search leaves out to be quick could not have won: each place of the states by itself says so."""
    facts = model_facts("qwen3-0.6b")
    if windows:
        facts = replace(facts, window=4096, layer_types=("sliding_attention",) * 20 + ("full_attention",) * 8)
    s = replace(LONG, tokens=tokens, streamed=streamed, ranks=sizes)
    limits = Limits(device * GIB, host * GIB, disk * GIB)
    states = tuple(state_plans(gpu=True, clips=clips, rows=1, adapter=False, offload_optimizer=None))
    found = fit(facts, s, limits, states)
    alone = [(each, fit(facts, s, limits, (each,))) for each in states]
    there = [each for each, one in alone if one.fits]
    fitting = [(one, relative_seconds(facts, one.settings)) for _, one in alone if one.fits]
    assert found.fits == bool(fitting)
    if not fitting:
        return
    best, chosen, first = relative_seconds(facts, found.settings), found.settings, fitting[0][0].settings
    assert any(best == pytest.approx(each) and one.settings.states == chosen.states for one, each in fitting)
    before = [each for one, each in fitting if one.settings.states != chosen.states]
    for one, each in fitting:
        if one.settings.layer_tile >= first.layer_tile:  # those with smaller ones are not looked for
            assert best <= each / (1 - WORTH) * 1.000_001
    assert (found.faster is None) == (chosen.states == first.states)
    if found.faster is not None:
        assert found.faster.than == there[0]
        assert best <= before[0] * (1 - WORTH)
