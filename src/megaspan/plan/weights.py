"""Bytes of weights, gradients and the optimizer's states, wherever they lie.

Bytes a trained parameter (`megaspan/optimizer`): 8 in pure bf16 (weight, gradient, two moments of 2), 18 with fp32 masters, 6
with moments of 8 bits. On the device is what the plan of the states leaves there: moments on the host visit it in pieces, and
gradients that wait on the host or are used up at once leave one layer's share.
"""

from __future__ import annotations

from megaspan.plan.facts import ModelFacts
from megaspan.plan.keep import Place
from megaspan.plan.parts import Part, Settings
from megaspan.plan.states import ON_THE_WAY_BYTES, PIECES_BYTES

BLOCK = 256  # moments of 8 bits that share one fp32 scale


def state_parts(facts: ModelFacts, s: Settings) -> list[Part]:
    """Weights and, after the first step, what the optimizer keeps, on the device and on the host."""
    count, c, over = facts.parameters, s.compute_bytes, s.over_shards
    # A trained shard in fp32 is its own master; what layers gather of it is rounded on the way.
    own_masters = s.masters and s.ranks.shard > 1
    each = 4 if own_masters and not s.adapter else c
    parts = [Part("weights", s.per_shard(count * each), s.place, f"{count:,} parameters x {each} B{over}")]
    there: Place = "host" if s.states.moments == "host" else s.place
    pinned = ", pinned" if s.gpu and there == "host" else ""
    trained = s.adapter or count
    what = "adapter's " if s.adapter else ""
    if s.adapter:
        each = 4 if own_masters else c
        parts.append(Part("adapter", s.per_shard(s.adapter * each), s.place, f"{s.adapter:,} LoRA parameters x {each} B{over}"))
    if s.masters and not own_masters:
        parts.append(Part(f"{what}fp32 masters{pinned}", trained * 4, there, f"{trained:,} x 4 B"))
    size, formula = moments(facts, s)
    parts.append(Part(f"{what}AdamW moments{pinned}", size, there, formula))
    return parts


def moments(facts: ModelFacts, s: Settings) -> tuple[int, str]:
    """Bytes of AdamW's two moments of every trained parameter of this rank, and the arithmetic."""
    size, formula = _moments(facts, s)
    return s.per_shard(size), formula + s.over_shards


def _moments(facts: ModelFacts, s: Settings) -> tuple[int, str]:
    count = s.adapter or facts.parameters
    if not s.eight_bit:
        each = 4 if s.masters or s.compute_bytes == 4 else 2
        return count * 2 * each, f"{count:,} x 2 x {each} B"
    # Tables of embeddings keep moments of 32 bits, as in transformers.
    table = 0 if s.adapter else facts.head_parameters
    small = count - table
    formula = f"{small:,} x 2 x (1 + 4/{BLOCK}) B" + (f" + {table:,} x 8 B of the embedding" if table else "")
    return small * 2 + 2 * 4 * -(-small // BLOCK) + table * 8, formula


def whole_gradients(facts: ModelFacts, s: Settings) -> int:
    """Bytes of the gradients of everything that this rank updates."""
    return s.per_shard((s.adapter or facts.parameters) * s.gradient_bytes)


def gradients_pass(s: Settings) -> bool:
    """Gradients are not collected on the device: each is used up, or goes to the host, when it is complete."""
    return (s.states.gradients == "update" and s.rows == 1) or (s.states.gradients == "host" and s.gpu)


def gradient_part(facts: ModelFacts, s: Settings, layers_done: int) -> Part:
    """Gradients on the device when the backward has passed the last `layers_done` layers, and the head.

    A window of several rows has the sum of the earlier ones there all the time, unless it waits on the host.
    """
    each = s.gradient_bytes
    if gradients_pass(s):
        return _passing(facts, s, layers_done)
    whole = layers_done == facts.layers or s.rows > 1
    if s.adapter:
        count = s.adapter if whole else s.adapter * layers_done // facts.layers
    elif whole:
        count = facts.parameters
    else:
        count = facts.head_parameters + sum(facts.layer_parameters[facts.layers - layers_done :])
    formula = f"{count:,} x {each} B{s.over_shards}, of layers done and the head"
    return Part("gradients", s.per_shard(count * each), s.place, formula)


def _passing(facts: ModelFacts, s: Settings, layers_done: int) -> Part:
    """Gradients that are not collected on the device: those on their way, and a tied table's, which waits for its second."""
    each = s.gradient_bytes
    largest = max(facts.layer_parameters) if not s.adapter else s.adapter // facts.layers
    waiting = facts.head_parameters if (facts.tied or layers_done == 0) and not s.adapter else 0
    size = s.per_shard(largest * each)
    size = min(size, ON_THE_WAY_BYTES) if s.states.gradients == "host" else size
    table = f" + {waiting:,} x {each} B of the head's table" if waiting else ""
    formula = f"one layer's: {largest:,} x {each} B{table}{s.over_shards}"
    if s.rows > 1:
        size += PIECES_BYTES * each
        formula += f" + 3 x 16 Mi x {each} B of the sum so far"
    return Part("gradients on their way", size + s.per_shard(waiting * each), s.place, formula)


def update_part(facts: ModelFacts, s: Settings) -> Part:
    """What an update needs beside states and gradients: nothing when fused, pieces of what lies on the host."""
    if s.states.moments == "host":
        size, _ = _moments(facts, s)
        each = (4 if s.masters and s.ranks.shard == 1 else 0) + size / (s.adapter or facts.parameters) + s.gradient_bytes
        return Part("pieces of the optimizer's states", round(PIECES_BYTES * each), s.place, f"3 x 16 Mi x {each:.3g} B")
    if s.states.gradients == "host" and s.gpu:
        each = s.gradient_bytes
        return Part("pieces of gradients", PIECES_BYTES * each, s.place, f"3 x 16 Mi x {each} B")
    # The loop, which a CPU runs, makes some copies of the largest parameter.
    loop = 0 if s.gpu else s.per_shard(4 * 4 * (facts.head_parameters if not s.adapter else 0))
    return Part("update of one parameter", loop, s.place, "4 copies of V x E in fp32")


def host_gradients(facts: ModelFacts, s: Settings) -> Part:
    """Gradients that wait on the host for the norm of all of them; of no bytes where they do not."""
    size = whole_gradients(facts, s) if s.states.gradients == "host" and s.gpu else 0
    return Part("gradients, pinned", size, "host", f"{s.adapter or facts.parameters:,} x {s.gradient_bytes} B{s.over_shards}")


def link_bytes(facts: ModelFacts, s: Settings) -> tuple[int, int]:
    """Bytes of states that cross the link: beside a row's backward (gradients), and each way in the optimizer's pass."""
    gradients = host_gradients(facts, s).bytes
    if s.states.moments != "host":
        return gradients, gradients
    masters = 4 * (s.adapter or facts.parameters) if s.masters and s.ranks.shard == 1 else 0
    return gradients, moments(facts, s)[0] + masters + gradients
