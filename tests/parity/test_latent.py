"""P1 for latent attention (MLA): keys of two parts, values narrower than keys, as many KV heads as query heads.

Layers run whole; what is particular is at the seam, where values are as wide as keys, and in what a plan counts.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from megaspan.attention import install
from megaspan.config import SFTConfig
from megaspan.data import Row
from megaspan.human import UserError
from megaspan.model import levers, prepare, wrap_lora
from megaspan.model.counted import facts_of
from megaspan.model.kinds import refuse_shared_rows
from megaspan.model.shard import shard
from megaspan.plan.facts import ModelFacts
from megaspan.plan.layer import layer_bytes
from megaspan.plan.parts import Settings
from megaspan.trainer.share import Share
from megaspan.trainer.step import Accumulator
from megaspan.world.axes import Mesh, device_axes
from tests.gloo import run_ranks
from tests.layers.test_streamed_ranks import by_hand
from tests.model.support import plan, settings, step
from tests.models import VOCAB, assert_same_gradients, batch, gradients, randomise
from tests.parity.ranks import whole_gradients

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 4096, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None, "tie_word_embeddings": False, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 32, "mscale": 1.0,
    "mscale_all_dim": 1.0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "youtu": {},
    "deepseek_v2": EXPERTS | {"q_lora_rank": None},
    "deepseek_v3": EXPERTS | {"rope_interleave": True, "rope_parameters": YARN},
    "glm4_moe_lite": EXPERTS | {"v_head_dim": 16, "mlp_layer_types": ["dense", "sparse"]},
}


def config_of(family: str, **changes: Any) -> Any:
    return AutoConfig.for_model(family, **copy.deepcopy(SIZES | FAMILIES[family] | changes))


@functools.cache
def _built(family: str) -> Any:
    model = AutoModelForCausalLM.from_config(config_of(family), attn_implementation="eager")
    randomise(model, 0)
    return model.train()


def model_of(family: str) -> Any:
    """A plain model in fp32: torch multiplies groups of experts in no wider type."""
    return copy.deepcopy(_built(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient_equal_plain_transformers(family: str) -> None:
    plain, model = model_of(family), model_of(family)
    prepare(model, settings(), plan(streamed=False))
    for length in (1, 7, 129):
        data = batch(length) if length > 1 else {"input_ids": torch.tensor([[5]])}
        found = []
        for each in (plain, model):
            each.zero_grad()
            out = each(**data, use_cache=False)
            loss = out.loss if length > 1 else out.logits.square().sum()
            loss.backward()
            found.append((float(loss.detach()), gradients(each)))
        assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
        assert_same_gradients(found[1][1], found[0][1], 1e-4)
        assert any("kv_b_proj" in name for name in found[1][1])


def test_values_narrower_than_keys_beside_windows_and_sinks() -> None:
    """MiMo-V2-Flash: no latents, but values of another width, and twice the KV heads in layers with a window."""
    config = AutoConfig.for_model(
        "mimo_v2_flash", vocab_size=VOCAB, hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=24, v_head_dim=16, sliding_window=9, moe_intermediate_size=32, n_routed_experts=4,
        num_experts_per_tok=2, layer_types=["full_attention", "sliding_attention"],
        mlp_layer_types=["dense", "sparse"], pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    randomise(plain, 0)
    model = copy.deepcopy(plain)
    prepare(model, settings(), plan())
    (want_loss, want), (loss, got) = step(plain, **batch(67)), step(model, **batch(67))
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert_same_gradients(got, want, 1e-4)
    assert any("sinks" in name for name in got)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_are_as_alone(family: str) -> None:
    plain, model = model_of(family), model_of(family)
    prepare(model, settings(), plan(streamed=False))
    refuse_shared_rows(model)
    row = row_of((13, 1, 9), 3)
    _, got = step(model, **Share(torch.device("cpu")).inputs(row), num_items_in_batch=1)
    assert_same_gradients(got, _alone(plain, [row], 1), 1e-4)


def test_adapters_on_every_linear_layer() -> None:
    """peft's all-linear reaches the projections to and from the latents, which are given to theirs as one head."""
    args = settings(use_peft=True, lora_r=4, lora_target_modules="all-linear", lora_dropout=0.0)
    torch.manual_seed(0)
    plain = wrap_lora(model_of("youtu"), args)
    for name, parameter in plain.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model = copy.deepcopy(plain)
    prepare(model, args, plan(streamed=False))
    (want_loss, want), (loss, got) = step(plain, **batch(37)), step(model, **batch(37))
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert_same_gradients(got, want, 1e-4)
    assert any("kv_a_proj_with_mqa.lora_A" in name for name in got)
    dropping = wrap_lora(model_of("youtu"), settings(use_peft=True, lora_target_modules="all-linear", lora_dropout=0.5))
    prepare(dropping, args, plan(streamed=False))
    _, got = step(dropping, **batch(37), megaspan_seed=1)
    _, again = step(dropping, **batch(37), megaspan_seed=1)
    _, other = step(dropping, **batch(37), megaspan_seed=2)
    name = next(name for name in got if "kv_b_proj.lora_B" in name)
    assert torch.equal(got[name], again[name])
    assert not torch.equal(got[name], other[name])


def test_generation_is_that_of_plain_transformers() -> None:
    """With a cache, whose keys are more than the queries."""
    plain, model = model_of("deepseek_v3").eval(), model_of("deepseek_v3").eval()
    prepare(model, settings(), plan(streamed=False))
    ids = batch(11)["input_ids"]
    found = [each.generate(ids, max_new_tokens=9, do_sample=False) for each in (plain, model)]
    assert torch.equal(*found)


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_are_those_of_the_heads(family: str) -> None:
    """Sizes of heads as attention sees them, by the configuration alone; `head_dim` there is another."""
    config = config_of(family)
    for facts in (ModelFacts.from_config(config.to_dict()), facts_of(model_of(family))):
        assert (facts.heads, facts.kv_heads, facts.head_dim) == (4, 4, 16)
    assert facts.exact
    assert not facts.family.streamed
    assert facts.parameters == sum(parameter.numel() for parameter in model_of(family).parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_layer_keeps_is_what_the_plan_counts(family: str) -> None:
    """Storages that autograd holds after the forward of a dense layer, in bf16: as many bytes, or up to 4 % fewer."""
    sizes = {
        "hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8, "num_key_value_heads": 8, "kv_lora_rank": 64,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 48 if family == "glm4_moe_lite" else 32,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(config_of(family, **sizes)).bfloat16()
    install(model)
    layer, tokens = model.model.layers[0], 1024
    x = torch.randn(1, tokens, 256, dtype=torch.bfloat16, requires_grad=True)
    tables = model.model.rotary_emb(x, torch.arange(tokens)[None])
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def hold(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        out = layer(x, position_embeddings=tables, attention_mask=None)
    del out
    counted = layer_bytes(facts_of(model), 0, Settings(tokens, True, 2, False, True, True, True, 2048))
    gradient = 2 * 256  # of the layer's output, which the plan counts with its attention
    assert 0.96 <= sum(kept.values()) / tokens / (counted.kept - gradient) <= 1.001


def test_sizes_that_no_head_has_are_refused_by_their_name() -> None:
    for key, value in (("qk_rope_head_dim", 7), ("kv_lora_rank", -4), ("v_head_dim", "8")):
        with pytest.raises(UserError, match=key):
            ModelFacts.from_config(config_of("youtu").to_dict() | {key: value})


def row_of(lengths: Sequence[int], seed: int) -> Row:
    ids = np.random.default_rng(seed).integers(VOCAB, size=sum(lengths))
    labels = ids.copy()
    labels[np.cumsum((0, *lengths[:-1]))] = -100
    return Row(ids, labels, tuple(lengths), 0, tuple(lengths))


def _alone(plain: Any, rows: Sequence[Row], items: int) -> dict[str, Tensor]:
    """Gradients of rows, document by document, in plain transformers; losses are sums by `items`."""
    want: dict[str, Tensor] = {}
    for row in rows:
        ends = np.cumsum(row.document_lengths)
        for start, end in zip((0, *ends[:-1]), ends, strict=True):
            if end - start > 1:
                data = {"input_ids": row.input_ids[start:end], "labels": row.labels[start:end]}
                given = {name: torch.from_numpy(array)[None] for name, array in data.items()}
                _, found = step(plain, **given, num_items_in_batch=items)
                want = {name: want.get(name, 0) + gradient for name, gradient in found.items()}
    return want


def _two_ranks(rank: int, world: int) -> None:
    """A row's tokens shared, its heads shared, and a row each: gradients are those of one plain process."""
    rows = [row_of((40, 1, 22), 5), row_of((7, 3), 6)]
    for family in ("youtu", "deepseek_v3"):
        plain = model_of(family)
        want = _alone(plain, rows, 60 + 8)
        for sizes in ({"cp": 2}, {"sp": 2}, {"dp_shard": 2}):
            mesh = Mesh(**sizes, rank=rank)
            axes, model = device_axes(mesh, "cpu"), model_of(family)
            shard(model, axes.fsdp, masters=True, compute=torch.float32)
            prepare(model, SFTConfig(max_length=256, packing=True), by_hand(None))
            share = Share.of(model, torch.device("cpu"), mesh, axes, 1)
            levers(model).reserve(model, share.slots(rows))  # type: ignore[union-attr]
            accumulator = Accumulator(model, share, 7)
            accumulator.backward(rows, 3)
            assert accumulator.sums().trained == 60 + 8
            assert_same_gradients(whole_gradients(model, axes), want, 1e-4)
            levers(model).close()  # type: ignore[union-attr]


def test_two_ranks_find_what_one_plain_process_finds() -> None:
    run_ranks(2, [(_two_ranks, ())])
