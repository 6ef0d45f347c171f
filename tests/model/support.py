"""Configurations, plans and one plain step, for the tests of this folder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from megaspan.config import SFTConfig
from tests.models import gradients

torch.set_num_threads(1)


def settings(**changes: Any) -> SFTConfig:
    return SFTConfig(**({"max_length": 256} | changes))


def plan(*, checkpoint: bool = True, offload: bool = True, keep: int = 1, tile: int = 7) -> Any:
    """A plan by hand: tiles that divide nothing, one layer input kept where two layers are."""
    return SimpleNamespace(
        checkpoint=checkpoint,
        offload=offload,
        keep_on_device=keep if offload else 0,
        loss_tile_tokens=tile,
        host_limit=2**34,
    )


def step(model: torch.nn.Module, **inputs: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one forward and backward."""
    model.zero_grad(set_to_none=True)
    loss = model(**inputs).loss
    loss.backward()
    return float(loss.detach()), gradients(model)
