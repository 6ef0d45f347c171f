"""Keys and values of other cp ranks, and their gradients on the way home: the collectives of an `Exchange`.

Keys and values travel together, token by token, [tokens, 2, G, D]: one collective a head group. It is an all-gather of the
first slots of every shard, or the all-to-all of a window's halo. Gradients come home in fp32: eight ranks' parts of one key,
rounded to bf16 before they are added, would be the error that other trainers have published. That is twice the bytes of the
way out, behind an arithmetic two and a half times as long.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from megaspan.attention.exchange import Exchange
from megaspan.attention.onway import OnTheWay


@final
class Gather:
    """One rank's exchange, with its indices on the device; made once for a row and a kind of layer."""

    def __init__(self, exchange: Exchange, slots: int, group: dist.ProcessGroup | None, device: torch.device | str) -> None:
        """Copies the indices to the device.

        Args:
            exchange: what is sent and received.
            slots: slots of a shard, padding included.
            group: the ranks that split the row's tokens, in the order of the layout; None for one.
            device: where keys and values lie.
        """
        self.exchange, self.slots, self.group = exchange, slots, group
        self._sends = torch.from_numpy(exchange.sends.index()).to(device)

    def bring(self, k_tGD: Tensor, v_tGD: Tensor) -> OnTheWay:
        """Begins to fill the pool, [pool_tokens, 2, G, D], from this rank's keys and values. All ranks call it."""
        exchange = self.exchange
        if exchange.gathered and not exchange.silent:
            mine = _together(k_tGD[: exchange.gathered], v_tGD[: exchange.gathered])
            pool = mine.new_empty(exchange.pool_tokens, *mine.shape[1:])
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renames it
            return OnTheWay(pool, mine, gather(pool, mine, group=self.group, async_op=True))
        pool = k_tGD.new_empty(exchange.pool_tokens, 2, *k_tGD.shape[1:])
        _together(k_tGD, v_tGD, pool[: self.slots])
        if exchange.silent:
            return OnTheWay(pool)
        leaves = pool.index_select(0, self._sends)
        receive, send = list(exchange.receive_tokens), list(exchange.send_tokens)
        work = dist.all_to_all_single(pool[self.slots :], leaves, receive, send, group=self.group, async_op=True)
        return OnTheWay(pool, leaves, work)

    def take_home(self, d_pool_s2GD: Tensor) -> OnTheWay:
        """Begins to send every gradient in the pool to the rank of its key; all ranks call it.

        Returns:
            Sums of all ranks' gradients of this rank's first slots, [gathered or slots, 2, G, D].
        """
        exchange = self.exchange
        if exchange.silent:
            return OnTheWay(d_pool_s2GD)
        if exchange.gathered:
            return _sum_to_owners(d_pool_s2GD, exchange.gathered, self.group)
        mine, foreign = d_pool_s2GD[: self.slots], d_pool_s2GD[self.slots :]
        arrives = foreign.new_empty(len(self._sends), *foreign.shape[1:])
        receive, send = list(exchange.receive_tokens), list(exchange.send_tokens)
        work = dist.all_to_all_single(arrives, foreign, send, receive, group=self.group, async_op=True)
        return OnTheWay(arrives, d_pool_s2GD, work, lambda arrived: self._add(mine, arrived))

    def _add(self, mine: Tensor, arrived: Tensor) -> Tensor:
        # Receiver by receiver: no slot is twice in one share, so the order of additions is fixed, on a GPU too.
        for start, stop in pairwise(accumulate(self.exchange.send_tokens, initial=0)):
            if stop > start:
                mine.index_add_(0, self._sends[start:stop], arrived[start:stop])
        return mine


def _together(k_tGD: Tensor, v_tGD: Tensor, into: Tensor | None = None) -> Tensor:
    """Keys and values token by token, [t, 2, G, D]."""
    into = k_tGD.new_empty(k_tGD.shape[0], 2, *k_tGD.shape[1:]) if into is None else into
    into[:, 0] = k_tGD
    into[:, 1] = v_tGD
    return into


def _sum_to_owners(d_pool: Tensor, slots: int, group: dist.ProcessGroup | None) -> OnTheWay:
    """Each rank's own part of the sum of all ranks' pools: reduce-scatter.

    gloo has no reduce-scatter in every torch that we run on. There each rank sends all parts to their owners, who add them in
    the order of ranks: as many bytes, more memory.
    """
    if d_pool.is_cuda:
        arrives = d_pool.new_empty(slots, *d_pool.shape[1:])
        reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # torch 2.13 renames it
        return OnTheWay(arrives, d_pool, reduce(arrives, d_pool, group=group, async_op=True))
    parts = torch.empty_like(d_pool)
    work = dist.all_to_all_single(parts, d_pool, group=group, async_op=True)
    return OnTheWay(parts, d_pool, work, lambda arrived: arrived.unflatten(0, (-1, slots)).sum(0))
