"""Bytes of a training step as pure arithmetic, every number with the formula it came from.

What is modelled is what runs: transformers' layers, each checkpointed by its input and run once more in the backward, the loss
in tiles, AdamW. Anchors: layer inputs that others reported (28 layers x 131,072 x 1,024: 7.52 GB), and peaks measured on one
H200 with the 4B shape in pure bf16 (32k to 131k tokens, with and without offload), which these formulas meet within 2 %.

Letters: t tokens, E hidden, Q = heads x head size, K = KV heads x head size, F MLP width, V vocabulary, L layers, c bytes of
the computation's type (2 for bf16).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megaspan.human import format_tokens
from megaspan.plan.facts import ModelFacts

Place = Literal["device", "host", "disk"]
NLL_BYTES = 20  # fp32 logits, their log-softmax kept for the backward, and three fp32 temporaries of the entropy
CONTEXT_BYTES = 768 * 2**20  # CUDA context, cuBLAS and attention workspaces
HOST_BASE_BYTES = 4 * 2**30  # Python, torch and the CUDA libraries of one process
CPU_BASE_BYTES = 2**30
SLACK = 0.02  # allocator rounding with expandable segments


@dataclass(frozen=True)
class Part:
    """One line of a plan: what it is, how many bytes, where they lie, and the arithmetic."""

    name: str
    bytes: int
    place: Place
    formula: str


@dataclass(frozen=True)
class Settings:
    """The levers that memory depends on.

    Attributes:
        tokens: tokens of the longest row.
        gpu: the step runs on a GPU.
        compute_bytes: 2 for bf16, 4 for fp32.
        masters: fp32 masters beside bf16 weights.
        checkpoint: only layer inputs are kept between forward and backward.
        offload: and these wait in host memory.
        keep_on_device: except those of the last layers.
        chunked: the loss is taken in tiles.
        loss_tile: tokens of such a tile.
        adapter: trained LoRA parameters; 0 trains all weights.
        adapter_inputs: input channels of the adapted projections of one layer.
    """

    tokens: int
    gpu: bool
    compute_bytes: int
    masters: bool
    checkpoint: bool
    offload: bool
    keep_on_device: int
    chunked: bool
    loss_tile: int
    adapter: int = 0
    adapter_inputs: int = 0

    @property
    def place(self) -> Place:
        """Where tensors of the computation lie."""
        return "device" if self.gpu else "host"

    @property
    def trained(self) -> str:
        """Precision of the weights in words."""
        if self.compute_bytes == 4:
            return "fp32"
        return "bf16 compute, fp32 masters" if self.masters else "pure bf16 (updates are rounded)"


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
    if s.adapter:
        return [*parts, Part("adapter, AdamW", s.adapter * 12, s.place, f"{s.adapter:,} LoRA parameters x (4 + 8) B, fp32")]
    if s.masters:
        parts.append(Part("fp32 masters", count * 4, s.place, f"{count:,} x 4 B"))
    each = 8 if s.masters or c == 4 else 4
    parts.append(Part("AdamW moments", count * each, s.place, f"{count:,} x 2 x {each // 2} B"))
    return parts


def gradient_bytes(facts: ModelFacts, s: Settings, layers_done: int) -> int:
    """Gradients that exist once the backward has passed the last `layers_done` layers; all of them with every layer."""
    if s.adapter:
        return s.adapter * 4 * layers_done // facts.layers
    head = facts.head_parameters
    done = facts.layer_parameters[facts.layers - layers_done :] if layers_done else ()
    count = facts.parameters if layers_done == facts.layers else head + sum(done)
    return count * s.compute_bytes


def input_bytes(facts: ModelFacts, s: Settings) -> int:
    """One layer's input."""
    return s.tokens * facts.hidden * s.compute_bytes


def layer_inputs(facts: ModelFacts, s: Settings) -> list[Part]:
    """What waits in host memory between forward and backward."""
    moved = facts.layers - s.keep_on_device if s.checkpoint and s.offload else 0
    if not moved:
        return []
    formula = f"{moved} layers x {format_tokens(s.tokens)} tokens x {facts.hidden:,} x {s.compute_bytes} B"
    name = "layer inputs, pinned" if s.gpu else "layer inputs"
    return [Part(name, moved * input_bytes(facts, s), "host", formula)]


@dataclass(frozen=True)
class LayerBytes:
    """Bytes a token that one layer needs when it runs with gradients.

    Attributes:
        attention: kept by norms, projections, rotary positions and attention.
        mlp: kept by the MLP.
        mlp_backward: more at the peak of the MLP's backward, everything kept being still there.
        attention_backward: more at the peak of the attention's backward, when the MLP's share is gone.
        formulas: the arithmetic of attention and MLP.
    """

    attention: int
    mlp: int
    mlp_backward: int
    attention_backward: int
    formulas: tuple[str, str]

    @property
    def kept(self) -> int:
        """After the layer's forward."""
        return self.attention + self.mlp

    @property
    def peak(self) -> int:
        """In the layer's backward."""
        return max(self.kept + self.mlp_backward, self.attention + self.attention_backward)


def layer_bytes(facts: ModelFacts, layer: int, s: Settings) -> LayerBytes:
    """The largest tensors of a transformers decoder layer under autograd, in bytes a token.

    A norm keeps its input in fp32, the normalised value and its output (the next product's input); normed queries and keys the
    same; attention keeps q, k, v, its output and the log-sum-exp; a gated MLP keeps gate, its activation, up and their product,
    and its backward holds two gradients of that width more.
    """
    e, q, k, c, family = facts.hidden, facts.query_width, facts.kv_width, s.compute_bytes, facts.family
    in_fp32, in_type = family.norm_tensors
    norm_fp32, norm_type = family.qk_norm_tensors if facts.qk_norm else (0, 0)
    each = c + 4 * norm_fp32 + c * norm_type
    more_q, more_k = family.more_heads
    heads = (q + k) * each + k * c + q * c + c * (more_q * q + more_k * k) + 4 * facts.heads
    attention = (4 * in_fp32 + c * in_type) * e + heads + c * e
    sparse = facts.experts is not None and facts.experts.sparse_layers[layer]
    width = facts.active_mlp_width if sparse else facts.mlp_width
    tensors, backward = (family.mlp_tensors, 2) if family.gated else (2, 1)
    routed = 2 * c * e * facts.experts.active if sparse and facts.experts else 0
    formulas = (
        f"norms {4 * in_fp32 + c * in_type}·E + (Q + K)·{each} + {c}·(K + Q)"
        + (f" + {c}·({more_q}·Q + {more_k}·K)" if more_q else "")
        + f" + gradient {c}·E; E = {e:,}, Q = {q:,}, K = {k:,}",
        f"({tensors} + {backward})·{c}·F; F = {width:,}" + (" of a token's experts, and its copies" if routed else ""),
    )
    dq_dk_dv = q * c * 2 + 2 * k * c + (4 * q if s.gpu else 0)  # output gradient, dq, dk, dv, and dq summed in fp32
    lora = 5 * s.adapter_inputs
    return LayerBytes(attention + lora, tensors * c * width + routed, backward * c * width, dq_dk_dv, formulas)


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
    candidates = [
        Part("one MLP tensor", t * max(facts.mlp_width, facts.active_mlp_width) * c, s.place, f"t x F x {c} B"),
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
    layer = max(kinds.values(), key=lambda kind: kind.peak)
    kept = [kinds[kind].kept for kind in sparse] if not s.checkpoint else []
    x = input_bytes(facts, s)

    def resident(layers: int, done: bool) -> list[Part]:
        """What the first `layers` layers keep on the device while the next one runs."""
        if not s.checkpoint:
            size = s.tokens * sum(kept[:layers]) + layers * x
            return (
                [Part("activations of all layers", size, s.place, f"{layers} layers, nothing is recomputed")] if layers else []
            )
        if not s.offload:
            return (
                [Part("layer inputs", layers * x, s.place, f"{layers} layers x t x E x {s.compute_bytes} B")] if layers else []
            )
        stay = max(0, layers - (facts.layers - s.keep_on_device))
        moving = min(2, layers - stay) if s.gpu and done else min(2, layers) if s.gpu else 0
        parts = (
            [Part("layer inputs kept", stay * x, s.place, f"last {stay} layers x t x E x {s.compute_bytes} B")] if stay else []
        )
        return (
            [*parts, Part("layer inputs in flight", moving * x, s.place, f"{moving} x t x E x {s.compute_bytes} B")]
            if moving
            else parts
        )

    def backward(index: int) -> list[Part]:
        t = s.tokens
        gradients = Part(
            "gradients", gradient_bytes(facts, s, facts.layers - index), s.place, "of the layers done so far and the head"
        )
        mlp_first = layer.kept + layer.mlp_backward >= layer.attention + layer.attention_backward
        extra = layer.mlp + layer.mlp_backward if mlp_first else layer.attention_backward
        work = [
            Part("one layer: attention", t * layer.attention, s.place, f"t x ({layer.formulas[0]})"),
            Part(
                "one layer: MLP" if mlp_first else "one layer: attention backward",
                t * extra,
                s.place,
                f"t x {layer.formulas[1]}" if mlp_first else "t x (2·Q + 2·K of gradients, and Q in fp32)",
            ),
        ]
        if not s.checkpoint:
            work = [
                Part(
                    "gradients inside a layer", t * (extra - (layer.mlp if mlp_first else 0)), s.place, "of the layer that runs"
                )
            ]
        return [gradients, *resident(index + 1, True), *work]

    forward_work = Part(
        "one layer without gradients", s.tokens * 3 * s.compute_bytes * facts.active_mlp_width, s.place, "t x 3·c·F"
    )
    moments = [
        ("forward", [*resident(facts.layers, False), forward_work]),
        ("loss", [*resident(facts.layers, False), *loss_parts(facts, s)]),
        *((f"backward of layer {index + 1}", backward(index)) for index in _telling_layers(facts, s)),
        ("optimizer", [Part("gradients", gradient_bytes(facts, s, facts.layers), s.place, "of all trained parameters")]),
    ]
    made = []
    for name, parts in moments:
        whole = [*states, always, *parts]
        size = sum(part.bytes for part in whole)
        whole.append(_overhead(s, size))
        made.append(Moment(name, tuple(part for part in whole if part.bytes)))
    waiting = layer_inputs(facts, s)
    if s.gpu:
        waiting.append(Part("process", HOST_BASE_BYTES, "host", "Python, torch, CUDA libraries: allowance"))
    return Memory(tuple(made), tuple(waiting), s.gpu)


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


def with_tokens(s: Settings, tokens: int) -> Settings:
    """The same levers at another length."""
    return replace(s, tokens=tokens)
