"""The GPUs that this process sees, and the allocator on them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megaspan import world
from megaspan.human import UserError
from megaspan.world import devices
from megaspan.world.gpu import _visible

GIB = 2**30


@pytest.mark.parametrize(
    ("visible", "names"),
    [(None, "abc"), ("1", "b"), ("2,0", "ca"), ("GPU-b", "b"), ("", ""), ("-1", ""), ("0,9,1", "a"), ("NoDevFiles", "")],
)
def test_visible_devices_are_counted_as_cuda_counts_them(visible, names):
    found = [(f"GPU-{name}", world.Gpu(name, GIB, "1")) for name in "abc"]
    assert "".join(gpu.name for gpu in _visible(found, visible)) == names


def test_a_gpu_that_torch_cannot_use_is_no_silent_cpu_run(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "gpus", lambda: [world.Gpu("NVIDIA H200", 140 * GIB, "570.1")])
    with pytest.raises(UserError, match=r"NVIDIA H200.*use_cpu: true"):
        world.device()
    assert world.device(use_cpu=True) == torch.device("cpu")


def test_no_gpu_leaves_the_environment_alone(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    environ: dict[str, str] = {}
    assert not world.set_allocator(environ).expandable
    assert environ == {}


ALLOCATE = """
import torch
from megaspan import world
{before}
setting = world.set_allocator()
torch.zeros(2**28, device="cuda")
print(world.allocator().expandable, world.allocator().reason, torch.cuda.memory_stats()["num_alloc_retries"])
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("environ", "before", "expected"),
    [
        ({}, "", "True set by megaspan"),
        ({}, "torch.zeros(1, device='cuda')", "True set by megaspan"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "", "False your own PYTORCH_CUDA_ALLOC_CONF"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}, "", "False your own PYTORCH_ALLOC_CONF"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "", "True"),
    ],
)
def test_the_live_allocator_has_the_setting(environ, before, expected):
    clean = {name: value for name, value in os.environ.items() if name not in world.ALLOCATOR_VARIABLES}
    code = ALLOCATE.format(before=before)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=clean | environ)
    assert ran.stdout.startswith(expected)


@pytest.mark.gpu
def test_the_driver_and_torch_see_the_same_gpus():
    import torch

    found = world.gpus()
    assert len(found) == torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(0)
    assert found[0].name == properties.name
    assert abs(found[0].total_bytes - properties.total_memory) < 2 * GIB
