"""On a GPU: what goes to the disk comes back as it was, whole or by tiles, while the device computes beside it.

`PYTHONPATH=src python3 -m pytest tests/gpu/test_disk.py -m gpu -s` prints what it measures; under a minute on an H200 with a
disk of 1 GB/s.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from megaspan.memory.disk import DiskTier
from megaspan.memory.diskspeed import measure
from megaspan.memory.offload import LayerInputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

LAYERS, TOKENS, WIDTH = 8, 32_768, 4_096  # 256 MiB each


def computing(seconds: float) -> None:
    """Keeps the device busy, and its allocator handing out memory that was let go of."""
    a = torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(max(1, int(seconds / 0.0017))):
        a @ a


def value(layer: int, number: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(100 * number + layer)
    return torch.randint(-1000, 1000, (1, TOKENS, WIDTH), device="cuda", generator=generator).bfloat16()


@pytest.mark.parametrize("by_tiles", [False, True])
def test_bytes_come_back_and_host_memory_stays_two_layers(tmp_path: Path, by_tiles: bool) -> None:
    """Three steps; sources are overwritten as soon as the store allows it, so a late copy or write would be found out."""
    speed = measure(tmp_path)
    size = 2 * TOKENS * WIDTH
    layer_seconds = 1.5 * size / min(speed.write_bytes_per_second, speed.read_bytes_per_second)
    disk = DiskTier(tmp_path)
    inputs = LayerInputs(torch.device("cuda"), disk=disk, in_flight=None)
    inputs.reserve(0, size, on_disk=LAYERS)
    disk.reserve([size] * LAYERS)
    host = inputs.stats().host_bytes
    assert host == 2 * size
    cuts = [slice(at, at + 8192) for at in range(0, TOKENS, 8192)]
    took = []
    for number in range(3):
        began = time.perf_counter()
        inputs.start_row(0)
        saved = []
        for layer in range(LAYERS):
            hidden = value(layer, number)
            saved.append(inputs.pack(hidden, "disk"))
            computing(layer_seconds)
            inputs.land()
            del hidden
            torch.empty(1, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16).fill_(float("nan"))
        for layer in reversed(range(LAYERS)):
            for ahead in saved[max(layer - 2, 0) : layer + 1][::-1]:
                inputs.recall(ahead)
            if by_tiles:
                got = torch.cat(list(inputs.tiles(saved[layer], cuts)), dim=1)
                inputs.release(saved[layer])
            else:
                got = inputs.unpack(saved[layer])
            computing(layer_seconds)
            assert torch.equal(got, value(layer, number)), (number, layer)
            del got
        torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
        assert disk.stats().used == 0
        assert inputs.stats().host_bytes == host
    stats = inputs.stats()
    print(f"{speed}; steps {[round(each, 2) for each in took]} s, waited {stats.seconds_waiting:.2f} s in all; {disk.stats()}")
    inputs.close()
    disk.close()
