"""On a GPU: the fused step needs no memory of its own, and does what the CPU's does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from megaspan.config import SFTConfig
from megaspan.optimizer import NonFiniteGradient, Optimizer
from megaspan.plan.states import StatePlan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_step_takes_no_memory(dtype: str | None) -> None:
    """18 bytes a parameter with masters, 8 without, and nothing beside them while the step runs and clips."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        model = torch.nn.Sequential(*[torch.nn.Linear(8192, 8192, bias=False, dtype=torch.bfloat16) for _ in range(8)])
    count = sum(parameter.numel() for parameter in model.parameters())
    optimizer = Optimizer(model, SFTConfig(max_length=8, dtype=dtype), 3)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 8192, device="cuda", dtype=torch.bfloat16)).float().square().sum().backward()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.clip(1e-3)
        optimizer.step()
    extra = torch.cuda.max_memory_allocated() - held
    size = (torch.cuda.memory_allocated() - before) / count
    print(f"\n{dtype}: {size:.2f} bytes a parameter, {extra / 2**20:.1f} MiB more in a step")
    assert extra < 16 * 2**20
    assert size == pytest.approx(8 if dtype else 18, rel=0.02)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_the_gpu_does_what_the_cpu_does(optim: str) -> None:
    """fp32 masters after five clipped steps with the same gradients, to fp32 rounding."""
    settings = SFTConfig(max_length=8, learning_rate=1e-2, weight_decay=0.1, optim=optim, warmup_steps=2)
    here = torch.nn.Linear(64, 64).bfloat16()
    there = copy.deepcopy(here).cuda()
    optimizers = [Optimizer(here, settings, 5), Optimizer(there, settings, 5)]
    for step in range(5):
        gradient = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))
        for model, optimizer in zip((here, there), optimizers, strict=True):
            model.weight.grad = gradient.to(model.weight.device)
            norm = optimizer.clip(1.0)
            assert norm == pytest.approx(float(gradient.norm()), rel=1e-6)
            optimizer.step()
            optimizer.zero_grad()
    masters = [optimizer.state_dict()["parameters"]["weight"]["master"].cpu() for optimizer in optimizers]
    torch.testing.assert_close(masters[1], masters[0], rtol=1e-6, atol=1e-7)


def _train(states: StatePlan | None, **options: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any], list[float], int]:
    """Three steps of three rows; weights, state, norms and the peak of device memory above the weights in the last step."""
    torch.manual_seed(0)
    settings = SFTConfig(max_length=8, learning_rate=1e-2, weight_decay=0.1, **options)
    model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096, dtype=torch.bfloat16) for _ in range(8)]).cuda()
    held = torch.cuda.memory_allocated()
    optimizer = Optimizer(model, settings, 3, states=states)
    norms = []
    for step in range(3):
        torch.cuda.reset_peak_memory_stats()
        for number in range(3):
            if number == 2:
                optimizer.last_row()
            generator = torch.Generator("cuda").manual_seed(10 * step + number)
            rows = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16, generator=generator)
            for layer in model:
                rows = layer(rows)
                rows.register_hook(lambda gradient: optimizer.settle())  # the trainer calls it at every layer
            rows.float().square().mean().backward()
        norms.append(optimizer.clip(settings.max_grad_norm))
        optimizer.step()
        optimizer.zero_grad()
    peak = torch.cuda.max_memory_allocated() - held
    state = {
        name: {key: value.detach().cpu().clone() for key, value in one.items()}
        for name, one in optimizer.state_dict()["parameters"].items()
    }
    weights = {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}
    if states is not None and states.moments == "host":
        assert all(moment.is_pinned() for moment in optimizer._trained["0.weight"].moments.values())
    optimizer.close()
    return weights, state, norms, peak


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("gradients", ["device", "host", "update"])
@pytest.mark.parametrize("moments", ["device", "host"])
def test_every_place_gives_the_same_bits(dtype: str | None, gradients: Any, moments: Any) -> None:
    """The fused kernel goes element by element, whole or in pieces; copies on side streams lose nothing."""
    options = {"dtype": dtype, "max_grad_norm": 0.0 if gradients == "update" else 1e-3}
    want_weights, want_state, want_norms, want_peak = _train(None, **options)
    weights, state, norms, peak = _train(StatePlan(gradients, moments), **options)
    print(
        f"\n{dtype} {gradients} {moments}: {peak / 2**20:.0f} MiB above the weights, all on the device {want_peak / 2**20:.0f}"
    )
    assert norms == want_norms
    for name, weight in want_weights.items():
        assert torch.equal(weights[name], weight), name
        for key, value in want_state[name].items():
            assert torch.equal(state[name][key], value), (name, key)
    if (gradients, moments) == ("host", "host"):
        assert peak < want_peak


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
def test_a_bad_gradient_stops_the_updates_of_the_backward(optim: str) -> None:
    """The fused kernel heeds a flag on the device: no wait for the device inside the backward, and nothing changed after it."""
    with torch.device("cuda"):
        model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, dtype=torch.bfloat16) for _ in range(3)])
    settings = SFTConfig(max_length=8, max_grad_norm=0.0, optim=optim)
    optimizer = Optimizer(model, settings, 3, states=StatePlan("update", "host"))
    before = copy.deepcopy(model)
    model[1].weight.register_hook(lambda gradient: gradient * float("nan"))
    optimizer.last_row()

    def step() -> None:
        model(torch.randn(8, 512, device="cuda", dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.clip(0.0)
        optimizer.step()

    with pytest.raises(NonFiniteGradient, match="had been updated in this backward"):
        step()
    assert not torch.equal(model[2].bias, before[2].bias)
    assert torch.equal(model[1].weight, before[1].weight)
    assert torch.equal(model[0].weight, before[0].weight)


def test_eight_bits_on_the_gpu() -> None:
    """Moments of 8 bits move the weights nearly as those of 32 do, and the same on the host as on the device."""
    pytest.importorskip("bitsandbytes")
    full = _train(None, max_grad_norm=0.0)[0]
    eight = _train(None, optim="adamw_8bit", max_grad_norm=0.0)[0]
    for states in (StatePlan("host", "host"), StatePlan("update", "host"), StatePlan("update", "device")):
        moved = _train(states, optim="adamw_8bit", max_grad_norm=0.0)[0]
        assert all(torch.equal(moved[name], weight) for name, weight in eight.items())
    for name, weight in full.items():
        assert (eight[name].float() - weight.float()).norm() < 0.05 * weight.float().norm(), name
