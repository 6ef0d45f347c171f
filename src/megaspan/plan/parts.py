"""What a plan is written in: parts with their arithmetic, and the levers that bytes depend on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from megaspan.plan.keep import KeepPolicy, Place
from megaspan.plan.packed import PackedRow
from megaspan.plan.ranks import RankSizes
from megaspan.plan.states import StatePlan


class Part(NamedTuple):
    """One line of a plan: what it is, how many bytes, where they lie, and the arithmetic.

    A tuple, which is made in a third of a dataclass's time: a search makes some 100,000 of them.
    """

    name: str
    bytes: int
    place: Place
    formula: str


def bytes_of(parts: Iterable[Part]) -> int:
    """The sum of their bytes."""
    return sum([part.bytes for part in parts])


@dataclass(frozen=True)
class SecondsPart:
    """One summand of a step's seconds."""

    name: str
    seconds: float
    formula: str


@dataclass(frozen=True)
class Settings:
    """The levers that memory depends on.

    Attributes:
        tokens: tokens of the longest row.
        gpu: the step runs on a GPU.
        compute_bytes: 2 for bf16, 4 for fp32.
        masters: fp32 masters beside bf16 weights, and fp32 gradients.
        checkpoint: little is kept of each layer between forward and backward.
        offload: and that may wait in host memory.
        chunked: the loss is taken in tiles.
        loss_tile: tokens of such a tile.
        keep: what each layer keeps, and where; None for everything, on the host with `offload`.
        streamed: layers run in tiles, attention forward once.
        layer_tile: tokens of token-wise work in such a layer at once.
        tiled_mlp: layers run whole but for their MLP, which runs in such tiles.
        kv_heads_per_call: KV heads that a rank attends at once; None for all. sp ranks take as many each.
        stream_back: what waits on the host comes back tile by tile, not whole a layer ahead.
        project_ahead: and the next head group is made of it while this one is attended.
        states: where gradients and AdamW's states lie.
        eight_bit: AdamW's moments have 8 bits.
        rows: of one window: the gradients of several are summed.
        adapter: trained LoRA parameters; 0 trains all weights.
        adapter_inputs: input channels of the adapted projections of one layer.
        ranks: who shares row and states.
        packed: the documents of the longest row, where they are known and do not see each other.
        packs: rows will hold such documents, and which is not known yet.
    """

    tokens: int
    gpu: bool
    compute_bytes: int
    masters: bool
    checkpoint: bool
    offload: bool
    chunked: bool
    loss_tile: int
    keep: KeepPolicy | None = None
    streamed: bool = False
    layer_tile: int = 16_384
    tiled_mlp: bool = False
    kv_heads_per_call: int | None = None
    stream_back: bool = False
    project_ahead: bool = False
    states: StatePlan = field(default_factory=StatePlan)
    eight_bit: bool = False
    rows: int = 1
    adapter: int = 0
    adapter_inputs: int = 0
    ranks: RankSizes = field(default_factory=RankSizes)
    packed: PackedRow | None = None
    packs: bool = False

    @cached_property
    def slots(self) -> int:
        """Tokens of the row on this rank outside of attention."""
        return self.ranks.slots(self.tokens)

    def per_shard(self, size: int) -> int:
        """This rank's part of bytes that are cut over all ranks that share the states."""
        return -(-size // self.ranks.shard)

    @property
    def over_shards(self) -> str:
        """The same in a formula."""
        return f" / {self.ranks.shard} ranks" if self.ranks.shard > 1 else ""

    @property
    def place(self) -> Place:
        """Where tensors of the computation lie."""
        return "device" if self.gpu else "host"

    @cached_property
    def streams(self) -> bool:
        """Whether layers run in tiles now: without checkpointing every layer keeps all it computes."""
        return self.streamed and self.checkpoint

    @property
    def mlp_tile(self) -> int:
        """Tokens that a layer's MLP works on at once."""
        return min(self.layer_tile, self.slots) if self.streams or self.tiled_mlp else self.slots

    def policy(self, layers: int) -> KeepPolicy:
        """What each layer keeps."""
        if self.keep is not None:
            return self.keep
        return KeepPolicy.everything(layers, "host" if self.offload else "device", outputs=self.streams)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one gradient."""
        return 4 if self.masters else self.compute_bytes

    @property
    def trained(self) -> str:
        """Precision of the weights in words."""
        if self.compute_bytes == 4:
            return "fp32"
        return "bf16 compute, fp32 masters" if self.masters else "pure bf16 (updates are rounded)"
