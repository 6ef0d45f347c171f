"""The optimizer is torch's AdamW with transformers' clipping, decay and schedules, and nothing more: compared bit for bit."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from transformers import Trainer, get_scheduler

from megaspan.config import SFTConfig
from megaspan.human import UserError
from megaspan.optimizer import NonFiniteGradient, Optimizer, decayed_names, warmup_steps
from tests.models import FAMILIES, batch, tiny

BF16 = torch.bfloat16


def config(**options: Any) -> SFTConfig:
    return SFTConfig(**({"max_length": 64, "learning_rate": 1e-2, "weight_decay": 0.1} | options))


def backward(model: Any, seed: int) -> None:
    model(**batch(32, seed=seed), use_cache=False).loss.backward()


def equal(left: Any, right: Any) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left.parameters(), right.parameters(), strict=True))


def reference(model: Any, options: SFTConfig, total: int) -> tuple[torch.optim.AdamW, Any]:
    """What transformers' Trainer makes of the same settings."""
    decayed = Trainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]
    named = dict(model.named_parameters())
    adamw = torch.optim.AdamW(
        [
            {"params": [named[name] for name in named if name in decayed], "weight_decay": options.weight_decay},
            {"params": [named[name] for name in named if name not in decayed], "weight_decay": 0.0},
        ],
        lr=options.learning_rate,
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_epsilon,
    )
    schedule = get_scheduler(
        options.lr_scheduler_type,
        adamw,
        num_warmup_steps=warmup_steps(options, total),
        num_training_steps=total,
        scheduler_specific_kwargs=options.lr_scheduler_kwargs,
    )
    return adamw, schedule


@pytest.mark.parametrize("family", FAMILIES)
def test_decay_spares_what_transformers_spares(family: str) -> None:
    model = tiny(family)
    expected = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    assert decayed_names(model) == expected & {name for name, _ in model.named_parameters()}
    assert 0 < len(decayed_names(model)) < len(list(model.parameters()))


def test_decay_spares_norms_of_any_name() -> None:
    model = torch.nn.ModuleDict({"ln": torch.nn.LayerNorm(2), "rms": torch.nn.RMSNorm(2), "lin": torch.nn.Linear(2, 2)})
    assert decayed_names(model) == {"lin.weight"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"warmup_steps": 2, "max_grad_norm": 0.05},
        {"lr_scheduler_type": "cosine", "warmup_ratio": 0.3, "adam_beta2": 0.95, "adam_epsilon": 1e-6, "optim": "adamw_torch"},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "max_grad_norm": 0.0},
        {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.5, "weight_decay": 0.0},
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_steps_equal_torch_and_transformers(options: dict[str, Any], tied: bool) -> None:
    """fp32 on the CPU, five steps: weights, norm and rate are bit-equal to AdamW + clip_grad_norm_ + get_scheduler."""
    settings, total = config(**options), 5
    ours = tiny("qwen2", tied=tied)  # with biases
    theirs = copy.deepcopy(ours)
    optimizer = Optimizer(ours, settings, total)
    adamw, schedule = reference(theirs, settings, total)
    clipped = 0
    for step in range(total):
        backward(ours, step)
        backward(theirs, step)
        limit = settings.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit if limit > 0 else math.inf)
        assert optimizer.learning_rate == schedule.get_last_lr()[0]
        assert optimizer.clip(limit) == norm.item()
        clipped += bool(limit and norm > limit)
        optimizer.step()
        adamw.step()
        schedule.step()
        assert equal(ours, theirs), step
        optimizer.zero_grad()
        adamw.zero_grad()
    assert clipped == (total if settings.max_grad_norm else 0)
    assert not equal(ours, tiny("qwen2", tied=tied))
    assert optimizer.steps == total


def test_a_scale_is_applied_once_and_counts_in_the_norm() -> None:
    """Gradients of a sum, divided by the token count at the step: as if the loss had been the mean."""
    mean, total = tiny("llama"), tiny("llama")
    optimizers = [Optimizer(model, config(), 3) for model in (mean, total)]
    for step in range(3):
        mean(**batch(32, seed=step)).loss.backward()
        (total(**batch(32, seed=step)).loss * 64).backward()  # a power of two, so that scaling is exact
        norms = [optimizers[0].clip(0.5), optimizers[1].clip(0.5, scale=1 / 64)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)
        optimizers[0].step()
        optimizers[1].step(1 / 64)
        for optimizer in optimizers:
            optimizer.zero_grad()
    for one, other in zip(mean.parameters(), total.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_clip_and_step_agree_on_the_scale() -> None:
    model = tiny("llama")
    optimizer = Optimizer(model, config(), 3)
    backward(model, 0)
    optimizer.clip(1.0, scale=0.5)
    with pytest.raises(ValueError, match=r"a scale of 0\.5, step one of 1\.0"):
        optimizer.step()


def test_unscaled_unclipped_gradients_are_left_alone() -> None:
    model = tiny("llama")
    optimizer = Optimizer(model, config(), 3)
    backward(model, 0)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.clip(1e9)
    optimizer.step()
    assert all(torch.equal(old, parameter.grad) for old, parameter in zip(before, model.parameters(), strict=True))


def test_masters_follow_fp32_training_exactly() -> None:
    """Given the same gradients, masters are an fp32 run and the bf16 weights its rounding; pure bf16 loses small updates."""
    half = torch.nn.Linear(8, 8).to(BF16)
    full, pure = copy.deepcopy(half).float(), copy.deepcopy(half)
    settings = {"learning_rate": 1e-5, "lr_scheduler_type": "constant"}
    optimizers = {
        "masters": (half, Optimizer(half, config(**settings), 50)),
        "fp32": (full, Optimizer(full, config(**settings), 50)),
        "pure": (pure, Optimizer(pure, config(dtype="bfloat16", **settings), 50)),
    }
    start = pure.weight.detach().clone()
    for step in range(50):
        gradient = torch.randn(8, 8, generator=torch.Generator().manual_seed(step)).abs()
        for model, optimizer in optimizers.values():
            for parameter in model.parameters():
                grad_dtype = getattr(parameter, "grad_dtype", parameter.dtype)
                parameter.grad = (gradient if parameter.ndim == 2 else gradient[0]).to(grad_dtype)
            optimizer.clip(1.0)
            optimizer.step()
            optimizer.zero_grad()
    state = optimizers["masters"][1].state_dict()["parameters"]
    for name, parameter in full.named_parameters():
        assert torch.equal(state[name]["master"], parameter)
        assert torch.equal(half.get_parameter(name), parameter.to(BF16))
    big = start.abs() > 0.1
    assert torch.equal(pure.weight[big], start[big])
    assert not torch.equal(half.weight[big], start[big])
    assert state["weight"]["exp_avg"].dtype == torch.float32
    assert optimizers["pure"][1].state_dict()["parameters"]["weight"]["exp_avg"].dtype == BF16


def test_gradients_of_bf16_weights_accumulate_in_fp32() -> None:
    """300 micro-batches of gradient 1: bf16 stops counting at 256."""
    sums = {}
    for dtype in (None, "bfloat16"):
        model = torch.nn.Linear(1, 1, bias=False).to(BF16)
        optimizer = Optimizer(model, config(dtype=dtype), 1)
        for _ in range(300):
            model(torch.ones(1, 1, dtype=BF16)).sum().backward()
        sums[dtype] = model.weight.grad.item()
        assert model.weight.grad.dtype == (torch.float32 if dtype is None else BF16)
        assert float(optimizer.gradient_norm()) == sums[dtype]
    assert sums == {None: 300.0, "bfloat16": 256.0}


def test_a_bf16_model_with_masters_learns_like_fp32() -> None:
    """Whole-model run: the loss curve of bf16 with masters stays with that of fp32."""
    losses = {}
    for name, dtype in (("fp32", torch.float32), ("masters", BF16)):
        model = tiny("llama", dtype=dtype)
        optimizer = Optimizer(model, config(learning_rate=3e-3), 12)
        curve = []
        for _ in range(12):
            loss = model(**batch(32, seed=0)).loss
            loss.backward()
            optimizer.clip(1.0)
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
        losses[name] = torch.tensor(curve)
    assert losses["fp32"][-1] < 0.7 * losses["fp32"][0]
    torch.testing.assert_close(losses["masters"], losses["fp32"], rtol=0.03, atol=0.02)


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
@pytest.mark.parametrize("weights", [torch.float32, BF16])
def test_resume_is_bit_equal(dtype: str | None, weights: torch.dtype) -> None:
    """Stop after three of six steps, load into a fresh model and optimizer, continue: nothing differs."""
    settings, total = config(dtype=dtype, lr_scheduler_type="cosine", warmup_steps=2), 6

    def steps(model: Any, optimizer: Optimizer, which: range) -> None:
        for step in which:
            backward(model, step)
            optimizer.clip(1.0)
            optimizer.step()
            optimizer.zero_grad()

    straight = tiny("qwen2", tied=True, dtype=weights)
    straight_optimizer = Optimizer(straight, settings, total)
    steps(straight, straight_optimizer, range(3))
    saved, saved_model = copy.deepcopy(straight_optimizer.state_dict()), copy.deepcopy(straight.state_dict())
    steps(straight, straight_optimizer, range(3, 6))
    resumed = tiny("qwen2", tied=True, dtype=weights, seed=9)
    optimizer = Optimizer(resumed, settings, total)
    resumed.load_state_dict(saved_model)
    optimizer.load_state_dict(saved)
    assert optimizer.steps == 3
    steps(resumed, optimizer, range(3, 6))
    assert equal(resumed, straight)
    assert optimizer.learning_rate == straight_optimizer.learning_rate
    left, right = (one.state_dict()["parameters"] for one in (optimizer, straight_optimizer))
    assert all(torch.equal(left[name][key], right[name][key]) for name in right for key in right[name])


def test_resume_before_the_first_step_and_from_masters_alone() -> None:
    model = torch.nn.Linear(4, 4).to(BF16)
    optimizer = Optimizer(model, config(), 3)
    state = copy.deepcopy(optimizer.state_dict())
    want = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    optimizer.load_state_dict(state)
    assert torch.equal(model.weight, want)


def test_a_state_of_another_model_is_refused() -> None:
    state = Optimizer(torch.nn.Linear(4, 4), config(), 3).state_dict()
    with pytest.raises(UserError, match=r"1 are missing, 0 unknown.*0\.bias"):
        Optimizer(torch.nn.Sequential(torch.nn.Linear(4, 4)), config(), 3).load_state_dict(
            {"steps": 0, "parameters": {"0.weight": state["parameters"]["weight"]}}
        )
    model = torch.nn.Linear(4, 4)
    optimizer = Optimizer(model, config(), 3)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(UserError, match=r"weight of shape \(4, 4\).*\(4, 5\) here"):
        Optimizer(torch.nn.Linear(5, 4), config(), 3).load_state_dict(optimizer.state_dict())
    with pytest.raises(UserError, match="without fp32 masters"):
        Optimizer(torch.nn.Linear(4, 4).to(BF16), config(), 3).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("clip", [True, False])
def test_a_gradient_that_is_not_finite_changes_nothing(poison: float, clip: bool) -> None:
    model = tiny("llama", dtype=BF16)
    optimizer = Optimizer(model, config(), 3)
    before = copy.deepcopy(model)
    backward(model, 0)
    model.model.layers[1].mlp.up_proj.weight.grad[3, 5] = poison
    if clip:
        assert not math.isfinite(optimizer.clip(1.0))
    expected = (
        "sum of squares overflows" if poison == 1e30 else r"1 of \d+ parameters, first model\.layers\.1\.mlp\.up_proj\.weight"
    )
    with pytest.raises(NonFiniteGradient, match=expected):
        optimizer.step()
    assert equal(model, before)
    assert optimizer.steps == 0
    optimizer.zero_grad()
    backward(model, 0)
    optimizer.step()
    assert not equal(model, before)


def test_tied_parameters_count_once() -> None:
    tied = tiny("llama", tied=True)
    optimizer = Optimizer(tied, config(), 3)
    assert "lm_head.weight" not in optimizer.state_dict()["parameters"]
    backward(tied, 0)
    squares = sum(float(parameter.grad.double().square().sum()) for parameter in tied.parameters())
    assert float(optimizer.gradient_norm()) == pytest.approx(squares**0.5, rel=1e-6)


def test_frozen_parameters_are_left_out() -> None:
    model = tiny("llama")
    model.requires_grad_(False)
    with pytest.raises(UserError, match="no parameter of the model is trained"):
        Optimizer(model, config(), 3)
    model.model.norm.weight.requires_grad_()
    optimizer = Optimizer(model, config(), 3)
    before = model.lm_head.weight.clone()
    backward(model, 0)
    optimizer.step()
    assert list(optimizer.state_dict()["parameters"]) == ["model.norm.weight"]
    assert torch.equal(model.lm_head.weight, before)


def test_parameters_without_gradient_are_skipped() -> None:
    """An expert that no token chose: no decay, no moments, and the norm is over the others."""
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]).to(BF16)
    optimizer = Optimizer(model, config(), 3)
    assert float(optimizer.gradient_norm()) == 0.0
    before = model[1].weight.detach().clone()
    model[0](torch.ones(1, 2, dtype=BF16)).sum().backward()
    optimizer.clip(1.0)
    optimizer.step()
    assert torch.equal(model[1].weight, before)
    assert "exp_avg" not in optimizer.state_dict()["parameters"]["1.weight"]


def test_a_skipped_step_moves_the_schedule_only() -> None:
    model = tiny("llama")
    before = copy.deepcopy(model)
    optimizer = Optimizer(model, config(learning_rate=1.0), 4)
    optimizer.skip()
    assert (optimizer.steps, optimizer.learning_rate) == (1, 0.75)
    assert equal(model, before)


@pytest.mark.parametrize(
    ("options", "steps"), [({"warmup_steps": 3}, 3), ({"warmup_steps": 0.25}, 3), ({"warmup_ratio": 0.45}, 5), ({}, 0)]
)
def test_warmup_is_a_number_or_a_share(options: dict[str, Any], steps: int) -> None:
    assert warmup_steps(config(**options), 10) == steps


def test_wrong_schedule_arguments_are_a_sentence() -> None:
    with pytest.raises(UserError, match="polynomial does not take lr_scheduler_kwargs as given: lr_end"):
        Optimizer(tiny("llama"), config(lr_scheduler_type="polynomial", lr_scheduler_kwargs={"lr_end": 1.0}), 3)


def test_the_header_says_what_the_weights_are_kept_in() -> None:
    """Bytes per parameter: 18 with masters, 16 in fp32, 8 in pure bf16."""
    for dtype, wish, name, size in (
        (BF16, None, "bf16 weights with fp32 masters", 18),
        (torch.float32, None, "fp32 weights", 16),
        (BF16, "bfloat16", "pure bf16 weights", 8),
    ):
        optimizer = Optimizer(torch.nn.Linear(1024, 1024, bias=False).to(dtype), config(dtype=wish), 3)
        assert optimizer.precision == name
        assert f"1,048,576 trained parameters take {size}.0 MiB" in optimizer.reason
