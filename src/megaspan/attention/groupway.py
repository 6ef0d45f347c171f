"""A head group on its way to where it is attended, and its gradients on the way back (`context.py`).

What waits here is of one head group: 0.13 GB of queries, 0.5 GB of keys and values of Qwen3-8B at 1,048,576 tokens on each of
8 ranks. It is let go of as soon as it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, final

import torch.distributed as dist
from torch import Tensor

from megaspan.attention.heads import to_tokens
from megaspan.attention.onway import OnTheWay
from megaspan.attention.slices import Call
from megaspan.attention.ulysses import HeadSplit

Two: TypeAlias = tuple[OnTheWay, OnTheWay]
"""Each on its own: two that travel together would be copied apart when they arrive."""


@final
class Started:
    """A head group on its way; good for one `attend` or `attend_backward`."""

    def __init__(self, split: HeadSplit, q: OnTheWay, kv: Two, pool: OnTheWay | None, outputs: Two | None) -> None:
        self.split = split
        self._q, self._kv, self._pool, self._outputs = q, kv, pool, outputs

    def queries(self) -> Tensor:
        """The group's queries [slots, H, D]."""
        return self._q.land()

    def own(self) -> tuple[Tensor, Tensor]:
        """Keys and values of this rank's own shard, [slots, G, D] each."""
        return self._kv[0].land(), self._kv[1].land()

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


@dataclass(frozen=True, eq=False)
class Gradients:
    """Where the gradients of a head group's calls are summed: queries, own keys and values, and those of the pool if any."""

    dq: Tensor
    d_kv: Tensor
    d_pool: Tensor | None

    def add(self, call: Call, keys: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        """One call's. Only the pool's keys are in several calls, none of them twice in one."""
        self.dq[call.queries] = dq
        if self.d_pool is None or call.local:
            self.d_kv[call.keys, 0], self.d_kv[call.keys, 1] = dk, dv
            return
        for number, gradient in enumerate((dk, dv)):
            self.d_pool[:, number].index_add_(0, keys[call.keys], gradient.to(self.d_pool.dtype))


@dataclass(frozen=True, eq=False)
class Going:
    """Gradients of a head group on their way to the ranks that hold the tokens.

    Attributes:
        d_sink_H: of this rank's queries and heads, zeros for other heads of the group; a sum over all ranks of the row is the
            gradient. In fp32 (fp64). None without sinks.
    """

    d_sink_H: Tensor | None
    _dq: OnTheWay
    _d_kv: OnTheWay | Two
    _home: OnTheWay | None
    _sp: dist.ProcessGroup | None
    _split: HeadSplit

    def land(self) -> tuple[Tensor, Tensor, Tensor]:
        """dq [t, H, D], dk and dv [t, G, D] of this rank's tokens, in q's dtype, once. All ranks call it."""
        dq = self._dq.land()
        if not isinstance(self._d_kv, OnTheWay):
            dk, dv = (part.land() for part in self._d_kv)
            return dq, dk.to(dq.dtype), dv.to(dq.dtype)
        d_kv, sp = self._d_kv.land(), self._sp
        if self._home is not None:
            home = self._home.land()
            # A slot belongs to a cut document or to a whole one: one of the two is zero here, so nothing is rounded twice.
            d_kv[: len(home)] += home.to(d_kv.dtype)
            if sp is not None:
                d_kv = to_tokens(d_kv, sp, self._split.replicas).land()
        dk, dv = d_kv.to(dq.dtype).unbind(1)
        return dq, dk, dv


def only(x_T1HD: Tensor) -> Tensor:
    """A tensor that travelled alone."""
    return x_T1HD[:, 0]
