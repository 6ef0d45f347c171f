"""The norm behind the last layer in tiles: same result, same gradients, no tensor of the row but input and output."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from megaspan.layers.reuse import Reuse
from megaspan.layers.tokenwise import tile_final_norm
from tests.models import FAMILIES, tiny


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("frozen", [False, True])
def test_output_and_gradients_are_the_modules_own(family, frozen):
    plain = tiny(family)
    model = copy.deepcopy(plain)
    norm = tile_final_norm(model, 5, Reuse())
    assert not isinstance(norm, str)
    own = plain.get_submodule(next(name for name, module in model.named_modules() if module is norm))
    x = torch.randn(1, 13, plain.config.hidden_size)
    results = []
    for module in (own, norm):
        module.requires_grad_(not frozen)
        leaf = x.clone().requires_grad_()
        y = module(leaf * 1.0)
        (y * torch.linspace(-1, 2, y.numel()).view_as(y)).sum().backward()
        results.append((y.detach(), leaf.grad, *(parameter.grad for parameter in module.parameters())))
    for got, want in zip(results[1], results[0], strict=True):
        if want is None:
            assert got is None
        else:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_no_temporary_is_as_long_as_the_row():
    model = tiny("qwen3")
    norm: Any = tile_final_norm(model, 8, Reuse())
    x, sizes = torch.randn(1, 640, 64, requires_grad=True), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for each in out if isinstance(out, tuple | list) else [out]:
                if isinstance(each, torch.Tensor) and each.numel() == x.numel() and each._base is None:
                    sizes.append(str(function))
            return out

    with Watch():
        norm(x * 1.0).sum().backward()
    made = [name for name in sizes if "empty" in name or "_to_copy" in name or "mul" in name]
    assert len(made) <= 4, made  # x * 1.0, its gradient, y, and dx where the expanded gradient of a sum cannot be reused


def test_a_model_without_one_norm_behind_its_layers_is_left_alone():
    model = tiny("qwen3")
    model.model.second_norm = copy.deepcopy(model.model.norm)
    assert tile_final_norm(model, 5, Reuse()) == "the model has 2 norms behind its layers"


class _CountingNorm(LlamaRMSNorm):
    """A norm that counts its calls, which no trial may change."""

    calls = 0

    def forward(self, hidden_states):
        self.calls += 1
        return super().forward(hidden_states)


class _BlockNorm(LlamaRMSNorm):
    """Mixes a token with the one 64 before it."""

    def forward(self, hidden_states):
        return super().forward(hidden_states + 0.1 * F.pad(hidden_states, (0, 0, 64, 0))[:, : hidden_states.shape[1]])


def test_a_norm_that_is_not_known_to_work_token_by_token_runs_whole():
    model = tiny("qwen3")
    model.model.norm.__class__ = _BlockNorm
    assert tile_final_norm(model, 5, Reuse()) == "_BlockNorm does not work token by token"
    assert "forward" not in model.model.norm.__dict__
    model.model.norm.__class__ = _CountingNorm
    norm = tile_final_norm(model, 5, Reuse())
    assert norm is model.model.norm
    assert norm.calls == 0
    norm(torch.randn(1, 13, 64))
    assert norm.calls == 3


def test_a_norm_with_a_weight_that_is_made_before_each_forward_gives_the_same_gradients():
    """Pruning computes it from another one; its graph goes back once."""
    plain = tiny("qwen3")
    model = copy.deepcopy(plain)
    norm = tile_final_norm(model, 5, Reuse())
    x, found = torch.randn(1, 13, 64), []
    for module in (plain.model.norm, norm):
        prune.l1_unstructured(module, "weight", 20)
        module(x).square().sum().backward()
        found.append(module.weight_orig.grad)
    assert torch.equal(*found)
    assert found[0].any()
