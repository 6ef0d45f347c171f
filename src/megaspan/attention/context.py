"""Attention of a row that lies on many ranks, one head group at a time: what the streamed layer calls.

A rank holds its shard's tokens (with sp a part of them). For a head group it brings the keys that its queries see, 0.5 GB of
Qwen3-8B at 1,048,576 tokens, runs at most three kernel calls, each of which sees all keys of its queries, and drops them again:
nothing is merged, and what a rank holds falls with the number of ranks. Calls on local keys come first and hide the exchange;
the exchange of the next group is begun before this one is attended:

    row = ContextPlan.of(layout, mask, ranks, device)                       # once for a row and a kind of layer
    started = row.start(q, k, v)                                            # group 0
    for each group:
        coming = row.start(q, k, v) of the next group
        out, lse = row.attend(started, scoring, sink_H, kernels)            # out.land() after the next group's
        started = coming

    started = row.start(q, k, v, out, d_out)                                # backward: keys are brought again, not kept
        going = row.attend_backward(started, lse, scoring, sink_H, kernels)
        dq, dk, dv = going.land()                                           # after the next group's attend_backward

All ranks must call these in one order. Padding slots are in no call: their output, log-sum-exp and gradients are 0. Sources:
all-gathered keys as in Llama 3 (arXiv 2407.21783), heads by all-to-all as in DeepSpeed Ulysses (arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megaspan.attention.attend import backward_with, forward_with, settle
from megaspan.attention.choose import KERNELS
from megaspan.attention.gather import Gather
from megaspan.attention.groupway import Going, Gradients, KeyGradients, Started, Two, only
from megaspan.attention.heads import to_heads, to_tokens
from megaspan.attention.kernel import Kernel, Scoring
from megaspan.attention.layout import TokenLayout
from megaspan.attention.mask import Mask
from megaspan.attention.onway import OnTheWay
from megaspan.attention.runs import Ints, Runs
from megaspan.attention.segments import Segments
from megaspan.attention.slices import Call, plan_slices
from megaspan.attention.ulysses import HeadSplit


@dataclass(frozen=True, eq=False)
class RowRanks:
    """The ranks that work on one row.

    Attributes:
        cp: those that split its tokens with this rank, in the order of the layout; None for one.
        sp: those that split a shard's heads with this rank; None for one.
    """

    cp: dist.ProcessGroup | None = None
    sp: dist.ProcessGroup | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """cp_size and sp_size."""
        return (self.cp.size() if self.cp else 1), (self.sp.size() if self.sp else 1)


@dataclass(frozen=True, eq=False)
class ContextPlan:
    """All that the attention of one kind of layer needs of a row, on one rank; made once a row.

    Attributes:
        slots: slots of the shard, padding included.
        tokens: those of them that hold a token, the first ones.
        mask: which keys a token sees.
        ranks: who shares the row.
        calls: the kernel calls with their segments on the device, calls on local keys first.
        keys: slots of the pool that the other calls' keys are copied from, int32 on the device.
        gather: how the pool is filled.
        among: of the last call's keys the places among those copied, likewise, where they do not lie side by side; else None.
    """

    slots: int
    tokens: int
    mask: Mask
    ranks: RowRanks
    calls: tuple[tuple[Call, Segments], ...]
    keys: Tensor
    gather: Gather
    among: Tensor | None = None

    @staticmethod
    def of(layout: TokenLayout, mask: Mask, ranks: RowRanks, device: torch.device | str) -> ContextPlan:
        """The plan of this rank. Copies to the device wait for it: a row and kind of layer, not a layer.

        Raises:
            ValueError: a layout for other numbers of ranks.
        """
        if ranks.sizes != (layout.cp_size, layout.sp_size):
            sizes = layout.cp_size, layout.sp_size
            raise ValueError(f"a layout for (cp, sp) ranks of {sizes}, and there are {ranks.sizes}")
        rank = dist.get_rank(ranks.cp) if ranks.cp is not None else 0
        slices = plan_slices(layout, mask, rank)
        calls = tuple((call, Segments.of(call.query_lengths, call.key_lengths, device)) for call in slices.calls)
        among = next((_index(call.among, device) for call in slices.calls if call.among is not None), None)
        gather = Gather(slices.exchange, layout.shard_tokens, ranks.cp, device)
        tokens, keys = layout.shard_lengths[rank], _index(slices.keys, device)
        return ContextPlan(layout.shard_tokens, tokens, mask, ranks, calls, keys, gather, among)

    @property
    def exchanges(self) -> bool:
        """Whether keys go through a pool, on this rank or another."""
        return not self.gather.exchange.silent or len(self.keys) > 0

    def start(
        self, q_tHD: Tensor, k_tGD: Tensor, v_tGD: Tensor, out_tHD: Tensor | None = None, d_out_tHD: Tensor | None = None
    ) -> Started:
        """Begins to bring a head group together. The tensors must not change before it is attended.

        Args:
            q_tHD: queries of this rank's tokens (its `layout.part`), all heads of the group.
            k_tGD: keys.
            v_tGD: values.
            out_tHD: in the backward: attention's output.
            d_out_tHD: and its gradient.

        Raises:
            ValueError: another number of tokens than the layout's.
            UserError: heads that sp ranks cannot share.
        """
        sp = self.ranks.sp
        ranks = 1 if sp is None else sp.size()
        if not q_tHD.shape[0] * ranks == k_tGD.shape[0] * ranks == self.slots:
            raise ValueError(f"{q_tHD.shape[0]} queries and {k_tGD.shape[0]} keys for a part of {self.slots // ranks} slots")
        split = HeadSplit(q_tHD.shape[1], k_tGD.shape[1], ranks)
        kv: Two = self._to_heads(k_tGD, split.replicas), self._to_heads(v_tGD, split.replicas)
        q = self._to_heads(q_tHD)
        outputs: Two | None = None
        if out_tHD is not None and d_out_tHD is not None:
            outputs = self._to_heads(out_tHD), self._to_heads(d_out_tHD.to(out_tHD.dtype))
        if not self.exchanges:
            return Started(split, q, kv, None, outputs)
        # With sp the device waits here for the heads: they are this exchange's input.
        k, v = kv[0].land(), kv[1].land()
        pool = self.gather.bring(k, v)
        # What is sent is a copy. Of own keys the call on them alone reads some: they get memory of their own, and that of all
        # is free: 1 GB of the 0.6B shape at 1,048,576 tokens on two ranks, 0.5 of this group and 0.5 of the next.
        local = next((call.keys for call, _ in self.calls if call.local), None)
        own = None if local is None else (OnTheWay(k[local].clone()), OnTheWay(v[local].clone()))
        return Started(split, q, own, pool, outputs)

    def attend(
        self, started: Started, scoring: Scoring, sink_H: Tensor | None = None, kernels: tuple[Kernel, ...] = KERNELS
    ) -> tuple[OnTheWay, Tensor]:
        """Attention of a head group; with sp its output is on its way to the tokens' ranks.

        Args:
            started: from `start`.
            scoring: with the window of this plan's mask.
            sink_H: the sinks of the group's query heads.
            kernels: what may compute it.

        Returns:
            Output [t, H, D] of this rank's tokens, all heads of the group; log-sum-exp in natural logarithm, [H, slots] of the
            heads that this rank attended, H / sp of them. It goes into the backward as it is.
        """
        self._check(scoring)
        q = started.queries()
        sink = self._own_sinks(started.split, sink_H, q.dtype)
        whole: tuple[Tensor, Tensor] | None = None
        for call, segments, k, v in self._calls(started):
            rows = call.queries
            kernel, settled = settle(q[rows], k, v, replace(scoring, window=call.window), kernels=kernels, segments=segments)
            part = forward_with(kernel, q[rows], k, v, sink, settled, segments)
            whole = part if self._alone else whole or self._empty(q)
            if not self._alone:
                whole[0][rows], whole[1][:, rows] = part
            del part, k, v
        out, lse = whole or self._empty(q)
        return self._to_tokens(out), lse

    def attend_backward(
        self,
        started: Started,
        lse_HT: Tensor,
        scoring: Scoring,
        sink_H: Tensor | None = None,
        kernels: tuple[Kernel, ...] = KERNELS,
    ) -> Going:
        """Gradients of a head group from what `attend` returned; they are on their way to the tokens' ranks.

        Args:
            started: from `start`, with output and gradient.
            lse_HT: log-sum-exp from `attend`.
            scoring: as in `attend`.
            sink_H: as in `attend`.
            kernels: as in `attend`.
        """
        self._check(scoring)
        q, (out, d_out) = started.queries(), started.outputs()
        sp, split, sums = self.ranks.sp, started.split, lse_HT.dtype
        sink = self._own_sinks(split, sink_H, q.dtype)
        d_sink = None if sink is None else torch.zeros_like(sink)
        found, kv_dtype = Gradients(), sums if split.replicas > 1 else q.dtype
        for call, segments, k, v in self._calls(started):
            rows = call.queries
            kernel, settled = settle(q[rows], k, v, replace(scoring, window=call.window), kernels=kernels, segments=segments)
            dq, dk, dv, d_sink_part = backward_with(
                kernel, d_out[rows], q[rows], k, v, out[rows], lse_HT[:, rows], sink, settled, segments
            )
            if d_sink is not None and d_sink_part is not None:
                d_sink += d_sink_part
            if self._alone:
                # Ranks that share a KV head add up what they send.
                k_home, v_home = (self._to_tokens(part.to(kv_dtype), split.replicas) for part in (dk, dv))
                return Going(self._all_sinks(split, d_sink), self._to_tokens(dq), (k_home, v_home), sp, split)
            found.add(call, dq, dk, dv, None if call.among is None else self.among)
            del dq, dk, dv, k, v
        del out, d_out
        dq, like_GD = found.queries(q), q.new_empty(0, split.rounds, q.shape[2])
        d_kv: OnTheWay | KeyGradients
        if self.exchanges:
            d_pool = found.pool(self.gather.exchange.pool_tokens, self.keys, like_GD, sums)
            d_kv = KeyGradients(self.slots, like_GD, kv_dtype, found.own(), self.gather.take_home(d_pool))
        else:
            whole = KeyGradients(self.slots, like_GD, kv_dtype, found.own()).land()
            d_kv = OnTheWay(whole) if sp is None else to_tokens(whole, sp, split.replicas)
        return Going(self._all_sinks(split, d_sink), self._to_tokens(dq), d_kv, sp, split)

    def _calls(self, started: Started) -> Iterator[tuple[Call, Segments, Tensor, Tensor]]:
        """The calls with their keys and values; what has been brought is waited for when the first call wants it."""
        copied: tuple[Tensor, Tensor] | None = None
        for call, segments in self.calls:
            keys = call.keys
            if call.local:
                k, v = started.own()
                keys = slice(None) if self.exchanges else keys  # `start` has cut them out
            else:
                if copied is None:
                    pool = started.pool()
                    copied = pool[:, 0].index_select(0, self.keys), pool[:, 1].index_select(0, self.keys)
                    del pool
                k, v = copied
                if call.among is not None:
                    # The last call: what only those before it have read goes, and nothing was there twice beside a kernel.
                    assert self.among is not None
                    copied = None
                    k = k.index_select(0, self.among)
                    v = v.index_select(0, self.among)
            yield call, segments, k[keys], v[keys]
            del k, v
        started.end()

    @property
    def _alone(self) -> bool:
        """Whether one call is all there is to do: its results are the group's, and nothing is copied."""
        if self.exchanges or len(self.calls) != 1:
            return False
        call, _ = self.calls[0]
        return call.queries == call.keys == slice(0, self.slots)

    def _empty(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp to be filled, 0 in padding slots."""
        out, lse = torch.empty_like(q), q.new_empty(q.shape[1], self.slots, dtype=_sums(q.dtype))
        out[self.tokens :], lse[:, self.tokens :] = 0, 0
        return out, lse

    def _check(self, scoring: Scoring) -> None:
        if (scoring.window or None) != self.mask.window:
            raise ValueError(f"a layer with a window of {scoring.window}, and a plan for one of {self.mask.window}")

    def _to_heads(self, x_tHD: Tensor, replicas: int = 1) -> OnTheWay:
        """This rank's heads of all tokens of the shard."""
        return OnTheWay(x_tHD) if self.ranks.sp is None else to_heads((x_tHD,), self.ranks.sp, replicas).after(only)

    def _to_tokens(self, x_THD: Tensor, replicas: int = 1) -> OnTheWay:
        """All heads of this rank's tokens."""
        return OnTheWay(x_THD) if self.ranks.sp is None else to_tokens(x_THD[:, None], self.ranks.sp, replicas).after(only)

    def _own_heads(self, heads: int) -> slice:
        """The query heads of a group that this rank attends."""
        if self.ranks.sp is None:
            return slice(0, heads)
        share = heads // self.ranks.sp.size()
        first = dist.get_rank(self.ranks.sp) * share
        return slice(first, first + share)

    def _own_sinks(self, split: HeadSplit, sink_H: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        # In fp32, so that the gradients of several calls are summed in it.
        return None if sink_H is None else sink_H.detach()[self._own_heads(split.heads)].to(_sums(dtype))

    def _all_sinks(self, split: HeadSplit, d_sink: Tensor | None) -> Tensor | None:
        if d_sink is None:
            return None
        d_sinks = d_sink.new_zeros(split.heads)
        d_sinks[self._own_heads(split.heads)] = d_sink
        return d_sinks


def _index(runs: Runs, device: torch.device | str) -> Tensor:
    """Every element of runs on the device, in 32 bits: 4 bytes a key beside the 512 of one KV head."""
    return torch.from_numpy(runs.index().astype(np.int32)).to(device)


def _sums(dtype: torch.dtype) -> torch.dtype:
    """What gradients and log-sum-exps are summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@final
class RowContext:
    """How one row lies on this rank, and the plans of its layers, each made when a layer of its kind first asks.

    On one rank (`RowRanks()`) it says that a row is packed: each document sees itself only. It travels through a model's
    forward as the keyword argument `megaspan_row`, down to every layer and its attention.
    """

    def __init__(self, layout: TokenLayout, ranks: RowRanks, device: torch.device | str) -> None:
        """Nothing is made yet.

        Args:
            layout: where the row's tokens are.
            ranks: who shares it.
            device: where the layers compute.
        """
        self.layout, self.ranks, self.device = layout, ranks, device
        self.asked = 0
        self._plans: dict[Mask, ContextPlan] = {}
        self._cp_rank = dist.get_rank(ranks.cp) if ranks.cp is not None else 0
        self._part = layout.part(dist.get_rank(ranks.sp) if ranks.sp is not None else 0)

    @property
    def slots(self) -> int:
        """Slots of this rank outside attention: what every tensor of the model is long here."""
        return self._part.stop - self._part.start

    @property
    def tokens(self) -> int:
        """How many of them hold a token, always the first ones; may be 0."""
        return min(max(self.layout.shard_lengths[self._cp_rank] - self._part.start, 0), self.slots)

    @cached_property
    def positions(self) -> Tensor:
        """Positions in their documents, int64 [slots] on the device, 0 for padding."""
        return self._on_device(self.layout.positions(self._cp_rank))

    @cached_property
    def token_index(self) -> Tensor:
        """Number of the token in the whole row, int64 [slots] on the device; past the row's end for padding."""
        index = self.layout.token_index(self._cp_rank)
        return self._on_device(np.where(index < 0, self.layout.tokens, index))

    def shard(self, row: np.ndarray, fill: int | float = 0) -> np.ndarray:
        """This rank's part [slots, ...] of something that the whole row has for each token.

        Args:
            row: [tokens of the row, ...].
            fill: what stands in padding slots: -100 for labels.
        """
        return self.layout.shard(row, self._cp_rank, fill)[self._part]

    def plan(self, mask: Mask) -> ContextPlan:
        """The plan of layers with this mask. `asked` counts these calls: every attention of a forward makes one."""
        self.asked += 1
        if mask not in self._plans:
            self._plans[mask] = ContextPlan.of(self.layout, mask, self.ranks, self.device)
        return self._plans[mask]

    def _on_device(self, shard: Ints) -> Tensor:
        return torch.from_numpy(shard[self._part].copy()).to(self.device)
