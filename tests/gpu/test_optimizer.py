"""On a GPU: the fused step needs no memory of its own, and does what the CPU's does."""

from __future__ import annotations

import copy

import pytest
import torch

from megaspan.config import SFTConfig
from megaspan.optimizer import Optimizer

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
