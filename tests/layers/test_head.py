"""What `head_of` reads is what the model's own forward does, and a model that does more is refused by `check_head`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from megaspan.human import UserError
from megaspan.layers.dropout import counter_mask
from megaspan.layers.head import check_head, head_of
from megaspan.layers.loss import linear_cross_entropy
from tests.models import FAMILIES, VOCAB, assert_same_gradients, gradients, tiny, tiny_config

torch.set_num_threads(1)
SETTINGS = {"granite": (0.25, None), "cohere": (0.0625, None), "gemma2": (1.0, 5.0)}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_read_as_they_are(family: str, tied: bool) -> None:
    """Scale and cap of every family, the live weight (the embedding itself where tied), in agreement with the model."""
    model = tiny(family, tied=tied)
    head = check_head(model)
    assert (head.scale, head.softcap) == SETTINGS.get(family, (1.0, None))
    assert head.weight_VE is model.lm_head.weight
    assert (head.weight_VE is model.get_input_embeddings().weight) == tied
    assert (head.bias_V, head.deltas, head.vocab) == (None, (), VOCAB)


@pytest.mark.parametrize("family", ["gemma2", "granite"])
def test_bf16_models_agree_too(family: str) -> None:
    assert check_head(tiny(family, dtype=torch.bfloat16)).scale == SETTINGS[family][0]


def test_a_divider_that_multiplies() -> None:
    """HyperCLOVA X multiplies by the number by which Granite divides (R53: a wrong formula in silence)."""
    if "hyperclovax" not in CONFIG_MAPPING_NAMES:
        pytest.skip("this transformers has no HyperCLOVA X")
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("hyperclovax", **sizes, num_key_value_heads=1, logits_scaling=0.125, pad_token_id=None)
    assert check_head(AutoModelForCausalLM.from_config(config)).scale == 0.125


def test_a_bias_on_the_output_layer() -> None:
    model = tiny("llama")
    model.lm_head = nn.Linear(64, VOCAB)
    assert check_head(model).bias_V is model.lm_head.bias


class Louder(LlamaForCausalLM):
    """One part in a thousand on every logit."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 1.001
        return out


class Capped(LlamaForCausalLM):
    """A cap so wide that the logits of a random model do not feel it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = 5e3 * torch.tanh(out.logits / 5e3)
        return out


class Masked(LlamaForCausalLM):
    """One word that may never be said."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits[..., 77] = torch.finfo(out.logits.dtype).min
        return out


class Shorter(LlamaForCausalLM):
    """Padded words cut off."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits[..., :120]
        return out


class Scaled(LlamaForCausalLM):
    """Twice the last hidden state to the output layer."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(hidden * 2))


class Own(LlamaForCausalLM):
    """Decoder, output layer and loss in a forward of its own; the classes below do one thing more."""

    def embedded(self, input_ids: Any) -> Any:
        return self.model.embed_tokens(input_ids)

    def before_head(self, hidden: Any) -> Any:
        return hidden

    def loss_of(self, logits: Any, labels: Any, hidden: Any) -> Any:
        return self.loss_function(logits, labels, self.config.vocab_size)

    def forward(self, input_ids: Any = None, labels: Any = None, use_cache: Any = None, **kwargs: Any) -> Any:
        embeds = self.embedded(input_ids)
        hidden = self.model(inputs_embeds=embeds, use_cache=use_cache, **kwargs).last_hidden_state
        logits = self.lm_head(self.before_head(hidden))
        loss = None if labels is None else self.loss_of(logits, labels, hidden)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class Penalised(Own):
    def loss_of(self, logits: Any, labels: Any, hidden: Any) -> Any:
        return super().loss_of(logits, labels, hidden) + 1e-4 * logits.float().logsumexp(-1).square().mean()


class Smoothed(Own):
    def loss_of(self, logits: Any, labels: Any, hidden: Any) -> Any:
        return nn.functional.cross_entropy(logits[0, :-1].float(), labels[0, 1:], label_smoothing=0.1)


class Small(Own):
    def loss_of(self, logits: Any, labels: Any, hidden: Any) -> Any:
        return super().loss_of(logits, labels, hidden) + 1e-3 * hidden.float().square().mean()


class Unshifted(Own):
    def loss_of(self, logits: Any, labels: Any, hidden: Any) -> Any:
        return nn.functional.cross_entropy(logits[0].float(), labels[0])


class Lossless(Own):
    def loss_of(self, logits: Any, labels: Any, hidden: Any) -> Any:
        return None


class Dropped(Own):
    def before_head(self, hidden: Any) -> Any:
        return nn.functional.dropout(hidden, 0.5, self.training)


class Embedded(Own):
    def embedded(self, input_ids: Any) -> Any:
        return self.model.embed_tokens(input_ids) * 3


class Narrowed(nn.Linear):
    """An output layer that scales its input."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input * 0.5)


@pytest.mark.parametrize("kind", [Louder, Capped, Masked, Shorter])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unknown_steps_after_the_head_are_refused(kind: type, dtype: torch.dtype) -> None:
    model = kind(tiny_config("llama")).to(dtype)
    with pytest.raises(UserError, match=f"{kind.__name__} is not known here, because its logits are not x·W"):
        check_head(model)


def test_a_hidden_state_changed_before_the_head_is_refused() -> None:
    model = tiny("llama")
    model.model.norm.register_forward_hook(lambda _m, _a, output: output)  # harmless: the backbone's output includes it
    check_head(model)
    model.__class__ = Scaled
    with pytest.raises(UserError, match="not given the last hidden state as it is"):
        check_head(model)


def test_an_output_layer_of_another_kind_is_refused() -> None:
    model = tiny("llama")
    model.lm_head = Narrowed(64, VOCAB)
    with pytest.raises(UserError, match=r"cannot read this kind of output layer; got .*Narrowed"):
        head_of(model)
    with pytest.raises(UserError, match="no output layer"):
        head_of(nn.Linear(2, 2))
    config = tiny_config("granite", logits_scaling=0)
    with pytest.raises(UserError, match="logits_scaling"):
        head_of(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize(
    "hook",
    ["register_forward_pre_hook", "register_forward_hook", "register_full_backward_hook", "register_full_backward_pre_hook"],
)
def test_a_hook_on_the_output_layer_is_refused(hook: str) -> None:
    """The loss never calls the layer, so none of them would run; those inside a LoRA layer neither."""
    for model, inside in ((tiny("llama"), "lm_head"), (adapted(), "base_model.model.lm_head.lora_A.default")):
        head_of(model)
        handle = getattr(model.get_submodule(inside), hook)(lambda *_: None)
        with pytest.raises(UserError, match=rf"a hook on {inside.removeprefix('base_model.model.')} is to see whole rows"):
            head_of(model)
        handle.remove()
        head_of(model)


def test_a_pruned_output_layer_is_refused_until_it_is_made_permanent() -> None:
    model = tiny("llama")
    prune.l1_unstructured(model.lm_head, "weight", 0.3)
    with pytest.raises(UserError, match="a hook on lm_head"):
        check_head(model)
    prune.remove(model.lm_head, "weight")
    assert (check_head(model).weight_VE == 0).float().mean() > 0.29


def test_the_check_leaves_the_model_as_it_was() -> None:
    """Modes of single modules, hooks and gradients: a frozen module in evaluation stays there, also after a refusal."""
    for model in (tiny("gemma2"), Louder(tiny_config("llama"))):
        model.train()
        model.model.layers[0].eval()
        before = [module.training for module in model.modules()]
        with torch.enable_grad():
            try:
                check_head(model)
            except UserError:
                assert isinstance(model, Louder)
        assert [module.training for module in model.modules()] == before
        assert not any(module._forward_hooks for module in model.modules())
        assert all(parameter.grad is None for parameter in model.parameters())


def test_the_formula_is_told() -> None:
    assert check_head(tiny("gemma2")).describe() == "5·tanh((x·W)/5)"
    assert check_head(tiny("granite")).describe() == "0.25·(x·W)"


def adapted(**settings: Any) -> Any:
    """A tiny model with LoRA on its head whose B is not zero."""
    peft = pytest.importorskip("peft")
    chosen = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "lm_head"], "lora_dropout": 0.0} | settings
    model = peft.get_peft_model(tiny("granite"), peft.LoraConfig(task_type="CAUSAL_LM", **chosen))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return model


def loss_and_gradients(model: Any, *, plain: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Through the model's own logits, or through its backbone and the chunked loss."""
    model.zero_grad(set_to_none=True)
    ids = torch.arange(1, 41)[None] % VOCAB
    labels = ids[0].roll(-1)
    if plain:
        loss = nn.functional.cross_entropy(model(input_ids=ids).logits[0].float(), labels, reduction="sum")
    else:
        hidden = model.get_base_model().model(input_ids=ids).last_hidden_state[0]
        loss = linear_cross_entropy(hidden, head_of(model), labels, tile_tokens=64).loss
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True},
        {"lora_dropout": 0.5},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"]},
    ],
    ids=["lora", "rslora", "dropout", "modules_to_save", "body"],
)
def test_lora_on_the_head_is_pefts_own(settings: dict[str, Any]) -> None:
    """Loss and every trained gradient equal peft's forward. With dropout in evaluation mode, where it is off."""
    model = adapted(**settings).train("lora_dropout" not in settings)
    head = check_head(model)
    assert len(head.deltas) == ("lm_head" in model.peft_config["default"].target_modules)
    want_loss, want = loss_and_gradients(model, plain=True)
    got_loss, got = loss_and_gradients(model, plain=False)
    torch.testing.assert_close(got_loss, want_loss, rtol=1e-6, atol=0)
    trained = settings.get("target_modules") != ["q_proj"] or "modules_to_save" in settings
    assert any("lm_head" in name and gradient.any() for name, gradient in want.items()) == trained
    assert_same_gradients(got, want)


def test_dropout_follows_the_mode_of_the_model() -> None:
    """Exact, not refused: in training the adapter's input is dropped by the counter's mask, which plain peft gets by hand."""
    model = adapted(lora_dropout=0.5, target_modules=["lm_head"]).train()
    assert head_of(model).deltas[0].dropout == 0.5
    assert head_of(model.eval()).deltas[0].dropout == 0.0
    model.train()
    torch.manual_seed(3)
    got = loss_and_gradients(model, plain=False)
    torch.manual_seed(3)
    seed = int(torch.randint(2**62, ()))
    dropout = next(module for name, module in model.named_modules() if "lora_dropout.default" in name)
    dropout.forward = lambda x: x * counter_mask(seed, -1, "head 0", 0, x.shape[-2], x.shape[-1], 0.5) / 0.5
    want = loss_and_gradients(model, plain=True)
    torch.testing.assert_close(got[0], want[0], rtol=1e-6, atol=0)
    assert_same_gradients(got[1], want[1])


def test_adapters_switched_off_merged_and_several() -> None:
    model = adapted()
    trained = float(loss_and_gradients(model, plain=True)[0])
    with model.disable_adapter():
        assert head_of(model).deltas == ()
        assert check_head(model).deltas == ()
    merged = copy.deepcopy(model)
    merged.merge_adapter()
    assert head_of(merged).deltas == ()
    ids = torch.arange(1, 41)[None] % VOCAB
    hidden = merged.get_base_model().model(input_ids=ids).last_hidden_state[0]
    loss = linear_cross_entropy(hidden, head_of(merged), ids[0].roll(-1), tile_tokens=64).loss
    assert loss.item() == pytest.approx(trained, rel=1e-5)
    model.add_adapter("second", model.peft_config["default"])
    model.base_model.set_adapter(["default", "second"])
    assert len(check_head(model).deltas) == 2


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_bias": True}], ids=["dora", "bias"])
def test_other_adapters_on_the_head_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"must be plain LoRA.*lora_modules_to_save"):
        head_of(adapted(**settings))
