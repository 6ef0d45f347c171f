"""Parameters that FSDP2 has sharded (DTensor): hooks come, and updates work on the local shard, wherever states lie."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megaspan.human import UserError
from megaspan.optimizer import Optimizer
from megaspan.optimizer.eight_bit import EightBitAdamW
from megaspan.optimizer.state import load_state
from megaspan.optimizer.trained import Entry, Trained, local
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


def test_moments_of_8_bits_are_cut_with_whole_scales_or_not_at_all(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of 256 weights shares a scale: where rows end within one, ranks could not share it, and 32 bits are kept."""
    monkeypatch.setattr(EightBitAdamW, "__init__", lambda *_: None)
    rule = EightBitAdamW(settings(), torch.device("cpu"))

    def entries(rows: int, columns: int, sharded: bool) -> dict[str, Entry]:
        layer = torch.nn.Linear(columns, rows, bias=False)
        if sharded:
            fully_shard(layer, mesh=mesh)
        return rule.entries(Trained("w", layer.weight, 0.0, tied=False, embedding=False, step=torch.zeros(())))

    assert entries(64, 512, True)["absmax1"] == Entry((128,), torch.float32, 256)
    assert entries(64, 512, True)["state1"].dtype == torch.uint8
    assert entries(64, 500, False)["state1"].dtype == torch.uint8
    assert entries(64, 500, True).keys() == {"state1", "state2"}
    assert entries(64, 500, True)["state1"].dtype == torch.float32


def test_moments_of_other_bits_are_told_from_another_optimizer(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process alone has 8 bits where ranks have 32: the one does not continue the other, whatever `optim` says."""
    monkeypatch.setattr(EightBitAdamW, "__init__", lambda *_: None)
    rule = EightBitAdamW(settings(), torch.device("cpu"))
    alone, shared = (torch.nn.Linear(500, 64, bias=False) for _ in range(2))
    fully_shard(shared, mesh=mesh)
    trained = [
        {"w": Trained("w", each.weight, 0.0, tied=False, embedding=False, step=torch.zeros(()))} for each in (alone, shared)
    ]
    states = [
        {"w": {key: torch.zeros(each["w"].whole_shape(entry)) for key, entry in rule.entries(each["w"]).items()}}
        for each in trained
    ]
    for here, saved, words in (
        (trained[1], states[0], r"in 8 bits, and this run in 32: .*Resume in one process, as that run was"),
        (trained[0], states[1], r"in 32 bits, and this run in 8: .*Resume on several ranks, as that run was"),
    ):
        with pytest.raises(UserError, match=words):
            load_state(here, saved, rule, lambda each: None)
