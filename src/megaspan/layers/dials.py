"""How much of a streamed layer is worked on at once, and the count of what has run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerPlan:
    """How much of a layer is worked on at once; the planner's choice, from shapes and memory.

    Attributes:
        tile_tokens: tokens of token-wise work at once; a row that is no longer runs in one piece.
        kv_heads_per_call: KV heads (with their query heads) that this rank attends at once, None for all. Of one group q, k, v,
            their gradients and the kernel's fp32 sums are there at a time, 16 bytes for each of tokens x (H + 2 G) x D; where a
            group is exchanged between ranks, q, k, v of the next one too.
        stream_back: what waits on the host is read tile by tile and group by group, not whole a layer ahead.
        project_ahead: and q, k, v of the next head group are made of it, and its output fetched, while this one is attended.
        sp_size: ranks that share the heads of a row; so many groups' heads are in one exchange.
        fused_norms: norms that are plain RMSNorms run as torch's fused operation (`norms.py`).
        fused: q/k norms with rotary embedding, and the MLP's gated product, run as fused passes where a layer has the common
            form (`halves.py`).
    """

    tile_tokens: int = 16384
    kv_heads_per_call: int | None = None
    stream_back: bool = False
    sp_size: int = 1
    fused_norms: bool = True
    fused: bool = True
    project_ahead: bool = False


@dataclass
class Counts:
    """Attention kernels run so far, the read-back of "attention runs forward once", and calls that did not stream.

    Attributes:
        forwards, backwards: attention kernels run forward and backward, one a layer, row and step.
        passed_on: calls that took ordinary checkpointing.
        reused: backwards whose gradient overwrote the incoming one.
    """

    forwards: int = 0
    backwards: int = 0
    passed_on: int = 0
    reused: int = 0
