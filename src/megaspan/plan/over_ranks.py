"""What many ranks add to a step's memory: keys of the whole row, heads that travel, gathered weights, gradients under way.

A rank's own part of a row and of the states shrinks with the number of ranks. What does not: a head group's keys are those of
the whole row (Qwen3-8B at 1,048,576 tokens, one KV head: 0.5 GB, and their gradients in fp32 1 GB), two layers' weights are
whole (0.8 GB), and so are the word tables around their uses (1.2 GB each, their gradients 2.5 GB). Read off
`attention/context.py`, `gather.py`, `groupway.py`, `model/tables.py` and FSDP2's own source.

While a head group is attended the next one is under way, and in the backward the gradients of the one before go home. Moments
of a head group's backward, of which the heaviest counts (`tests/plan/test_over_ranks.py` follows each storage of the code):

    a kernel     q, dq so far, keys in the order of the calls, dk and dv of the calls so far, the kernel's fp32 sums
    the sums     q, dq, dk and dv of all calls, their sums in fp32 in a pool
    going home   q, dq, that pool, and a rank's own part of all ranks' sums
    beginning    with heads that travel: both ends of the next group's, beside both ends of this one's

The worst rank is the first one, whose last queries see all keys, or the last one, whose queries are all in one call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megaspan.human import count_of
from megaspan.plan.facts import ModelFacts
from megaspan.plan.parts import Part, Settings
from megaspan.plan.ranks import kv_heads_a_call

CAST_ELEMENTS = 2**24
"""Of a key's gradient, in fp32 at once while it is added to the sums: 64 MiB, where all of it may be 1 GB."""


class Group(NamedTuple):
    """Elements of one head group on one rank.

    Attributes:
        q: of the queries that the rank attends.
        kv: of keys and values of its own tokens.
        width: of the keys and values that one token brings to a rank's attention.
        groups: head groups of a layer.
        shared: ranks that attend the same KV head.
    """

    q: int
    kv: int
    width: int
    groups: int
    shared: int


class Keys(NamedTuple):
    """Tokens whose keys one rank reads in one kind of layer; the row is one document.

    Attributes:
        pool: that are brought together, its own among them.
        copied: side by side, in the order of the calls.
        calls: of each kernel call, the later queries' first: its share of the rank's queries, and its keys.
        home: whose gradients all ranks send here.
        sent: that it sends.
    """

    pool: int
    copied: int
    calls: tuple[tuple[float, int], ...]
    home: int
    sent: int


class Held(NamedTuple):
    """Bytes of one moment of a head group.

    Attributes:
        name: of the moment.
        q: bytes for each number of q that the rank attends.
        kv: and for each of its own keys and values.
        keys: of keys of all ranks, and their gradients.
        pool: tokens brought together.
        landed: head groups whose dk and dv have come home.
    """

    name: str
    q: float
    kv: float
    keys: int = 0
    pool: int = 0
    landed: int = 0


def heads_a_call(facts: ModelFacts, s: Settings) -> int | None:
    """KV heads of a head group, None for all of them."""
    return kv_heads_a_call(facts.kv_heads, s.ranks.sp, s.kv_heads_per_call)


def group_of(facts: ModelFacts, s: Settings, kv_heads: int | None) -> Group:
    """The head group of so many KV heads; None for all."""
    heads, sp = kv_heads or facts.kv_heads, s.ranks.sp
    shared = max(1, sp // facts.kv_heads)
    q = s.slots * heads * facts.query_width // facts.kv_heads
    width = 2 * heads * facts.head_dim * shared
    return Group(q, s.slots * width, width // sp, -(-facts.kv_heads // heads), shared)


def pool_tokens(facts: ModelFacts, s: Settings) -> int:
    """Tokens whose keys are brought to one rank, in the kind of layer that brings most: all, or windows before pieces."""
    return max(_pool_tokens(s, span) for span in _spans(facts))


def keys_of(s: Settings, span: int | None, rank: int) -> Keys:
    """What a rank reads in layers whose queries see `span` tokens, None for all before them (`attention/slices.py`).

    A shard is two chunks of 2 x cp, from the front and from the back of the row; the last rank's two are one piece.
    """
    if s.packs:
        span = None  # documents that are cut bring halos of their own: how many is known when rows are
    cp, shard = s.ranks.cp, s.slots * s.ranks.sp
    chunk, pool = -(-shard // 2), _pool_tokens(s, span)
    gathered = pool == cp * shard
    reach = cp * shard if span is None else span - 1
    halo = reach * (2 if 0 < rank < cp - 1 else 1)  # before a chunk; nothing is before the row, nor between the last rank's two

    def seen(first: int, stop: int) -> int:
        return stop * chunk - max(0, first * chunk - reach)

    if rank == cp - 1:
        calls: tuple[tuple[float, int], ...] = ((1.0, seen(rank, cp + 1)),)
    else:
        calls = (0.5, seen(2 * cp - 1 - rank, 2 * cp - rank)), (0.5, seen(rank, rank + 1))
    # Where the back's keys begin with the row, the front's are among them.
    one = (2 * cp - 1 - rank) * chunk <= reach
    copied = calls[0][1] if one else sum(keys for _, keys in calls)
    if span is not None and s.packed is not None:
        return _packed_keys(s.packed.halo(span), Keys(pool if gathered else shard + halo, copied, calls, shard, shard), shard)
    if gathered:
        return Keys(pool, copied, calls, shard, shard)
    return Keys(shard + halo, copied, calls, halo, halo)


def _packed_keys(found: tuple[int, int], plain: Keys, shard: int) -> Keys:
    """Keys of a packed row in layers with windows, where they are more than a plain one's: more halos, in the same calls."""
    pool, copied = max(found[0], plain.pool), max(found[1], plain.copied)
    calls = tuple((share, round(seen * copied / plain.copied)) for share, seen in plain.calls)
    travels = min(shard, pool - shard)
    return Keys(pool, copied, calls, travels, travels)


def forward_group(facts: ModelFacts, s: Settings) -> list[Part]:
    """What a head group's forward holds beside attention's output."""
    g = group_of(facts, s, heads_a_call(facts, s))
    return _parts(facts, s, g, max(_forward(facts, s, g), key=lambda held: _size(s, g, held)), "q, k, v", "keys of all ranks")


def backward_group(facts: ModelFacts, s: Settings) -> list[Part]:
    """What a head group's backward holds beside attention's output, and its gradient or dq in that one's place."""
    g = group_of(facts, s, heads_a_call(facts, s))
    heaviest = max(_backward(facts, s, g), key=lambda held: _size(s, g, held))
    parts = _parts(facts, s, g, heaviest, "q, k, v, gradients, sums", "keys of all ranks, their gradients")
    told = f"of {count_of(heaviest.landed, 'head group')} before"
    return [*parts, Part("one layer: gradients of k, v", _landed(s, g, heaviest), s.place, told)]


def whole_layer_pool(facts: ModelFacts, s: Settings) -> list[Part]:
    """The keys of all ranks in a layer that is not streamed: all heads at once."""
    if s.ranks.cp == 1:
        return []
    g = group_of(facts, s, None)
    most = max(_backward(facts, s, g), key=lambda held: held.keys)
    return _parts(facts, s, g, most, "", "keys of all ranks, their gradients")[1:]


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


def _forward(facts: ModelFacts, s: Settings, g: Group) -> Iterator[Held]:
    """Moments of a head group's forward."""
    c, ahead, travels = s.compute_bytes, int(g.groups > 1), s.ranks.sp > 1
    # What is projected, and both ends of it, beside both ends of the group before.
    begins = c * (3 + 2 * ahead)
    if s.ranks.cp == 1:
        yield Held("heads begin to travel", begins, begins)
        # Both ends of the next group's; the output of this one and of the one before on its way, and that one in order.
        yield Held("attended", c * (2 + 4 * ahead), c * (1 + 2 * ahead))
        return
    for keys in _kinds(facts, s):
        sent = c * g.width * (keys.pool + keys.sent)
        if travels:
            yield Held("heads begin to travel", begins, 2 * c, sent * (1 + ahead), keys.pool)
        # The pool that keys are copied from is there still.
        copied = c * g.width * (keys.copied + keys.pool) + 4 * keys.copied
        yield Held("keys are copied", c * (1 + (4 if travels else 1) * ahead), 0, copied + sent * ahead, keys.pool)


def _backward(facts: ModelFacts, s: Settings, g: Group) -> Iterator[Held]:
    """Moments of a head group's backward."""
    c, travels = s.compute_bytes, s.ranks.sp > 1
    scratch = 4 if s.gpu else 0
    shared = scratch if facts.heads > facts.kv_heads else 0  # one query head a KV head: the kernel sums dk and dv in place
    each = 4 if g.shared > 1 else c  # of dk and dv that are sent to the tokens' ranks
    # Log-sum-exp, its copy to base 2, and the dot products of output and gradient.
    rows = 3 * scratch / facts.head_dim
    # The group's queries, and with heads that travel its output; both ends of its gradient have one in `d_out`.
    q = c * (2 if travels else 1)
    for ahead, behind, landed in _stages(g.groups):
        around = c * (5 * ahead + behind if travels else ahead)
        if travels:
            # What is projected, and both ends of it, of the output and of its gradient; of the group before it both ends.
            begins = c * (7 + 5 * ahead + behind), c * (3 + 2 * ahead if s.ranks.cp == 1 else 2)
        if s.ranks.cp == 1:
            beside = 2 * c * ahead + 2 * each * behind
            yield Held("a kernel", q + c + scratch + rows + around, 2 * c + shared + beside, landed=landed)
            yield Held("heads begin to travel", begins[0], begins[1] + 2 * each * behind, landed=landed)
            continue
        for keys in _kinds(facts, s):
            pool, came = 4 * g.width * keys.pool, 4 * g.width * keys.home
            if not s.gpu:
                came = pool  # gloo brings all ranks' parts
            beside = c * g.width * (keys.pool + keys.sent) * ahead + (pool + came) * behind + 4 * keys.copied
            results, done = 0, 0.0
            for share, seen in keys.calls:
                results, done = results + seen, done + share
                held = g.width * (c * (keys.copied + results) + shared * seen)
                yield Held("a kernel", q + c * done + (scratch + rows) * share + around, 0, held + beside, keys.pool, landed)
            cast = 0 if c == 4 else 4 * min(CAST_ELEMENTS, g.width // 2 * keys.calls[0][1])
            sums = c * g.width * results + pool + cast
            # Attention's output and its gradient have been read: dq is in that one's place.
            yield Held("dq in order", 2 * c + around, 0, c * g.width * results + beside, keys.pool, landed)
            yield Held("the sums", c + around, 0, sums + beside, keys.pool, landed)
            yield Held("going home", c * (2 if travels else 1) + around, 0, pool + came + beside, keys.pool, landed)
            if travels:
                sent = c * g.width * (keys.pool + keys.sent) * (1 + ahead)
                beside = sent + (pool + came) * behind + 4 * keys.copied
                yield Held("heads begin to travel", *begins, beside, keys.pool, landed)


def _stages(groups: int) -> list[tuple[int, int, int]]:
    """Whether the next group is under way, whether gradients of the one before are, and groups whose gradients have landed."""
    if groups < 3:
        return [(0, 0, 0)] if groups == 1 else [(1, 0, 0), (0, 1, 0)]
    return [(1, 1, groups - 3), (0, 1, groups - 2)]


def _spans(facts: ModelFacts) -> set[int | None]:
    return {facts.span(layer) for layer in range(facts.layers)}


def _kinds(facts: ModelFacts, s: Settings) -> Iterator[Keys]:
    """Of every kind of layer what the ranks read that may be the worst: the first two and the last."""
    for span in _spans(facts):
        for rank in sorted({0, min(1, s.ranks.cp - 1), s.ranks.cp - 1}):
            yield keys_of(s, span, rank)


def _pool_tokens(s: Settings, span: int | None) -> int:
    shard = s.slots * s.ranks.sp
    whole = s.ranks.cp * shard
    halo = whole if span is None else 2 * (span - 1)
    return whole if 2 * halo > whole - shard else min(whole, shard + halo)


def _size(s: Settings, g: Group, held: Held) -> int:
    return round(held.q * g.q + held.kv * g.kv) + held.keys + _landed(s, g, held)


def _landed(s: Settings, g: Group, held: Held) -> int:
    return held.landed * (g.kv // g.shared) * s.compute_bytes


def _parts(facts: ModelFacts, s: Settings, g: Group, held: Held, own: str, keys: str) -> list[Part]:
    """Two lines of a plan."""
    groups = f"{held.name}; of this head group and those beside it" if g.groups > 1 else f"{held.name}; all heads"
    told = f"{groups}: {held.q:.4g} B x {g.q:,} numbers in q, {held.kv:g} B x {g.kv:,} in k and v"
    parts = [Part(f"one layer: {own}", round(held.q * g.q + held.kv * g.kv), s.place, told)]
    if held.pool:
        each = held.keys / (held.pool * g.width)
        told = f"{held.name}: {held.pool:,} tokens x {g.width:,} of k and v x {each:.4g} B"
        parts.append(Part(f"one layer: {keys}", held.keys, s.place, told))
    return parts
