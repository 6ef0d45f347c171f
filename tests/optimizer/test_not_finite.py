"""A gradient that is not finite: nothing is updated by it, and what was updated before it is never saved."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megaspan.model.shard import shard
from megaspan.optimizer import NonFiniteGradient, Optimizer
from megaspan.optimizer.adamw import TorchAdamW
from megaspan.plan.states import StatePlan
from megaspan.world.axes import Mesh, device_axes
from tests.gloo import run_ranks
from tests.optimizer.support import PLACES, backward, make, small_pieces, window  # noqa: F401


def poison(model: Any, layer: int, value: float) -> Any:
    """Spoils one gradient on its way to `up_proj.weight` of a layer."""

    def spoil(gradient: Tensor) -> Tensor:
        return gradient.index_put((torch.tensor([3]), torch.tensor([5])), torch.tensor(value, dtype=gradient.dtype))

    return model.model.layers[layer].mlp.up_proj.weight.register_hook(spoil)


@pytest.mark.parametrize("place", PLACES[:3])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_nothing_is_updated_where_the_norm_comes_first(place: StatePlan, value: float) -> None:
    model, config = make("masters", max_grad_norm=1.0)
    optimizer = Optimizer(model, config, 3, states=place)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    handle = poison(model, 1, value)
    backward(model, window(0, 2), optimizer)
    assert not math.isfinite(optimizer.clip(1.0))
    said = (
        "the sum of squares overflows"
        if value == 1e30
        else r"1 of \d+ parameters, first model\.layers\.1\.mlp\.up_proj\.weight"
    )
    with pytest.raises(NonFiniteGradient, match=said + r"\); nothing was updated"):
        optimizer.step()
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert not optimizer.updating
    handle.remove()
    optimizer.zero_grad()
    backward(model, window(0, 2), optimizer)
    optimizer.clip(1.0)
    optimizer.step()
    assert optimizer.steps == 1


@pytest.mark.parametrize("moments", ["device", "host"])
def test_the_update_in_the_backward_stops_at_the_first_bad_gradient(moments: Any) -> None:
    """Layer 1 is updated, layer 0 is bad: the weights are between two steps, which is said and never saved."""
    model, config = make("masters", max_grad_norm=0.0)
    optimizer = Optimizer(model, config, 3, states=StatePlan("update", moments))
    saved = optimizer.state_dict()
    saved = {
        "steps": saved["steps"],
        "parameters": {n: {k: v.clone() for k, v in s.items()} for n, s in saved["parameters"].items()},
    }
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    poison(model, 0, math.nan)
    with pytest.raises(NonFiniteGradient, match=r"\d+ of \d+ parameters had been updated in this backward, so nothing"):
        backward(model, window(0, 1), optimizer)
    assert not torch.equal(model.model.layers[1].mlp.up_proj.weight, before["model.layers.1.mlp.up_proj.weight"])
    for name in ("up_proj", "gate_proj"):
        assert torch.equal(getattr(model.model.layers[0].mlp, name).weight, before[f"model.layers.0.mlp.{name}.weight"])
    assert torch.equal(model.model.embed_tokens.weight, before["model.embed_tokens.weight"])
    assert optimizer.updating
    with pytest.raises(RuntimeError, match="no state to save"):
        optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert not optimizer.updating
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_a_bad_gradient_at_the_very_start_leaves_everything_as_it_was() -> None:
    model, config = make("fp32", max_grad_norm=0.0)
    optimizer = Optimizer(model, config, 3, states=StatePlan("update", "device"))
    with torch.no_grad():
        model.lm_head.weight[0, 0] = math.nan
    with pytest.raises(NonFiniteGradient, match="nothing was updated"):
        backward(model, window(0, 1), optimizer)
    assert not optimizer.updating


@pytest.mark.parametrize("layer", [0, 1, None])
def test_a_flag_on_the_device_stops_the_same_updates(layer: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the fused kernel does on a GPU, where the host never looks inside the backward; played by the CPU's own."""
    make_rule = TorchAdamW.__init__

    def fused(rule: TorchAdamW, config: Any, device: torch.device) -> None:
        make_rule(rule, config, device)
        rule._fused = rule.heeds = rule.steps_on_device = True

    monkeypatch.setattr(TorchAdamW, "__init__", fused)
    model, config = make("masters", max_grad_norm=0.0)
    optimizer = Optimizer(model, config, 3, states=StatePlan("update", "host"))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    if layer is not None:
        poison(model, layer, math.inf)
    backward(model, window(0, 1), optimizer)
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    if layer is None:
        optimizer.clip(0.0)
        optimizer.step()
        assert len(changed) > 0.5 * len(before)
        assert float(optimizer.state_dict()["parameters"]["lm_head.weight"]["step"]) == 1.0
        return
    assert "lm_head.weight" in changed
    assert not any(name.startswith(f"model.layers.{layer}.self_attn") or "embed" in name for name in changed)
    assert float(optimizer._trained["model.embed_tokens.weight"].step) == 0.0
    assert not math.isfinite(optimizer.clip(0.0))
    with pytest.raises(NonFiniteGradient, match=rf"first model\.layers\.{layer}\.mlp\.up_proj.*had been updated"):
        optimizer.step()
    assert optimizer.updating


def on_one_rank(rank: int, world: int) -> None:
    model, config = make("fp32")
    shard(model, device_axes(Mesh(dp_shard=world, rank=rank), "cpu").fsdp, masters=True, compute=torch.float32)
    optimizer = Optimizer(model, config, 3)
    backward(model, window(0, 1), optimizer)
    if rank == 1:
        model.model.layers[1].mlp.up_proj.weight.grad.to_local()[0] = math.nan
    assert not math.isfinite(optimizer.clip(1.0))
    with pytest.raises(
        NonFiniteGradient, match=r"1 of \d+ parameters, first model\.layers\.1\.mlp\.up_proj\.weight\); nothing"
    ):
        optimizer.step()


def test_ranks_whose_parts_are_finite_name_what_is_not() -> None:
    run_ranks(2, [(on_one_rank, ())])
