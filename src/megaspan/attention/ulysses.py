"""Which heads an sp rank works on: the arithmetic of splitting attention by heads (Ulysses, DeepSpeed 2023).

Outside attention each of sp_size ranks holds a run of the shard's tokens with all heads; inside, all of the shard's tokens
with some heads. Rounds keep that small: in round j every rank works on its j-th KV head with the query heads that share it.
Its q, k and v are 1.5 GiB of Qwen3-8B at 1,048,576 tokens, where all four heads of an sp_size of 2 would be 6 GiB at once.
With more ranks than KV heads a KV head is sent to several ranks, each with some of its query heads, and their gradients of it
are summed.
"""

from __future__ import annotations

from dataclasses import dataclass

from megaspan.config.parallel import check_heads


@dataclass(frozen=True)
class HeadSplit:
    """The heads of one layer over sp ranks.

    Attributes:
        heads: query heads H of the layer.
        kv_heads: KV heads G of the layer; query head h uses KV head h // (H / G).
        sp_size: ranks that split them.

    Raises:
        UserError: a size that does not split these heads, with those that do.
    """

    heads: int
    kv_heads: int
    sp_size: int

    def __post_init__(self) -> None:
        check_heads(self.sp_size, self.heads, self.kv_heads)

    @property
    def rounds(self) -> int:
        """KV heads that a rank works on, one after the other."""
        return max(1, self.kv_heads // self.sp_size)

    @property
    def replicas(self) -> int:
        """Ranks that work on the same KV head."""
        return max(1, self.sp_size // self.kv_heads)

    def kv_head(self, sp_rank: int, round: int) -> int:
        """The KV head of a rank in a round."""
        return sp_rank // self.replicas * self.rounds + round

    def query_heads(self, sp_rank: int, round: int) -> range:
        """The query heads of a rank in a round; all use its KV head of that round."""
        each = self.heads // (self.sp_size * self.rounds)
        first = (sp_rank * self.rounds + round) * each
        return range(first, first + each)

    def sharers(self, sp_rank: int) -> range:
        """The ranks whose gradients of this rank's KV heads are summed, itself among them."""
        first = sp_rank // self.replicas * self.replicas
        return range(first, first + self.replicas)
