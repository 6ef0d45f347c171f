"""Seconds that ranks spend on each other: keys and heads that travel, weights that are gathered, gradients that are reduced.

Keys and heads travel beside attention, which takes a hundred times as long at a million tokens and about as long at 4,096
tokens a rank; weights travel beside the layer. What does not find its seconds there is waited for, and so is what nothing can
hide: the word tables, and attention's output of a layer's last head group on its way from heads to tokens.
"""

from __future__ import annotations

from megaspan.plan.facts import ModelFacts
from megaspan.plan.over_ranks import pool_tokens
from megaspan.plan.parts import SecondsPart, Settings
from megaspan.plan.streamed import group_count

# Bytes a second that one GPU receives from the others of its node. NVLink of an H200 has 450e9 each way; measured between two
# of them, of 32 to 128 MiB that travel (`benchmarks.hiding`): 136e9 to 229e9.
PEERS = 200e9


def rank_seconds(
    facts: ModelFacts, s: Settings, forward: float, backward: float, computed: float, attends_again: float
) -> list[SecondsPart]:
    """What a step waits for other ranks; nothing for one rank.

    Args:
        facts: the model.
        s: the levers.
        forward: seconds of attention forward.
        backward: and backward.
        computed: seconds of everything that is computed.
        attends_again: the share of layers whose attention runs forward twice.
    """
    parts, again = [], attends_again
    if s.ranks.row > 1:
        keys, heads = key_bytes(facts, s), head_bytes(facts, s)
        # Keys once for every forward of attention and once for its backward; their gradients come home in fp32.
        there = (1 + again) * keys + (1 + again) * heads
        back = keys * (1 + 4 / s.compute_bytes) + 3 * heads
        groups = group_count(facts, s) if s.streams else 1
        waited = _waited(there, forward, groups) + _waited(back, backward, groups)
        beside = f"beside attention but for the first of {groups} head groups" if groups > 1 else "not hidden: one head group"
        formula = f"{(there + back) / 1e9:.1f} GB at {PEERS / 1e9:.0f} GB/s, {beside}"
        parts.append(SecondsPart("waiting for keys and heads", waited, formula))
        # The output of the forward, and in the backward the gradients of q, k and v, which are as much and a little more.
        out = 2 * (1 + again) * output_home(facts, s) / PEERS / groups
        last = f"of the last of {groups} head groups, not hidden" if groups > 1 else "not hidden: one head group"
        parts.append(SecondsPart("attention's output on its way home", out, last))
    if s.ranks.shard > 1:
        layers, tables = weight_bytes(facts, s)
        waited = max(0.0, layers / PEERS - computed)
        formula = f"{layers / 1e9:.1f} GB gathered and reduced at {PEERS / 1e9:.0f} GB/s beside the layers"
        parts.append(SecondsPart("waiting for weights", waited, formula))
        parts.append(SecondsPart("word tables", tables / PEERS, f"{tables / 1e9:.1f} GB gathered and reduced, not hidden"))
    return [part for part in parts if part.seconds or part.name.startswith("waiting")]


def _waited(size: float, attention: float, groups: int) -> float:
    """Seconds of an exchange that attention does not hide: each layer's first head group has none before it."""
    return max(size / PEERS - attention, size / PEERS / groups)


def key_bytes(facts: ModelFacts, s: Settings) -> float:
    """Keys and values of all layers that a rank receives from other cp ranks in one forward."""
    if s.ranks.cp == 1:
        return 0.0
    foreign = pool_tokens(facts, s) - s.slots * s.ranks.sp
    return facts.layers * foreign * 2 * facts.kv_width * _shared(facts, s) / s.ranks.sp * s.compute_bytes


def head_bytes(facts: ModelFacts, s: Settings) -> float:
    """q, k, v of all layers that a rank receives from other sp ranks in one forward."""
    width = facts.query_width + 2 * facts.kv_width * _shared(facts, s)
    return facts.layers * s.slots * width * s.compute_bytes * (s.ranks.sp - 1) / s.ranks.sp


def output_home(facts: ModelFacts, s: Settings) -> float:
    """Attention's output of all layers that a rank receives from other sp ranks."""
    return facts.layers * s.slots * facts.query_width * s.compute_bytes * (s.ranks.sp - 1) / s.ranks.sp


def weight_bytes(facts: ModelFacts, s: Settings) -> tuple[float, float]:
    """What a rank receives for a row: layers' weights twice and gradients in fp32; the word tables'."""
    foreign = (s.ranks.shard - 1) / s.ranks.shard
    trained = 0 if s.adapter else 4
    again = s.policy(facts.layers).runs_again / facts.layers if s.streams else 0
    layers = sum(facts.layer_parameters) * ((2 + again) * s.compute_bytes + trained)
    tables = 2 * facts.head_parameters * (s.compute_bytes + trained)
    return foreign * layers, foreign * tables


def _shared(facts: ModelFacts, s: Settings) -> int:
    return max(1, s.ranks.sp // facts.kv_heads)
