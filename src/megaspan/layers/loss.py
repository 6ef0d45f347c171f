"""Linear layer and cross-entropy in one, a tile of tokens at a time.

The logits of a row are the first thing that runs out: 131,072 tokens of a 151,936-word model are 74 GiB in fp32, a million
tokens 593 GiB, and their gradient as much again, for a loss that is one number. `linear_cross_entropy` holds one tile of them,
forward and backward: gradients are made in the forward pass while the tile is there, and scaled by the incoming gradient in the
backward (`loss_tiles`). `plain_cross_entropy` is the same formula with full logits and ordinary autograd (`loss_type: nll`).

Bytes above the inputs (`loss_bytes`), in bf16 with fp32 sums, tile n, rows t:

    n*V*2 + 2*ceil(n/4)*V*4      one tile of gradients of the logits; logits and softmax of a quarter of it, in fp32
    V*E*4                        gradient of the weight, summed in fp32 (none where the head is frozen)
    t*E*2                        gradient of the hidden states
    n*E*6, t*24                  rows of a tile, their gradient; labels and row numbers

which at t = 131,072, V = 151,936, E = 2,560 and n = 2,048 is 3.3 GiB. Softmax is fp32, sums of loss and entropy are fp64, so
the result depends on the tile by the rounding of the products only.

Gradients of the head in the forward pass: Liger Kernel, arXiv:2410.10989. Loss without logits: arXiv:2411.09009.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megaspan.human import UserError
from megaspan.layers.head import Head
from megaspan.layers.loss_tiles import LinearCrossEntropy, TileJob, slab_of

IGNORED = -100


@dataclass(frozen=True, eq=False)
class LossSums:
    """Sums over the rows that have a label, all scalars on the device of the hidden states.

    Attributes:
        loss: sum of the (weighted) negative log-likelihood in nats, differentiable; fp32, or fp64 for an fp64 head.
        tokens: rows with a label, int64.
        correct: of these, rows whose largest logit is the label's, the first of equal ones; int64.
        entropy: sum of the entropy of the predicted distributions in nats, fp32.
    """

    loss: Tensor
    tokens: Tensor
    correct: Tensor
    entropy: Tensor


def launch_rows(tile_tokens: int, vocab: int) -> int:
    """Rows of a tile such that no kernel sees 2**31 elements of logits: offsets of 32 bits overflow there (case R56)."""
    return max(1, min(tile_tokens, (2**31 - 1) // vocab))


def loss_bytes(
    tokens: int, hidden: int, vocab: int, tile_tokens: int, *, element_bytes: int = 2, head_trains: bool = True
) -> int:
    """Peak bytes of `linear_cross_entropy` with gradients, above its inputs (the formula of the module's docstring).

    Args:
        tokens: rows.
        hidden: width of the hidden states.
        vocab: width of the logits.
        tile_tokens: rows of a tile.
        element_bytes: of the hidden states and of the head's weight.
        head_trains: whether the weight gets a gradient.
    """
    logits = tile_tokens * vocab * element_bytes + 2 * slab_of(tile_tokens) * vocab * 4
    sums = (vocab * hidden * 4 if head_trains else 0) + tokens * hidden * element_bytes
    return logits + sums + 3 * tile_tokens * hidden * element_bytes + tokens * 24


def linear_cross_entropy(
    hidden_tE: Tensor,
    head: Head,
    labels_t: Tensor,
    *,
    tile_tokens: int,
    weights_t: Tensor | None = None,
    incoming: float | Tensor = 1.0,
    tokens: Tensor | None = None,
    seed: int | None = None,
) -> LossSums:
    """Sums of the cross-entropy of `head` on `hidden_tE`, never holding more than one tile of logits.

    Rows labelled -100 cost nothing and get a zero gradient whatever they hold; without any label the loss is 0 and so is every
    gradient. Gradients of the head's weight and bias are summed in fp32 and rounded once, to `grad_dtype` of the parameter.
    Under autocast the products are in autocast's type, as those of the model's own layer would be.

    Args:
        hidden_tE: last hidden states, t x E.
        head: from `head_of`.
        labels_t: int64 [t], already shifted: the label of row i is the token after it; -100 for none.
        tile_tokens: rows of a tile; lowered where a tile of logits would pass 2**31 elements.
        weights_t: weight of each row's loss, [t], without gradient; a row of weight 0 is treated as one without a label.
        incoming: gradient that the loss is expected to get in the backward, above 0: 1/N where the caller divides by N. Any
            other is right too, but the hidden states' gradient is then rounded once when it is made and once when it is scaled,
            and two roundings of bf16 can leave up to 0.4 % on all of it.
        tokens: number of each token in its row, int64 [t], which dropout of an adapter on the head depends on: those of a shard
            on a rank that holds one; None for 0 to t - 1. Of padding any number.
        seed: the number that this dropout is drawn from, the same on all ranks that share a row (`dropout.row_seed`); None: one
            from torch's CPU generator.

    Raises:
        UserError: shapes or types do not fit, or a label is outside the vocabulary.
    """
    if tile_tokens < 1:
        raise UserError("a tile of the loss holds at least one row", got=tile_tokens)
    rows_n, labels_n, weights_n = _labelled(hidden_tE, head, labels_t, weights_t)
    device = hidden_tE.device.type
    autocast = torch.is_autocast_enabled(device)
    factors = [factor for delta in head.deltas for factor in (delta.a_RE, delta.b_VR)]
    tensors = (hidden_tE, head.weight_VE, head.bias_V, *factors)
    dtype = torch.get_autocast_dtype(device) if autocast else head.weight_VE.dtype
    if dtype == torch.float16:
        incoming = 1.0  # fp16 ends at 6e-8: divided by a count, most gradients of logits would be lost
    job = TileJob(
        rows_n=rows_n,
        labels_n=labels_n,
        weights_n=weights_n,
        incoming=torch.as_tensor(incoming, device=hidden_tE.device).to(torch.promote_types(dtype, torch.float32)),
        scale=head.scale,
        softcap=head.softcap,
        adapters=tuple((delta.scaling, delta.dropout) for delta in head.deltas),
        numbers_n=tokens if tokens is None or rows_n is None else tokens.index_select(0, rows_n),
        step_seed=_seed(head, seed),
        tile=launch_rows(tile_tokens, head.vocab),
        dtype=dtype,
        wanted=tuple(tensor is not None and tensor.requires_grad and torch.is_grad_enabled() for tensor in tensors),
        gradient_dtypes=tuple(None if tensor is None else _gradient_dtype(tensor) for tensor in tensors),
    )
    with torch.autocast(device, enabled=False):
        loss, correct, entropy = LinearCrossEntropy.apply(job, *tensors)
    return LossSums(loss, _count(labels_n), correct, entropy)


def plain_cross_entropy(
    hidden_tE: Tensor,
    head: Head,
    labels_t: Tensor,
    *,
    tile_tokens: int = 0,
    weights_t: Tensor | None = None,
    incoming: float | Tensor = 1.0,
    tokens: Tensor | None = None,
    seed: int | None = None,
) -> LossSums:
    """The same sums by full logits and ordinary autograd, in transformers' order and precision: `loss_type: nll`.

    Logits are made in the head's own type and turned into fp32 for the cross-entropy: 9 and 19 GiB for 32,768 tokens of a
    151,936-word model, and as much again for their gradients. `tile_tokens` and `incoming` belong to the common signature:
    nothing is tiled, and autograd knows the incoming gradient. Dropout of an adapter draws the same masks as there.

    Raises:
        UserError: as `linear_cross_entropy`.
    """
    rows_n, labels_n, weights_n = _labelled(hidden_tE, head, labels_t, weights_t)
    numbers_t = torch.arange(len(labels_t), device=labels_t.device) if tokens is None else tokens
    numbers_n = numbers_t if rows_n is None else numbers_t.index_select(0, rows_n)
    hidden_nE = hidden_tE if rows_n is None else hidden_tE.index_select(0, rows_n)
    logits_nV = head.finish(head.linear(hidden_nE, numbers_n, _seed(head, seed)))
    logits_nV = logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32))
    if weights_n is None:
        loss = torch.nn.functional.cross_entropy(logits_nV, labels_n, reduction="sum")
    else:
        loss = (torch.nn.functional.cross_entropy(logits_nV, labels_n, reduction="none") * weights_n).sum()
    with torch.no_grad():
        correct = logits_nV.argmax(1).eq(labels_n).sum()
        log_p_nV = logits_nV.log_softmax(1)
        entropy = -(log_p_nV.exp() * log_p_nV).sum(dtype=torch.float64).float()
    return LossSums(loss, _count(labels_n), correct, entropy)


def _labelled(
    hidden_tE: Tensor, head: Head, labels_t: Tensor, weights_t: Tensor | None
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Numbers of the rows with a label (None: all of them), their labels and weights; raises on what does not fit."""
    if hidden_tE.ndim != 2 or hidden_tE.shape[1] != head.weight_VE.shape[1]:
        raise UserError(
            "the hidden states do not fit the head",
            found=f"shape {list(hidden_tE.shape)}",
            allowed=f"[tokens, {head.weight_VE.shape[1]}]",
        )
    for name, tensor, integer in (("labels", labels_t, True), ("weights", weights_t, False)):
        if tensor is not None and (tensor.shape != hidden_tE.shape[:1] or integer != (tensor.dtype == torch.int64)):
            raise UserError(
                f"the {name} of the loss do not fit the hidden states",
                found=f"{tensor.dtype} of shape {list(tensor.shape)}",
                allowed=f"{'torch.int64' if integer else 'floating point'} of shape [{hidden_tE.shape[0]}]",
            )
    if weights_t is not None and weights_t.requires_grad:
        raise UserError("the weights of the loss get no gradient", do="pass weights_t.detach()")
    valid_t = labels_t.ne(IGNORED)
    if weights_t is not None:
        valid_t = valid_t & weights_t.ne(0)
    rows_n = valid_t.nonzero().squeeze(1)
    if len(rows_n) == len(labels_t):
        everything, labels_n, weights_n = None, labels_t, weights_t
    else:
        everything, labels_n = rows_n, labels_t.index_select(0, rows_n)
        weights_n = None if weights_t is None else weights_t.index_select(0, rows_n)
    if len(labels_n):
        low, high = (int(bound) for bound in labels_n.aminmax())
        if low < 0 or high >= head.vocab:
            raise UserError(
                "a label is outside the model's vocabulary",
                got=low if low < 0 else high,
                allowed=f"0 to {head.vocab - 1:,}, and {IGNORED} for a token that is not trained",
                do="check that the rows were made with this model's tokenizer",
            )
    return everything, labels_n, weights_n


def _seed(head: Head, given: int | None) -> int | None:
    """The number that dropout of the head's adapters is drawn from; None without any."""
    if not any(delta.dropout for delta in head.deltas):
        return None
    return int(torch.randint(2**62, ())) if given is None else given


def _gradient_dtype(tensor: Tensor) -> torch.dtype | None:
    """Type in which autograd keeps the gradient of a parameter; None where it takes any."""
    # `grad_dtype` came with torch 2.10 and exists for leaves only; before, a gradient had the type of its tensor.
    return getattr(tensor, "grad_dtype", tensor.dtype) if tensor.is_leaf else tensor.dtype


def _count(labels_n: Tensor) -> Tensor:
    return torch.tensor(len(labels_n), device=labels_n.device)
