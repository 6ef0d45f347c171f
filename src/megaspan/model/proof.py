"""A proof on the user's own model, at the moment it is prepared: the same tokens through it before and after.

Two families that look alike in their configuration can differ in their code. A bias on the attention scores that arrives
inside a mask, or a second use of the attention weights, would vanish without a word under long attention, which takes no mask
and returns no weights, and the loss would merely be a little worse. So a few dozen tokens run through the plain model first
(milliseconds), and a model whose hidden states come out different is refused. (The head has its own proof,
`layers.head.check_head`.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from megaspan.human import UserError
from megaspan.layers.shards import compute_dtype
from megaspan.model.forward import backbone_of
from megaspan.model.limits import device_of

_TOKENS = 64
_LONGEST_WINDOW = 512
"""Windows up to this are crossed by the proof; a longer one would make it slow."""

_EXACT, _ROUNDED = 1e-4, 0.1
"""Largest relative distance in fp32, and in bf16, where two right kernels differ by some percent after dozens of layers."""


@dataclass(frozen=True)
class Reference:
    """What the plain model makes of the tokens: ids [tokens] and hidden states [tokens, hidden], fp32."""

    ids_t: torch.Tensor
    hidden_tE: torch.Tensor


def reference(model: PreTrainedModel) -> Reference:
    """The plain model's answer, to be taken before anything is installed."""
    window = getattr(model.config, "sliding_window", None) or 0
    length = _TOKENS + (window if window <= _LONGEST_WINDOW else 0)
    length = min(length, getattr(model.config, "max_position_embeddings", length))
    # A prime stride walks over the whole vocabulary before it repeats.
    ids_t = torch.arange(1, length + 1, device=device_of(model)) * 7919 % model.config.vocab_size
    return Reference(ids_t, _hidden(model, ids_t))


def prove_attention(model: PreTrainedModel, before: Reference) -> None:
    """Compare the model under long attention with what it was.

    Raises:
        UserError: its hidden states are not the plain model's.
    """
    distance_t = (_hidden(model, before.ids_t) - before.hidden_tE).norm(dim=1) / before.hidden_tE.norm(dim=1).clamp(min=1e-30)
    exact = compute_dtype(next(model.parameters())) in (torch.float32, torch.float64)
    # The median token: in bf16 the router of a mixture of experts may send a few of them elsewhere.
    distance = float(distance_t.median())
    if not distance <= (_EXACT if exact else _ROUNDED):
        raise UserError(
            f"{type(model).__name__} does something in its attention that long attention does not: "
            f"the hidden states of {len(before.ids_t)} tokens differ by {distance:.1e}",
            do="Report the model; it cannot be trained with exact long attention yet",
        )


@torch.no_grad()
def _hidden(model: PreTrainedModel, ids_t: torch.Tensor) -> torch.Tensor:
    with _evaluating(model):
        hidden: torch.Tensor = backbone_of(model)(input_ids=ids_t[None], use_cache=False).last_hidden_state[0]
    return hidden.float()


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Without dropout; each module's mode is put back, since a user may have frozen some."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
