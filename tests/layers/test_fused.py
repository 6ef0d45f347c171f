"""The fused formulas against transformers' modules, bit for bit on the CPU, and their compiled form."""

from __future__ import annotations

import shutil

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from megaspan.layers.fused import Fused, RmsNorm, rms_norm
from megaspan.layers.halves import rms_norm_of

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "form"), [(Qwen3RMSNorm, "plain"), (Olmo2RMSNorm, "late"), (Gemma3RMSNorm, "plus one")])
def test_norms_have_the_bits_of_the_modules(kind, form, dtype):
    torch.manual_seed(0)
    norm = kind(16, eps=3e-3)
    norm.weight.data.normal_()
    norm.to(dtype)
    assert rms_norm_of(norm) == RmsNorm(3e-3, form)
    x = torch.randn(7, 3, 16).to(dtype)
    assert torch.equal(rms_norm(x, norm.weight, 3e-3, form), norm(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
def test_rotation_and_norm_have_the_bits_of_the_module(dtype, rows):
    """With one table for all rows and with one each; written to a place of their own or not."""
    torch.manual_seed(0)
    norm = Qwen3RMSNorm(16).to(dtype)
    q, k = torch.randn(rows, 9, 4, 16).to(dtype), torch.randn(rows, 9, 2, 16).to(dtype)
    for tables_rows in {1, rows}:
        cos, sin = torch.randn(2, tables_rows, 9, 16).to(dtype)
        want = apply_rotary_pos_emb(norm(q), norm(k), cos, sin, unsqueeze_dim=2)
        for into in (None, (torch.empty_like(q), torch.empty_like(k))):
            got = Fused().norm_and_rotate(
                q, k, (cos, sin), (norm.weight, norm.weight), RmsNorm(norm.variance_epsilon, "plain"), dtype, into
            )
            assert all(torch.equal(left, right) for left, right in zip(got, want, strict=True))
            assert into is None or (torch.equal(into[0], want[0]) and torch.equal(into[1], want[1]))


@needs_compiler
def test_rows_of_many_lengths_share_one_compilation():
    """R32: forward and backward of eleven lengths are one graph a formula, equal to the formula itself."""
    from torch._dynamo.utils import counters

    counters.clear()
    torch.manual_seed(0)
    compiled, plain = Fused(("cpu",)), Fused(())
    weights = (torch.randn(16).requires_grad_(), torch.randn(16).requires_grad_())
    for tokens in (24, 7, 129, 1000, 3, 2, 1, 513, 16, 32, 4):
        q, k = torch.randn(1, tokens, 4, 16, requires_grad=True), torch.randn(1, tokens, 2, 16, requires_grad=True)
        table = torch.randn(2, 1, tokens + 5, 16)[:, :, 3 : 3 + tokens]
        gate, up = torch.randn(2, 1, tokens, 24, requires_grad=True)
        found = []
        for fused in (compiled, plain):
            rotated = fused.norm_and_rotate(q, k, (table[0], table[1]), weights, RmsNorm(1e-6, "plain"), torch.float32, None)
            outputs = (*rotated, fused.gated(gate, up, "silu"))
            leaves = [q, k, *weights, gate, up]
            weighted = sum((part * part.detach().cos()).sum() for part in outputs)
            found.append([*outputs, *torch.autograd.grad(weighted, leaves)])
        for left, right in zip(*found, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)
    assert compiled.reason is None
    assert compiled.compiled == 2
    assert counters["stats"]["unique_graphs"] == 2


def test_a_compiler_that_fails_costs_no_result(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no compiler here\nand a long story")

    monkeypatch.setattr(torch, "compile", broken)
    fused = Fused(("cpu",))
    gate, up = torch.randn(2, 1, 5, 8)
    assert torch.equal(fused.gated(gate, up, "silu"), torch.nn.functional.silu(gate) * up)
    assert fused.reason == "not compiled: RuntimeError: no compiler here"
    assert fused.compiled == 0


def test_a_lack_of_memory_is_not_taken_for_a_lack_of_a_compiler(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: full)
    with pytest.raises(torch.OutOfMemoryError):
        Fused(("cpu",)).gated(*torch.randn(2, 1, 5, 8), "silu")
