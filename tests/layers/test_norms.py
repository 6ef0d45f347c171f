"""The fused norm stands in only for what it is equal to."""

from __future__ import annotations

import copy

import pytest
import torch

from megaspan.layers.norms import fuse_norms, unfuse_norms
from tests.models import assert_same_gradients, batch, gradients, tiny


@pytest.mark.parametrize(
    ("family", "norms"),
    [("llama", 2), ("qwen3", 4), ("olmo2", 4), ("granite", 2), ("gpt_oss", 2), ("gemma2", 0), ("gemma3", 0)],
)
def test_norms_that_are_the_plain_one_are_fused_and_change_nothing(family, norms):
    """Gemma's norms multiply by one plus the weight: they stay."""
    plain = tiny(family)
    model = copy.deepcopy(plain)
    changed = fuse_norms(model.model.layers)
    assert len(changed) == 2 * norms
    data = batch(17)
    for one in (plain, model, copy.deepcopy(model)):
        one.zero_grad()
        one(**data, use_cache=False).loss.backward()
        assert_same_gradients(gradients(one), gradients(plain), 1e-4)
    unfuse_norms(changed)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_copied_model_uses_its_own_weights():
    model = tiny("qwen3")
    fuse_norms(model.model.layers)
    twin = copy.deepcopy(model)
    ids = batch(9)["input_ids"]
    with torch.no_grad():
        before = model(ids).logits
        twin.model.layers[0].input_layernorm.weight.mul_(2)
        assert torch.equal(model(ids).logits, before)
        assert not torch.equal(twin(ids).logits, before)


def test_bf16_is_no_farther_from_fp32_than_the_written_out_norm():
    norm = tiny("llama", dtype=torch.bfloat16).model.layers[0].input_layernorm
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = copy.deepcopy(norm).float()(x.float())
    plain = norm(x)
    fuse_norms([norm])
    assert (norm(x).float() - exact).norm() <= (plain.float() - exact).norm()
