"""What many ranks add to a step's memory: keys of the whole row, heads that travel, gathered weights, gradients under way.

A rank's own part of a row and of the states shrinks with the number of ranks. What does not: a head group's keys are those of
the whole row (Qwen3-8B at 1,048,576 tokens, one KV head: 0.5 GB, and their gradients in fp32 1 GB), two layers' weights are
whole (0.8 GB), and so are the word tables around their uses (1.2 GB each, their gradients 2.5 GB). Read off
`attention/context.py`, `gather.py`, `groupway.py`, `model/tables.py` and FSDP2's own source.

While a head group is attended the next one is under way, and in the backward the gradients of the one before go home:

    forward      keys in the order of the calls; for a moment the pool they are copied from; the next group's pool
    backward     the same, dk and dv of the calls, their sums in fp32 in a pool, that of the group before
"""

from __future__ import annotations

from typing import NamedTuple

from megaspan.plan.facts import ModelFacts
from megaspan.plan.parts import Part, Settings


class Group(NamedTuple):
    """Elements of one head group on one rank.

    Attributes:
        q: of the queries that the rank attends.
        kv: of keys and values of its own tokens.
        pool: of keys and values that are brought together, 0 where nothing is.
        several: there are more groups than one, so that the next one is under way.
        shared: ranks that attend the same KV head.
    """

    q: int
    kv: int
    pool: int
    several: bool
    shared: int


def heads_a_call(facts: ModelFacts, s: Settings) -> int | None:
    """KV heads of a head group, None for all of them: sp ranks take as many each as one does (`attention/heads.py`)."""
    wanted = s.kv_heads_per_call
    return None if wanted is None or wanted * s.ranks.sp >= facts.kv_heads else wanted * s.ranks.sp


def group_of(facts: ModelFacts, s: Settings, kv_heads: int | None) -> Group:
    """The head group of so many KV heads; None for all."""
    heads, sp = kv_heads or facts.kv_heads, s.ranks.sp
    shared = max(1, sp // facts.kv_heads)
    q = s.slots * heads * facts.query_width // facts.kv_heads
    width = 2 * heads * facts.head_dim * shared
    pool = pool_tokens(facts, s) * width // sp if s.ranks.cp > 1 else 0
    return Group(q, s.slots * width, pool, heads < facts.kv_heads, shared)


def pool_tokens(facts: ModelFacts, s: Settings) -> int:
    """Tokens whose keys are brought to one rank, in the kind of layer that brings most: all, or windows before pieces."""
    shard = s.slots * s.ranks.sp
    whole = s.ranks.cp * shard
    found = []
    for span in {facts.span(layer) for layer in range(facts.layers)}:
        halo = whole if span is None else 2 * (span - 1)
        found.append(whole if 2 * halo > whole - shard else min(whole, shard + halo))
    return max(found)


def forward_group(facts: ModelFacts, s: Settings) -> list[Part]:
    """What a head group's forward holds beside attention's output."""
    g, c = group_of(facts, s, heads_a_call(facts, s)), s.compute_bytes
    each = (g.q + g.kv) * (1 + g.several)
    if s.ranks.sp > 1:
        # Both ends of what travels to the heads; the output of the group before on its way home, and in order.
        each += g.q + g.kv + 3 * g.q
    if g.pool:
        each += g.kv  # keys and values side by side, as they are sent
    parts = [Part("one layer: q, k, v", c * each, s.place, _both(g, "q, k, v"))]
    if g.pool:
        copies = 3 if g.several else 2
        parts.append(Part("one layer: keys of all ranks", copies * c * g.pool, s.place, _pool(facts, s, g, copies * c)))
    return parts


def backward_group(facts: ModelFacts, s: Settings) -> list[Part]:
    """What a head group's backward holds beside attention's output, its gradient, and the gradients of groups before."""
    g, c, sums = group_of(facts, s, heads_a_call(facts, s)), s.compute_bytes, 4 if s.gpu else 0
    each = g.q * (2 * c + sums) + g.kv * c + (g.q + g.kv) * c * g.several
    if g.pool:
        # dq and dk, dv of the rank's own keys in one piece beside those of the calls; keys and values as they are sent.
        each += g.q * c + g.kv * (c + (4 if g.shared > 1 else c))
    else:
        each += g.kv * (c + sums)
    if s.ranks.sp > 1:
        # Output and its gradient, of this group and at both ends of the next; dq on its way home, and in order.
        each += c * (g.q * (2 + 4 * g.several) + 2 * g.q + g.q + g.kv)
    parts = [Part("one layer: q, k, v, gradients, sums", each, s.place, _both(g, "q, k, v, gradients, fp32 sums of dq"))]
    if g.pool:
        size = 3 * c + 10 if g.several else 2 * c + 6
        parts.append(Part("one layer: keys of all ranks, their gradients", size * g.pool, s.place, _pool(facts, s, g, size)))
    return parts


def whole_layer_pool(facts: ModelFacts, s: Settings) -> list[Part]:
    """The keys of all ranks in a layer that is not streamed: all heads at once."""
    g = group_of(facts, s, None)
    size = 2 * s.compute_bytes + 6
    return [Part("one layer: keys of all ranks, their gradients", size * g.pool, s.place, _pool(facts, s, g, size))]


def gathered_weights(facts: ModelFacts, s: Settings) -> list[Part]:
    """Weights that are whole on the device beside their shards, all through a step."""
    if s.ranks.shard == 1:
        return []
    layer, c = max(facts.layer_parameters), s.compute_bytes
    return [Part("weights of two layers, gathered", 2 * layer * c, s.place, f"2 x {layer:,} x {c} B: this one, the next")]


def gathered_head(facts: ModelFacts, s: Settings) -> list[Part]:
    """The output layer around the loss."""
    size = facts.head_parameters * s.compute_bytes if s.ranks.shard > 1 else 0
    return [Part("output layer, gathered", size, s.place, f"V x E x {s.compute_bytes} B")]


def going_gradient(facts: ModelFacts, s: Settings) -> list[Part]:
    """In a layer's backward: the gradient of the layer above, in fp32, until its reduction has ended."""
    if s.ranks.shard == 1:
        return []
    count = s.adapter // facts.layers if s.adapter else max(facts.layer_parameters)
    return [Part("gradient of the layer above, on its way", 4 * count, s.place, f"{count:,} x 4 B")]


def embedding_gradient(facts: ModelFacts, s: Settings) -> list[Part]:
    """At the end of the backward: the gradient of the row and that of the whole embedding, before it is reduced."""
    each = s.compute_bytes + 4
    size = facts.head_parameters * each
    return [
        Part("gradient of the row", s.slots * facts.hidden * s.compute_bytes, s.place, f"t x {s.compute_bytes}·E"),
        Part("gradient of the whole embedding", size, s.place, f"V x E x {each} B"),
    ]


def _both(g: Group, what: str) -> str:
    groups = "of this head group and the next" if g.several else "of all heads"
    return f"{what} {groups}: {g.q:,} numbers in q, {g.kv:,} in k and v"


def _pool(facts: ModelFacts, s: Settings, g: Group, each: int) -> str:
    tokens = pool_tokens(facts, s)
    return f"{tokens:,} tokens x {g.pool // tokens:,} of k and v x {each} B" if g.pool else ""
