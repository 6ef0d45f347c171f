"""Saving from a GPU: through one staging buffer, with the device's own random numbers."""

import time
from pathlib import Path

import pytest
import torch

from megaspan.store import load_checkpoint, save_checkpoint
from megaspan.store.tensors import TensorFile, write_tensors
from megaspan.store.writer import CHUNK_BYTES, STAGED
from tests.store.training import Masters, start

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def peak_host_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def test_a_save_takes_one_staging_buffer_of_host_memory_whatever_the_size(tmp_path, capsys):
    """R88. 4 GiB of weights; more than the buffer each, one of them transposed."""
    tensors = {f"w{number}": torch.randn(2**28, device="cuda").bfloat16() for number in range(8)}
    tensors["t"] = torch.randn(1000, 3000, device="cuda").T
    assert tensors["w0"].numel() * 2 > 4 * STAGED * CHUNK_BYTES
    write_tensors(tmp_path / "warm.safetensors", {"x": torch.zeros(1, device="cuda")})
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_host_bytes()
    begun = time.monotonic()
    write_tensors(tmp_path / "w.safetensors", tensors)
    seconds = time.monotonic() - begun
    assert peak_host_bytes() - before < 2 * STAGED * CHUNK_BYTES
    with capsys.disabled():
        print(f" {4 / seconds:.2f} GiB/s ", end="")
    file = TensorFile(tmp_path / "w.safetensors")
    assert all(torch.equal(file[name], tensor.cpu()) for name, tensor in tensors.items())


def train(model, optimizer, steps):
    losses = []
    for _ in range(steps):
        tokens = torch.randint(128, (1, 24), device="cuda")
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_resumed_run_draws_the_same_numbers_on_the_device(tmp_path):
    def fresh():
        model, _ = start()
        model = model.cuda()
        return model, Masters(model)

    torch.cuda.manual_seed(3)
    model, optimizer = fresh()
    train(model, optimizer, 2)
    path = save_checkpoint(tmp_path, model=model, optimizer=optimizer, progress={"step": 2})
    want = train(model, optimizer, 2)
    torch.cuda.manual_seed(4)
    model, optimizer = fresh()
    load_checkpoint(path, model, optimizer)
    assert all(master.device.type == "cuda" for master in optimizer.masters)
    assert train(model, optimizer, 2) == pytest.approx(want, rel=1e-3)
