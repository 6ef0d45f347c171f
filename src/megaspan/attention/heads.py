"""From some tokens of all heads to all tokens of some heads and back, over the sp ranks (Ulysses, DeepSpeed 2023).

Outside attention an sp rank holds a run of its shard's tokens, inside the whole shard in its share of a head group's heads. A
group of sp KV heads is a round: every rank works on one KV head with its query heads. What a rank attends at once is then as
much as one KV head, whatever sp is. The heads of a rank are neighbours in the group, so groups stay plain ranges of heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from megaspan.attention.onway import OnTheWay


def to_heads(parts_tHD: Sequence[Tensor], group: dist.ProcessGroup, replicas: int = 1) -> OnTheWay:
    """Begins to bring this rank's heads of all tokens; all sp ranks call it.

    Args:
        parts_tHD: tensors of this rank's tokens, [t, H, D] each, that travel together.
        group: the sp ranks, in the order of their tokens.
        replicas: ranks that get the same head: a KV head that several ranks share.

    Returns:
        [sp * t, parts, H * replicas / sp, D].
    """
    ranks, (tokens, heads, size) = group.size(), parts_tHD[0].shape
    share = heads * replicas // ranks
    leaves = parts_tHD[0].new_empty(ranks, tokens, len(parts_tHD), share, size)
    for number, part in enumerate(parts_tHD):
        each = part.unsqueeze(2).expand(-1, -1, replicas, -1).reshape(tokens, ranks, share, size)
        leaves[:, :, number] = each.transpose(0, 1)
    arrives = leaves.new_empty(ranks * tokens, len(parts_tHD), share, size)
    return OnTheWay(arrives, leaves, dist.all_to_all_single(arrives, leaves.flatten(0, 1), group=group, async_op=True))


def to_tokens(parts_TpHD: Tensor, group: dist.ProcessGroup, replicas: int = 1) -> OnTheWay:
    """Begins to bring all heads of this rank's tokens; all sp ranks call it.

    Args:
        parts_TpHD: this rank's heads of all tokens, [sp * t, parts, heads, D].
        group: the sp ranks.
        replicas: ranks that share a head; what they have of it is summed. Give fp32 then.

    Returns:
        [t, parts, heads * sp / replicas, D].
    """
    ranks, (tokens, *rest) = group.size(), parts_TpHD.shape
    leaves = parts_TpHD.contiguous()
    arrives = leaves.new_empty(tokens, *rest)

    def in_order(arrived: Tensor) -> Tensor:
        heads = arrived.unflatten(0, (ranks, tokens // ranks)).permute(1, 2, 0, 3, 4).flatten(2, 3)
        return heads if replicas == 1 else heads.unflatten(2, (-1, replicas)).sum(3)

    return OnTheWay(arrives, leaves, dist.all_to_all_single(arrives, leaves, group=group, async_op=True), in_order)
