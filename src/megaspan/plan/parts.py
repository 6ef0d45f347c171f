"""What a plan is written in: parts with their arithmetic, and the levers that bytes depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Place = Literal["device", "host", "disk"]


@dataclass(frozen=True)
class Part:
    """One line of a plan: what it is, how many bytes, where they lie, and the arithmetic."""

    name: str
    bytes: int
    place: Place
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
        offload: and that waits in host memory.
        keep_on_device: except that of the last layers.
        chunked: the loss is taken in tiles.
        loss_tile: tokens of such a tile.
        streamed: layers run in tiles, attention forward once.
        layer_tile: tokens of token-wise work in such a layer at once.
        kv_heads_per_call: KV heads in one call of its attention's backward; None for all.
        keep_outputs: last layers whose attention output is kept; the others run attention forward again.
        adapter: trained LoRA parameters; 0 trains all weights.
        adapter_inputs: input channels of the adapted projections of one layer.
    """

    tokens: int
    gpu: bool
    compute_bytes: int
    masters: bool
    checkpoint: bool
    offload: bool
    keep_on_device: int
    chunked: bool
    loss_tile: int
    streamed: bool = False
    layer_tile: int = 16_384
    kv_heads_per_call: int | None = None
    keep_outputs: int = 0
    adapter: int = 0
    adapter_inputs: int = 0

    @property
    def place(self) -> Place:
        """Where tensors of the computation lie."""
        return "device" if self.gpu else "host"

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
