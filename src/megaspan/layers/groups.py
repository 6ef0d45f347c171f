"""Head groups: some KV heads with the query heads that share them, projected and attended together.

Attention works head by head, so a row's q, k and v need never be there for all heads at once: 12.9 GB for an 8B layer at
1,048,576 tokens, 1.6 GB for one KV head of eight. Source: UPipe (untied Ulysses) does the same between ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megaspan.attention import AttentionCall


@dataclass(frozen=True)
class HeadGroup:
    """Some KV heads and the query heads that share them."""

    kv: slice
    heads: slice

    def of(self, call: AttentionCall) -> AttentionCall:
        """The part of an attention call that is this group's."""
        if self == ALL_HEADS:
            return call
        q, k, v = call.q_BHTD[:, self.heads], call.k_BGSD[:, self.kv], call.v_BGSD[:, self.kv]
        sink = None if call.sink_H is None else call.sink_H[self.heads]
        return replace(call, q_BHTD=q, k_BGSD=k, v_BGSD=v, sink_H=sink)


ALL_HEADS = HeadGroup(slice(None), slice(None))


def head_groups(call: AttentionCall, kv_heads: int | None) -> tuple[HeadGroup, ...]:
    """Groups of `kv_heads` KV heads; the last one may be smaller. One group of all where None."""
    count, share = call.k_BGSD.shape[1], call.q_BHTD.shape[1] // call.k_BGSD.shape[1]
    if kv_heads is None or kv_heads >= count:
        return (ALL_HEADS,)
    starts = range(0, count, kv_heads)
    return tuple(HeadGroup(slice(s, s + kv_heads), slice(s * share, (s + kv_heads) * share)) for s in starts)


def side_by_side(parts: list[Tensor]) -> Tensor:
    """What head groups have, [1, t, heads, D] each, as all heads have it."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
