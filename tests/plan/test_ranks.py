"""Plans of one rank of many: its part of a row and of the states, the keys of all, links, and rows shorter than the ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.config import SFTConfig
from megaspan.human import UserError
from megaspan.plan import Machine, Plan, RankSizes, choose, model_facts, plan_command
from megaspan.plan.cost import memory
from megaspan.plan.fit import Limits, can_fit, fit
from megaspan.plan.keep import KeepPolicy
from megaspan.plan.over_ranks import pool_tokens
from megaspan.plan.parts import Settings
from megaspan.plan.seconds import step_seconds
from megaspan.plan.states import state_plans
from megaspan.plan.streamed import group_count

GIB = 2**30
EIGHT = Machine("NVIDIA H200", 139 * GIB, 1024 * GIB, 128)
LONG = Settings(1 << 20, True, 2, True, True, True, True, 2048, streamed=True)
CP8 = RankSizes(cp=8)


def plan(tokens: int | str = "1M", model: str = "qwen3-8b", machine: Machine = EIGHT, **options: Any) -> Plan:
    options = {"model_init_kwargs": {"rope_parameters": "auto"}} | options
    return plan_command(SFTConfig(model_name_or_path=model, max_length=tokens, **options), machine)


def sizes_of(made: Plan) -> dict[str, int]:
    return {part.name: part.bytes for part in made.parts if part.place == "device"}


def test_a_rank_has_its_part_of_row_and_states_and_the_keys_of_all() -> None:
    """8B at a million tokens on 8 GPUs, by hand."""
    made, facts = plan(cp_size=8, memory_limit="80GiB"), model_facts("qwen3-8b")
    found, count, t = sizes_of(made), facts.parameters, (1 << 20) // 8
    assert (made.sizes, made.tokens_per_rank) == (CP8, t)
    assert found["weights"] == -(-count * 4 // 8), "fp32 shards, which are their own masters"
    assert "fp32 masters" not in found
    assert found["AdamW moments"] == -(-count * 8 // 8)
    assert found["gradients"] < count * 4 / 8
    assert found["weights of two layers, gathered"] == 2 * max(facts.layer_parameters) * 2
    assert found["one layer: gradient of the row"] == t * 4096 * 2
    assert made.kv_heads_per_call is not None
    width = 2 * made.kv_heads_per_call * 128
    # Keys in the order of the calls, dk and dv, the kernel's sums of them in fp32; the next group's pool, and what is sent for
    # it; sums in fp32 of the group before, and this rank's part of all ranks'. Of a key that is copied its place, too.
    each = 2 + 2 + 4 + 2 * (1 + 1 / 8) + 4 * (1 + 1 / 8)
    assert found["one layer: keys of all ranks, their gradients"] == (1 << 20) * (width * each + 4)
    inputs = sum(part.bytes for part in made.parts if part.name == "layer inputs, pinned")
    assert inputs % (t * 4096 * 2) == 0
    assert 20 * GIB < made.device_bytes < 56 * GIB, "another trainer's run of this row took 56.2 GB"
    pure = sizes_of(plan(cp_size=8, memory_limit="80GiB", dtype="bfloat16"))
    assert pure["weights"] == -(-count * 2 // 8)


def test_states_are_cut_over_data_ranks_too_and_rows_are_not() -> None:
    made = plan("128k", dp_shard_size=4)
    assert made.sizes == RankSizes(dp_shard=4)
    assert made.tokens_per_rank == 131_072
    assert sizes_of(made)["weights"] == -(-made.model.parameters * 4 // 4)
    assert not any("all ranks" in name for name in sizes_of(made))
    copies = plan("128k", dp_replicate_size=4)
    assert sizes_of(copies)["weights"] == made.model.parameters * 2, "a copy each, with masters of its own"
    adapter = sizes_of(plan("128k", cp_size=4, use_peft=True))
    assert adapter["weights"] == -(-made.model.parameters * 2 // 4)


def test_a_window_needs_its_halo_only() -> None:
    facts = model_facts("qwen3-8b")
    s = replace(LONG, ranks=CP8)
    windows = replace(facts, layer_types=("sliding_attention",) * 36, window=4096)
    mixed = replace(windows, layer_types=("full_attention",) + ("sliding_attention",) * 35)
    assert pool_tokens(windows, s) == (1 << 17) + 2 * 4095
    assert pool_tokens(mixed, s) == pool_tokens(facts, s) == 1 << 20
    assert pool_tokens(windows, replace(s, tokens=8192)) == 8192, "a halo as long as half of all is gathered"
    assert memory(windows, s).device_bytes < memory(facts, s).device_bytes


def test_heads_are_shared_in_groups_that_all_sp_ranks_work_on() -> None:
    facts = model_facts("qwen3-8b")
    for sp, wanted, groups in ((1, 1, 8), (2, 1, 4), (2, 2, 2), (4, 1, 2), (8, 1, 1), (16, 1, 1)):
        assert group_count(facts, replace(LONG, ranks=RankSizes(sp=sp), kv_heads_per_call=wanted)) == groups
    for sp in (1, 2, 4, 8, 16, 32):
        made = choose(SFTConfig(max_length="1M"), facts, replace(EIGHT, device_bytes=200 * GIB), sizes=RankSizes(sp=sp))
        heads = (made.kv_heads_per_call or 0) * sp
        assert heads == 0 or (facts.kv_heads % heads == 0 and heads < facts.kv_heads)
    with pytest.raises(UserError, match="sp_size"):
        plan(sp_size=3)
    with pytest.raises(UserError, match="1, 2, 4, 8, 16, 32"):
        choose(SFTConfig(max_length=8), facts, EIGHT, sizes=RankSizes(sp=6))


@pytest.mark.parametrize("tokens", [1, 2, 5, 17])
@pytest.mark.parametrize("options", [{"cp_size": 8}, {"sp_size": 8}, {"cp_size": 4, "sp_size": 2}], ids=str)
def test_a_row_shorter_than_the_ranks_is_planned(tokens: int, options: dict[str, int]) -> None:
    config = SFTConfig(max_length=64, **options)
    made = choose(config, model_facts("qwen3-0.6b"), EIGHT, longest=tokens, sizes=RankSizes.of(config))
    assert made.fits
    assert made.tokens_per_rank == -(-tokens // 8)
    assert made.seconds.total is not None
    assert made.seconds.total < 1
    assert made.render()


@pytest.mark.parametrize("sizes", [CP8, RankSizes(cp=2, sp=2), RankSizes(dp_shard=2, cp=3)], ids=str)
def test_the_longest_row_of_many_ranks_fits_and_one_more_round_does_not(sizes: RankSizes) -> None:
    machine = Machine("NVIDIA H200", 24 * GIB, 32 * GIB, 8)
    config, facts = SFTConfig(max_length=4096), model_facts("qwen3-0.6b")
    row = choose(config, facts, machine, sizes=sizes).longest_row
    assert row > choose(config, facts, machine).longest_row
    assert choose(config, facts, machine, longest=row, sizes=sizes).fits
    assert not choose(config, facts, machine, longest=row + 1, sizes=sizes).fits


def test_ranks_of_one_machine_share_its_host_memory() -> None:
    made = plan("128k", cp_size=4)
    assert made.host_limit == 256 * GIB
    assert made.machine.host_ranks == 4
    assert "for each of 4 ranks" in made.limits_from[1]
    assert plan("128k", cp_size=4, host_memory="512GiB").host_limit == 128 * GIB, "the option says what the machine has"
    assert plan("128k", dp_shard_size=32).host_limit == 128 * GIB, "of several machines each has its own"
    agreed = replace(EIGHT, host_bytes=100 * GIB, host_ranks=8)
    made = plan_command(SFTConfig(model_name_or_path="qwen3-0.6b", max_length=8, cp_size=8), agreed, CP8)
    assert made.host_limit == 100 * GIB, "a rank of a run is told its part"


def test_more_gpus_are_a_lever_where_one_is_too_small() -> None:
    little: dict[str, Any] = {"model": "qwen3-4b", "memory_limit": "20GiB", "dtype": "bfloat16", "offload_optimizer": False}
    made = plan("128k", **little)
    assert not made.fits
    lever = next(each for each in made.levers if each.name == "2 GPUs")
    assert lever.do == "--nproc 2 --cp_size 2"
    assert lever.saves > 5 * GIB
    assert plan("128k", **little, cp_size=4).fits
    twice = plan("128k", **little, cp_size=2)
    assert next(each for each in twice.levers if "GPUs" in each.name).do == "--nproc 4 --cp_size 4"
    none = plan("128k", model="qwen3-4b", machine=Machine("CPU", 0, 64 * GIB, 4))
    assert not any("GPUs" in each.name for each in none.levers)


def test_the_text_and_the_json_say_ranks_and_what_is_split() -> None:
    made = plan(cp_size=4, sp_size=2)
    text = made.render()
    assert "8 ranks: cp_size 4 × sp_size 2; 131,072 tokens of a row on each" in text
    assert "all numbers are of one rank" in text
    back = json.loads(json.dumps(made.as_dict()))
    assert (back["ranks"], back["tokens_per_rank"]) == (8, 131_072)
    assert back["sizes"] == {"dp_replicate": 1, "dp_shard": 1, "cp": 4, "sp": 2}
    assert "rank" not in plan("128k").render().replace("waiting", "")


def test_seconds_are_shared_and_what_travels_is_shown() -> None:
    facts = model_facts("qwen3-8b")
    one = step_seconds(facts, replace(LONG, kv_heads_per_call=1), "NVIDIA H200", "flash-attn-4")
    many = step_seconds(facts, replace(LONG, kv_heads_per_call=1, ranks=CP8), "NVIDIA H200", "flash-attn-4")
    here = {part.name: part.seconds for part in many.parts}
    alone = {part.name: part.seconds for part in one.parts}
    assert here["attention backward"] == pytest.approx(alone["attention backward"] / 8)
    assert here["projections and MLP"] == pytest.approx(alone["projections and MLP"] / 8)
    keys = 36 * (7 / 8) * (1 << 20) * 2 * 1024 * 2
    travels = next(part for part in many.parts if part.name == "waiting for keys and heads")
    assert f"{4 * keys / 1e9:.1f} GB" in travels.formula, "forward, backward again, and gradients in fp32"
    assert travels.seconds == pytest.approx(4 * keys / 200e9 / 8), "the first of 8 head groups has nothing to hide behind"
    short = step_seconds(facts, replace(LONG, tokens=8192, ranks=CP8), "NVIDIA H200", "flash-attn-4")
    waits = {part.name: part.seconds for part in short.parts}
    assert waits["waiting for weights"] > 0.1, "nothing hides 49 GB of weights and gradients there"
    assert many.total is not None
    assert one.total is not None
    assert one.total / 8 < many.total < one.total / 7
    sp = step_seconds(facts, replace(LONG, ranks=RankSizes(sp=8)), "NVIDIA H200", "flash-attn-4")
    assert any(part.name.startswith("attention's output") and part.seconds > 0 for part in sp.parts)


def test_head_groups_are_taken_where_they_hide_the_exchange() -> None:
    """One device takes all heads at once while they fit; ranks would wait for the keys of all of them."""
    assert plan("256k", model="qwen3-4b").kv_heads_per_call is None
    assert plan("1M", model="qwen3-4b", cp_size=8).kv_heads_per_call is not None


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 1 << 22),
    device=st.integers(4, 160),
    host=st.integers(4, 300),
    sizes=st.builds(
        RankSizes, st.just(1), st.sampled_from([1, 2]), st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 2, 8, 16])
    ),
    streamed=st.booleans(),
    masters=st.booleans(),
)
def test_what_can_fit_is_found(tokens: int, device: int, host: int, sizes: RankSizes, streamed: bool, masters: bool) -> None:
    facts = model_facts("qwen3-0.6b")
    s = Settings(tokens, True, 2, masters, True, True, True, 2048, streamed=streamed, ranks=sizes)
    limits = Limits(device * GIB, host * GIB)
    states = tuple(state_plans(gpu=True, clips=True, rows=1, adapter=False, offload_optimizer=None))
    found = fit(facts, s, limits, states)
    assert found.fits == can_fit(facts, s, limits, states)
    assert limits.hold(found.used) or not found.fits
    keep = KeepPolicy.everything(facts.layers, "host", outputs=streamed)
    fixed = replace(s, keep=keep)
    more = replace(fixed, ranks=fixed.ranks.more())
    if sizes.total > 1:
        assert memory(facts, more).host_bytes <= memory(facts, fixed).host_bytes
        assert memory(facts, replace(fixed, tokens=tokens + 1)).device_bytes >= memory(facts, fixed).device_bytes
