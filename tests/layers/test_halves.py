"""Which layers run their halves fused, that fusing changes no bit on the CPU, and what falls back."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch

from megaspan.attention import install as install_attention
from megaspan.human import UserError
from megaspan.layers.dials import LayerPlan
from megaspan.layers.family import before, describe
from megaspan.layers.fused import Fused, RmsNorm
from megaspan.layers.streamed import Streaming
from tests.models import FAMILIES, assert_same_gradients, batch, gradients, tiny

# Which of the families' first halves and MLPs have the common form.
FIRST = {"llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "granite", "qwen3_moe"}
GATED = {"llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "granite", "olmo2", "cohere"}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def streamed(plain, **plan):
    model = copy.deepcopy(plain)
    install_attention(model)
    streaming = Streaming(LayerPlan(**({"tile_tokens": 5, "fused_norms": False} | plan)))
    assert streaming.install(model, prove=False) == [None] * len(streaming.reasons)
    return model, streaming


def step(model, data):
    model.zero_grad()
    loss = model(**data, use_cache=False).loss
    loss.backward()
    return loss.detach(), gradients(model)


def watch(monkeypatch):
    """Names of the fused formulas as they are called."""
    called = []
    for name in ("norm_and_rotate", "gated"):
        own = getattr(Fused, name)
        monkeypatch.setattr(Fused, name, lambda *args, name=name, own=own: (called.append(name), own(*args))[1])
    return called


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tile", [5, 64])
def test_fused_halves_run_where_they_fit_and_change_no_loss(family, tile, monkeypatch):
    plain = tiny(family)
    model, streaming = streamed(plain, tile_tokens=tile)
    other, _ = streamed(plain, tile_tokens=tile, fused=False)
    stats = streaming.stats()
    assert (stats.fused_attentions, stats.fused_mlps) == (2 * (family in FIRST), 2 * (family in GATED))
    assert len(streaming.unfused()) == (family not in FIRST) + (family not in GATED)
    called = watch(monkeypatch)
    (want_loss, want), (loss, got) = step(other, batch(17)), ([], called.clear(), step(model, batch(17)))[2]
    assert set(called) == {name for name, some in (("norm_and_rotate", FIRST), ("gated", GATED)) if family in some}
    assert torch.equal(loss, want_loss)
    assert_same_gradients(got, want, 1e-6)


def test_norms_and_activations_are_read_off_the_modules():
    _, qwen = streamed(tiny("qwen3"))
    _, gemma = streamed(tiny("gemma3"))
    assert [(halves.norm, halves.activation) for halves in (qwen._halves[0], gemma._halves[0])] == [
        (RmsNorm(1e-6, "plain"), "silu"),
        (RmsNorm(1e-6, "plus one"), "gelu_tanh"),
    ]


def patch_attention(layer):
    attention, own = layer.self_attn, type(layer.self_attn).forward
    attention.forward = lambda *args, **kwargs: own(attention, *args, **kwargs)


def clip(layer):
    """clip_qkv, as OLMo has it: a clamp that random hidden states of usual size do not reach."""
    kind = type(layer.self_attn)

    class Clipped(kind):
        def forward(self, hidden_states, **kwargs):
            capture = kwargs.get("megaspan_capture")
            if capture is not None:
                from dataclasses import replace

                kwargs["megaspan_capture"] = lambda call: capture(replace(call, v_BGSD=call.v_BGSD.clamp(-8, 8)))
            return super().forward(hidden_states, **kwargs)

    layer.self_attn.__class__ = Clipped


def scale_mlp(layer):
    class Scaled(type(layer.mlp)):
        def forward(self, x):
            return 1.1 * super().forward(x)

    layer.mlp.__class__ = Scaled


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (patch_attention, "Qwen3Attention fused is hooked or patched"),
        (clip, "Clipped fused differs from its own code"),
        (scale_mlp, "Scaled fused differs from its own code"),
        (lambda layer: layer.mlp.register_forward_hook(lambda *_: None), "Qwen3MLP fused is hooked or patched"),
        (lambda layer: layer.self_attn.q_norm.register_forward_pre_hook(lambda *_: None), "Qwen3Attention fused is hooked"),
        (lambda layer: layer.self_attn.add_module("rotary_emb", torch.nn.Identity()), "Qwen3Attention has other parts"),
        (lambda layer: setattr(layer.mlp, "act_fn", torch.nn.Mish()), "Qwen3MLP has an activation that is not known"),
    ],
)
def test_unusual_layers_keep_their_own_code(change, reason):
    plain = tiny("qwen3")
    for module in plain.model.layers[:1]:
        change(module)
    install_attention(plain)
    streaming = Streaming(LayerPlan(tile_tokens=5))
    streaming.install(plain, prove=False)
    assert len(streaming.unfused()) == 1
    assert streaming.unfused()[0].startswith(reason)
    assert streaming.stats().fused_attentions + streaming.stats().fused_mlps == 3


@pytest.mark.parametrize("late", ["self_attn", "self_attn.k_norm", "mlp", "mlp.act_fn"])
def test_a_hook_set_later_sees_whole_rows(late, monkeypatch):
    """Its layer runs whole, in its own code; the other layer stays as it was."""
    model, _ = streamed(tiny("qwen3"))
    called, seen = watch(monkeypatch), []
    step(model, batch(9))
    before = {name: called.count(name) for name in ("norm_and_rotate", "gated")}
    module = model.model.layers[1].get_submodule(late)
    hook = module.register_forward_hook(lambda _, given, out: seen.append((out if torch.is_tensor(out) else out[0]).shape[1]))
    called.clear()
    step(model, batch(9))
    assert set(seen) == {9}
    assert all(called.count(name) == count / 2 for name, count in before.items())
    hook.remove()
    called.clear()
    step(model, batch(9))
    assert all(called.count(name) == count for name, count in before.items())


def test_hooks_on_projections_run_and_stay_fused():
    model, streaming = streamed(tiny("qwen3"))
    seen = []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: seen.append(1))
    step(model, batch(9))
    assert seen
    assert streaming.stats().fused_attentions == 2


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear"])
def test_adapters_stay_in_fused_halves(targets, monkeypatch):
    """R63: projections are called as the live modules they are."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(0)
    plain = peft.get_peft_model(tiny("qwen3"), config).train()
    model, streaming = streamed(plain)
    assert (streaming.stats().fused_attentions, streaming.stats().fused_mlps) == (2, 2)
    called = watch(monkeypatch)
    got, want = step(model, batch(17))[1], step(plain, batch(17))[1]
    assert_same_gradients(got, want)
    assert "norm_and_rotate" in called


def test_a_copied_model_runs_its_own_weights():
    plain = tiny("qwen3")
    model, _ = streamed(plain)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for one in (plain, twin):
            one.model.layers[0].self_attn.q_norm.weight.mul_(2)
            one.model.layers[0].mlp.gate_proj.weight.mul_(2)
    assert_same_gradients(step(twin, batch(12))[1], step(plain, batch(12))[1])


def test_a_window_that_the_mask_denies_is_refused_on_the_whole_row():
    """One token, from which scale and window are read, shows no disagreement: a row longer than the window does."""
    from megaspan.human import UserError

    model, _ = streamed(tiny("mistral"), tile_tokens=64)
    attention = model.model.layers[1].self_attn
    attention.config = copy.copy(attention.config)
    attention.config.sliding_window = attention.sliding_window = None
    step(model, batch(7))
    with pytest.raises(UserError, match="disagree about the window"):
        step(model, batch(30))


def test_a_toy_that_differs_when_fused_streams_unfused(monkeypatch):
    import megaspan.layers.streamed as module

    monkeypatch.setattr(module, "prove_family", lambda _, fused: "differs" if fused else None)
    model = tiny("qwen3")
    install_attention(model)
    streaming = Streaming(LayerPlan(tile_tokens=5))
    assert streaming.install(model) == [None, None]
    assert streaming.unfused() == ["differs"]
    assert streaming.stats().fused_attentions == 0


def test_a_row_of_one_tile_leaves_the_incoming_gradient_alone():
    """Where a layer hands the gradient of its output through, the gradient of its input gets memory of its own."""
    plain = tiny("qwen3")
    for layer in plain.model.layers:
        layer.mlp.down_proj.weight.data.zero_()
        layer.mlp.requires_grad_(False)
    model, _ = streamed(plain, tile_tokens=64)
    kept = []
    for one in (plain, model):
        hidden = one.model(batch(12)["input_ids"], use_cache=False).last_hidden_state
        weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
        hidden.backward(weights)
        kept.append(weights)
    assert torch.equal(*kept)
    assert_same_gradients(gradients(model), gradients(plain))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_halves_train_like_plain_transformers():
    """Forward and backward of a whole model with compiled formulas, in tiles, several tiles of unequal length."""
    plain = tiny("qwen3")
    model = copy.deepcopy(plain)
    install_attention(model)
    streaming = Streaming(LayerPlan(tile_tokens=5))
    streaming.fused = Fused(("cpu",))
    streaming.install(model, prove=False)
    for tokens in (17, 33, 12):
        data = batch(tokens)
        assert_same_gradients(step(model, data)[1], step(plain, data)[1])
    assert streaming.unfused() == []
    assert streaming.stats().compiled == 2


def test_attention_that_is_not_asked_for_is_left_to_the_layers_own_code_by_the_option_that_does_so():
    """Only streamed layers, of `gradient_checkpointing: true`, come here."""
    layer = tiny("qwen3").model.layers[0]
    family = describe(layer)
    layer.self_attn.forward = lambda **_: None
    with pytest.raises(UserError, match=r"did not call the attention.*Set gradient_checkpointing: false"):
        before(layer, family, torch.zeros(1, 4, layer.hidden_size), slice(4), {"position_embeddings": None})
