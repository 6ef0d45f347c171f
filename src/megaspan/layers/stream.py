"""One decoder layer as one autograd function: attention once, by head groups; everything else in tiles.

Ordinary checkpointing keeps a layer's input and runs the whole layer again in the backward: attention forward twice (a
quarter of a million-token step), and the working memory of one whole layer (155 GB for an 8B model at 1,048,576 tokens).
Here the layer keeps its input `x`, attention's output `O` and its log-sum-exp (`tape.py`), and

* forward: per head group, `x` to q, k, v tile by tile, and attention on the whole row; then, per tile, `x` and `O` to the
  layer's output;
* backward: per tile, the second half again with a graph, back through it to dO; per head group, q, k, v again, attention's
  backward on the whole row from the kept `O` and log-sum-exp, dq in the place of dO; per tile, the first half again with a
  graph, back through it. The gradient of `x` is built in the memory of the incoming one where nobody else holds it.

Each tile's graph is torch's own over the live modules, so adapters, biases, frozen weights and any activation need no formula.
Sources: tiles of ALST (arXiv 2506.13996), head groups of UPipe (untied Ulysses), keeping O of FlashAttention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megaspan.attention import AttentionCall
from megaspan.attention.context import ContextPlan, RowContext
from megaspan.attention.mask import Mask
from megaspan.layers.attending import Attending, Landing, attended, one_ahead
from megaspan.layers.balance import Balance
from megaspan.layers.dials import Counts, LayerPlan
from megaspan.layers.dropout import DropoutHandle
from megaspan.layers.family import Family, after, attention_trains, before
from megaspan.layers.groups import ALL_HEADS, HeadGroup, head_groups, side_by_side
from megaspan.layers.halves import Halves
from megaspan.layers.projection import Projection
from megaspan.layers.reuse import Reuse
from megaspan.layers.routing import Router, Routing
from megaspan.layers.tape import Kept, Stores, Tape
from megaspan.layers.tile import GradientSums, tiles, together
from megaspan.memory.aside import Aside
from megaspan.plan.keep import Place
from megaspan.plan.ranks import kv_heads_a_call

Tiles: TypeAlias = Callable[[Sequence[slice]], Iterator[Tensor]]
"""Gives a row's hidden states in tiles of tokens."""


@dataclass(frozen=True, eq=False)
class LayerRun:
    """One forward of one layer, with all that its backward needs beside what is kept.

    Attributes:
        index: of the layer.
        layer: the live layer.
        family: what stands where in it.
        plan: tile and head group sizes.
        place: where attention's output is kept for the backward; None: it is computed again there, and waits at `attends`.
        arguments: the layer's keyword arguments.
        parameters: those of the layer that want a gradient.
        wants_x: whether the layer's input wants one.
        dropout: tells the layer's dropouts where the computation is.
        seed: the number of this forward, for them; None where there are none.
        counts: where attention calls are counted.
        on_backward: called when the backward begins.
        reuse: tells whether the memory of an incoming gradient is free.
        halves: what runs fused, None for nothing.
        router: of a layer with experts.
        balance: where it hands out what the balance loss wants, None if that is not asked for.
        autocast: as it was in the forward.
        asked: what the layer asks attention for beside q, k and v, None where its first half is not fused.
        groups: its head groups.
        routing: its experts' choices in this forward.
        context: how the row lies on ranks and in documents, None for one document on this rank.
    """

    index: int
    layer: nn.Module
    family: Family
    plan: LayerPlan
    place: Place | None
    attends: Place
    arguments: dict[str, Any]
    parameters: Sequence[Tensor]
    wants_x: bool
    dropout: DropoutHandle
    seed: int | None
    counts: Counts
    on_backward: Callable[[], None]
    reuse: Reuse
    halves: Halves | None = None
    router: Router | None = None
    balance: Balance | None = None
    autocast: dict[str, Any] = field(default_factory=dict)
    asked: AttentionCall | None = None
    groups: tuple[HeadGroup, ...] = (ALL_HEADS,)
    routing: Routing | None = None
    context: ContextPlan | None = None

    def __call__(self, x_BTE: Tensor, tape: Tape) -> Tensor:
        """The layer's output, differentiable."""
        run = self._settled(x_BTE)
        y_BTE, *probabilities = _StreamedLayer.apply(x_BTE, run, tape, *self.parameters)
        tape.leave(self.index, y_BTE)
        if self.balance is not None and run.routing is not None:
            run.routing.report(self.balance, *probabilities)
        return y_BTE

    def without_gradients(self, x_BTE: Tensor, stores: Stores) -> Tensor:
        """Its output where nobody wants a gradient (evaluation, frozen layers below all trained ones): nothing is kept."""
        run = self._settled(x_BTE)
        y_BTE = run.forward(x_BTE, Kept(stores, True), None)
        if self.balance is not None and run.routing is not None and run.routing.sums is not None:
            run.routing.report(self.balance, run.routing.sums.probabilities_X)
        return y_BTE

    def _settled(self, x_BTE: Tensor) -> LayerRun:
        """With what is known once its input is there."""
        kind = x_BTE.device.type
        # Without autocast's cache: a weight that it casts here, outside a graph, would be found again inside one.
        autocast: dict[str, Any] = {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
            "cache_enabled": False,
        }
        asked, context, groups, kv_heads = None, None, self.groups, self.plan.kv_heads_per_call
        row: RowContext | None = self.arguments.get("megaspan_row")
        with torch.no_grad(), torch.autocast(**autocast), self._at(slice(0, 1)):
            if self.halves is not None:
                asked = self.halves.ask(self.layer, self.family, x_BTE, self.arguments)
            if kv_heads is not None or row is not None:
                seen = asked or before(self.layer, self.family, x_BTE[:, :1], slice(0, 1), self.arguments)
                if row is not None:
                    context = row.plan(Mask(seen.scoring.window or None))
                sp_size = 1 if row is None else row.ranks.sizes[1]
                groups = head_groups(seen, kv_heads_a_call(seen.k_BGSD.shape[1], sp_size, kv_heads))
        routing, balance = None, self.balance
        if self.router is not None:
            counts = (None, None) if balance is None else (balance.top_k, balance.real_t)
            routing = Routing(self.router, x_BTE.shape[1], *counts)
        return replace(self, autocast=autocast, asked=asked, groups=groups, routing=routing, context=context)

    @torch.no_grad()
    def forward(self, x_BTE: Tensor, kept: Kept, place: Place | None) -> Tensor:
        """The layer's output; keeps attention's at `place`, unless it is kept already: then attention is not run."""
        cuts = self._tiles(x_BTE)
        parts: list[Tensor] = []
        with torch.autocast(**self.autocast):
            if not kept.has_outputs:
                parts = self._attend(lambda cuts: (x_BTE[:, cut] for cut in cuts), cuts, kept, place)
            whole = (side_by_side([part[:, tokens] for part in parts]) for tokens in cuts)
            outs: Iterator[Tensor] = whole if parts else kept.output_tiles(cuts, passing=True)
            y_BTE: Tensor | None = None
            for tokens, out in together(cuts, outs):
                with self._at(tokens), self._choosing(tokens):
                    tile = self._after(x_BTE[:, tokens], out)
                if len(cuts) == 1:
                    return tile
                y_BTE = tile.new_empty(x_BTE.shape) if y_BTE is None else y_BTE
                y_BTE[:, tokens] = tile
                del tile, out
            assert y_BTE is not None
            return y_BTE

    def again(self, x_BTE: Tensor, kept: Kept, place: Place | None) -> Tensor:
        """`forward` in the backward of a later layer: a sharded layer's weights are gathered for it and let go of."""
        sharded: Any = self.layer if hasattr(self.layer, "reshard") else None
        if sharded is not None:
            sharded.unshard()
        try:
            return self.forward(x_BTE, kept, place)
        finally:
            if sharded is not None:
                sharded.reshard()

    def backward(
        self, dy_BTE: Tensor, kept: Kept, mine: bool, d_probabilities_X: Tensor | None = None
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Gradients of the input (None unless wanted) and of `parameters`; with `mine`, that of the input overwrites dy."""
        cuts, sums = self._tiles(dy_BTE), GradientSums(self.parameters)
        needs_attention = self.wants_x or attention_trains(self.layer, self.family)
        with torch.autocast(**self.autocast):
            if not kept.has_outputs:
                self._attend(kept.input_tiles, cuts, kept, self.attends, again=True)
            # Tiles of x pass by here: the first head group need not ask for them again.
            ahead = self._projection(cuts, self.groups[0]) if needs_attention and self._aside(kept, cuts) else None
            dx, d_outs = self._second_half(cuts, sums, dy_BTE, mine, kept, needs_attention, d_probabilities_X, ahead)
            if needs_attention:
                self._first_half(cuts, sums, dx, d_outs, kept, None if ahead is None else ahead.whole())
        return (dx if self.wants_x else None), sums.take()

    def _second_half(
        self,
        cuts: list[slice],
        sums: GradientSums,
        dy: Tensor,
        mine: bool,
        kept: Kept,
        needs_attention: bool,
        d_probabilities_X: Tensor | None,
        ahead: Projection | None,
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Back through projection, norms, MLP and residuals: the gradients of x (its part so far) and of attention's output.

        Fills `ahead` with the first head group.
        """
        once = len(cuts) == 1
        dx: Tensor | None = None
        d_outs: list[Tensor] = []
        for tokens, x_tile, out_tile in together(cuts, kept.input_tiles(cuts), kept.output_tiles(cuts)):
            x_tile = x_tile.detach().requires_grad_(self.wants_x)
            out_tile = out_tile.detach().requires_grad_(needs_attention)
            with torch.enable_grad(), self._at(tokens), self._choosing(tokens) as probabilities:
                y_tile = self._after(x_tile, out_tile)
            parts: list[Tensor | None] = [None, None]
            if y_tile.requires_grad:
                outputs, gradients = [y_tile], [dy[:, tokens]]
                if d_probabilities_X is not None and probabilities[0].requires_grad:
                    outputs, gradients = [y_tile, *probabilities], [*gradients, d_probabilities_X]
                (*parts,) = self._gradients(outputs, gradients, [x_tile, out_tile])
                del outputs, gradients
                sums.add(parts[2:])
            if self.wants_x:
                part = torch.zeros_like(x_tile) if parts[0] is None else parts[0]
                if once:
                    dx = part if mine and part.is_contiguous() else _own(part, dy)
                else:
                    # Each tile of dy is read before it is written.
                    dx = dx if dx is not None else dy if mine else part.new_empty(dy.shape)
                    dx[:, tokens] = part
            if needs_attention:
                part = torch.zeros_like(out_tile) if parts[1] is None else parts[1]
                cut = [part[:, :, group.heads] for group in self.groups]
                if once:
                    d_outs = cut
                else:
                    d_outs = d_outs or [each.new_empty(1, dy.shape[1], *each.shape[2:]) for each in cut]
                    for whole, each in zip(d_outs, cut, strict=True):
                        whole[:, tokens] = each
                del cut
            del y_tile, probabilities, parts, out_tile
            if ahead is not None:
                self._project(ahead, x_tile, tokens, self.groups[0])
            del x_tile
        return dx, d_outs

    def _first_half(
        self,
        cuts: list[slice],
        sums: GradientSums,
        dx: Tensor | None,
        d_outs: list[Tensor],
        kept: Kept,
        first: AttentionCall | None,
    ) -> None:
        """Back through attention, q, k, v and the first norm: adds to `dx`. `first` is what the first head group asks for."""
        # A row of one tile and one group keeps the graph of its q, k, v: they are not computed a third time.
        once = len(cuts) == len(self.groups) == 1
        call: AttentionCall | None = None
        x_whole: Any = None
        if once:
            (x_whole,) = kept.input_tiles(cuts)
            x_whole = x_whole.detach().requires_grad_(self.wants_x)
            with torch.enable_grad(), self._at(cuts[0]):
                call = self._before(x_whole, cuts[0])
        firsts, first = [call or first], None
        dks, dvs, d_sinks = self._attend_backward(cuts, d_outs, kept, firsts)
        self.counts.backwards += 1
        kept.let_go_of_outputs()
        for tokens, x_tile in together(cuts, [x_whole] if once else kept.input_tiles(cuts)):
            if call is None:
                x_tile = x_tile.detach().requires_grad_(self.wants_x)
                with torch.enable_grad(), self._at(tokens):
                    call = self._before(x_tile, tokens)
            outputs = [call.q_BHTD, call.k_BGSD, call.v_BGSD]
            gradients = [
                side_by_side([part[:, tokens] for part in parts]).transpose(1, 2).to(like.dtype)
                for parts, like in zip((d_outs, dks, dvs), outputs, strict=True)
            ]
            if d_sinks and call.sink_H is not None and tokens.start == 0:
                outputs, gradients = [*outputs, call.sink_H], [*gradients, torch.cat(d_sinks).to(call.sink_H.dtype)]
            pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
            if pairs:
                gx, *rest = self._gradients([o for o, _ in pairs], [g for _, g in pairs], [x_tile])
                sums.add(rest)
                if gx is not None and dx is not None:
                    dx[:, tokens] += gx
                del gx, rest
            del outputs, gradients, pairs, x_tile
            call = None

    def _attend(self, x: Tiles, cuts: list[slice], kept: Kept, place: Place | None, *, again: bool = False) -> list[Tensor]:
        """Attention of the row, a head group at a time, kept at `place`: [1, T, heads, D] of each group; `again` in a backward.

        Nothing where it is read back tile by tile: a group has left the device when the next but one begins.
        """
        outs: list[Tensor] = []
        stays = place in (None, "device") or not self.plan.stream_back
        aside = self._aside(kept, cuts) if again else None

        def begin(number: int) -> Attending:
            asked = self._projected(x, cuts, self.groups[number], aside)
            return Attending(asked, self.context, arrive=None if aside is None else partial(kept.stores.wait, [aside.done]))

        def ready(number: int) -> None:
            if number == 0 or not stays:
                kept.stores.land()  # what the layer before keeps is on the host by now

        for out, lse in attended(len(self.groups), begin, self.context, ready, aside is not None):
            if place is not None:
                kept.keep_output(out[None], lse[None], place)
            outs += [out[None]] if stays else []
            del out, lse
        self.counts.forwards += 1
        if not stays:
            kept.stores.land()
        return outs

    def _attend_backward(
        self, cuts: list[slice], d_outs: list[Any], kept: Kept, first: list[AttentionCall | None]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """dk and dv of each head group as [1, T, heads, D], and its sinks' gradients (none without). dq takes the place of dO
        in `d_outs`. `first` holds what the first group asks for, where it is projected already, and is emptied.
        """
        found: tuple[list[Tensor], list[Tensor], list[Tensor]] = [], [], []
        aside = self._aside(kept, cuts)

        def begin(number: int) -> Attending:
            ready = first.pop() if first else None
            asked = self._projected(kept.input_tiles, cuts, self.groups[number], aside) if ready is None else ready
            coming = None if aside is None else [] if ready is not None else [aside.done]
            (out, lse), d_out, d_outs[number] = kept.output_of(number, coming), d_outs[number], None
            arrive = None if coming is None else partial(kept.stores.wait, coming)
            return Attending(asked, self.context, (out[0], lse[0], d_out[0]), arrive)

        def land(number: int, going: Landing) -> None:
            d_outs[number], *others = (part[None] for part in going.land())
            for parts, part in zip(found, [*others, *([] if going.d_sink_H is None else [going.d_sink_H])], strict=False):
                parts.append(part)

        going: Landing | None = None
        for number, now in one_ahead(len(self.groups), begin, self.context, aside is not None):
            before, going = going, now.backward()
            del now
            if before is not None:
                land(number - 1, before)  # on its way while this group was attended
        assert going is not None
        land(len(self.groups) - 1, going)
        return found

    def _gradients(self, outputs: list[Tensor], gradients: list[Tensor], leaves: list[Tensor]) -> list[Tensor | None]:
        """Gradients of `leaves` (None for those that want none) and of the parameters."""
        wanted = [*leaves, *self.parameters]
        asked = [tensor for tensor in wanted if tensor.requires_grad]
        found = iter(torch.autograd.grad(outputs, asked, gradients, allow_unused=True))
        return [next(found) if tensor.requires_grad else None for tensor in wanted]

    def _aside(self, kept: Kept, cuts: list[slice]) -> Aside | None:
        """Where the next head group is projected beside attention of this one, which hides what comes over the link for it.

        Between ranks a group is on its way then, and would wait for that; rows of several documents go the same way.
        """
        fits = len(self.groups) > 1 and len(cuts) > 1 and self.asked is not None and self.context is None
        return kept.stores.aside if self.plan.project_ahead and fits and kept.input_waits else None

    def _projected(self, x: Tiles, cuts: list[slice], group: HeadGroup, aside: Aside | None = None) -> AttentionCall:
        """What the whole row asks attention for in one head group, q, k, v in memory as [1, T, heads, D]; outside any graph.

        With `aside` they are there when its `done` is.
        """
        row = self._projection(cuts, group)
        with nullcontext() if aside is None else aside:
            for tokens, x_tile in together(cuts, x(cuts)):
                call = self._project(row, x_tile, tokens, group)
                del x_tile
        return call if len(cuts) == 1 else row.whole()

    def _projection(self, cuts: list[slice], group: HeadGroup) -> Projection:
        like = group.of(self.asked) if self.asked is not None and len(cuts) > 1 else None
        return Projection(cuts[-1].stop, like)

    def _project(self, row: Projection, x: Tensor, tokens: slice, group: HeadGroup) -> AttentionCall:
        """Adds one tile to a head group's row."""
        with torch.no_grad(), self._at(tokens):
            call = self._before(x, tokens, group, row.into(tokens))
        if tokens.stop - tokens.start < row.tokens:
            row.add(tokens, call)
        return call

    def _before(self, x: Tensor, tokens: slice, group: HeadGroup | None = None, into: Any = None) -> AttentionCall:
        if self.asked is not None and self.halves is not None:
            heads = None if group is None or group == ALL_HEADS else (group.heads, group.kv)
            call = self.halves.before(self.layer, self.family, self.asked, x, tokens, self.arguments, heads, into)
            return call if heads is None else replace(call, sink_H=None if call.sink_H is None else call.sink_H[heads[0]])
        call = before(self.layer, self.family, x, tokens, self.arguments)
        return call if group is None else group.of(call)

    def _after(self, x: Tensor, out: Tensor) -> Tensor:
        mlp = None if self.halves is None else self.halves.mlp(self.layer)
        return after(self.layer, self.family, x, out, mlp)

    def _choosing(self, tokens: slice) -> AbstractContextManager[list[Tensor]]:
        """A tile's experts are chosen when it runs for the first time, and the same ones taken whenever it runs again."""
        if self.routing is None:
            return nullcontext([])
        run = self.routing.replaying if self.routing.recorded else self.routing.recording
        return run(self.layer, tokens)

    def _tiles(self, x: Tensor) -> list[slice]:
        return tiles(x.shape[1], self.plan.tile_tokens)

    def _at(self, tokens: slice) -> AbstractContextManager[None]:
        """The place of a tile, which its dropout masks depend on."""
        row: RowContext | None = self.arguments.get("megaspan_row")
        first = tokens.start if row is None or self.seed is None else row.token_index[tokens]
        return self.dropout.at(self.seed, self.index, first, tokens.stop - tokens.start)


class _StreamedLayer(torch.autograd.Function):
    """x, a `LayerRun` with its tape and the parameters that want gradients, to the layer's output, and to the sum of its
    router's probabilities where a balance loss wants them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: LayerRun, tape: Tape, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.run, ctx.tape = run, tape
        y = run.forward(x, tape.enter(run.index, x, run.again), run.place)
        sums = None if run.routing is None else run.routing.sums
        return (y,) if sums is None else (y, sums.probabilities_X)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        run, tape = ctx.run, ctx.tape
        mine = run.reuse.allows(gradients)
        run.counts.reused += mine
        run.on_backward()
        dx, found = run.backward(gradients[0], tape.back_at(run.index, run.on_backward), mine, *gradients[1:])
        tape.done(run.index)
        return (dx, None, None, *found)


def _own(gradient: Tensor, incoming: Tensor) -> Tensor:
    """The gradient in memory that may be added to: autograd hands the incoming one through where nothing changes it."""
    shared = gradient.untyped_storage().data_ptr() == incoming.untyped_storage().data_ptr()
    return gradient.clone() if shared or not gradient.is_contiguous() else gradient
