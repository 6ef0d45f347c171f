"""The loop over tiles behind `linear_cross_entropy`: three matrix products a tile, everything else in place.

A tile of logits is made once. While it is there, its loss, its metrics and the gradient of the loss by the logits are computed,
and from that gradient those of the hidden states, the weight, the bias and the adapters. A backward that recomputed the tile
would cost a fourth product: 0.13 s on top of 0.39 s for 131,072 tokens, 151,936 words and 2,560 channels at 790 TFLOP/s.

Two sizes keep both memory and products right. Softmax needs fp32 logits and one fp32 scratch, 8 bytes an element: they hold a
quarter of a tile (a slab). The product with the hidden states, summed into the weight's fp32 gradient, wants many rows at once
to be worth the pass over that sum: it takes the whole tile, in the precision of the weight (2 bytes an element).

Between the products about 50 bytes are moved for each logit: 131,072 x 151,936 x 50 / 4.3 TB/s = 0.23 s of a step of 37 s (4B
model), 0.06 s of 4 s at 32,768. A hand-written kernel would save four fifths of that 0.6 to 1.5 %: not worth its code yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megaspan.layers.head import head_mask


@dataclass(frozen=True, eq=False)
class TileJob:
    """What one call works on, beside the tensors that get gradients.

    Attributes:
        rows_n: numbers of the rows with a label, or None when all t have one.
        labels_n: their labels, int64.
        weights_n: their weights, or None for 1.
        incoming: scalar tensor in fp32 or fp64, the incoming gradient that gradients are made for.
        scale: multiplier of the logits.
        softcap: bound of the logits, or None.
        adapters: scaling and dropout of each low-rank delta.
        numbers_n: number of each of those rows' tokens in its row of the batch, int64; None: their numbers in this call.
        step_seed: the number that dropout of this call's adapters is drawn from, whatever the tile; None without dropout.
        tile: rows of logit gradients held at once.
        dtype: of the matrix products.
        wanted: which of hidden, weight, bias and the deltas' factors get a gradient.
        gradient_dtypes: type of each of those gradients; None for any.
    """

    rows_n: Tensor | None
    labels_n: Tensor
    weights_n: Tensor | None
    incoming: Tensor
    scale: float
    softcap: float | None
    adapters: tuple[tuple[float, float], ...]
    numbers_n: Tensor | None
    step_seed: int | None
    tile: int
    dtype: torch.dtype
    wanted: tuple[bool, ...]
    gradient_dtypes: tuple[torch.dtype | None, ...]


def slab_of(tile: int) -> int:
    """Rows of fp32 logits held at once within a tile."""
    return -(-tile // 4)


class LinearCrossEntropy(torch.autograd.Function):
    """`apply(job, hidden_tE, weight_VE, bias_V, a_RE, b_VR, ...)` gives (loss, correct, entropy) sums."""

    @staticmethod
    def forward(ctx: Any, job: TileJob, hidden_tE: Tensor, weight_VE: Tensor, bias_V: Tensor | None, *factors: Tensor) -> Any:
        """Sums over all rows, and every wanted gradient for the incoming gradient that is expected."""
        tiles = _Tiles(job, hidden_tE, weight_VE, bias_V, factors)
        tiles.run()
        ctx.job = job
        ctx.save_for_backward(*(gradient for gradient, want in zip(tiles.gradients(), job.wanted, strict=True) if want))
        ctx.mark_non_differentiable(tiles.correct, entropy := tiles.entropy.float())
        return tiles.loss.to(tiles.stats), tiles.correct, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor, *_unused: Tensor) -> Any:
        """The gradients of the forward, scaled: in place, unless the graph is to be used again."""
        ratio = (d_loss / ctx.job.incoming).reshape(1)
        saved = iter(ctx.saved_tensors)
        again = torch._C._autograd._get_current_graph_task_keep_graph()
        results: list[Tensor | None] = []
        for want, dtype in zip(ctx.job.wanted, ctx.job.gradient_dtypes, strict=True):
            if not want:
                results.append(None)
                continue
            gradient = next(saved)
            # A vector of one, not a scalar: a scalar is rounded to the gradient's type before the product, and in bf16 would be
            # up to 0.4 % off for every parameter of the model.
            scaled = torch.mul(gradient, ratio, out=None if again else gradient)
            results.append(scaled if dtype is None else scaled.to(dtype))
        return None, *results


@dataclass(frozen=True, eq=False)
class _Delta:
    """One adapter in one tile: its input after dropout, the dropout's factors, the low-rank product, that one's gradient."""

    a_RE: Tensor
    b_VR: Tensor
    scaling: float
    input_nE: Tensor
    keep_nE: Tensor | None
    low_nR: Tensor
    d_low_nR: Tensor


class _Tiles:
    """Buffers and running sums of one call."""

    def __init__(
        self, job: TileJob, hidden_tE: Tensor, weight_VE: Tensor, bias_V: Tensor | None, factors: tuple[Tensor, ...]
    ) -> None:
        self.job, self.hidden_tE = job, hidden_tE
        self.count, vocab = len(job.labels_n), weight_VE.shape[0]
        self.tile, self.slab = min(job.tile, self.count), min(slab_of(job.tile), self.count)
        self.stats = torch.promote_types(job.dtype, torch.float32)
        self.device = hidden_tE.device
        self.weight_VE = weight_VE.to(job.dtype)
        self.bias_V = None if bias_V is None else bias_V.to(self.stats)
        self.factors = [factor.to(self.stats) for factor in factors]

        self.loss, self.entropy = self._zeros(dtype=torch.float64), self._zeros(dtype=torch.float64)
        self.correct = self._zeros(dtype=torch.int64)
        self.trains = any(job.wanted)
        wants_hidden, wants_weight, wants_bias = job.wanted[:3]
        self.d_hidden_tE = self._zeros(*hidden_tE.shape, dtype=hidden_tE.dtype) if wants_hidden else None
        self.d_weight_VE = self._zeros(*weight_VE.shape) if wants_weight else None
        self.d_bias_V = self._zeros(vocab) if wants_bias else None
        self.d_factors = [self._zeros(*factor.shape) if self.trains else None for factor in factors]

        self.logits_sV = torch.empty(self.slab, vocab, dtype=self.stats, device=self.device)
        self.scratch_sV = torch.empty_like(self.logits_sV)
        kept = job.dtype if _sums_in_fp32(hidden_tE, job.dtype) else self.stats
        self.d_logits_nV: Tensor | None = None
        if wants_hidden or wants_weight:
            self.d_logits_nV = torch.empty(self.tile, vocab, dtype=kept, device=self.device)

    def run(self) -> None:
        """All tiles, in order."""
        for start in range(0, self.count, max(self.tile, 1)):
            self._tile(start, min(start + self.tile, self.count))

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Of hidden, weight, bias and factors, for the expected incoming gradient."""
        return (self.d_hidden_tE, self.d_weight_VE, self.d_bias_V, *self.d_factors)

    def _tile(self, start: int, stop: int) -> None:
        """Rows `start` to `stop` of those with a label: sums and gradients."""
        rows_n = None if self.job.rows_n is None else self.job.rows_n[start:stop]
        hidden_nE = self.hidden_tE[start:stop] if rows_n is None else self.hidden_tE.index_select(0, rows_n)
        hidden_nE = hidden_nE.to(self.job.dtype)
        numbers_n = rows_n if self.job.numbers_n is None else self.job.numbers_n[start:stop]
        deltas = self._deltas(hidden_nE, start if numbers_n is None else numbers_n)
        for first in range(start, stop, self.slab):
            self._slab(slice(first - start, min(first + self.slab, stop) - start), start, hidden_nE, deltas)
        for index, delta in enumerate(deltas):
            if (d_a_RE := self.d_factors[2 * index]) is not None:
                d_a_RE.addmm_(delta.d_low_nR.t(), delta.input_nE, alpha=delta.scaling)
        if self.d_logits_nV is None:
            return
        d_logits_nV = self.d_logits_nV[: stop - start]
        if self.d_weight_VE is not None:
            _add_product(self.d_weight_VE, d_logits_nV.t(), hidden_nE)
        if self.d_hidden_tE is not None:
            d_hidden_nE = torch.mm(d_logits_nV.to(self.job.dtype), self.weight_VE)
            for delta in deltas:
                through_nE = torch.mm(delta.d_low_nR, delta.a_RE) * delta.scaling
                d_hidden_nE = d_hidden_nE + (through_nE if delta.keep_nE is None else through_nE * delta.keep_nE)
            if rows_n is None:
                self.d_hidden_tE[start:stop] = d_hidden_nE
            else:
                self.d_hidden_tE.index_copy_(0, rows_n, d_hidden_nE.to(self.d_hidden_tE.dtype))

    def _slab(self, rows: slice, start: int, hidden_nE: Tensor, deltas: list[_Delta]) -> None:
        """Rows of a tile that begins at `start`: sums, gradients of logits, bias and the adapters' `b`."""
        job, here = self.job, slice(start + rows.start, start + rows.stop)
        logits_sV, scratch_sV = self.logits_sV[: rows.stop - rows.start], self.scratch_sV[: rows.stop - rows.start]
        labels_s1 = job.labels_n[here, None]
        weights_s1 = None if job.weights_n is None else job.weights_n[here, None].to(self.stats)

        _product(hidden_nE[rows], self.weight_VE.t(), out=logits_sV)
        if self.bias_V is not None:
            logits_sV.add_(self.bias_V)
        for delta in deltas:
            logits_sV.addmm_(delta.low_nR[rows], delta.b_VR.t())
        if job.scale != 1.0:
            logits_sV.mul_(job.scale)
        if job.softcap is not None:
            logits_sV.div_(job.softcap).tanh_().mul_(job.softcap)

        top_s1, best_s1 = logits_sV.max(dim=1, keepdim=True)  # of equal logits the first, as argmax
        sum_s1, nll_s1, entropy_s1 = _softmax_sums(logits_sV, scratch_sV, top_s1, labels_s1)
        self.loss += (nll_s1 if weights_s1 is None else nll_s1 * weights_s1).sum(dtype=torch.float64)
        self.entropy += entropy_s1.sum(dtype=torch.float64)
        self.correct += best_s1.eq(labels_s1).sum()
        if not self.trains:
            return

        factor_s1 = (torch.ones_like(sum_s1) if weights_s1 is None else weights_s1) * job.scale * job.incoming
        _softmax_gradient(logits_sV, scratch_sV, top_s1, sum_s1, labels_s1, factor_s1, job.softcap)
        if self.d_bias_V is not None:
            self.d_bias_V += scratch_sV.sum(0)
        for index, delta in enumerate(deltas):
            torch.mm(scratch_sV, delta.b_VR, out=delta.d_low_nR[rows])
            if (d_b_VR := self.d_factors[2 * index + 1]) is not None:
                d_b_VR.addmm_(scratch_sV.t(), delta.low_nR[rows])
        if self.d_logits_nV is not None:
            self.d_logits_nV[rows] = scratch_sV

    def _deltas(self, hidden_nE: Tensor, first_row: int | Tensor) -> list[_Delta]:
        """The adapters' part of a tile, in fp32: their rank is small, so precision costs nothing."""
        deltas = []
        factors = zip(self.job.adapters, self.factors[::2], self.factors[1::2], strict=True)
        for number, ((scaling, dropout), a_RE, b_VR) in enumerate(factors):
            input_nE, keep_nE = hidden_nE.to(self.stats), None
            if self.job.step_seed is not None and dropout:
                keep_nE = head_mask(self.job.step_seed, number, first_row, input_nE, dropout)
                input_nE = input_nE * keep_nE
            low_nR = torch.mm(input_nE, a_RE.t()) * scaling
            deltas.append(_Delta(a_RE, b_VR, scaling, input_nE, keep_nE, low_nR, torch.empty_like(low_nR)))
        return deltas

    def _zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(shape, dtype=dtype or self.stats, device=self.device)


def _softmax_sums(logits_sV: Tensor, scratch_sV: Tensor, top_s1: Tensor, labels_s1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of exponentials, negative log-likelihood and entropy, [s, 1]; leaves `logits - top` and its exponential behind."""
    logits_sV.sub_(top_s1)
    torch.exp(logits_sV, out=scratch_sV)
    sum_s1 = scratch_sV.sum(1, keepdim=True)
    log_sum_s1 = sum_s1.log()
    # A row's dot product as a batched matrix product: no temporary of the slab's size.
    dot_s1 = torch.bmm(scratch_sV[:, None], logits_sV[:, :, None]).squeeze(2)
    return sum_s1, log_sum_s1 - logits_sV.gather(1, labels_s1), log_sum_s1 - dot_s1 / sum_s1


def _softmax_gradient(
    logits_sV: Tensor,
    scratch_sV: Tensor,
    top_s1: Tensor,
    sum_s1: Tensor,
    labels_s1: Tensor,
    factor_s1: Tensor,
    softcap: float | None,
) -> None:
    """Turns `scratch` from exponentials into `factor * (softmax - one at the label)`, times the soft cap's derivative."""
    at_label_s1 = (scratch_sV.gather(1, labels_s1) / sum_s1 - 1) * factor_s1
    scratch_sV.mul_(factor_s1 / sum_s1).scatter_(1, labels_s1, at_label_s1)
    if softcap is not None:
        logits_sV.add_(top_s1).div_(softcap).square_()  # tanh squared: the derivative of the cap is 1 minus it
        scratch_sV.addcmul_(scratch_sV, logits_sV, value=-1)


def _sums_in_fp32(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether the device multiplies 16-bit matrices into an fp32 result (torch 2.8 and newer, CUDA only)."""
    return tensor.is_cuda and dtype in (torch.bfloat16, torch.float16)


def _product(left: Tensor, right: Tensor, *, out: Tensor) -> None:
    """`out = left @ right`, in the precision of `out` where the device can."""
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out)
    elif _sums_in_fp32(left, left.dtype):
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        out.copy_(torch.mm(left, right))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left @ right`, the product never rounded before it is added."""
    if _sums_in_fp32(left, left.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left, right.to(total.dtype))
