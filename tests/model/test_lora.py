"""LoRA by peft under the levers: the same gradients as plain peft, in every layer, and an adapter that stock peft loads."""

from __future__ import annotations

import importlib.util
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from megaspan.human import UserError
from megaspan.layers.dropout import counter_mask
from megaspan.model import levers, prepare, unprepare, wrap_lora
from megaspan.model.load import LoadedModel
from tests.model.support import plan, settings, step
from tests.models import assert_same_gradients, batch, tiny

LENGTH = 37
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "all-linear": {"lora_target_modules": "all-linear", "use_rslora": True},
    "head": {"lora_target_modules": ["q_proj", "down_proj", "lm_head"]},
    "saved": {"lora_target_modules": ["v_proj"], "lora_modules_to_save": ["lm_head", "embed_tokens"]},
}


def lora(**changes: Any) -> Any:
    return settings(**({"use_peft": True, "lora_dropout": 0.0, "lora_r": 3, "lora_alpha": 7} | changes))


def wrapped(family: str, args: Any, **overrides: Any) -> Any:
    """A tiny model with an adapter whose B is not zero, so that A gets a gradient too."""
    model = wrap_lora(tiny(family, **overrides), args)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def test_an_adapter_comes_without_a_warning_that_no_user_can_mend() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        wrap_lora(tiny("qwen3"), lora())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_gradients_are_those_of_plain_peft(family: str, case: str) -> None:
    args = lora(**CASES[case])
    plain, long = wrapped(family, args), prepare(wrapped(family, args), args, plan())
    want_loss, want = step(plain, **batch(LENGTH))
    got_loss, got = step(long, **batch(LENGTH))
    assert got_loss == pytest.approx(want_loss, rel=1e-6)
    assert_same_gradients(got, want)


def test_every_layer_learns_and_the_base_does_not() -> None:
    """R63: B of every layer gets a gradient in step 1 (A is zero there, as B starts at zero), also with a frozen embedding."""
    model = prepare(wrap_lora(tiny("llama", layers=4), lora(lora_target_modules="all-linear")), settings(), plan(layers=4))
    _, gradients = step(model, **batch(LENGTH))
    parts = [name for name in gradients if "lora_B" in name]
    assert len(parts) == 4 * 7
    assert all(gradients[name].any() for name in parts)
    assert not any(gradients[name].any() for name in gradients if "lora_A" in name)
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if "lora_" not in name)


WHOLE = [plan(streamed=False), plan(streamed=False, offload=False)]
TILES = [plan(), plan(offload=False), plan(heads=1), plan(outputs=1)]
HOW = ("whole host", "whole device", "tiles host", "tiles device", "grouped", "again")


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize("how", [*WHOLE, *TILES], ids=HOW)
def test_dropout_is_plain_pefts_with_the_mask_of_the_counter(how: Any, family: str) -> None:
    """In tiles, in head groups, run again or whole: loss and gradients are those of plain peft with the same mask in it."""
    args = lora(lora_dropout=0.3, lora_target_modules="all-linear")
    long, plain = prepare(wrapped(family, args), args, how), wrapped(family, args)
    seeds = []
    for seed in (11, 12):
        torch.manual_seed(seed)
        got_loss, got = step(long, **batch(LENGTH))
        torch.manual_seed(seed)
        seeds.append(int(torch.randint(2**62, ())))  # a forward draws one number, before anything else does
        mask_by_hand(plain, seeds[-1])
        want_loss, want = step(plain, **batch(LENGTH))
        assert got_loss == pytest.approx(want_loss, rel=1e-6)
        assert_same_gradients(got, want)
    state: Any = levers(long)
    assert getattr(state.checkpointing.stats(), "streamed", 0) == (2 if how.streamed else 0)


def mask_by_hand(plain: Any, step_seed: int) -> None:
    """Puts the counter's masks into plain peft's dropouts, in plain torch."""
    for index, layer in enumerate(plain.base_model.model.model.layers):
        for name, module in layer.named_modules():
            if isinstance(module, torch.nn.Dropout):
                module.forward = partial(_masked, step_seed, index, name, module.p)  # type: ignore[method-assign]


def _masked(step_seed: int, index: int, name: str, p: float, x: torch.Tensor) -> torch.Tensor:
    return x * counter_mask(step_seed, index, name, 0, x.shape[1], x.shape[2], p) / (1 - p)


def test_dropout_without_checkpointing_is_pefts_own() -> None:
    args = lora(lora_dropout=0.3, lora_target_modules=["q_proj", "down_proj"])
    found = []
    for model in (wrapped("qwen3", args), prepare(wrapped("qwen3", args), args, plan(checkpoint=False))):
        torch.manual_seed(11)
        found.append(step(model, **batch(LENGTH)))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    assert_same_gradients(found[1][1], found[0][1])


def test_dropout_on_the_head() -> None:
    """Drawn tile by tile, so not plain peft's numbers; but the gradient is that of the loss which was computed."""
    args = lora(lora_dropout=0.3, lora_target_modules=["lm_head"])
    model = prepare(wrapped("qwen3", args), args, plan())
    name, weight = next((n, p) for n, p in model.named_parameters() if "lora_B" in n)

    def loss() -> torch.Tensor:
        torch.manual_seed(4)
        return model(**batch(LENGTH)).loss

    loss().backward()
    direction, size = weight.grad.clone(), 1e-2
    with torch.no_grad():
        weight += size * direction
        up = float(loss())
        weight -= 2 * size * direction
        down = float(loss())
    assert (up - down) / (2 * size) == pytest.approx(float(direction.square().sum()), rel=1e-2), name


def test_prepared_before_or_after() -> None:
    args = lora(lora_target_modules=["q_proj"])
    after, before = prepare(wrapped("qwen3", args), args, plan()), tiny("qwen3")
    prepare(before, args, plan())
    before = wrap_lora(before, args)
    before.load_state_dict(after.state_dict())
    want, got = step(after, **batch(LENGTH)), step(before, **batch(LENGTH))
    assert got[0] == want[0]
    assert_same_gradients(got[1], want[1])
    assert unprepare(before)(**batch(LENGTH)).logits is not None


def test_stock_peft_loads_the_adapter(tmp_path: Path) -> None:
    """P5 for adapters."""
    args = lora(lora_target_modules=["q_proj", "up_proj"])
    model = prepare(wrapped("gemma2", args), args, plan())
    step(model, **batch(LENGTH))
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(tiny("gemma2"), tmp_path)
    ids = batch(LENGTH)["input_ids"]
    model.eval()
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    assert model.generate(input_ids=ids, max_new_tokens=4, pad_token_id=0, do_sample=False).shape == (1, LENGTH + 4)


def test_the_adapter_has_the_type_of_the_weights() -> None:
    model = wrap_lora(tiny("qwen3", dtype=torch.bfloat16), lora())
    assert {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} == {torch.bfloat16}


def test_pefts_own_configuration() -> None:
    model = wrap_lora(tiny("qwen3"), settings(), LoraConfig(r=5, target_modules=["k_proj"], task_type="CAUSAL_LM"))
    assert {tuple(p.shape) for n, p in model.named_parameters() if "lora_A" in n} == {(5, 64)}


def test_a_loaded_model_comes_back_as_one() -> None:
    loaded = LoadedModel(tiny("qwen3"), None, None, "name", "commit", "origin", None, None, False)  # type: ignore[arg-type]
    again = wrap_lora(loaded, lora())
    assert isinstance(again.model, PeftModel)
    assert again.name == "name"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [(0, 2), (1, 2)]}, "layer_replication"),
        ({"target_parameters": ["x"]}, "target_parameters"),
        ({"target_modules": ["no_such"]}, "no_such"),
    ],
)
def test_what_is_not_proven_is_refused(changes: dict[str, Any], words: str) -> None:
    chosen = LoraConfig(**({"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | changes))
    with pytest.raises(UserError, match=words):
        wrap_lora(tiny("qwen3"), settings(), chosen)


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("qwen3_moe", {"lora_target_modules": "all-linear"}, "means the experts of Qwen3MoeForCausalLM too"),
        ("qwen3_moe", {"lora_target_modules": "all-linear", "lora_dropout": 0.0}, "means the experts of Qwen3Moe"),
        ("olmoe", {"lora_target_modules": ["up_proj"]}, "peft cannot place the adapter: Cannot convert"),
        ("gpt_oss", {}, "peft cannot place the adapter"),
    ],
)
def test_adapters_on_experts_are_refused_with_names_that_are_taken(family: str, options: dict[str, Any], words: str) -> None:
    """peft makes them of experts in one tensor by itself, so that the option itself names nothing wrong."""
    with pytest.raises(UserError, match=words) as caught:
        wrap_lora(tiny(family), settings(use_peft=True, **options))
    assert str(caught.value).endswith("Write lora_target_modules: [q_proj, k_proj, v_proj, o_proj].")
    wrap_lora(tiny(family), settings(use_peft=True, lora_target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))


def test_other_adapters_are_refused() -> None:
    from peft import IA3Config, PromptTuningConfig

    for other in (IA3Config(task_type="CAUSAL_LM"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)):
        with pytest.raises(UserError, match=type(other).__name__):
            wrap_lora(tiny("qwen3"), settings(), other)
    prompts = get_peft_model(tiny("qwen3"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(UserError, match="PromptTuningConfig"):
        prepare(prompts, settings(), plan())


def test_without_peft_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "peft" else found(name, *rest))
    with pytest.raises(UserError, match=r"pip install 'megaspan\[lora\]'"):
        wrap_lora(tiny("qwen3"), lora())
