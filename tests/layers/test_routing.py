"""Experts are chosen once: own tile loops over the MoE blocks of transformers, against the blocks run whole."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from megaspan.layers.balance import Balance
from megaspan.layers.routing import Router, Routing, find_router, watching
from megaspan.layers.tile import tiles
from tests.models import HIDDEN, randomise, tiny

MOE = ("qwen3_moe", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "glm4_moe")
BALANCED = tuple(family for family in MOE if family != "glm4_moe")  # transformers has no balance loss for it


def layers(family: str) -> list[Any]:
    """Decoder layers with experts."""
    return [layer for layer in tiny(family).model.layers if find_router(layer) is not None]


def run(mlp: nn.Module, x: Tensor) -> Tensor:
    out = mlp(x)
    return out if isinstance(out, Tensor) else out[0]


class _Tiled(torch.autograd.Function):
    """What the streamed layer does with a layer's MLP: x to y and the sum of probabilities, tile by tile, both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any, routing: Routing, sizes: tuple[int, int], *parameters: Tensor) -> Any:
        y = torch.empty_like(x)
        for tokens in tiles(x.shape[1], sizes[0]):
            with routing.recording(layer, tokens):
                y[:, tokens] = run(layer.mlp, x[:, tokens])
        ctx.layer, ctx.routing, ctx.size, ctx.parameters = layer, routing, sizes[1], parameters
        ctx.save_for_backward(x)
        return y, x.new_empty(0) if routing.sums is None else routing.sums.probabilities_X

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,), (dy, d_probabilities_X) = ctx.saved_tensors, grads
        dx, totals = torch.empty_like(x), [torch.zeros_like(parameter) for parameter in ctx.parameters]
        for tokens in reversed(tiles(x.shape[1], ctx.size)):
            leaf = x[:, tokens].detach().requires_grad_()
            with torch.enable_grad(), ctx.routing.replaying(ctx.layer, tokens) as probabilities:
                out = run(ctx.layer.mlp, leaf)
            outputs, gradients = [out], [dy[:, tokens]]
            if probabilities:
                outputs, gradients = [*outputs, *probabilities], [*gradients, d_probabilities_X]
            found = torch.autograd.grad(outputs, [leaf, *ctx.parameters], gradients, allow_unused=True)
            dx[:, tokens] = found[0]
            for total, part in zip(totals, found[1:], strict=True):
                if part is not None:
                    total += part
        return dx, None, None, None, *totals


def tiled(layer: Any, x: Tensor, sizes: tuple[int, int], balance: Balance | None = None) -> Tensor:
    """The MLP of a layer in tiles of `sizes` tokens, forward and backward."""
    router = find_router(layer)
    assert isinstance(router, Router)
    asked = () if balance is None else (balance.top_k, balance.real_t)
    routing = Routing(router, x.shape[1], *asked)
    y, probabilities_X = _Tiled.apply(x, layer, routing, sizes, *layer.mlp.parameters())
    if balance is not None:
        routing.report(balance, probabilities_X)
    return y


def rows(length: int, seed: int = 0) -> Tensor:
    return torch.randn(1, length, HIDDEN, generator=torch.Generator().manual_seed(seed))


def distance(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm().clamp(min=1e-12))


def router_module(layer: Any) -> nn.Module:
    router = find_router(layer)
    assert isinstance(router, Router)
    return layer.get_submodule(router.name)


def seen_by_experts(layer: Any) -> list[Tensor]:
    """A list to which the experts of a layer add the indices that they are called with."""
    seen: list[Tensor] = []
    layer.mlp.experts.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    return seen


@pytest.mark.parametrize("family", MOE)
def test_routers_are_found_and_what_they_keep_is_counted(family: str) -> None:
    found = [find_router(layer) for layer in tiny(family).model.layers]
    name = "mlp.router" if family == "gpt_oss" else "mlp.gate"
    if family == "glm4_moe":
        # Two scores of each of 4 groups, 2 groups and 2 experts.
        assert found[0] is None
        assert isinstance(found[1], Router)
        assert (found[1].name, found[1].bytes_per_token) == (name, 4 * 2 + 2 + 2)
    else:
        assert found == [None if family == "qwen2_moe" else Router(name, 2, 0, 4), Router(name, 2, 0, 4)]


@pytest.mark.parametrize("family", ["llama", "gemma3", "cohere"])
def test_a_dense_layer_has_none(family: str) -> None:
    assert find_router(tiny(family).model.layers[0]) is None


def test_the_trial_draws_no_random_numbers() -> None:
    model: Any = tiny("mixtral", router_jitter_noise=0.1)
    random = torch.get_rng_state()
    assert find_router(model.model.layers[0]) == Router("mlp.gate", 2, 0, 4)
    assert torch.equal(torch.get_rng_state(), random)


def test_what_is_not_known_has_a_reason() -> None:
    config = AutoConfig.for_model(
        "phimoe", hidden_size=32, intermediate_size=24, num_hidden_layers=1, vocab_size=32, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, pad_token_id=None, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    reason = find_router(AutoModelForCausalLM.from_config(config).model.layers[0])
    assert isinstance(reason, str)
    assert "PhimoeSparseMoeBlock chooses by max" in reason

    (layer, *_) = layers("qwen3_moe")
    own = layer.mlp.gate.forward
    layer.mlp.gate.forward = lambda hidden: (own(hidden), hidden.topk(2, dim=0))[0]
    assert "chooses among something else" in str(find_router(layer))
    layer.mlp.gate.forward = lambda hidden: own(hidden.double())
    assert "did not run on a trial" in str(find_router(layer))
    layer.mlp.gate.forward = own
    layer.mlp.experts.register_forward_pre_hook(lambda _, args: args[0].topk(2) and None)
    assert "in several modules" in str(find_router(layer))


@pytest.mark.parametrize("family", MOE)
@pytest.mark.parametrize(("length", "sizes"), [(1, (5, 5)), (7, (3, 4)), (7, (64, 2)), (129, (50, 31))])
def test_tiles_are_the_whole_block(family: str, length: int, sizes: tuple[int, int]) -> None:
    """Output and every gradient, with the balance loss where there is one; the backward cuts other tiles than the forward."""
    layer, *_ = layers(family)
    twin, weight = copy.deepcopy(layer), rows(length, seed=1)
    x, y = rows(length).requires_grad_(), rows(length).requires_grad_()
    balance = Balance(2, 1) if family in BALANCED else None
    logits: list[Tensor] = []
    router_module(twin).register_forward_hook(lambda _, args, output: logits.append(output[0]))

    want = run(twin.mlp, y)
    got = tiled(layer, x, sizes, balance)
    want_loss, got_loss = (want * weight).sum(), (got * weight).sum()
    if balance is not None:
        function = sys.modules[type(layer).__module__].load_balancing_loss_func
        want_balance, got_balance = function(tuple(logits), 4, 2), balance.loss(length)
        torch.testing.assert_close(got_balance, want_balance, rtol=1e-6, atol=0)
        want_loss, got_loss = want_loss + 50 * want_balance, got_loss + 50 * got_balance
    want_loss.backward()
    got_loss.backward()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert distance(x.grad, y.grad) < 1e-5
    for (name, parameter), other in zip(layer.mlp.named_parameters(), twin.mlp.parameters(), strict=True):
        assert parameter.grad is not None, name
        assert other.grad is not None, name
        assert distance(parameter.grad, other.grad) < 1e-5, name


@pytest.mark.parametrize("family", MOE)
def test_a_second_run_that_would_choose_otherwise_takes_the_first_choice(family: str) -> None:
    layer, *_ = layers(family)
    noise, router = rows(1, seed=7)[0, 0], router_module(layer)

    def disturb(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor] | None:
        return (args[0] + noise,) if torch.is_grad_enabled() else None

    router.register_forward_pre_hook(disturb)
    seen = seen_by_experts(layer)
    tiled(layer, rows(40).requires_grad_(), (16, 8)).sum().backward()
    # The first is `find_router`; the backward goes over its tiles from the end.
    forward, backward = torch.cat(seen[1:4]), torch.cat(list(reversed(seen[4:])))
    assert forward.shape == (40, 2)
    assert torch.equal(forward, backward)
    seen.clear()
    run(layer.mlp, rows(40))
    assert not torch.equal(seen[0], forward)  # the noise is enough to choose otherwise


def test_the_gradient_is_that_of_the_kept_choice() -> None:
    """Scores that move under a kept choice: the router's gradient is that of the weights at the kept places."""
    layer, *_ = layers("mixtral")
    x, router = rows(20), find_router(layer)
    assert isinstance(router, Router)
    routing, chosen = Routing(router, 20), layer.mlp.gate(x)[2]
    assert not routing.recorded
    with torch.no_grad(), routing.recording(layer, slice(0, 20)):
        run(layer.mlp, x)
    assert routing.recorded
    layer.mlp.gate.weight.data.mul_(-1)
    with routing.replaying(layer, slice(0, 20)):
        got = run(layer.mlp, x)
    weights = (x[0] @ layer.mlp.gate.weight.T).softmax(-1).gather(-1, chosen)
    want = layer.mlp.experts(x[0], chosen, weights / weights.sum(-1, keepdim=True))
    gradients = [torch.autograd.grad(y.square().sum(), layer.mlp.gate.weight)[0] for y in (got, want)]
    assert distance(*gradients) < 1e-5


def test_a_router_that_chooses_more_or_less_often_than_in_the_forward_is_an_error() -> None:
    layer, *_ = layers("mixtral")
    x, routing = rows(20), Routing(Router("mlp.gate", 2), 20)
    twice = nn.Sequential(layer.mlp.gate, nn.Identity())
    twice.forward = lambda hidden: (layer.mlp.gate(hidden), layer.mlp.gate(hidden))  # type: ignore[method-assign]
    with torch.no_grad(), routing.recording(layer, slice(0, 20)):
        run(layer.mlp, x)
    with pytest.raises(RuntimeError, match="more often"), routing.replaying(layer, slice(0, 20)):
        twice(x)
    with pytest.raises(RuntimeError, match="less often"), routing.replaying(layer, slice(0, 20)):
        pass


def test_the_layer_is_left_as_it_was() -> None:
    layer, *_ = layers("qwen3_moe")
    gate = layer.mlp.gate
    routing = Routing(Router("mlp.gate", 2, 0, 4), 5)
    with pytest.raises(ValueError, match="in between"), routing.recording(layer, slice(0, 5)):
        raise ValueError("in between")
    assert "forward" not in gate.__dict__
    own = gate.forward
    gate.forward = own
    with torch.no_grad(), routing.recording(layer, slice(0, 5)):
        run(layer.mlp, rows(5))
    assert gate.__dict__["forward"] is own
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules())


@pytest.mark.parametrize(("experts", "dtype"), [(4, torch.uint8), (256, torch.uint8), (300, torch.int16)])
def test_choices_take_as_few_bytes_as_they_can(experts: int, dtype: torch.dtype) -> None:
    model = tiny("qwen3_moe", num_experts=experts, num_experts_per_tok=3, moe_intermediate_size=8, layers=1)
    layer: Any = model.model.layers[0]
    seen, router = seen_by_experts(layer), find_router(layer)
    assert isinstance(router, Router)
    assert router.bytes_per_token == 3 * dtype.itemsize
    seen.clear()
    routing = Routing(router, 50)
    for tokens in tiles(50, 20):
        with torch.no_grad(), routing.recording(layer, tokens):
            run(layer.mlp, rows(50)[:, tokens])
    assert [(kept.shape, kept.dtype) for kept in routing._chosen] == [((50, 3), dtype)]
    assert torch.equal(routing._chosen[0].long(), torch.cat(seen))
    assert experts == 4 or int(routing._chosen[0].max()) > 127


def test_a_missing_layer_is_noticed() -> None:
    (layer, other), balance = layers("mixtral"), Balance(2, 2)
    router = Router("mlp.gate", 2, 0, 4)
    with pytest.raises(RuntimeError, match="of 0 tokens"):
        balance.loss(5)
    for one in (layer, other):
        with pytest.raises(RuntimeError, match="not of 5 in each of 2 layers"):
            balance.loss(5)
        with watching(one, router, balance):
            run(one.mlp, rows(5))
    assert balance.loss(5) > 0


def test_a_layer_that_runs_whole_is_watched() -> None:
    """Also inside a checkpoint, whose second run has no part in it."""
    (layer, *_), x = layers("mixtral"), rows(9)
    router, twin = find_router(layer), copy.deepcopy(layer)
    assert isinstance(router, Router)
    for one, checkpointed in ((layer, True), (twin, False)):
        balance = Balance(2, 1)
        with watching(one, router, balance):
            y = torch.utils.checkpoint.checkpoint(one.mlp, x, use_reentrant=False) if checkpointed else one.mlp(x)
        (y.sum() + 50 * balance.loss(9)).backward()
    for parameter, other in zip(layer.mlp.parameters(), twin.mlp.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, other.grad)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_experts_of_a_tile_are_those_of_the_row_in_every_implementation(implementation: str) -> None:
    """transformers takes grouped_mm by default; in fp32 no implementation depends on the cut beyond rounding."""
    model = tiny("qwen3_moe", num_experts=16, num_experts_per_tok=4, layers=1)
    assert model.config._experts_implementation == "grouped_mm"
    model.set_experts_implementation(implementation)
    mlp, x = model.model.layers[0].mlp, rows(129)
    whole = run(mlp, x)
    cut = torch.cat([run(mlp, x[:, tokens]) for tokens in tiles(129, 50)], dim=1)
    torch.testing.assert_close(cut, whole, rtol=1e-5, atol=1e-6)
    randomise(model, 1)
    assert not torch.allclose(run(mlp, x), whole, rtol=1e-2)
