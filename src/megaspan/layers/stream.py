"""One decoder layer as one autograd function: attention once, everything else in tiles.

Ordinary checkpointing keeps a layer's input and runs the whole layer again in the backward: attention forward twice (a
quarter of a million-token step), and the working memory of one whole layer (155 GB for an 8B model at 1,048,576 tokens).
Here the layer keeps its input `x`, attention's output `O` and its log-sum-exp, and

* forward: per tile, `x` to q, k, v; attention on the whole row; per tile, `x` and `O` to the layer's output; * backward:
per tile, the second half again with a graph, back through it to dO; q, k, v again per tile; attention's backward on the
  whole row from the kept `O` and log-sum-exp; per tile, the first half again with a graph, back through it.

Each tile's graph is torch's own over the live modules, so adapters, biases, frozen weights and any activation need no formula.
Source: the tiling of token-wise work is that of ALST (arXiv 2506.13996), keeping O that of FlashAttention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megaspan.attention import AttentionCall
from megaspan.attention.attend import backward_with, forward_with, settle
from megaspan.layers.family import Family, after, attention_trains, before
from megaspan.layers.halves import Halves
from megaspan.layers.tile import GradientSums, drawing, tiles


@dataclass(frozen=True)
class LayerPlan:
    """How much of a layer is worked on at once; the planner's choice, from shapes and memory.

    With all heads a call, the backward of attention holds, beside x, dx, dy, O and dO, the row's q, k, v, their gradients and
    the kernel's fp32 sums of dq, dk and dv: 16 bytes for each of tokens x (H + 2 G) x D. With fewer KV heads a call the
    gradients take the place of q, k and v, and the rest shrinks to the heads of one call.

    Attributes:
        tile_tokens: tokens of token-wise work at once; a row that is no longer runs in one piece.
        kv_heads_per_call: KV heads (with their query heads) in one call of attention's backward, None for all.
        fused_norms: norms that are plain RMSNorms run as torch's fused operation (`norms.py`).
        fused: q/k norms with rotary embedding, and the MLP's gated product, run as fused passes where a layer has the common
            form (`halves.py`).
    """

    tile_tokens: int = 16384
    kv_heads_per_call: int | None = None
    fused_norms: bool = True
    fused: bool = True


@dataclass
class Counts:
    """Attention kernels run so far, the read-back of "attention runs forward once", and calls that did not stream."""

    forwards: int = 0
    backwards: int = 0
    passed_on: int = 0


@dataclass(frozen=True, eq=False)
class LayerRun:
    """One forward of one layer, with all that its backward needs beside the saved tensors.

    Attributes:
        layer: the live layer.
        family: what stands where in it.
        plan: tile and head group sizes.
        keep_output: attention's output is kept for the backward; else it is computed again there.
        arguments: the layer's keyword arguments.
        parameters: those of the layer that want a gradient.
        wants_x: whether the layer's input wants one.
        seed: for layers that draw random numbers, the step's seed, else None.
        counts: where attention calls are counted.
        on_backward: called when the backward begins.
        halves: what runs fused, None for nothing.
        autocast: as it was in the forward.
        asked: what the layer asks attention for beside q, k and v, None where its first half is not fused.
    """

    layer: nn.Module
    family: Family
    plan: LayerPlan
    keep_output: bool
    arguments: dict[str, Any]
    parameters: Sequence[Tensor]
    wants_x: bool
    seed: int | None
    counts: Counts
    on_backward: Callable[[], None]
    halves: Halves | None = None
    autocast: dict[str, Any] = field(default_factory=dict)
    asked: AttentionCall | None = None

    def __call__(self, x_BTE: Tensor) -> Tensor:
        """The layer's output, differentiable."""
        kind = x_BTE.device.type
        # Without autocast's cache: a weight that it casts here, outside a graph, would be found again inside one.
        autocast: dict[str, Any] = {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
            "cache_enabled": False,
        }
        asked = None
        if self.halves is not None:
            # Random numbers that this draws are not to be missing in the tiles.
            with torch.autocast(**autocast), drawing(self.seed, x_BTE.device):
                asked = self.halves.ask(self.layer, self.family, x_BTE, self.arguments)
        return _StreamedLayer.apply(x_BTE, replace(self, autocast=autocast, asked=asked), *self.parameters)

    def forward(self, x_BTE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Output, attention's output [batch, T, H, D] and log-sum-exp [batch, H, T]; builds no graph."""
        cuts = self._tiles(x_BTE)
        with torch.autocast(**self.autocast):
            out, lse = self._attend(self._projected(x_BTE, cuts))
            y_BTE: Tensor | None = None
            for tokens in cuts:
                with drawing(self._seed(tokens, 1), x_BTE.device):
                    tile = self._after(x_BTE[:, tokens], out[:, tokens])
                if len(cuts) == 1:
                    return tile, out, lse
                y_BTE = tile.new_empty(x_BTE.shape) if y_BTE is None else y_BTE
                y_BTE[:, tokens] = tile
            assert y_BTE is not None
            return y_BTE, out, lse

    def backward(
        self, dy_BTE: Tensor, x_BTE: Tensor, out_BTHD: Tensor | None = None, lse_BHT: Tensor | None = None
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Gradients of the input (None unless wanted) and of `parameters`."""
        self.on_backward()
        cuts, sums = self._tiles(x_BTE), GradientSums(self.parameters)
        needs_attention = self.wants_x or attention_trains(self.layer, self.family)
        with torch.autocast(**self.autocast):
            if out_BTHD is None or lse_BHT is None:
                out_BTHD, lse_BHT = self._attend(self._projected(x_BTE, cuts))
            found = self._second_half(cuts, sums, dy_BTE, x_BTE, out_BTHD, needs_attention)
            if needs_attention:
                self._first_half(cuts, sums, found, x_BTE, out_BTHD, lse_BHT)
        return (found[0] if self.wants_x else None), sums.take()

    def _second_half(
        self, cuts: list[slice], sums: GradientSums, dy: Tensor, x: Tensor, out: Tensor, needs_attention: bool
    ) -> list[Tensor]:
        """Back through projection, norms, MLP and residuals: the gradients of x (its part so far) and of attention's output."""
        once = len(cuts) == 1
        found = [] if once else [torch.empty_like(x), torch.empty_like(out)]
        for tokens in cuts:
            x_tile = x[:, tokens].detach().requires_grad_(self.wants_x)
            out_tile = out[:, tokens].detach().requires_grad_(needs_attention)
            with torch.enable_grad(), drawing(self._seed(tokens, 1), x.device):
                y_tile = self._after(x_tile, out_tile)
            parts: list[Tensor | None] = [None, None]
            if y_tile.requires_grad:
                (*parts,) = self._gradients([y_tile], [dy[:, tokens]], [x_tile, out_tile])
                sums.add(parts[2:])
            if once:
                found = [torch.empty_like(x) if parts[0] is None else _own(parts[0], dy),
                         torch.empty_like(out) if parts[1] is None else parts[1]]  # fmt: skip
            else:
                for whole, part in zip(found, parts[:2], strict=True):
                    if part is not None:
                        whole[:, tokens] = part
            del y_tile, parts
        return found

    def _first_half(
        self, cuts: list[slice], sums: GradientSums, found: list[Tensor], x: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        """Back through attention, q, k, v and the first norm: takes d_out out of `found` and adds to dx, which stays in it."""
        once, d_out = len(cuts) == 1, found.pop()
        (dx,) = found
        # A row of one tile keeps the graph of its q, k, v: they are not computed a third time.
        x_whole = x.detach().requires_grad_(self.wants_x)
        with torch.set_grad_enabled(once):
            call = self._projected(x_whole, cuts)
        dq, dk, dv, d_sink = self._attend_backward(call, d_out, out, lse, reuse=not once)
        del d_out
        for tokens in cuts:
            x_tile = x_whole
            if not once:
                del call  # before the first tile: the row's q, k, v
                x_tile = x[:, tokens].detach().requires_grad_(self.wants_x)
                with torch.enable_grad(), drawing(self._seed(tokens, 0), x.device):
                    call = self._before(x_tile, tokens)
            outputs = [call.q_BHTD, call.k_BGSD, call.v_BGSD]
            gradients = [
                part[:, tokens].transpose(1, 2).to(like.dtype) for part, like in zip((dq, dk, dv), outputs, strict=True)
            ]
            if d_sink is not None and call.sink_H is not None and tokens.start == 0:
                outputs, gradients = [*outputs, call.sink_H], [*gradients, d_sink.to(call.sink_H.dtype)]
            pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
            if pairs:
                gx, *rest = self._gradients([o for o, _ in pairs], [g for _, g in pairs], [x_tile])
                sums.add(rest)
                if gx is not None:
                    dx[:, tokens] += gx
                del gx, rest
            del outputs, gradients, pairs

    def _gradients(self, outputs: list[Tensor], gradients: list[Tensor], leaves: list[Tensor]) -> list[Tensor | None]:
        """Gradients of `leaves` (None for those that want none) and of the parameters."""
        wanted = [*leaves, *self.parameters]
        asked = [tensor for tensor in wanted if tensor.requires_grad]
        found = iter(torch.autograd.grad(outputs, asked, gradients, allow_unused=True))
        return [next(found) if tensor.requires_grad else None for tensor in wanted]

    def _projected(self, x: Tensor, cuts: list[slice]) -> AttentionCall:
        """What the whole row asks attention for, q, k, v in memory as [batch, T, heads, D]."""
        whole: list[Tensor] = []
        if self.asked is not None and len(cuts) > 1:
            parts = (self.asked.q_BHTD, self.asked.k_BGSD, self.asked.v_BGSD)
            whole = [part.new_empty(*x.shape[:2], part.shape[1], part.shape[3]) for part in parts]
        for tokens in cuts:
            into = tuple(buffer[:, tokens] for buffer in whole) if self.asked is not None and whole else None
            with drawing(self._seed(tokens, 0), x.device):
                call = self._before(x[:, tokens], tokens, into)
            if len(cuts) == 1:
                return call
            if into is None:
                tiled = [part.transpose(1, 2) for part in (call.q_BHTD, call.k_BGSD, call.v_BGSD)]
                whole = whole or [part.new_empty(part.shape[0], x.shape[1], *part.shape[2:]) for part in tiled]
                for buffer, part in zip(whole, tiled, strict=True):
                    buffer[:, tokens] = part
        q, k, v = (buffer.transpose(1, 2) for buffer in whole)
        return replace(call, q_BHTD=q, k_BGSD=k, v_BGSD=v)

    def _before(self, x: Tensor, tokens: slice, into: Any = None) -> AttentionCall:
        if self.asked is not None and self.halves is not None:
            return self.halves.before(self.layer, self.family, self.asked, x, tokens, self.arguments, into)
        return before(self.layer, self.family, x, tokens, self.arguments)

    def _after(self, x: Tensor, out: Tensor) -> Tensor:
        mlp = None if self.halves is None else self.halves.mlp(self.layer)
        return after(self.layer, self.family, x, out, mlp)

    def _attend(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for q, k, v in _rows(call):
            kernel, scoring = settle(q, k, v, call.scoring, kernels=call.kernels)
            out, lse = forward_with(kernel, q, k, v, call.sink_H, scoring)
            outs.append(out)
            lses.append(lse)
            self.counts.forwards += 1
        return _stacked(outs), _stacked(lses)

    def _attend_backward(self, call: AttentionCall, d_out: Tensor, out: Tensor, lse: Tensor, *, reuse: bool) -> tuple[Any, ...]:
        """dq, dk, dv as [batch, T, heads, D], and the gradient of the sinks (None without).

        With several calls and `reuse`, the gradients overwrite q, k and v.
        """
        found, d_sink = [], None
        for row, (q, k, v) in enumerate(_rows(call)):
            kernel, scoring = settle(q, k, v, call.scoring, kernels=call.kernels)
            share, group = q.shape[1] // k.shape[1], self.plan.kv_heads_per_call or k.shape[1]
            grads: list[Tensor] = []
            d_sinks: list[Any] = []
            for first in range(0, k.shape[1], group):
                kv, heads = slice(first, first + group), slice(first * share, (first + group) * share)
                sink = None if call.sink_H is None else call.sink_H.detach()[heads]
                *parts, d_part = backward_with(
                    kernel,
                    d_out[row, :, heads],
                    q[:, heads],
                    k[:, kv],
                    v[:, kv],
                    out[row, :, heads],
                    lse[row, heads],
                    sink,
                    scoring,
                )
                d_sinks.append(d_part)
                if group < k.shape[1]:
                    grads = grads or [part if reuse else torch.empty_like(part) for part in (q, k, v)]
                    for whole, cut, part in zip(grads, (heads, kv, kv), parts, strict=True):
                        whole[:, cut] = part
                else:
                    grads = parts
            found.append(grads)
            if call.sink_H is not None:
                of_row = torch.cat(d_sinks)
                d_sink = of_row if d_sink is None else d_sink + of_row
            self.counts.backwards += 1
        dq, dk, dv = (_stacked(list(parts)) for parts in zip(*found, strict=True))
        return dq, dk, dv, d_sink

    def _tiles(self, x: Tensor) -> list[slice]:
        return tiles(x.shape[1], max(1, self.plan.tile_tokens // x.shape[0]))

    def _seed(self, tokens: slice, half: int) -> int | None:
        """One seed for each tile and half of the layer."""
        return None if self.seed is None else self.seed + 2 * tokens.start + half


class _StreamedLayer(torch.autograd.Function):
    """x, a `LayerRun` and the parameters that want gradients, to the layer's output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: LayerRun, *parameters: Tensor) -> Tensor:
        y, out, lse = run.forward(x)
        ctx.run = run
        # In this order, which the keepers of `streamed.py` go by.
        ctx.save_for_backward(x, *((out, lse) if run.keep_output else ()))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dx, gradients = ctx.run.backward(grads[0], *ctx.saved_tensors)
        return (dx, None, *gradients)


def _rows(call: AttentionCall) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """q, k, v of each row of the batch, [T, heads, D], outside any graph."""
    for row in range(call.q_BHTD.shape[0]):
        q, k, v = (part[row].detach().transpose(0, 1) for part in (call.q_BHTD, call.k_BGSD, call.v_BGSD))
        yield q, k, v


def _own(gradient: Tensor, incoming: Tensor) -> Tensor:
    """The gradient in memory that may be added to: autograd hands the incoming one through where nothing changes it."""
    shared = gradient.untyped_storage().data_ptr() == incoming.untyped_storage().data_ptr()
    return gradient.clone() if shared or not gradient.is_contiguous() else gradient


def _stacked(parts: list[Tensor]) -> Tensor:
    return parts[0][None] if len(parts) == 1 else torch.stack(parts)
