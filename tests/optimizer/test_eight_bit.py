"""8-bit moments: the wiring with a library played by the test, the arithmetic with the real one where it is installed."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from megaspan.config import SFTConfig
from megaspan.human import UserError
from megaspan.optimizer import Optimizer, check_optim
from megaspan.plan.states import StatePlan
from tests.optimizer.support import PLACES, assert_same, backward, make, small_pieces, train, window  # noqa: F401

NAME = "bitsandbytes"


def played(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, torch.dtype]]:
    """A library of that name whose moments count calls; returns (kind, elements, type of the weight) of each call."""
    module, functional = ModuleType(NAME), ModuleType(f"{NAME}.functional")
    calls: list[tuple[str, int, torch.dtype]] = []

    def eight(name: str, g: Any, p: Any, one: Any, two: Any, b1: float, b2: float, b3: float, alpha: float, eps: float,
              step: int, lr: float, code1: Any, code2: Any, scale1: Any, scale2: Any, weight_decay: float) -> None:  # fmt: skip
        assert (name, code1.numel(), g.dtype) == ("adam", 256, p.dtype)
        assert scale1.numel() == scale2.numel() == -(-p.numel() // 256)
        one += 1
        two += 2
        scale1 += step
        p.sub_(g, alpha=lr)
        calls.append(("8", p.numel(), p.dtype))

    def full(name: str, g: Any, p: Any, one: Any, b1: float, eps: float, step: int, lr: float, two: Any, b2: float,
             weight_decay: float) -> None:  # fmt: skip
        one += g
        p.sub_(g, alpha=lr)
        calls.append(("32", p.numel(), p.dtype))

    functional.create_dynamic_map = lambda signed: torch.linspace(-1.0, 1.0, 256)  # type: ignore[attr-defined]
    functional.optimizer_update_8bit_blockwise, functional.optimizer_update_32bit = eight, full  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, NAME, module)
    monkeypatch.setitem(sys.modules, f"{NAME}.functional", functional)
    return calls


def test_both_names_are_one_optimizer() -> None:
    assert SFTConfig(max_length=8, optim="adamw_bnb_8bit").optim == SFTConfig(max_length=8, optim="adamw_8bit").optim


@pytest.mark.parametrize("place", [None, *PLACES])
def test_embeddings_and_small_tensors_keep_32_bits(place: StatePlan | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in transformers; every block of 256 is whole wherever a tensor is cut."""
    calls = played(monkeypatch)
    model, config = make("masters", optim="adamw_8bit", max_grad_norm=0.0)
    reference = train(model, config, None, [window(0, 1)])
    calls.clear()
    result = train(model, config, place, [window(0, 1)])
    assert_same(result, reference)
    kinds = {name: state["state1"].dtype for name, state in result.state["parameters"].items()}
    assert kinds["model.embed_tokens.weight"] == torch.float32
    assert kinds["lm_head.weight"] == torch.uint8
    assert kinds["model.norm.weight"] == torch.float32
    scales = result.state["parameters"]["lm_head.weight"]["absmax1"]
    assert scales.shape == (-(-model.lm_head.weight.numel() // 256),)
    assert bool((scales == 1.0).all())
    assert {dtype for _, _, dtype in calls[2:]} == {torch.float32}  # the masters; the first two try the library


def test_the_header_and_the_bytes_know_of_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch)
    model, config = make("pure", optim="adamw_8bit", max_grad_norm=0.0)
    optimizer = Optimizer(model, config, 3)
    assert "moments of 8 bits" in optimizer.reason
    backward(model, window(0, 1), optimizer)
    optimizer.step()
    held = optimizer.state_dict()["parameters"].values()
    assert optimizer.state_bytes == sum(value.nbytes for state in held for key, value in state.items() if key != "step")


def test_other_moments_are_not_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch)
    model, config = make("fp32", max_grad_norm=0.0)
    plain = Optimizer(model, config, 3)
    backward(model, window(0, 1), plain)
    plain.step()
    eight = Optimizer(copy.deepcopy(model), config.replace(optim="adamw_8bit"), 3)
    with pytest.raises(UserError, match=r"keeps exp_avg, exp_avg_sq of .*Set optim to what that run had"):
        eight.load_state_dict(plain.state_dict())


def test_without_the_library_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, NAME, None)
    monkeypatch.delitem(sys.modules, f"{NAME}.functional", raising=False)
    model, config = make("fp32", optim="adamw_8bit")
    said = r"needs bitsandbytes.*pip install 'megaspan\[optim8\]'"
    with pytest.raises(UserError, match=said):
        Optimizer(model, config, 3)
    with pytest.raises(UserError, match=said):
        check_optim(config)
    check_optim(config.replace(optim="adamw_torch"))


def test_a_library_that_does_not_run_here_is_found_out_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch)

    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no kernel for cpu")

    monkeypatch.setattr(sys.modules[f"{NAME}.functional"], "optimizer_update_8bit_blockwise", refuse)
    model, config = make("fp32", optim="adamw_8bit")
    with pytest.raises(UserError, match=r"does not run on cpu .*no kernel for cpu"):
        Optimizer(model, config, 3)


@pytest.mark.skipif(importlib.util.find_spec(NAME) is None, reason="needs bitsandbytes")
@pytest.mark.parametrize("kind", ["fp32", "masters", "pure"])
def test_the_real_library_gives_what_its_own_optimizer_gives(kind: str) -> None:
    """Five steps against bitsandbytes' own AdamW with the same gradients; on the host the same bits."""
    library = importlib.import_module(NAME)
    model, config = make(kind, optim="adamw_8bit", max_grad_norm=0.0, lr_scheduler_type="constant")
    theirs = copy.deepcopy(model)
    if kind == "masters":
        theirs = theirs.float()
    decayed = [p for n, p in theirs.named_parameters() if "norm" not in n and "bias" not in n]
    rest = [p for n, p in theirs.named_parameters() if "norm" in n or "bias" in n]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    manager = library.optim.GlobalOptimManager.get_instance()
    manager.register_module_override(theirs.model.embed_tokens, "weight", {"optim_bits": 32})
    reference = library.optim.AdamW8bit(groups, lr=config.learning_rate, betas=(config.adam_beta1, config.adam_beta2), eps=1e-8)
    ours = copy.deepcopy(model)
    optimizer = Optimizer(ours, config, 5)
    hosted = copy.deepcopy(model)
    on_host = Optimizer(hosted, config, 5, states=StatePlan("device", "host"))
    for step in range(5):
        backward(ours, window(step, 1), optimizer)
        for mine, other, third in zip(ours.parameters(), theirs.parameters(), hosted.parameters(), strict=True):
            assert mine.grad is not None
            other.grad, third.grad = mine.grad.clone(), mine.grad.clone()
        for each in (optimizer, on_host):
            each.step()
            each.zero_grad()
        reference.step()
    state = optimizer.state_dict()["parameters"]
    for name, parameter in theirs.named_parameters():
        got = state[name].get("master", ours.get_parameter(name))
        assert torch.equal(got, parameter), name
        assert torch.equal(hosted.get_parameter(name), ours.get_parameter(name)), name
