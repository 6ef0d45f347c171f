"""Bytes of a training step as pure arithmetic, every number with the formula it came from.

What is modelled is what runs: layers streamed in tiles or checkpointed whole, what they keep on the device or in host memory,
the loss in tiles, AdamW. Anchors: layer inputs that others reported (28 layers x 131,072 x 1,024: 7.52 GB), and peaks of whole
checkpointed layers measured on one H200 (4B shape in pure bf16, 32k to 131k tokens), which these formulas meet within 2 %.

Letters: t tokens, E hidden, Q = heads x head size, V vocabulary, c bytes of the computation's type (2 for bf16).
"""

from __future__ import annotations

from dataclasses import dataclass

from megaspan.human import format_tokens
from megaspan.plan.facts import ModelFacts
from megaspan.plan.layer import LayerBytes, layer_bytes, streamed_layer_parts, whole_layer_parts
from megaspan.plan.parts import Part, Settings

NLL_BYTES = 20  # fp32 logits, their log-softmax kept for the backward, and three fp32 temporaries of the entropy
CONTEXT_BYTES = 768 * 2**20  # CUDA context, cuBLAS and attention workspaces
HOST_BASE_BYTES = 4 * 2**30  # Python, torch and the CUDA libraries of one process
CPU_BASE_BYTES = 2**30
SLACK = 0.02  # allocator rounding with expandable segments


def loss_tile(vocab: int) -> int:
    """Tokens of logits held at once: 2,048, halved until a tile and its fp32 quarter take at most 1.25 GiB, not below 256."""
    tile = 2048
    while tile > 256 and vocab * (2 * tile + 8 * -(-tile // 4)) > 5 * 2**28:
        tile //= 2
    return tile


def weight_parts(facts: ModelFacts, s: Settings) -> list[Part]:
    """Weights and, after the first step, what the optimizer keeps."""
    count, c = facts.parameters, s.compute_bytes
    parts = [Part("weights", count * c, s.place, f"{count:,} parameters x {c} B")]
    moments = 8 if s.masters or c == 4 else 4
    if s.adapter:
        each = c + (4 if s.masters else 0) + moments
        return [*parts, Part("adapter and its AdamW", s.adapter * each, s.place, f"{s.adapter:,} LoRA parameters x {each} B")]
    if s.masters:
        parts.append(Part("fp32 masters", count * 4, s.place, f"{count:,} x 4 B"))
    parts.append(Part("AdamW moments", count * moments, s.place, f"{count:,} x 2 x {moments // 2} B"))
    return parts


def gradient_part(facts: ModelFacts, s: Settings, layers_done: int) -> Part:
    """Gradients that exist when the backward has passed the last `layers_done` layers, and the head's."""
    if s.adapter:
        count = s.adapter * layers_done // facts.layers
    elif layers_done == facts.layers:
        count = facts.parameters
    else:
        count = facts.head_parameters + sum(facts.layer_parameters[facts.layers - layers_done :])
    return Part(
        "gradients", count * s.gradient_bytes, s.place, f"{count:,} x {s.gradient_bytes} B, of layers done and the head"
    )


def input_bytes(facts: ModelFacts, s: Settings) -> int:
    """One layer's input."""
    return s.tokens * facts.hidden * s.compute_bytes


def output_bytes(facts: ModelFacts, s: Settings) -> int:
    """One layer's attention output; 0 where layers are not streamed."""
    return s.tokens * facts.query_width * s.compute_bytes if s.streamed else 0


def layer_inputs(facts: ModelFacts, s: Settings) -> list[Part]:
    """What waits in host memory between forward and backward."""
    moved = facts.layers - s.keep_on_device if s.checkpoint and s.offload else 0
    outputs = max(0, min(moved, s.keep_outputs - s.keep_on_device)) if s.streamed else 0
    pinned = ", pinned" if s.gpu else ""
    size = f"{format_tokens(s.tokens)} tokens x"
    parts = [
        Part(
            f"layer inputs{pinned}",
            moved * input_bytes(facts, s),
            "host",
            f"{moved} layers x {size} {facts.hidden:,} x {s.compute_bytes} B",
        ),
        Part(
            f"attention outputs{pinned}",
            outputs * output_bytes(facts, s),
            "host",
            f"{outputs} layers x {size} {facts.query_width:,} x {s.compute_bytes} B",
        ),
    ]
    return [part for part in parts if part.bytes]


def position_part(facts: ModelFacts, s: Settings) -> Part:
    """Tables of cos and sin, token ids, labels and positions, which stay for the whole step."""
    kinds = len(set(facts.layer_types)) if facts.model_type == "gemma3_text" else 1
    each = 2 * kinds * facts.head_dim * s.compute_bytes + 32
    return Part(
        "cos, sin, ids, labels", s.tokens * each, s.place, f"t x ({2 * kinds} x {facts.head_dim} x {s.compute_bytes} + 32) B"
    )


def loss_parts(facts: ModelFacts, s: Settings) -> list[Part]:
    """The loss: tile, gradient of the head's weight in fp32, gradient of the hidden states; or all logits."""
    t, v, e, c, n = s.tokens, facts.vocab, facts.hidden, s.compute_bytes, s.loss_tile
    parts = [Part("final norm, hidden states", t * e * (4 + 3 * c), s.place, f"t x E x {4 + 3 * c} B")]
    if not s.chunked:
        formula = f"t x V x {NLL_BYTES} B: {format_tokens(t)} x {v:,} (loss_type: nll)"
        return [*parts, Part("all logits", t * v * NLL_BYTES, s.place, formula)]
    n = min(n, t)
    tile = n * v * c + 2 * -(-n // 4) * v * 4 + 3 * n * e * c
    parts.append(Part("loss tile", tile, s.place, f"{n:,} x V x {c} B + 2 x {-(-n // 4):,} x V x 4 B, V = {v:,}"))
    parts.append(Part("hidden gradient", t * (e * c + 24), s.place, f"t x (E x {c} + 24) B"))
    if not s.adapter:
        parts.append(Part("head gradient, fp32", v * e * 4, s.place, f"V x E x 4 B = {v:,} x {e:,} x 4"))
    return parts


def largest_allocation(facts: ModelFacts, s: Settings) -> Part:
    """The largest single tensor on the device: what has to be found in one piece."""
    t, c = s.tokens, s.compute_bytes
    n = min(t, s.layer_tile) if s.streamed and s.checkpoint else t
    candidates = [
        Part("one MLP tensor", n * max(facts.mlp_width, facts.active_mlp_width) * c, s.place, f"{n:,} tokens x F x {c} B"),
        Part("queries of one layer in fp32", t * facts.query_width * 4, s.place, "t x Q x 4 B"),
        Part("embedding or its gradient", facts.head_parameters * 4, s.place, "V x E x 4 B"),
    ]
    if not s.chunked:
        candidates.append(Part("all logits in fp32", t * facts.vocab * 4, s.place, "t x V x 4 B"))
    if s.gpu:
        return max(candidates, key=lambda part: part.bytes)
    moved = layer_inputs(facts, s)
    return max([*candidates, *moved], key=lambda part: part.bytes)


def disk_parts(facts: ModelFacts, s: Settings, checkpoints: int) -> list[Part]:
    """What a run leaves on disk: checkpoints with the optimizer, and the final model."""
    states = sum(part.bytes for part in weight_parts(facts, s)[1 if s.adapter else 0 :])
    parts = [
        Part("final model", facts.parameters * s.compute_bytes if not s.adapter else s.adapter * 4, "disk", "weights as saved")
    ]
    if checkpoints:
        parts.append(
            Part(
                f"{checkpoints} checkpoint(s)", checkpoints * states, "disk", "weights and optimizer, streamed in 64 MiB pieces"
            )
        )
    return parts


def waiting_parts(facts: ModelFacts, s: Settings) -> tuple[Part, ...]:
    """What lies in host memory all the time, beside a computation on the host."""
    parts = layer_inputs(facts, s)
    if s.gpu:
        parts.append(Part("process", HOST_BASE_BYTES, "host", "Python, torch, CUDA libraries: allowance"))
    return tuple(parts)


@dataclass(frozen=True)
class Moment:
    """A moment of the step with everything that is on the device then (on the CPU: in host memory)."""

    name: str
    parts: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        """Their sum."""
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True)
class Memory:
    """All moments of a step, and what lies elsewhere all the time."""

    moments: tuple[Moment, ...]
    waiting: tuple[Part, ...]
    gpu: bool

    @property
    def peak(self) -> Moment:
        """The moment that needs most."""
        return max(self.moments, key=lambda moment: moment.bytes)

    @property
    def device_bytes(self) -> int:
        """Peak on the device; 0 without a GPU."""
        return self.peak.bytes if self.gpu else 0

    @property
    def host_bytes(self) -> int:
        """Peak of host memory."""
        return sum(part.bytes for part in self.waiting) + (0 if self.gpu else self.peak.bytes)


def memory(facts: ModelFacts, s: Settings) -> Memory:
    """Every moment of a step from the second on, when the optimizer's state exists."""
    states, always = weight_parts(facts, s), position_part(facts, s)
    sparse = facts.experts.sparse_layers if facts.experts else (False,) * facts.layers
    kinds = {kind: layer_bytes(facts, sparse.index(kind), s) for kind in set(sparse)}
    heaviest = max(kinds.values(), key=lambda kind: kind.peak)
    lives = [kinds[kind].kept for kind in sparse] if not s.checkpoint else []
    largest = max(facts.layer_parameters)

    def resident(layers: int, backward: bool) -> list[Part]:
        return _resident(facts, s, layers, backward, lives)

    def backward(index: int) -> list[tuple[str, list[Part]]]:
        name = f"backward of layer {index + 1}"
        done = facts.layers - index
        if s.checkpoint and s.streamed:
            before = [gradient_part(facts, s, done - 1), *resident(index + 1, True)]
            moments = streamed_layer_parts(facts, heaviest, s, largest)
            return [(f"{name}, {moment}", [*before, *work]) for moment, work in moments.items()]
        work = whole_layer_parts(heaviest, s) if s.checkpoint else [_inside(heaviest, s)]
        return [(name, [gradient_part(facts, s, done), *resident(index + 1, True), *work])]

    moments = [
        ("forward", [*resident(facts.layers, False), _forward_part(facts, s)]),
        ("loss", [*resident(facts.layers, False), *loss_parts(facts, s)]),
        *(moment for index in _telling_layers(facts, s) for moment in backward(index)),
        ("optimizer", [gradient_part(facts, s, facts.layers), _update_part(facts, s)]),
    ]
    made = []
    for name, parts in moments:
        whole = [*states, always, *parts]
        whole.append(_overhead(s, sum(part.bytes for part in whole)))
        made.append(Moment(name, tuple(part for part in whole if part.bytes)))
    return Memory(tuple(made), waiting_parts(facts, s), s.gpu)


def _resident(facts: ModelFacts, s: Settings, layers: int, backward: bool, lives: list[int]) -> list[Part]:
    """What the first `layers` layers keep where the computation is, while the next one runs."""
    x, out, total, place = input_bytes(facts, s), output_bytes(facts, s), facts.layers, s.place
    if not s.checkpoint:
        size = s.tokens * sum(lives[:layers]) + layers * x
        return [Part("activations of all layers", size, place, f"{layers} layers, nothing is recomputed")]
    kept_out = max(0, layers - (total - s.keep_outputs)) if s.streamed else 0
    each = f"t x E x {s.compute_bytes} B"
    each_out = f"t x Q x {s.compute_bytes} B"
    lse = Part("log-sum-exp", kept_out * s.tokens * facts.heads * 4, place, f"{kept_out} layers x t x {facts.heads} x 4 B")
    if not s.offload:
        inputs = Part("layer inputs", layers * x, place, f"{layers} layers x {each}")
        return [inputs, Part("attention outputs", kept_out * out, place, f"{kept_out} layers x {each_out}"), lse]
    stay = max(0, layers - (total - s.keep_on_device))
    stay_out = min(stay, kept_out)
    flying = (min(2, layers - stay) if backward else min(2, layers)) if s.gpu else 0
    flying_out = min(flying, kept_out)
    parts = [
        Part("layer inputs kept", stay * x, place, f"last {stay} layers x {each}"),
        Part("attention outputs kept", stay_out * out, place, f"last {stay_out} layers x {each_out}"),
        Part(
            "inputs and outputs in flight",
            flying * x + flying_out * out,
            place,
            f"{flying} x {each} + {flying_out} x {each_out}",
        ),
    ]
    return [*parts, lse]


def _inside(layer: LayerBytes, s: Settings) -> Part:
    extra = layer.mlp_backward if layer.mlp_is_peak else max(0, layer.attention_backward - layer.mlp)
    return Part("gradients inside a layer", s.tokens * extra, s.place, "of the layer that runs")


def _forward_part(facts: ModelFacts, s: Settings) -> Part:
    t, c = s.tokens, s.compute_bytes
    if s.checkpoint and s.streamed:
        width = facts.hidden + 2 * facts.query_width + 2 * facts.kv_width
        return Part("one layer without gradients", t * c * width, s.place, f"t x {c}·(E + 2·Q + 2·K)")
    return Part("one layer without gradients", t * 3 * c * facts.active_mlp_width, s.place, f"t x 3·{c}·F")


def _update_part(facts: ModelFacts, s: Settings) -> Part:
    """The fused update needs nothing; the loop, which a CPU runs, some copies of the largest parameter."""
    size = 0 if s.gpu else 4 * 4 * (facts.head_parameters if not s.adapter else 0)
    return Part("update of one parameter", size, s.place, "4 copies of V x E in fp32")


def _overhead(s: Settings, size: int) -> Part:
    if s.gpu:
        return Part("CUDA context, slack", CONTEXT_BYTES + round(SLACK * size), "device", f"allowance: 0.75 GiB + {SLACK:.0%}")
    return Part("process, slack", CPU_BASE_BYTES + round(SLACK * size), "host", f"allowance: 1 GiB + {SLACK:.0%}")


def _telling_layers(facts: ModelFacts, s: Settings) -> tuple[int, ...]:
    """Layers whose backward can be the peak: residents fall and gradients grow linearly in between."""
    turn = facts.layers - s.keep_on_device if s.offload else 0
    return tuple(
        sorted({facts.layers - 1, 0, *(layer for layer in (turn, turn - 1) if 0 <= layer < facts.layers)}, reverse=True)
    )
