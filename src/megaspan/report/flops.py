"""Model FLOP of a row: what its training takes at the least, the yardstick for model TFLOP/s.

At a million tokens an 8B model spends 95 % of its FLOP in attention, which grows with the square of the row, so the usual 6 x
parameters x tokens is off by a factor of twenty. Counted are the two operations (multiply, add) of every matrix product of
forward and backward; not counted is what a run does twice to save memory: recomputed layers, scores recomputed inside
attention kernels.

    linear     each weight multiplies every token once forward (2 FLOP) and twice backward (gradients of input and weight): 6
    attention  each pair of a query and a key it sees, for each query head and channel: q·k and p·v forward (4 FLOP), dv, dp, dq
               and dk backward (8): 12. A causal row of T tokens has T (T + 1) / 2 pairs, a window of W tokens about T W
"""

from __future__ import annotations

from collections.abc import Sequence

from megaspan.plan.facts import ModelFacts


def attended_pairs(tokens: int, span: int | None = None) -> int:
    """Pairs of a query and a key in one causal row; a query sees at most `span` tokens, itself included, or all before it."""
    reach = tokens if span is None else min(span, tokens)
    return reach * (reach + 1) // 2 + (tokens - reach) * reach


def linear_weights(facts: ModelFacts) -> int:
    """Weights that multiply every token: projections, MLP (of experts, those a token visits) and the output head."""
    return sum(facts.linear_parameters(layer) for layer in range(facts.layers)) + facts.head_parameters


def model_flops(facts: ModelFacts, tokens: int | Sequence[int], *, frozen: bool = False) -> float:
    """FLOP of one training step over rows of `tokens` tokens each.

    Args:
        facts: the model's sizes.
        tokens: length of a row, or of several; packed documents that do not see each other are rows of their own.
        frozen: the weights get no gradient (LoRA): 4 instead of 6 FLOP a weight and token.
    """
    rows = (tokens,) if isinstance(tokens, int) else tuple(tokens)
    linear = (4 if frozen else 6) * linear_weights(facts) * sum(rows)
    spans = [facts.span(layer) for layer in range(facts.layers)]
    pairs = sum(count * attended_pairs(row, span) for row in rows for span in set(spans) for count in (spans.count(span),))
    return float(linear + 12 * facts.query_width * pairs)


def heaviest_layer(facts: ModelFacts, tokens: int) -> float:
    """The part of a row's FLOP that its heaviest layer takes: among windows, one that sees the whole row."""
    layers = [
        6 * facts.linear_parameters(layer) * tokens + 12 * facts.query_width * attended_pairs(tokens, facts.span(layer))
        for layer in range(facts.layers)
    ]
    return max(layers) / (sum(layers) + 6 * facts.head_parameters * tokens)


def flops_formula(facts: ModelFacts, *, frozen: bool = False) -> str:
    """The formula with this model's numbers, for the run header."""
    windows = [span for layer in range(facts.layers) if (span := facts.span(layer)) is not None]
    full = facts.layers - len(windows)
    per_layer = f"12 x {facts.heads} heads x {facts.head_dim}"
    attention = [f"{full} layers x {per_layer} x T(T+1)/2"] * (full > 0)
    attention += [f"{len(windows)} layers x {per_layer} x pairs within {windows[0]:,}"] if windows else []
    factor = 4 if frozen else 6
    formula = f"{factor} x {linear_weights(facts):,} weights x T + {' + '.join(attention)}"
    return f"{formula} for a row of T tokens; recomputation not counted"
