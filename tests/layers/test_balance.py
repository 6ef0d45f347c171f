"""The balance loss from sums against each family's own function on whole logits."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megaspan.attention.context import RowRanks
from megaspan.layers.balance import Balance, balance_loss, knows_balance, probability_sum, real_tokens, sums_of
from megaspan.layers.routing import Router, find_router, watching
from tests.gloo import run_ranks
from tests.layers.test_routing import BALANCED, MOE, distance, rows, run, tiled
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


@pytest.mark.parametrize("family", BALANCED)
def test_padding_is_left_out_as_by_transformers_mask(family: str) -> None:
    """Counts, probabilities and their divisor; in pieces, one of which is padding alone, and its gradient is zero."""
    function = sys.modules[type(tiny(family)).__module__].load_balancing_loss_func
    logits = [(3 * torch.randn(37, 6, generator=torch.Generator().manual_seed(seed))).requires_grad_() for seed in (1, 2)]
    real_t = real_tokens(37, torch.device("cpu"), None, 8)
    assert real_t is not None
    balance = Balance(2, 2, None, real_t)
    for layer in logits:
        for tokens in (slice(0, 17), slice(17, 33), slice(33, 37)):
            balance.add(sums_of(layer[tokens], 2, real_t[tokens]))
    got, want = balance.loss(37), function(tuple(logits), 6, 2, real_t[None].long())
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    for left, right in zip(torch.autograd.grad(got, logits), torch.autograd.grad(want, logits), strict=True):
        assert distance(left, right) < 1e-6
        assert not left[29:].any()


def test_bf16_logits_are_summed_in_fp32() -> None:
    logits = torch.randn(20_000, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    got = sums_of(logits, 1)
    torch.testing.assert_close(got.probabilities_X.double(), logits.double().softmax(-1).sum(0), rtol=1e-6, atol=0)


# --- ranks that share a row -------------------------------------------------------------------------------------------------


def _way(way: str, layer: Any, x: torch.Tensor, balance: Balance) -> None:
    """A layer's MLP in one of the ways in which a model runs it."""
    router = find_router(layer)
    assert isinstance(router, Router)
    if way == "streamed":
        tiled(layer, x.requires_grad_(), (3, 2), balance)
        return
    with torch.set_grad_enabled(way != "evaluated"), watching(layer, router, balance):
        if way == "evaluated":
            for part in x.split(3, dim=1):
                run(layer.mlp, part)
        else:
            checkpoint(layer.mlp, x, use_reentrant=False)


def _ranks_share(rank: int, world: int) -> None:
    """Rows of 11 tokens in 8 slots of each of two ranks, 5 of them padding; and of 2 tokens, all of the first rank."""
    groups = (RowRanks(cp=dist.group.WORLD), RowRanks(sp=dist.group.WORLD))
    for way, length, slots, ranks in (
        ("streamed", 11, 8, groups[0]), ("checkpointed", 11, 8, groups[1]), ("evaluated", 11, 8, groups[0]),
        ("streamed", 2, 2, groups[1]), ("checkpointed", 2, 2, groups[0]),
    ):  # fmt: skip
        model: Any = tiny("qwen3_moe")
        whole, shared = Balance(2, 2), None
        padded = torch.cat([rows(length), 3 * rows(world * slots - length, seed=9)], dim=1)
        mine = padded[:, rank * slots : (rank + 1) * slots]
        here = min(slots, max(0, length - rank * slots))
        places = torch.arange(rank * slots, (rank + 1) * slots)
        row: Any = SimpleNamespace(
            tokens=here, slots=slots, ranks=ranks, layout=SimpleNamespace(tokens=length), token_index=places
        )
        real_t = real_tokens(slots, torch.device("cpu"), row)
        assert (real_t is None) == (here == slots)
        shared = Balance(2, 2, row, real_t)
        losses, gradients = [], []
        for x, balance, count in ((rows(length), whole, length), (mine, shared, slots)):
            for layer in model.model.layers:
                _way(way, layer, x.clone(), balance)
            loss = balance.loss(count)
            model.zero_grad()
            if way != "evaluated":
                loss.backward()
                gradients.append(torch.stack([layer.mlp.gate.weight.grad.clone() for layer in model.model.layers]))
            losses.append(loss.detach().clone())
        for ours in (losses[1], *gradients[1:]):
            dist.all_reduce(ours)
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
        assert way == "evaluated" or distance(gradients[1], gradients[0]) < 1e-5, (way, length)
        assert int(shared.over_row(torch.tensor(rank + 1))) == 3


def test_shares_of_ranks_are_the_balance_loss_of_the_row() -> None:
    run_ranks(2, [(_ranks_share, ())])
