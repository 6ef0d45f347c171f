"""The balance loss from sums against each family's own function on whole logits."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from megaspan.layers.balance import balance_loss, knows_balance, probability_sum, sums_of
from tests.layers.test_routing import BALANCED, MOE, distance
from tests.models import tiny


@pytest.mark.parametrize("family", BALANCED)
def test_the_balance_loss_is_the_familys_own_over_layers_and_pieces(family: str) -> None:
    function = sys.modules[type(tiny(family)).__module__].load_balancing_loss_func
    generator = torch.Generator().manual_seed(3)
    whole = [(3 * torch.randn(37, 6, generator=generator)).requires_grad_() for _ in range(3)]
    want = function(tuple(whole), 6, 2)
    found = None
    for logits in whole:
        for part in logits.split((17, 1, 19)):
            found = sums_of(part, 2) if found is None else found + sums_of(part, 2)
    assert found is not None
    assert found.tokens == 3 * 37
    assert int(found.counts_X.sum()) == 3 * 37 * 2
    got = balance_loss(found.probabilities_X, found.counts_X, found.tokens)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    for left, right in zip(torch.autograd.grad(got, whole), torch.autograd.grad(want, whole), strict=True):
        assert distance(left, right) < 1e-6


@pytest.mark.parametrize("family", MOE)
def test_a_loss_that_is_another_is_not_known(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny(family)
    assert knows_balance(model) == (family in BALANCED)
    assert not knows_balance(tiny("llama"))
    module = sys.modules[type(model).__module__]
    own = getattr(module, "load_balancing_loss_func", None)
    for other in (lambda *args: 2 * own(*args), lambda logits, experts: logits):
        monkeypatch.setattr(module, "load_balancing_loss_func", other, raising=False)
        assert not knows_balance(model)


def test_ranks_with_the_counts_of_all_have_shares_of_the_loss() -> None:
    logits = torch.randn(50, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    whole = sums_of(logits, 2)
    shares = [balance_loss(probability_sum(part), whole.counts_X, 50) for part in logits.split((20, 30))]
    want = balance_loss(whole.probabilities_X, whole.counts_X, 50)
    torch.testing.assert_close(sum(shares), want, rtol=1e-6, atol=0)
    (got,), (right,) = torch.autograd.grad(sum(shares), logits, retain_graph=True), torch.autograd.grad(want, logits)
    assert distance(got, right) < 1e-6


def test_bf16_logits_are_summed_in_fp32() -> None:
    logits = torch.randn(20_000, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    got = sums_of(logits, 1)
    torch.testing.assert_close(got.probabilities_X.double(), logits.double().softmax(-1).sum(0), rtol=1e-6, atol=0)
