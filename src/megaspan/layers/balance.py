"""The balance loss of a mixture of experts, made of sums that every layer hands out.

With `output_router_logits` transformers adds to the loss X * sum over experts of f * P, over the tokens of all layers: f the
share of tokens that chose the expert, P its mean probability. From whole logits that is 25 GB of them at 1,048,576 tokens (48
layers of 128 experts, fp32), kept until the backward. But both factors are sums over tokens. Here every layer hands out two
vectors, `Sums` of its tokens; the gradient of the loss by a sum of probabilities is one number for each expert, which the
layer's backward gets and applies tile by tile (`routing.py`). f has no gradient, in transformers' function neither.

Where a row lies on several ranks, f is of all of them: one all-reduce of X whole numbers a forward. P is each rank's own, so
that the ranks' losses, and their gradients, add up to the row's. Padding is no token, as under transformers' `attention_mask`:
neither the slots that a layout fills up, nor what `pad_to_multiple_of` put at a row's end. Letters: X experts.

Source: Fedus et al. 2022, "Switch Transformers", arXiv 2101.03961, equations 4 to 6; the form is transformers'
`load_balancing_loss_func`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from megaspan.attention.context import RowContext


@dataclass(frozen=True)
class Sums:
    """What the balance loss wants to know of some tokens.

    Attributes:
        probabilities_X: fp32, sum of the router's probabilities over the tokens.
        counts_X: int64, how many tokens chose the expert.
        tokens: how many there were, padding included: a check, not the divisor.
    """

    probabilities_X: Tensor
    counts_X: Tensor
    tokens: int

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.probabilities_X + other.probabilities_X, self.counts_X + other.counts_X, self.tokens + other.tokens)


def real_tokens(slots: int, device: torch.device, row: RowContext | None = None, padding: int = 0) -> Tensor | None:
    """Which of a rank's slots hold a token that is no padding: bool [slots] on the device; None where all do.

    Args:
        slots: of this rank.
        device: where its layers compute.
        row: how the row lies on ranks and in documents; None for one document on this rank.
        padding: tokens at the end of the whole row that are padding.
    """
    if row is not None and (padding or row.tokens < row.slots):
        return row.token_index < row.layout.tokens - padding
    return torch.arange(slots, device=device) < slots - padding if padding else None


def sums_of(logits_tX: Tensor, top_k: int, real_t: Tensor | None = None) -> Sums:
    """The sums of some tokens' logits, with the graph of the probabilities if the logits have one.

    `real_t` says which of them count, None for all.

    The choice that counts is that of the highest logits, as in transformers: a router that adds a bias to its scores first
    counts as if it did not.
    """
    chosen_tk = logits_tX.detach().topk(top_k, dim=-1).indices
    ones_tk = torch.ones_like(chosen_tk) if real_t is None else real_t[:, None].expand_as(chosen_tk).to(torch.int64)
    # Integers: their sum does not depend on the order of additions, and nothing waits for the device.
    counts = torch.zeros(logits_tX.shape[1], dtype=torch.int64, device=chosen_tk.device)
    counts.scatter_add_(0, chosen_tk.flatten(), ones_tk.flatten())
    return Sums(probability_sum(logits_tX, real_t), counts, logits_tX.shape[0])


def probability_sum(logits_tX: Tensor, real_t: Tensor | None = None) -> Tensor:
    """The sum over tokens (those that are real) of the probabilities, fp32 (fp64 for fp64) [X], differentiable."""
    probabilities_tX = logits_tX.softmax(dim=-1, dtype=torch.promote_types(logits_tX.dtype, torch.float32))
    if real_t is not None:
        probabilities_tX = torch.where(real_t[:, None], probabilities_tX, 0.0)
    return probabilities_tX.sum(dim=0)


def balance_loss(probabilities_X: Tensor, counts_X: Tensor, tokens: int | Tensor) -> Tensor:
    """The balance loss of sums over all layers and pieces: X * sum_X (counts / tokens) * (probabilities / tokens).

    Where tokens lie on several ranks, `counts_X` and `tokens` are to be summed over them first; each rank's probabilities then
    give its share of the loss, and the right gradient.

    Args:
        probabilities_X: fp32, sum of probabilities.
        counts_X: how many tokens chose each expert.
        tokens: tokens times layers.
    """
    share_X = (counts_X.double() / tokens).to(probabilities_X.dtype)
    return probabilities_X.shape[0] * (share_X * (probabilities_X / tokens)).sum()


@final
class Balance:
    """The sums of one forward of a model, over its layers and over the pieces of its batch.

    A streamed layer that trains adds with `Routing.report`. Any other layer runs inside `routing.watching`.

    Args:
        top_k: experts for each token.
        layers: how many have experts.
        row: how the row lies on ranks; None for a batch that lies on this one.
        real_t: which of this rank's slots count (`real_tokens`); None for all.
    """

    def __init__(self, top_k: int, layers: int, row: RowContext | None = None, real_t: Tensor | None = None) -> None:
        self.top_k, self.layers, self.real_t = top_k, layers, real_t
        self._row = row
        self._sums: Sums | None = None

    def add(self, sums: Sums) -> None:
        """Adds the sums of a layer or of a part of its tokens."""
        self._sums = sums if self._sums is None else self._sums + sums

    def loss(self, tokens: int) -> Tensor:
        """The balance loss; of a row on several ranks this rank's share of it, whose sum over them is the row's.

        All ranks of the row call this together.

        Args:
            tokens: of the batch, or slots of this rank, padding included, as a check that no layer is missing.

        Raises:
            RuntimeError: one is.
        """
        seen = 0 if self._sums is None else self._sums.tokens
        if self._sums is None or seen != tokens * self.layers:
            raise RuntimeError(f"router logits of {seen} tokens were seen, not of {tokens} in each of {self.layers} layers")
        counts_X = self.over_row(self._sums.counts_X)
        return balance_loss(self._sums.probabilities_X, counts_X, counts_X.sum() / self.top_k)  # each chose so many

    def over_row(self, number: Tensor) -> Tensor:
        """The sum of a tensor of whole numbers over the ranks of the row; all of them call this together."""
        groups = () if self._row is None else (self._row.ranks.cp, self._row.ranks.sp)
        total = number.detach().clone()
        for group in groups:
            if group is not None:
                dist.all_reduce(total, group=group)
        return total


def knows_balance(model: Any) -> bool:
    """Whether the balance loss of a causal language model is the one computed here: tried on random logits of two layers.

    Reads what transformers' own forward reads: `load_balancing_loss_func` of the model's file, `num_experts`,
    `num_experts_per_tok` and `router_aux_loss_coef`.
    """
    function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    experts, top_k = (getattr(model, name, None) for name in ("num_experts", "num_experts_per_tok"))
    if function is None or not isinstance(experts, int) or not isinstance(top_k, int):
        return False
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(5, experts, generator=generator, requires_grad=True) for _ in range(2)]
    try:
        want = function(tuple(logits), experts, top_k, None)
        got_sums = sums_of(logits[0], top_k) + sums_of(logits[1], top_k)
        got = balance_loss(got_sums.probabilities_X, got_sums.counts_X, got_sums.tokens)
        gradients = [torch.autograd.grad(loss, logits) for loss in (want, got)]
    except Exception:  # whatever another function takes or gives, it is not this one
        return False
    return (
        hasattr(model, "router_aux_loss_coef")
        and torch.allclose(want, got, rtol=1e-5)
        and all(torch.allclose(left, right, rtol=1e-4, atol=1e-7) for left, right in zip(*gradients, strict=True))
    )
