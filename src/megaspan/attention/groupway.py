"""A head group on its way to where it is attended, and its gradients on the way back (`context.py`).

What waits here is of one head group: 0.13 GB of queries, 0.5 GB of keys and values of Qwen3-8B at 1,048,576 tokens on each of
8 ranks, 1 GB of their gradients in fp32. It is let go of as soon as it is read, and made when a call has brought it. Of the
0.6B shape at 1,048,576 tokens on 2 ranks, two KV heads at once, that is 4.2 GB of 31 less at the peak of a step: own keys that
no call reads, gradients of them that nobody has yet, keys' gradients in fp32 whole, sums that have arrived and been read.
"""

from __future__ import annotations

from typing import TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor

from megaspan.attention.heads import to_tokens
from megaspan.attention.onway import OnTheWay
from megaspan.attention.slices import Call
from megaspan.attention.ulysses import HeadSplit
from megaspan.plan.over_ranks import CAST_ELEMENTS

Two: TypeAlias = tuple[OnTheWay, OnTheWay]
"""Each on its own: two that travel together would be copied apart when they arrive."""


@final
class Started:
    """A head group on its way; good for one `attend` or `attend_backward`."""

    def __init__(self, split: HeadSplit, q: OnTheWay, own: Two | None, pool: OnTheWay | None, outputs: Two | None) -> None:
        self.split = split
        self._q, self._own, self._pool, self._outputs = q, own, pool, outputs

    def queries(self) -> Tensor:
        """The group's queries [slots, H, D]."""
        return self._q.land()

    def own(self) -> tuple[Tensor, Tensor]:
        """Keys and values that the call on this rank's own keys reads, [keys, G, D] each, once: the memory is the caller's."""
        assert self._own is not None
        (k, v), self._own = self._own, None
        return k.land(), v.land()

    def outputs(self) -> tuple[Tensor, Tensor]:
        """Attention's output and its gradient [slots, H, D], once."""
        if self._outputs is None:
            raise ValueError("this head group was started without attention's output and its gradient")
        outputs, self._outputs = self._outputs, None
        return outputs[0].land(), outputs[1].land()

    def pool(self) -> Tensor:
        """What was brought, once: the memory is the caller's."""
        assert self._pool is not None
        pool, self._pool = self._pool.land(), None
        return pool

    def end(self) -> None:
        """Waits for what no call has read: its memory is free when this is dropped."""
        if self._pool is not None:
            self._pool.land()


@final
class Gradients:
    """Gradients of a head group's calls, as they came: their sums are made when the last kernel has let go of its scratch.

    A call's dk and dv are 2 bytes a number, their sums 4; beside a kernel there is room for the smaller of the two only.
    """

    def __init__(self) -> None:
        self._dq: list[tuple[slice, Tensor]] = []
        self._of_pool: list[tuple[slice | Tensor, Tensor, Tensor]] = []
        self._own: tuple[slice, Tensor, Tensor] | None = None

    def add(self, call: Call, dq: Tensor, dk: Tensor, dv: Tensor, among: Tensor | None = None) -> None:
        """One call's; with `among` its keys are at these places among those copied."""
        self._dq.append((call.queries, dq))
        if call.local:
            self._own = call.keys, dk, dv
        else:
            self._of_pool.append((call.keys if among is None else among, dk, dv))

    def queries(self, q_THD: Tensor) -> Tensor:
        """dq of all slots, once, 0 where no call had a query; made like `q_THD` where it is not one call's."""
        parts, self._dq = self._dq, []
        if len(parts) == 1 and len(parts[0][1]) == len(q_THD):
            return parts[0][1]
        dq, stop = torch.empty_like(q_THD), 0
        for rows, part in sorted(parts, key=lambda each: each[0].start):
            dq[stop : rows.start], dq[rows], stop = 0, part, rows.stop
        dq[stop:] = 0
        return dq

    def pool(self, tokens: int, keys: Tensor, like_GD: Tensor, sums: torch.dtype) -> Tensor:
        """Sums of the pool's keys and values, [tokens, 2, G, D], once; 0 where no call read any.

        Args:
            tokens: size of the pool.
            keys: slots of the pool that the calls' keys are, none of them twice in one call.
            like_GD: any tensor [..., G, D] where gradients are.
            sums: what they are summed in.
        """
        parts, self._of_pool = self._of_pool, []
        d_pool = like_GD.new_zeros(tokens, 2, *like_GD.shape[-2:], dtype=sums)
        step = max(1, CAST_ELEMENTS // d_pool[:1, 0].numel())
        while parts:
            part, *gradients = parts.pop(0)
            places = keys[part] if isinstance(part, slice) else keys.index_select(0, part)
            for number, gradient in enumerate(gradients):
                for some, there in zip(gradient.split(step), places.split(step), strict=True):
                    d_pool[:, number].index_add_(0, there.long(), some.to(sums))  # added in order, it wants 64 bits
        return d_pool

    def own(self) -> tuple[slice, Tensor, Tensor] | None:
        """Slots, dk and dv of the call on own keys, once; None without one."""
        own, self._own = self._own, None
        return own


@final
class KeyGradients:
    """dk and dv of this rank's shard, [slots, 2, G, D]: what comes home from the pool, and those of the call on own keys.

    Args:
        slots: of the shard.
        like: any tensor [..., G, D] where gradients are.
        dtype: what they are given out in.
        own: slots, dk and dv of the call on own keys.
        home: sums that are on their way; None where nothing is.
    """

    def __init__(
        self,
        slots: int,
        like: Tensor,
        dtype: torch.dtype,
        own: tuple[slice, Tensor, Tensor] | None,
        home: OnTheWay | None = None,
    ) -> None:
        self._size, self._like, self._own, self._home = (slots, 2), like[:0], own, home
        self._dtype = dtype

    def land(self) -> Tensor:
        """All of them, 0 in padding slots, once."""
        own, home, self._own, self._home = self._own, self._home, None, None
        sums = None if home is None else home.land()  # before there is more: what was sent is let go of
        d_kv = self._like.new_zeros(*self._size, *self._like.shape[1:], dtype=self._dtype)
        if sums is not None:
            d_kv[: len(sums)] = sums
        if own is not None:
            # A slot belongs to a cut document or to a whole one: where both have something, what came home is zero.
            keys, *parts = own
            d_kv[keys, 0], d_kv[keys, 1] = parts
        return d_kv


@final
class Going:
    """Gradients of a head group on their way to the ranks that hold the tokens.

    Attributes:
        d_sink_H: of this rank's queries and heads, zeros for other heads of the group; a sum over all ranks of the row is the
            gradient. In fp32 (fp64). None without sinks.
    """

    def __init__(
        self,
        d_sink_H: Tensor | None,
        dq: OnTheWay,
        d_kv: OnTheWay | Two | KeyGradients,
        sp: dist.ProcessGroup | None,
        split: HeadSplit,
    ) -> None:
        self.d_sink_H = d_sink_H
        self._going: tuple[OnTheWay, OnTheWay | Two | KeyGradients] | None = (dq, d_kv)
        self._sp, self._split = sp, split

    def land(self) -> tuple[Tensor, Tensor, Tensor]:
        """dq [t, H, D], dk and dv [t, G, D] of this rank's tokens, in q's dtype, once. All ranks call it."""
        assert self._going is not None, "the gradients of a head group land once"
        (going, keys), self._going = self._going, None
        dq = going.land()
        if isinstance(keys, tuple):
            dk, dv = (part.land() for part in keys)
            return dq, dk.to(dq.dtype), dv.to(dq.dtype)
        d_kv = keys.land()
        if isinstance(keys, KeyGradients) and self._sp is not None:
            d_kv = to_tokens(d_kv, self._sp, self._split.replicas).land()
        dk, dv = d_kv.to(dq.dtype).unbind(1)
        return dq, dk, dv


def only(x_T1HD: Tensor) -> Tensor:
    """A tensor that travelled alone."""
    return x_T1HD[:, 0]
