"""Bytes of the loss, and of the tables that stay for the whole step.

The logits of a row of 1,048,576 tokens and 151,936 words would be 319 GB in bf16; a tile of 2,048 tokens takes 1.2 GB,
whatever the row.

Letters: t tokens, n tokens of a tile, E hidden, V vocabulary, c bytes of the computation's type.
"""

from __future__ import annotations

from megaspan.human import format_tokens
from megaspan.plan.facts import ModelFacts
from megaspan.plan.parts import Part, Settings

NLL_BYTES = 20  # a logit: in fp32, its log-softmax kept for the backward, and three fp32 temporaries of the entropy


def loss_tile(vocab: int) -> int:
    """Tokens of logits held at once: 2,048, halved until a tile and its fp32 quarter take at most 1.25 GiB, not below 256.

    A tile reads and writes the whole fp32 gradient of the weight (8*V*E bytes) for 2*n*V*E operations: n/4 operations a byte.
    An H200 does 184 in the time of a byte (790 TFLOP/s, 4.3 TB/s): with 256 tokens that product waits for memory two thirds of
    its time, 1,024 barely hide the memory, 2,048 hide it more than twice over; more only cost memory.
    """
    tile = 2048
    while tile > 256 and vocab * (2 * tile + 8 * -(-tile // 4)) > 5 * 2**28:
        tile //= 2
    return tile


def position_part(facts: ModelFacts, s: Settings) -> Part:
    """Tables of cos and sin, token ids, labels and positions, which stay for the whole step."""
    kinds = len(set(facts.layer_types)) if facts.model_type == "gemma3_text" else 1
    each = 2 * kinds * facts.head_dim * s.compute_bytes + 32
    return Part(
        "cos, sin, ids, labels", s.slots * each, s.place, f"t x ({2 * kinds} x {facts.head_dim} x {s.compute_bytes} + 32) B"
    )


def loss_parts(facts: ModelFacts, s: Settings) -> list[Part]:
    """The loss: tile, gradient of the head's weight in fp32, gradient of the hidden states; or all logits."""
    t, v, e, c, n = s.slots, facts.vocab, facts.hidden, s.compute_bytes, s.loss_tile
    tile = min(s.layer_tile, t) if s.streams else t
    size, formula = t * e * 2 * c, f"t x E x {2 * c} B of input and output"
    if tile == t:
        size, formula = t * e * (4 + 3 * c), f"t x E x {4 + 3 * c} B"
    parts = [Part("final norm, hidden states", size, s.place, formula)]
    if not s.chunked:
        formula = f"t x V x {NLL_BYTES} B: {format_tokens(t)} x {v:,} (loss_type: nll)"
        return [*parts, Part("all logits", t * v * NLL_BYTES, s.place, formula)]
    n = min(n, t)
    tile = n * v * c + 2 * -(-n // 4) * v * 4 + 3 * n * e * c
    parts.append(Part("loss tile", tile, s.place, f"{n:,} x V x {c} B + 2 x {-(-n // 4):,} x V x 4 B"))
    parts.append(Part("hidden gradient", t * (e * c + 24), s.place, f"t x (E x {c} + 24) B"))
    if not s.adapter:
        parts.append(Part("head gradient, fp32", v * e * 4, s.place, "V x E x 4 B"))
    return parts


def largest_allocation(facts: ModelFacts, s: Settings) -> Part:
    """The largest single tensor on the device: what has to be found in one piece."""
    t, c = s.slots, s.compute_bytes
    n = min(t, s.layer_tile) if s.streams else t
    share = (s.kv_heads_per_call or facts.kv_heads) / facts.kv_heads if s.streams else 1
    each = c if s.streams and n < t else 4
    candidates = [
        Part(
            "one MLP tensor",
            s.mlp_tile * max(facts.mlp_width, facts.active_mlp_width) * c,
            s.place,
            f"{s.mlp_tile:,} tokens x F x {c} B",
        ),
        Part("queries of one call in fp32", round(t * share * facts.query_width * 4), s.place, f"t x {share:g} x Q x 4 B"),
        Part("hidden states", t * facts.hidden * each, s.place, f"t x E x {each} B" + ", a norm of a whole row" * (each > c)),
        Part("embedding or its gradient", facts.head_parameters * 4, s.place, "V x E x 4 B"),
    ]
    if not s.chunked:
        candidates.append(Part("all logits in fp32", t * facts.vocab * 4, s.place, "t x V x 4 B"))
    return max(candidates, key=lambda part: part.bytes)
