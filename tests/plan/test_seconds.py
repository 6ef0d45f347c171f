"""Predicted seconds: steps that were measured, and what each dial adds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megaspan.plan import model_facts
from megaspan.plan.keep import KeepPolicy, LayerKeep, Place
from megaspan.plan.parts import Settings
from megaspan.plan.seconds import Seconds, step_seconds
from megaspan.plan.states import StatePlan

EIGHT = model_facts("qwen3-8b")
LONG = Settings(1 << 20, True, 2, False, True, True, True, 2048, streamed=True)


def seconds(s: Settings) -> Seconds:
    return step_seconds(EIGHT, s, "NVIDIA H200", "flash-attn-4")


def part(s: Settings, name: str) -> float:
    return sum(each.seconds for each in seconds(s).parts if each.name == name)


def total(s: Settings) -> float:
    found = seconds(s).total
    assert found is not None
    return found


@pytest.mark.parametrize(("tokens", "measured"), [(32_768, 3.77), (65_536, 11.02), (131_072, 36.1)])
def test_streamed_steps_take_what_was_measured(tokens: int, measured: float) -> None:
    """docs/log.md, commit d7d2c6a: 4B shape, pure bf16, FlashAttention 4 on an H200."""
    made = step_seconds(model_facts("qwen3-4b"), replace(LONG, tokens=tokens), "NVIDIA H200", "flash-attn-4")
    assert made.total == pytest.approx(measured, rel=0.04)


def test_an_output_is_worth_13_seconds_and_an_input_about_one() -> None:
    def policy(outputs: int, starts: int) -> KeepPolicy:
        keep = [LayerKeep("host" if layer < starts else None, "host" if layer < outputs else None) for layer in range(36)]
        return KeepPolicy(tuple(keep))

    everything = total(replace(LONG, keep=policy(36, 36)))
    assert total(replace(LONG, keep=policy(26, 36))) - everything == pytest.approx(10 * 13.5, rel=0.05)
    assert 0.5 < (total(replace(LONG, keep=policy(36, 26))) - everything) / 10 < 1.5
    assert part(replace(LONG, keep=policy(36, 26)), "layers run again") > 0


def test_copies_that_do_not_hide_are_waited_for() -> None:
    """At a million tokens 23 s of copies hide behind half an hour; gradients in a backward of 1,024 tokens do not."""
    assert part(LONG, "waiting for the host link") == 0
    assert "run beside it" in seconds(LONG).note
    short = replace(LONG, tokens=1024, masters=True, states=StatePlan("host", "device"))
    assert part(short, "waiting for the host link") > 0.05
    assert part(replace(short, states=StatePlan()), "waiting for the host link") == 0


@pytest.mark.parametrize(("place", "waits"), [("host", False), ("disk", True)])
def test_a_disk_is_waited_for(place: Place, waits: bool) -> None:
    """An assumed 2 GB/s: at 131,072 tokens 77 GB take longer than the computation, at a million they hide."""
    s = replace(LONG, tokens=131_072, keep=KeepPolicy.everything(36, place))
    assert (part(s, "waiting for the disk") > 20) == waits
    assert part(replace(s, tokens=1 << 20), "waiting for the disk") == 0


def test_head_groups_and_tiles_from_the_host_cost_little_on_long_rows() -> None:
    groups = replace(LONG, kv_heads_per_call=1)
    assert 0 < total(groups) - total(LONG) < 0.01 * total(LONG)
    short = replace(LONG, tokens=8192)
    more = total(replace(short, kv_heads_per_call=1)) - total(short)
    assert more > 0.1 * total(short)
    assert 0 < total(replace(LONG, stream_back=True)) - total(LONG) < 0.01 * total(LONG)
    assert total(replace(LONG, layer_tile=4096)) > total(replace(LONG, layer_tile=8192)) > total(LONG)


def test_states_on_the_host_cross_the_link_once_each_way() -> None:
    here, there = part(LONG, "optimizer"), part(replace(LONG, states=StatePlan("device", "host")), "optimizer")
    assert 0 < here < 0.1
    assert there == pytest.approx(EIGHT.parameters * 4 / 53e9)
    both = part(replace(LONG, states=StatePlan("host", "host")), "optimizer")
    assert both == pytest.approx(EIGHT.parameters * (4 + 2) / 53e9)
    masters = part(replace(LONG, masters=True, states=StatePlan("host", "host")), "optimizer")
    assert masters == pytest.approx(EIGHT.parameters * (12 + 4) / 53e9)
    # In the backward the computation waits: a layer's gradients are complete at once, and its parameters come one by one.
    early = part(replace(LONG, states=StatePlan("update", "host")), "optimizer")
    assert early == pytest.approx(here + 1.5 * EIGHT.parameters * 4 / 53e9)
    assert part(replace(LONG, states=StatePlan("update", "device")), "optimizer") == pytest.approx(here)


def test_the_sum_of_a_windows_gradients_is_waited_for() -> None:
    """It comes to be added to, and goes, parameter by parameter; of one row each gradient goes beside the backward."""
    away = replace(LONG, states=StatePlan("host", "device"))
    name = "adding to the sum of gradients"
    assert part(away, name) == part(replace(LONG, rows=4), name) == 0
    assert part(replace(away, rows=4), name) == pytest.approx(2 * EIGHT.parameters * 2 / 53e9)
    assert total(replace(away, rows=4)) > total(away)
