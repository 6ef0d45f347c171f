"""Parameters that FSDP2 has sharded (DTensor): hooks come, and updates work on the local shard, wherever states lie."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megaspan.optimizer import Optimizer
from megaspan.optimizer.trained import local
from megaspan.plan.states import StatePlan
from tests.optimizer.support import PLACES, settings, small_pieces  # noqa: F401


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A world of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def run(states: StatePlan | None, mesh: DeviceMesh | None) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    if mesh is not None:
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    optimizer, norms = Optimizer(model, settings(max_grad_norm=0.0), 3, states=states), []
    for step in range(3):
        for number in range(2):
            if number == 1:
                optimizer.last_row()
            rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + number))
            model(rows).square().mean().backward()
        norms.append(optimizer.clip(0.0))
        assert optimizer.updating == (states is not None and states.gradients == "update")
        optimizer.step()
        optimizer.zero_grad()
    return norms, [local(parameter).detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("states", [None, *PLACES])
def test_a_sharded_model_trains_as_a_whole_one(states: StatePlan | None, mesh: DeviceMesh) -> None:
    norms, weights = run(states, mesh)
    want_norms, want_weights = run(None, None)
    assert norms == want_norms
    assert all(torch.equal(one, other) for one, other in zip(weights, want_weights, strict=True))
