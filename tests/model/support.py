"""Configurations, plans and one plain step, for the tests of this folder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from megaspan.config import SFTConfig
from megaspan.plan.keep import KeepPolicy, LayerKeep, Place
from tests.models import gradients

torch.set_num_threads(1)


def settings(**changes: Any) -> SFTConfig:
    return SFTConfig(**({"max_length": 256} | changes))


def plan(
    *,
    checkpoint: bool = True,
    offload: bool = True,
    keep: int = 1,
    tile: int = 7,
    streamed: bool = True,
    heads: int | None = None,
    outputs: int = 2,
    layers: int = 2,
) -> Any:
    """A plan by hand: tiles that divide nothing, one layer input kept where two layers are.

    Args:
        checkpoint, offload: as in the plan.
        keep: layer inputs that stay on the device.
        tile: tokens of logits at once.
        streamed: layers run in tiles of 9 tokens; False checkpoints them whole.
        heads: KV heads in one call of attention's backward.
        outputs: last layers that keep attention's output.
        layers: of the model.
    """
    places: list[Place] = ["host" if offload and index < layers - keep else "device" for index in range(layers)]
    kept = (LayerKeep(place, place if index >= layers - outputs else None) for index, place in enumerate(places))
    return SimpleNamespace(
        checkpoint=checkpoint,
        offload=offload,
        keep=KeepPolicy(tuple(kept)),
        loss_tile_tokens=tile,
        host_limit=2**34,
        host_for_layers=2**34,
        streamed=streamed,
        layer_tile_tokens=9,
        kv_heads_per_call=heads,
        stream_back=False,
        project_ahead=False,
        tokens=256,
        sizes=SimpleNamespace(cp=1, sp=1),
        model=SimpleNamespace(layers=layers),
    )


def step(model: torch.nn.Module, **inputs: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one forward and backward."""
    model.zero_grad(set_to_none=True)
    loss = model(**inputs).loss
    loss.backward()
    return float(loss.detach()), gradients(model)
