"""Attention inside unmodified transformers models: parity for every family, refusals, generation, one model's setting."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from megaspan.attention import install
from megaspan.attention import seam as seam_module
from megaspan.attention.context import RowContext, RowRanks
from megaspan.attention.layout import lay_out
from megaspan.attention.mask import Mask
from megaspan.attention.seam import work_of
from megaspan.attention.tiled import TiledMath
from megaspan.attention.work import Work
from megaspan.human import UserError
from tests.models import FAMILIES, assert_same_gradients, batch, gradients, tiny, tiny_config

WINDOWED = ("mistral", "gemma2", "gemma3", "gpt_oss")


def _pair(family, **settings):
    """The plain model and a copy of it with our attention."""
    plain = tiny(family, **settings)
    ours = copy.deepcopy(plain)
    install(ours)
    return plain, ours


def _loss(model, data, **more):
    loss = model(**data, use_cache=False, **more).loss
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", [1, 7, 33])
def test_loss_and_every_gradient_equal_plain_transformers(family, tokens):
    """P1 for attention alone: windows, soft caps, sinks (their gradients too), per-layer rotary tables (R35, R36, R42)."""
    plain, ours = _pair(family)
    data = batch(tokens, rows=2)
    if tokens == 1:  # nothing to predict: compare the logits
        torch.testing.assert_close(ours(data["input_ids"]).logits, plain(data["input_ids"]).logits, rtol=1e-5, atol=1e-5)
        return
    torch.testing.assert_close(_loss(ours, data), _loss(plain, data), rtol=1e-6, atol=0)
    tolerance = 1e-4 if family in ("gpt_oss", "qwen3_moe") else 1e-5
    assert_same_gradients(gradients(ours), gradients(plain), tolerance)
    if family == "gpt_oss":
        assert all((layer.self_attn.sinks.grad != 0).all() for layer in ours.model.layers)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
def test_bf16_is_no_farther_from_fp32_than_plain_bf16(family):
    data = batch(65)
    plain, ours = _pair(family, dtype=torch.bfloat16)
    exact = copy.deepcopy(plain).float()
    for model in (exact, plain, ours):
        _loss(model, data)
    want, other, got = (torch.cat([g.float().flatten() for g in gradients(m).values()]) for m in (exact, plain, ours))
    assert (got - want).norm() <= 1.5 * (other - want).norm()


def test_under_autocast_attention_computes_in_bf16():
    model = tiny("qwen3")
    install(model)
    seen = []
    original = seam_module.attend_with
    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16):
        patch.setattr(seam_module, "attend_with", lambda *x: seen.append({y.dtype for y in x[1:4]}) or original(*x))
        _loss(model, batch(9))
    assert seen == [{torch.bfloat16}] * 2


@pytest.mark.parametrize("family", WINDOWED)
def test_changing_the_first_token_reaches_exactly_the_window(family):
    """P2, R34: with only windowed layers active, token 0 changes the outputs of `window` positions a layer and no more."""
    model = tiny(family, layers=1).eval()
    install(model)
    ids = batch(64)["input_ids"]
    changed = ids.clone()
    changed[0, 0] = (ids[0, 0] + 1) % 128
    with torch.no_grad():
        # Experts are multiplied in groups of tokens, so bits may move elsewhere; influence is far larger.
        differs = ((model(ids).logits - model(changed).logits).abs() > 1e-4).any(-1)[0].nonzero()[:, 0].tolist()
    assert differs == list(range(8))


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3", "gpt_oss", "gemma2"])
def test_generation_with_a_cache_is_exact(family):
    """Queries shorter than the keys are their suffix, in full and in windowed layers (whose cache is cut)."""
    plain, ours = (model.eval() for model in _pair(family))
    prompt = batch(21)["input_ids"]
    settings = {"max_new_tokens": 12, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    got, want = (model.generate(prompt, **settings) for model in (ours, plain))
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=1e-4, atol=1e-5)


def test_only_this_model_is_changed():
    """Two models built from one config object share its attention setting; ours gets its own copy."""
    config = tiny_config("gemma3")
    config._attn_implementation = "eager"
    one, two = AutoModelForCausalLM.from_config(config), AutoModelForCausalLM.from_config(config)
    assert one.config is two.config
    install(one)
    assert {m.config._attn_implementation for m in one.modules() if hasattr(m, "config")} == {"megaspan"}
    assert {m.config._attn_implementation for m in two.modules() if hasattr(m, "config")} == {"eager"}
    assert one.config is one.model.config is one.model.layers[0].self_attn.config


def test_the_saved_config_does_not_name_our_kernel(tmp_path):
    model = tiny("qwen3")
    install(model)
    model.save_pretrained(tmp_path)
    assert "megaspan" not in (tmp_path / "config.json").read_text()
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_installing_twice_and_copying_keeps_working():
    model = tiny("qwen3")
    install(model)
    install(model)
    twin = copy.deepcopy(model)
    data = batch(9)
    assert torch.equal(_loss(twin, data), _loss(model, data))


def test_the_choice_is_reported_for_every_kind_of_layer():
    choice = install(tiny("gemma3", max_position_embeddings=4096))
    assert choice.name == "CPU flash"
    assert [other.name for other in choice.also] == ["tiled matrix products"]
    assert "window 8" in choice.also[0].reason
    assert "sinks" in install(tiny("gpt_oss")).reason


def test_a_layers_kernel_is_tried_with_its_own_query_heads_a_kv_head(monkeypatch):
    """FlashAttention 4 is compiled for that number: with another one a kernel would be proven that never runs."""
    asked = []
    real = seam_module._kind
    monkeypatch.setattr(seam_module, "_kind", lambda case, *more: asked.append(case.share) or real(case, *more))
    install(tiny("qwen3", num_attention_heads=8, num_key_value_heads=2))
    install(tiny("qwen3", num_attention_heads=4, num_key_value_heads=4))
    assert asked == [4, 1]


def test_kernels_are_tried_on_segments_when_a_packed_row_comes():
    model = tiny("qwen3")
    install(model)
    asked = []

    class Proof:
        def applied_to(self, kernels, share):
            asked.append((kernels, share))
            return (TiledMath(),)

    layers = [layer.self_attn for layer in model.model.layers]
    before = layers[0].megaspan_kernels
    for layer in layers:
        layer.megaspan_segments = Proof()
    model(batch(9)["input_ids"])
    assert asked == []
    row = RowContext(lay_out([4, 5], 1), RowRanks(), "cpu")
    for _ in range(2):
        model.model(batch(9)["input_ids"], megaspan_row=row)
    assert asked == [(before, 2)] * 2
    assert all([kernel.name for kernel in layer.megaspan_kernels] == ["tiled matrix products"] for layer in layers)


def test_the_kernels_of_expected_packed_rows_are_reported():
    choice = install(tiny("gemma3", max_position_embeddings=4096), packed=True)
    assert [("window 8" in each.reason, "variable lengths" in each.reason) for each in (choice, *choice.also)] == [
        (False, False),
        (True, False),
        (False, True),
        (True, True),
    ]


def test_a_rows_context_takes_one_row_at_a_time():
    model = tiny("qwen3")
    install(model)
    row = RowContext(lay_out([4, 5], 1), RowRanks(), "cpu")
    with pytest.raises(ValueError, match="batch of 2"):
        model.model(batch(9, rows=2)["input_ids"], megaspan_row=row)


def test_a_window_is_compared_with_the_whole_row_where_a_rank_has_less():
    """Five of a row's forty tokens: that a mask of eight and a layer without a window disagree shows in the row alone."""
    model = tiny("qwen3")
    install(model)
    q, k = torch.zeros(1, 4, 5, 16), torch.zeros(1, 2, 5, 16)
    row = RowContext(lay_out([40], 1), RowRanks(), "cpu")
    with pytest.raises(UserError, match="disagree about the window"):
        seam_module.attention(model.model.layers[0].self_attn, q, k, k, torch.tensor(8), megaspan_row=row)


def test_the_work_of_a_model_is_counted_by_its_layers():
    """Windows that a family keeps in its configuration too; a token's linear layers in pairs of a query and a key."""
    assert work_of(tiny("gemma3", layers=3)).layers == {Mask(window=8): 2, Mask(): 1}
    assert work_of(tiny("mistral")).layers == {Mask(window=8): 2}
    # q and o: 64 x 64 each, k and v: 32 x 64 each, an MLP of 3 x 96 x 64; a pair costs 2 x 64 of them
    assert work_of(tiny("llama")) == Work({Mask(): 2}, (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64) // 128)


def test_no_tensor_as_large_as_a_mask():
    """R31: on a row of 2,048 tokens nothing with tokens x tokens elements is built, for windows and full attention alike."""
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for value in result if isinstance(result, tuple | list) else [result]:
                if isinstance(value, torch.Tensor):
                    largest = max(largest, value.numel())
            return result

    model = tiny("gemma3", max_position_embeddings=4096)
    install(model)
    for layer in model.model.layers:
        layer.self_attn.megaspan_kernels = (TiledMath(tile_elements=2**16),)
    data = batch(2048)
    with Watch():
        model.model(data["input_ids"], attention_mask=torch.ones_like(data["input_ids"])).last_hidden_state.sum().backward()
    assert largest < 2048 * 2048 / 8


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1]])}, "padded batches are not supported"),
        ({"attention_mask": torch.ones(1, 1, 8, 8)}, "attention masks are not supported"),
        ({"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])}, "another mask than causal"),
        (
            {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]), "attention_mask": torch.ones(1, 8, dtype=torch.int64)},
            "packed rows are not supported",
        ),
        (
            {"cu_seq_lens_q": torch.tensor([0, 4, 8]), "cu_seq_lens_k": torch.tensor([0, 4, 8]), "max_length_q": 4},
            "arguments that are not supported; got cu_seq_lens_k, cu_seq_lens_q, max_length_q",
        ),
        ({"is_causal": False}, "another mask than causal"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(more, sentence):
    """R25, R26: padding, masks, packed rows (also where an all-ones mask hides them from transformers), foreign arguments."""
    model = tiny("qwen3")
    install(model)
    with pytest.raises(UserError, match=sentence):
        model(batch(8)["input_ids"], use_cache=False, **more)


def test_neutral_arguments_pass():
    plain, model = _pair("qwen3")
    data = batch(8)
    more = {"attention_mask": torch.ones(1, 8, dtype=torch.int64), "position_ids": torch.arange(8)[None], "cu_seq_lens_q": None}
    torch.testing.assert_close(_loss(model, data, **more), _loss(plain, data), rtol=1e-6, atol=0)


def test_attention_dropout_is_refused_before_training():
    with pytest.raises(UserError, match="attention_dropout"):
        install(tiny("llama", attention_dropout=0.1))
    model = tiny("llama")
    install(model)
    model.model.layers[1].self_attn.attention_dropout = 0.1
    with pytest.raises(UserError, match="dropout"):
        model(batch(8)["input_ids"])


def test_a_module_that_is_not_causal_is_named():
    model = tiny("llama")
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(UserError, match=r"not causal.*model\.layers\.1\.self_attn"):
        install(model)


def test_a_window_lost_between_mask_and_layer_is_an_error():
    """R34: a layer whose mask has a window but whose attention call has none would silently be full causal."""
    model = tiny("gemma3")
    install(model)
    model.model.layers[0].self_attn.sliding_window = None
    with pytest.raises(UserError, match=r"Gemma3Attention of layer 0 and its attention disagree.*mask 8, attention none"):
        model(batch(20)["input_ids"], use_cache=False)
    model(batch(8)["input_ids"], use_cache=False)  # a row as short as the window: both mean the same


def test_a_static_cache_is_refused():
    from transformers import StaticCache

    model = tiny("qwen3").eval()
    install(model)
    with pytest.raises(UserError, match="fixed size"):
        model(batch(8)["input_ids"], past_key_values=StaticCache(config=model.config, max_cache_len=32))


def test_a_model_without_the_interface_is_refused():
    with pytest.raises(UserError, match="in its own code"):
        install(torch.nn.Linear(2, 2))
