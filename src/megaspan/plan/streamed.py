"""Bytes of a streamed layer at work: forward, the three phases of its backward, and its second run inside a segment.

A streamed layer holds a few tensors of its row and one tile's or one head group's share of the rest. At a million tokens of an
8B model, one KV head at a time and what waits on the host read tile by tile, that is 28 GiB where a whole layer takes 155. The
phases are those of `layers/stream.py`:

    forward      x, O, and one head group's q, k, v, or then y and one tile of the second half
    P1, MLP      dx (in the memory of dy), dO, one tile's graph of the second half, weight gradients
    P2, attention  dx, dO (dq takes its place), dk, dv, and one head group's q, k, v, their gradients and the kernel's fp32 sums
    P3, projections  dx, dq, dk, dv, one tile's graph of the first half, weight gradients; O is gone
    again        dx of the layers above, x, O, and one head group's q, k, v, or then y and one tile of the second half

Of what the layer kept, x and O are there whole, and those of the layer below too, which come back one layer ahead; or, with
`stream_back`, two tiles of each and one head group of O. With `project_ahead` P1 has q, k, v of the first head group too, and
P2 q, k, v and O of the next one, but not the last one's dk, dv then. The parts here leave out what the keep policy leaves on
the device.

Letters: t tokens, n tokens of a tile, g a head group's share of the KV heads, E hidden, Q = heads x head size,
K = KV heads x head size, c bytes of the computation's type.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megaspan.plan.facts import ModelFacts
from megaspan.plan.layer import LayerBytes
from megaspan.plan.over_ranks import backward_group, forward_group, heads_a_call
from megaspan.plan.parts import Part, Settings, bytes_of

Output = Literal["whole", "leaves", "stored"]
"""Attention's output in a forward: there whole; leaving head group by head group; or counted with what is kept already."""


@dataclass(frozen=True)
class Phase:
    """One moment of a layer's work.

    Attributes:
        name: MLP, attention or projections.
        parts: what is there beside what is kept on the device.
        uses_output: attention's output of this layer is still there.
    """

    name: str
    parts: tuple[Part, ...]
    uses_output: bool = True

    @cached_property
    def bytes(self) -> int:
        """Their sum."""
        return bytes_of(self.parts)


def group_share(facts: ModelFacts, s: Settings) -> float:
    """The share of the KV heads in one call."""
    return (heads_a_call(facts, s) or facts.kv_heads) / facts.kv_heads


def group_count(facts: ModelFacts, s: Settings) -> int:
    """Calls that all heads take."""
    return -(-facts.kv_heads // (heads_a_call(facts, s) or facts.kv_heads))


def _heads(facts: ModelFacts, s: Settings) -> str:
    heads = heads_a_call(facts, s)
    return f"{heads} of {facts.kv_heads} KV heads" if heads else "all heads"


def _group_parts(facts: ModelFacts, s: Settings) -> list[Part]:
    """q, k, v of one head group; over ranks of the next one too, and keys of all."""
    if s.ranks.row > 1:
        return forward_group(facts, s)
    share, width = group_share(facts, s), facts.query_width + 2 * facts.kv_width
    size = round(s.slots * share * width * s.compute_bytes)
    return [Part("one layer: q, k, v", size, s.place, f"t x {share:g} x (Q + 2·K) x {s.compute_bytes} B, {_heads(facts, s)}")]


def forward_parts(
    facts: ModelFacts, layer: LayerBytes, s: Settings, output: Output, rows: int = 3, *, again: bool = False
) -> list[Part]:
    """A layer's forward without gradients: of attention and the token-wise rest, which follow each other, what needs more.

    Args:
        facts: the model.
        layer: the whole layer's bytes, of which a tile takes its share.
        s: the levers.
        output: what there is of attention's output beside what the keep policy leaves on the device.
        rows: input, output, and what lies beside them all the time: in the first forward the embedding, which transformers'
            loop holds in a variable to its end; inside a backward the gradient that waits.
        again: inside a backward. Then nothing of the layer before is on its way to the host while q, k, v are projected.
    """
    t, c, e, share, n = s.slots, s.compute_bytes, facts.hidden, group_share(facts, s), min(s.layer_tile, s.slots)
    each = facts.query_width * c + 4 * facts.heads
    name = "one layer again: input, output, gradient" if again else "one layer: input and output, the embedding"
    # Head groups leave one behind the other; while they are attended the layer's output is not there yet.
    attended = {"whole": t, "leaves": round(t * min(1.0, 2 * share)), "stored": 0}[output]
    tiled = t if output == "whole" else min(t, 2 * n)
    there = rows if output == "whole" and not again else rows - 1

    def held(count: int, tokens: int) -> Part:
        formula = f"t x {c}·{count}·E + {tokens:,} tokens x (Q x {c} + H x 4) B"
        return Part(f"{name}, attention's output", t * c * e * count + tokens * each, s.place, formula)

    mlp, told = layer.norms + layer.mlp, f"norms, {layer.formulas[1]}"
    if s.gpu and facts.experts is None and facts.family.fused:
        mlp, told = c * (3 * facts.mlp_width + 3 * e), f"{c}·(3·F + 3·E), norm and product fused"
    tile = Part("one tile: MLP", n * mlp, s.place, f"{n:,} tokens x ({told})")
    return max([held(there, attended), *_group_parts(facts, s)], [held(rows, tiled), tile], key=bytes_of)


def backward_phases(facts: ModelFacts, layer: LayerBytes, s: Settings, parameters: int) -> tuple[Phase, ...]:
    """The three phases of a streamed layer's backward, without x and O (see `fetched_parts`).

    A row that is no longer than a tile, with all heads in one call, keeps the graph of q, k, v over attention.

    Args:
        facts: the model.
        layer: the whole layer's bytes, of which a tile takes its share.
        s: the levers.
        parameters: of the layer.
    """
    t, c, e, q, k = s.slots, s.compute_bytes, facts.hidden, facts.query_width, facts.kv_width
    n, place, qkv, share = min(s.layer_tile, t), s.place, q + 2 * k, group_share(facts, s)
    tiles_once = n == t
    graph_stays = tiles_once and share == 1
    trained = parameters if not s.adapter else s.adapter // facts.layers
    dx = Part("one layer: gradient of the row", t * c * e, place, f"t x {c}·E")
    if tiles_once:
        # A tile is the row: the gradient of its input is there beside that of its output.
        dx = Part("one layer: gradients of the row", 2 * t * c * e, place, f"t x {c}·2·E of input and output")
    d_out = Part("one layer: gradient of attention's output", t * c * q, place, f"t x {c}·Q, then that of q")
    weights = Part(
        "one layer: weight gradients",
        trained * (c if tiles_once else 4 + c),
        place,
        f"{trained:,} x {c} B" if tiles_once else f"{trained:,} x (4 + {c}) B, summed over tiles in fp32",
    )
    mlp, told = layer.norms + layer.mlp + layer.mlp_backward + 2 * c * e, f"norms, {layer.formulas[1]}"
    if s.gpu and facts.experts is None and facts.family.fused:
        # Gate, up, and the gradients of both and of their product; the norm's input and output, the tile's output and one more.
        width = facts.mlp_width
        mlp, told = c * (5 * width + 4 * e), f"{c}·(5·F + 4·E), norm and product fused"
    # Rotated q and k, v, what their norms keep, and gradients on the way back through them: in fp32 where there are norms.
    norm_fp32, norm_type = facts.family.qk_norm_tensors if facts.qk_norm else (0, 0)
    graph = layer.norms // 2 + (q + k) * (4 * norm_fp32 + c * norm_type)
    projections = graph + qkv * c + q * (16 if facts.qk_norm else 2 * c)
    sums = 4 if s.gpu else 0
    each, rows = 2 * c + sums, 2 * sums * facts.heads
    group = Part(
        "one layer: q, k, v, gradients, sums",
        round(t * share * (qkv * each + rows)) + (t * graph if graph_stays else 0),
        place,
        f"t x {share:g} x ((Q + 2·K) x ({2 * c} + {sums}) + {rows}), {_heads(facts, s)}"
        + (" + t x norms" if graph_stays else ""),
    )
    summed, before = weights, 1.0 if share < 1 else 0.0
    ahead = []
    if projects_ahead(facts, s):
        ahead = [
            Part(
                "one layer: q, k, v of the next heads", round(t * share * qkv * c), place, f"t x {share:g} x (Q + 2·K) x {c} B"
            )
        ]
    if s.gpu:
        # Then only weights of the second half have gradients, summed. (On a CPU the operation's own copies take that place.)
        late, before = max(0, trained - (0 if s.adapter else e * qkv)), 1 - (2 if ahead else 1) * share
        each = c if tiles_once else 4
        summed = Part("one layer: weight gradients", late * each, place, f"{late:,} x {each} B, of the second half")
    dkv = Part("one layer: gradients of k, v", round(t * c * 2 * k * before), place, f"t x {c}·2·K of the groups before")
    groups = backward_group(facts, s) if s.ranks.row > 1 else [dkv, group, *ahead]
    return (
        Phase("MLP", (dx, d_out, weights, *ahead, Part("one tile: MLP", n * mlp, place, f"{n:,} tokens x ({told})"))),
        Phase("attention", (dx, d_out, summed, *groups)),
        Phase(
            "projections",
            (
                dx,
                weights,
                Part("one layer: gradients of q, k, v", t * qkv * c, place, f"t x {c}·(Q + 2·K)"),
                Part(
                    "one tile: projections",
                    n * projections,
                    place,
                    f"{n:,} tokens x {projections:,} B of q, k, v and their norms",
                ),
            ),
            uses_output=False,
        ),
    )


def projects_ahead(facts: ModelFacts, s: Settings) -> bool:
    """Whether the next head group is made beside attention of this one: of a row in tiles and groups, whole on this rank.

    Not of one of several documents: its head groups go the way of those that ranks share (`LayerRun._aside`).
    """
    cut = s.slots > s.layer_tile and group_share(facts, s) < 1 and s.ranks.row == 1
    one = s.packed is None and not s.packs
    return s.gpu and s.project_ahead and s.stream_back and s.streams and facts.family.fused and cut and one


def aside_bytes(facts: ModelFacts, s: Settings) -> int:
    """What the allocator holds for that stream alone: a tile that comes, one in use, its norm, its q, k, v before they are.

    Such memory does not go from stream to stream. None of it is in use when a layer needs most.
    """
    width = 3 * facts.hidden + group_share(facts, s) * (facts.query_width + 2 * facts.kv_width)
    return round(s.layer_tile * width * s.compute_bytes) if projects_ahead(facts, s) else 0


def output_bytes(facts: ModelFacts, s: Settings) -> int:
    """Attention's output and log-sum-exp of one layer; 0 where layers are not streamed."""
    return s.slots * (facts.query_width * s.compute_bytes + 4 * facts.heads) if s.streams else 0


def input_bytes(facts: ModelFacts, s: Settings) -> int:
    """One layer's input."""
    return s.slots * facts.hidden * s.compute_bytes


def tile_bytes(facts: ModelFacts, s: Settings, phase: str) -> tuple[int, int]:
    """With `stream_back`: bytes of x and of O that are on the device in a phase: two tiles, or a head group of O.

    Where keys travel, or groups are projected ahead, two groups of O: one is attended, the next one waits. Where heads do one,
    until it has been sent.
    """
    n = 2 * min(s.layer_tile, s.slots)
    x, out = input_bytes(facts, s), output_bytes(facts, s)
    tiles = min(x, n * facts.hidden * s.compute_bytes), min(out, n * (facts.query_width * s.compute_bytes + 4 * facts.heads))
    if phase == "projections":
        return tiles[0], 0
    groups = 2 if (s.ranks.cp > 1 and s.ranks.sp == 1) or projects_ahead(facts, s) else 1
    return tiles[0], min(out, round(groups * group_share(facts, s) * out)) if phase == "attention" else tiles[1]
