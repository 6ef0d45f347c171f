"""P1 with dropout: the mask of the counter, put by hand into plain peft, gives the loss and the gradients of every way to run.

Here a model's layers run under their places whole, run again in the backward, or are cut into tiles by a loop of this file.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from megaspan.layers.dropout import DropoutHandle, counter_mask, install_dropout, row_seed
from megaspan.model import prepare
from tests.model.support import plan, settings
from tests.models import assert_same_gradients, batch, gradients, tiny

RATE, STEP, TOKENS = 0.3, 1234567, 29


def adapted(family: str = "qwen3", **settings: Any) -> Any:
    """A tiny model with adapters on all its linear layers, in training; no adapter's B is zero."""
    chosen = {"r": 4, "lora_alpha": 6, "lora_dropout": RATE, "target_modules": "all-linear", "init_lora_weights": False}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return get_peft_model(tiny(family), LoraConfig(**(chosen | settings), task_type="CAUSAL_LM")).train()


def layers_of(model: Any) -> nn.ModuleList:
    return model.base_model.model.model.layers


def injected(model: Any, step: int = STEP) -> Any:
    """The model with the counter's masks in place of its dropouts, in plain torch."""
    for index, layer in enumerate(layers_of(model)):
        for name, module in layer.named_modules():
            if isinstance(module, nn.Dropout):
                module.forward = _injected(step, index, name, module.p)
    return model


def _injected(step: int, index: int, name: str, p: float) -> Any:
    return lambda x: x * counter_mask(step, index, name, 0, x.shape[1], x.shape[2], p) / (1 - p)


def result(model: Any) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**batch(TOKENS), use_cache=False).loss
    loss.backward()
    return float(loss.detach()), gradients(model)


def check(model: Any, plain: Any) -> None:
    (want_loss, want), (got_loss, got) = result(plain), result(model)
    assert got_loss == pytest.approx(want_loss, rel=1e-6)
    assert_same_gradients(got, want)
    assert all(bool(gradient.any()) for gradient in got.values())


def whole(layer: Any, handle: DropoutHandle, index: int) -> Any:
    own = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with handle.at(STEP, index, 0, args[0].shape[1]):
            return own(*args, **kwargs)

    return forward


def again(layer: Any, handle: DropoutHandle, index: int) -> Any:
    run = whole(layer, handle, index)
    return lambda *args, **kwargs: checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def tiled(sizes: tuple[int, ...]) -> Any:
    """A layer whose token-wise work runs in tiles of these sizes, each again in the backward; attention sees the whole row."""

    def of(layer: Any, handle: DropoutHandle, index: int) -> Any:
        attention = layer.self_attn

        def before(x: Tensor, start: int, cos: Tensor, sin: Tensor) -> Any:
            with handle.at(STEP, index, start, x.shape[1]):
                x = layer.input_layernorm(x)
                q, k, v = (
                    getattr(attention, f"{name}_proj")(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
                    for name in "qkv"
                )
                return *apply_rotary_pos_emb(attention.q_norm(q), attention.k_norm(k), cos, sin), v

        def after(x: Tensor, out: Tensor, start: int) -> Tensor:
            with handle.at(STEP, index, start, x.shape[1]):
                x = x + attention.o_proj(out)
                return x + layer.mlp(layer.post_attention_layernorm(x))

        def tile(function: Any, *args: Any) -> Any:
            return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)

        def forward(x: Tensor, **kwargs: Any) -> Tensor:
            cos, sin = kwargs["position_embeddings"]
            cuts, start = [], 0
            for size in sizes:
                cuts.append(slice(start, start + size))
                start += size
            assert start == x.shape[1]
            parts = [tile(before, x[:, cut], cut.start, cos[:, cut], sin[:, cut]) for cut in cuts]
            q, k, v = (torch.cat(each, dim=2) for each in zip(*parts, strict=True))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
            return torch.cat([tile(after, x[:, cut], out[:, cut], cut.start) for cut in cuts], dim=1)

        return forward

    return of


WAYS = {
    "whole": whole,
    "again": again,
    "one tile": tiled((29,)),
    "tiles": tiled((7, 7, 7, 7, 1)),
    "uneven tiles": tiled((1, 20, 8)),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_has_the_gradients_of_plain_peft_with_the_mask(way: str) -> None:
    model = adapted()
    plain = injected(copy.deepcopy(model))
    handle = install_dropout(layers_of(model))
    assert len(handle) == 2 * 7
    for index, layer in enumerate(layers_of(model)):
        layer.forward = WAYS[way](layer, handle, index)
    check(model, plain)


def test_the_reference_would_notice() -> None:
    """Another step, or masks of the wrong tokens, are no rounding."""
    model = adapted()
    other = injected(copy.deepcopy(model), STEP + 1)
    handle = install_dropout(layers_of(model))
    for index, layer in enumerate(layers_of(model)):
        layer.forward = whole(layer, handle, index)
    with pytest.raises(AssertionError):
        check(model, other)


@pytest.mark.parametrize("settings", [{"use_rslora": True}, {"target_modules": ["k_proj", "down_proj"]}, {"lora_dropout": 0.9}])
def test_kinds_of_adapters(settings: dict[str, Any]) -> None:
    model = adapted(**settings)
    plain = injected(copy.deepcopy(model))
    handle = install_dropout(layers_of(model))
    for index, layer in enumerate(layers_of(model)):
        layer.forward = again(layer, handle, index)
    check(model, plain)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("loss_type", ["chunked_nll", "nll"])
def test_a_prepared_model_takes_the_number_of_the_row(streamed: bool, loss_type: str) -> None:
    """Layers and head: whatever the generators' states are, a number gives one loss, and another number another."""
    model = adapted(target_modules=["q_proj", "down_proj", "lm_head"])
    prepare(model, settings(loss_type=loss_type), plan(streamed=streamed))
    losses = []
    for seed in (row_seed(0, 1, 2), row_seed(0, 1, 2), row_seed(0, 1, 3)):
        before = torch.get_rng_state()
        losses.append(model(**batch(TOKENS), megaspan_seed=seed).loss.item())
        assert torch.equal(before, torch.get_rng_state())
        torch.manual_seed(len(losses))
    assert losses[0] == losses[1] != losses[2]
