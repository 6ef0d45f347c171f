"""P1, parity: loss and every parameter's gradient of a prepared model against the unmodified one, over all levers at once.

fp32: loss 1e-6 relative, each gradient 1e-5 relative L2 (1e-4 for a mixture of experts), with a floor of 1e-7 of the global
gradient norm. bf16: distances from the fp32 gradients, against those of the plain model in bf16. The table of pairs runs in the
normal suite, the full cross with `-m full`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from megaspan.config import SFTConfig
from megaspan.layers.head import head_of
from megaspan.model import levers, prepare, wrap_lora
from tests.model.support import plan
from tests.models import assert_same_gradients, batch, gradients, randomise, tiny
from tests.parity.pairwise import Case, cross, name_of, pairwise

torch.set_num_threads(1)

LAYERS, TILE = 3, 7
FACTORS = {
    # gemma2: soft caps on logits and scores; granite: divided logits; gemma3, gpt_oss: windows; gpt_oss: sinks and experts
    "family": ("llama", "qwen3", "gemma2", "gemma3", "gpt_oss", "granite"),
    "tied": (False, True),
    "loss_type": ("chunked_nll", "nll"),
    "checkpoint": ("none", "device", "host"),
    "layer": ("streamed", "grouped", "again", "whole"),
    "accumulation": (1, 2),
    "lora": ("none", "body", "head"),
}
PAIRS = pairwise(FACTORS, seed=1)
REST = [case for case in cross(FACTORS) if case not in PAIRS]


# How a layer runs: in tiles, in tiles with one KV head a call, in tiles with attention run again in the first layer, whole.
LAYER_PLANS: dict[str, dict[str, Any]] = {
    "streamed": {},
    "grouped": {"heads": 1},
    "again": {"outputs": 1},
    "whole": {"streamed": False},
}


def config_of(case: Case) -> SFTConfig:
    targets = {"body": ["q_proj", "v_proj", "o_proj"], "head": ["q_proj", "lm_head"], "none": None}[case["lora"]]
    return SFTConfig(
        max_length=64,
        loss_type=case["loss_type"],
        gradient_checkpointing=case["checkpoint"] != "none",
        gradient_checkpointing_kwargs={"offload": case["checkpoint"] == "host"} if case["checkpoint"] != "none" else None,
        gradient_accumulation_steps=case["accumulation"],
        **({} if targets is None else {"use_peft": True, "lora_r": 4, "lora_dropout": 0.0, "lora_target_modules": targets}),
    )


def model_of(case: Case, config: SFTConfig, dtype: torch.dtype = torch.float32) -> Any:
    """The unmodified model, with an adapter whose B is not zero where there is one."""
    # In bf16 a router's choice may fall the other way by rounding, which is no distance to measure: all experts take part.
    every = {"num_experts_per_tok": 4} if case["family"] == "gpt_oss" and dtype != torch.float32 else {}
    model: Any = tiny(case["family"], tied=case["tied"], dtype=dtype, layers=LAYERS, **every)
    if config.use_peft:
        model = wrap_lora(model, config)
        adapters = torch.nn.Module()
        for index, (_, parameter) in enumerate(sorted(model.named_parameters())):
            if parameter.requires_grad:
                adapters.register_parameter(f"p{index}", parameter)
        randomise(adapters, seed=5)
    return model


def prepared(case: Case, config: SFTConfig, dtype: torch.dtype = torch.float32) -> Any:
    on = case["checkpoint"] != "none"
    by_hand = plan(checkpoint=on, offload=case["checkpoint"] == "host", tile=TILE, layers=LAYERS, **LAYER_PLANS[case["layer"]])
    return prepare(model_of(case, config, dtype), config, by_hand)


def window(count: int, seed: int = 0, *, device: str = "cpu") -> list[dict[str, torch.Tensor]]:
    """The micro-batches of one optimizer step: of unequal lengths, with unequal shares of trained tokens (R09)."""
    parts = [batch(41, seed=seed)] if count == 1 else [batch(41, seed=seed), batch(18, seed=seed + 1, ignored=0.7)]
    return [{name: tensor.to(device) for name, tensor in part.items()} for part in parts]


def step(model: Any, parts: list[dict[str, torch.Tensor]]) -> tuple[float, dict[str, torch.Tensor]]:
    """Sum of the losses over the window and the accumulated gradients, each part divided by the window's trained tokens."""
    model.zero_grad(set_to_none=True)
    total, loss = sum(int((part["labels"][:, 1:] != -100).sum()) for part in parts), 0.0
    for part in parts:
        output = model(**part, num_items_in_batch=torch.tensor(total, device=part["labels"].device), use_cache=False)
        output.loss.backward()
        loss += output.loss.item()
    return loss, gradients(model)


def check(case: Case) -> None:
    config = config_of(case)
    parts = window(case["accumulation"])
    want_loss, want = step(model_of(case, config), parts)
    model = prepared(case, config)
    for _ in range(2):  # the second step reuses what the first one left: host memory, streams
        got_loss, got = step(model, parts)
        assert got_loss == pytest.approx(want_loss, rel=1e-6)
        assert_same_gradients(got, want, 1e-4 if case["family"] == "gpt_oss" else 1e-5)
    check_levers(case, model)


def check_levers(case: Case, model: Any) -> None:
    """P4: the levers of the case are really on."""
    state = levers(model)
    assert state is not None
    assert state.settings.loss_type == case["loss_type"]
    assert (state.checkpointing is not None) == (case["checkpoint"] != "none")
    if state.checkpointing is not None:
        stats = state.checkpointing.stats()
        assert stats.layers == LAYERS
        assert (stats.moved > 0) == (case["checkpoint"] == "host")
        assert (getattr(stats, "streamed", 0) > 0) == (case["layer"] != "whole")
    assert len(head_of(model).deltas) == (case["lora"] == "head")
    trains = any(parameter.requires_grad for name, parameter in model.named_parameters() if "lora" not in name)
    assert trains == (case["lora"] == "none")


@pytest.mark.parametrize("case", PAIRS, ids=name_of)
def test_parity_of_every_pair_of_levers(case: Case) -> None:
    check(case)


@pytest.mark.full
@pytest.mark.parametrize("case", REST, ids=name_of)
def test_parity_of_the_full_cross(case: Case) -> None:
    check(case)


def test_the_reference_would_notice() -> None:
    """The comparison itself: another seed of the batch, one weight moved by a thousandth, or no cap, is caught."""
    case = {
        "family": "gemma2",
        "tied": False,
        "loss_type": "chunked_nll",
        "checkpoint": "host",
        "layer": "streamed",
        "accumulation": 1,
        "lora": "none",
    }
    config = config_of(case)
    _, want = step(model_of(case, config), window(1))
    uncapped = prepared(case, config)
    uncapped.config.final_logit_softcapping = None
    moved = prepared(case, config)
    with torch.no_grad():
        moved.model.layers[0].mlp.up_proj.weight.mul_(1.001)
    for model, parts in ((prepared(case, config), window(1, seed=9)), (uncapped, window(1)), (moved, window(1))):
        with pytest.raises(AssertionError, match="distance"):
            assert_same_gradients(step(model, parts)[1], want)


def squares(got: dict[str, torch.Tensor], true: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float((got[name].double() - want.double()).square().sum()) for name, want in true.items()}


def check_bf16(case: Case, device: str) -> None:
    """Distances over four batches together: of a sink or a router's bias, four numbers each, one batch says too little."""
    config = config_of(case)
    exact = model_of(case, config, torch.bfloat16).float().to(device)
    plain = model_of(case, config, torch.bfloat16).to(device)
    on = case["checkpoint"] != "none"
    ours = model_of(case, config, torch.bfloat16).to(device)
    prepare(ours, config, plan(checkpoint=on, offload=case["checkpoint"] == "host", tile=TILE, layers=LAYERS))
    loss_errors: dict[str, list[float]] = {"ours": [], "plain": []}
    errors: dict[str, Counter[str]] = {"ours": Counter(), "plain": Counter()}
    size: Counter[str] = Counter()
    for seed in (0, 10, 20, 30):
        parts = window(case["accumulation"], seed, device=device)
        true_loss, true = step(exact, parts)
        size.update(squares(true, {name: torch.zeros_like(tensor) for name, tensor in true.items()}))
        for name, model in (("ours", ours), ("plain", plain)):
            loss, got = step(model, parts)
            loss_errors[name].append(abs(loss - true_loss) / true_loss)
            errors[name].update(squares(got, true))
    assert max(loss_errors["ours"]) <= max(1.5 * max(loss_errors["plain"]), 2e-3)
    assert errors["ours"].total() <= 1.5**2 * errors["plain"].total()
    for name, whole in size.items():
        floor = max(2**-16 * whole, 1e-14 * size.total())
        assert errors["ours"][name] <= max(4 * errors["plain"][name], floor), name


BF16 = [
    {"family": family, "tied": tied, "loss_type": "chunked_nll", "checkpoint": "host", "accumulation": 2, "lora": lora}
    for family, tied, lora in (
        ("llama", True, "none"),
        ("qwen3", False, "head"),
        ("gemma2", True, "none"),
        ("gemma3", False, "none"),
        ("gpt_oss", False, "none"),
        ("granite", True, "body"),
    )
]


@pytest.mark.parametrize("case", BF16, ids=name_of)
def test_bf16_is_no_farther_from_fp32_than_the_plain_model(case: Case) -> None:
    check_bf16(case, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("case", BF16, ids=name_of)
def test_bf16_on_a_gpu(case: Case) -> None:
    check_bf16(case, "cuda")
