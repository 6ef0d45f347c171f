"""Bytes of one decoder layer with gradients, as transformers runs it whole. What a tile of a streamed layer takes is its share.

Whole, a layer keeps some 20 tensors: 215 KB a token of a 4B model, 26 GiB at 131,072 tokens. They were counted tensor by tensor
against autograd for every family, and agree with peaks measured on an H200 within 2 %.

Letters: t tokens, E hidden, Q = heads x head size, K = KV heads x head size, F MLP width, c bytes of the
computation's type (2 for bf16).
"""

from __future__ import annotations

from dataclasses import dataclass

from megaspan.plan.facts import ModelFacts
from megaspan.plan.over_ranks import whole_layer_pool
from megaspan.plan.parts import Part, Settings


@dataclass(frozen=True)
class LayerBytes:
    """Bytes a token that one whole layer needs when it runs with gradients.

    Attributes:
        norms: kept by the norms over the hidden size.
        attention: kept by projections, rotary positions and attention, and the gradient of the layer's output.
        mlp: kept by the MLP.
        mlp_backward: more at the peak of the MLP's backward, everything kept being still there.
        attention_backward: more at the peak of the attention's backward, when the MLP's share is gone.
        formulas: the arithmetic of norms with attention, and of the MLP.
    """

    norms: int
    attention: int
    mlp: int
    mlp_backward: int
    attention_backward: int
    formulas: tuple[str, str]

    @property
    def kept(self) -> int:
        """After the layer's forward."""
        return self.norms + self.attention + self.mlp

    @property
    def mlp_is_peak(self) -> bool:
        """Whether the backward needs most in the MLP."""
        return self.mlp + self.mlp_backward >= self.attention_backward

    @property
    def peak(self) -> int:
        """In the layer's backward."""
        return self.norms + self.attention + max(self.mlp + self.mlp_backward, self.attention_backward)


def layer_bytes(facts: ModelFacts, layer: int, s: Settings) -> LayerBytes:
    """The largest tensors of a transformers decoder layer under autograd, in bytes a token.

    A norm keeps its input in fp32, the normalised value and its output (the next product's input); normed queries and keys the
    same; attention keeps q, k, v, its output and the log-sum-exp; a gated MLP keeps gate, its activation, up and their product,
    and its backward holds two gradients of that width more. Experts keep two copies of a token each, and where their outputs
    are weighed and summed the backward holds three gradients of such copies.
    """
    e, q, k, c, family = facts.hidden, facts.query_width, facts.kv_width, s.compute_bytes, facts.family
    in_fp32, in_type = family.norm_tensors
    norm_fp32, norm_type = family.qk_norm_tensors if facts.qk_norm else (0, 0)
    each = c + 4 * norm_fp32 + c * norm_type
    more_q, more_k = family.more_heads
    norms = (4 * in_fp32 + c * in_type) * e
    attention = (q + k) * each + c * (k + q) + c * (more_q * q + more_k * k) + 4 * facts.heads + c * e + 5 * s.adapter_inputs
    attention += (4 + 2 * c) * family.latent
    sparse = facts.experts is not None and facts.experts.sparse_layers[layer]
    width = facts.active_mlp_width if sparse else facts.mlp_width
    tensors, backward = (family.mlp_tensors, 2) if family.gated else (2, 1)
    copies = e * facts.experts.active if sparse and facts.experts else 0
    weighed = 3 * (4 if family.weighs_in_fp32 else c) * copies
    gradients = backward * c * width
    told = f"({tensors} + {backward})·{c}·F" if gradients >= weighed else f"({tensors}·{c}·F + {weighed // e}·E)"
    formulas = (
        f"norms {4 * in_fp32 + c * in_type}·E + (Q + K)·{each} + {c}·(K + Q)"
        + (f" + {c}·({more_q}·Q + {more_k}·K)" if more_k else f" + {c * more_q}·Q" if more_q else "")
        + (f" + {4 + 2 * c}·{family.latent:,} of latents" if family.latent else "")
        + f" + gradient {c}·E",
        f"{told}; F = {width:,}" + (" of a token's experts, and its copies" if copies else ""),
    )
    # Output gradient, dq, dk, dv, and the kernel's fp32 sum of dq.
    of_attention = q * c * 2 + 2 * k * c + (4 * q if s.gpu else 0)
    return LayerBytes(norms, attention, tensors * c * width + 2 * c * copies, max(gradients, weighed), of_attention, formulas)


def whole_layer_parts(facts: ModelFacts, layer: LayerBytes, s: Settings) -> list[Part]:
    """The peak of a whole layer's backward; of its MLP perhaps one tile, and sums of its weight gradients."""
    pool = whole_layer_pool(facts, s) if s.ranks.row > 1 else []
    first = Part("one layer: attention", s.slots * (layer.norms + layer.attention), s.place, f"t x ({layer.formulas[0]})")
    if s.mlp_tile < s.slots:
        tile = _tile_parts(facts, layer, s)
        if sum(part.bytes for part in tile) >= s.slots * layer.attention_backward:
            return [first, *tile, *pool]
    elif layer.mlp_is_peak:
        size = s.slots * (layer.mlp + layer.mlp_backward)
        return [first, Part("one layer: MLP", size, s.place, f"t x {layer.formulas[1]}"), *pool]
    formula = "t x (2·Q + 2·K of gradients, and Q in fp32)"
    return [first, Part("one layer: attention backward", s.slots * layer.attention_backward, s.place, formula), *pool]


def _tile_parts(facts: ModelFacts, layer: LayerBytes, s: Settings) -> list[Part]:
    """An MLP's backward in tiles: the gradient of its input is there whole, its own tensors are those of a tile."""
    c, e, n = s.compute_bytes, facts.hidden, s.mlp_tile
    trained = s.adapter // facts.layers if s.adapter else (3 if facts.family.gated else 2) * e * facts.mlp_width
    return [
        Part("one layer: gradient of the MLP's input", s.slots * c * e, s.place, f"t x {c}·E"),
        Part("one tile: MLP", n * (layer.mlp + layer.mlp_backward), s.place, f"{n:,} tokens x {layer.formulas[1]}"),
        Part(
            "one layer: weight gradients of the MLP", trained * (4 + c), s.place, f"{trained:,} x (4 + {c}) B, summed in fp32"
        ),
    ]
