"""P1 for layers whose second half is their own code: experts beside a shared MLP, residual dropout, gated attention, odd norms.

Each family's loss and every gradient against plain transformers: in one tile and in tiles that divide nothing, head group by
head group, tied and not, packed, under autocast, and with a balance loss where it has one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megaspan.attention import install as install_attention
from megaspan.config import SFTConfig
from megaspan.data import Row
from megaspan.human import UserError
from megaspan.layers import streamed
from megaspan.layers.dials import LayerPlan
from megaspan.layers.family import Family, after, before, describe
from megaspan.layers.routing import Router, find_router
from megaspan.layers.streamed import Streaming
from megaspan.model import levers, prepare
from megaspan.model.counted import facts_of
from megaspan.model.kinds import check_class, check_config, refuse_shared_rows
from megaspan.trainer.share import Share
from tests.model.support import plan
from tests.models import assert_same_gradients, batch, gradients
from tests.parity.own import BALANCED, FAMILIES, WITH_EXPERTS, config_of, model_of

torch.set_num_threads(1)

LAYERS = 2
GATED = ("bitnet", "afmoe", "laguna")


def prepared(plain: Any, tile: int = 9, heads: int | None = None, offload: bool = True) -> Any:
    by_hand = plan(heads=heads, offload=offload)
    by_hand.layer_tile_tokens = tile
    model = prepare(plain, SFTConfig(max_length=256, gradient_checkpointing_kwargs={"offload": offload}), by_hand)
    stats = levers(model).checkpointing.stats()  # type: ignore[union-attr]
    assert stats.streamed == LAYERS, levers(model).checkpointing.reasons  # type: ignore[union-attr]
    return model


def step(model: Any, data: dict[str, Any], autocast: bool = False) -> tuple[Any, dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(**data, use_cache=False)
    output.loss.backward()
    return output, gradients(model)


def tolerance(model: Any) -> float:
    return 1e-4 if any("experts" in name for name, _ in model.named_parameters()) else 1e-5


def assert_parity(plain: Any, model: Any, data: dict[str, Any]) -> None:
    (want, want_gradients), (got, got_gradients) = step(plain, data), step(model, data)
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-6, atol=0)
    if "aux_loss" in want and want.aux_loss is not None:
        torch.testing.assert_close(got.aux_loss, want.aux_loss, rtol=1e-6, atol=0)
        assert want.aux_loss > 0.5
    assert_same_gradients(got_gradients, want_gradients, tolerance(plain))
    stats = levers(model).checkpointing.stats()  # type: ignore[union-attr]
    assert (stats.attention_forwards % LAYERS, stats.passed_on) == (0, 0)
    assert stats.attention_forwards > 0


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> tuple[str, Any, Any]:
    """A family, a plain tied model, and its twin in tiles and head groups."""
    family = request.param
    changes: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.5} if family in BALANCED else {}
    plain, model = (model_of(family, tie_word_embeddings=True, **changes) for _ in range(2))
    return family, plain, prepared(model, heads=1)


def test_loss_balance_and_every_gradient_equal_plain_transformers(pair: tuple[str, Any, Any]) -> None:
    family, plain, model = pair
    found = describe(model.model.layers[0])
    assert isinstance(found, Family)
    assert (found.own, found.gated) == (True, family in GATED)
    for length in (29, 5):
        assert_parity(plain, model, batch(length))


@pytest.mark.parametrize("family", FAMILIES)
def test_untied_and_in_one_piece(family: str) -> None:
    plain, model = model_of(family), model_of(family)
    install_attention(model)
    streaming = Streaming(LayerPlan(tile_tokens=64))
    assert streaming.install(model, prove=False) == [None] * LAYERS
    (want, want_gradients), (got, got_gradients) = step(plain, batch(29)), step(model, batch(29))
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-6, atol=0)
    assert_same_gradients(got_gradients, want_gradients, tolerance(plain))
    assert streaming.stats().attention_forwards == LAYERS


def test_packed_documents_are_as_alone(pair: tuple[str, Any, Any]) -> None:
    family, plain, model = pair
    refuse_shared_rows(model)
    quiet = {"output_router_logits": False} if family in BALANCED else {}  # a balance loss of parts is another one
    lengths, whole, first = (13, 1, 9), batch(23), 0
    want: dict[str, torch.Tensor] = {}
    for length in lengths:
        whole["labels"][:, first] = -100
        data = {name: tensor[:, first : first + length] for name, tensor in whole.items()}
        first += length
        if (data["labels"] != -100).any():
            _, found = step(plain, data | quiet | {"num_items_in_batch": 1})
            want = {name: want.get(name, 0) + gradient for name, gradient in found.items()}
    ids, labels = (whole[name][0].numpy() for name in ("input_ids", "labels"))
    inputs = Share(torch.device("cpu")).inputs(Row(ids, labels, lengths, 0, lengths))
    assert "megaspan_row" in inputs
    _, got = step(model, inputs | quiet | {"num_items_in_batch": 1})
    assert_same_gradients(got, want, tolerance(plain))


def test_under_autocast_it_is_no_farther_from_fp32_than_the_plain_model(pair: tuple[str, Any, Any]) -> None:
    _, plain, model = pair
    far = {"ours": 0.0, "plain": 0.0}
    for seed in (0, 10):
        # A choice of experts that falls the other way is no distance: where it does, it does for both.
        _, true = step(plain, batch(33, seed=seed))
        for name, each in (("ours", model), ("plain", plain)):
            _, found = step(each, batch(33, seed=seed), autocast=True)
            far[name] += sum(float((found[key] - true[key]).square().sum()) for key in true)
    assert 0 < far["ours"] <= 1.5**2 * far["plain"]


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_experts_are_found_wherever_they_stand(family: str) -> None:
    model = model_of(family)
    router = find_router(model.model.layers[-1])
    assert isinstance(router, Router)
    assert router.name.split(".")[0] in ("mlp", "block_sparse_moe")
    assert (router.logits is not None) or family not in BALANCED
    experts = facts_of(model).experts
    assert experts is not None
    assert (experts.count, experts.active) == (4, 2)


def test_gated_attention_projects_no_queries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind its kernel the module runs with the kernel's output; its q, k, v are zeros without memory."""
    model = prepared(model_of("afmoe"))
    layer = model.model.layers[0]
    calls, own = [], torch.nn.Linear.forward
    names = {id(getattr(layer.self_attn, name)): name for name in ("q_proj", "k_proj", "v_proj", "gate_proj")}
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: (calls.append(names.get(id(self))), own(self, x))[1])
    family = describe(layer)
    assert isinstance(family, Family)
    x, out = torch.randn(1, 7, 64), torch.randn(1, 7, 4, 16)
    with torch.no_grad():
        after(layer, family, x, out)
    assert [name for name in calls if name] == ["gate_proj"]


def test_a_layer_that_is_given_more_of_the_row_is_refused() -> None:
    layer = prepared(model_of("granitemoe")).model.layers[0]
    family = describe(layer)
    assert isinstance(family, Family)
    x = torch.randn(1, 7, 64)
    tables = (torch.ones(1, 7, 16), torch.zeros(1, 7, 16))
    assert before(layer, family, x, slice(0, 7), {"position_embeddings": tables, "attention_mask": None}).q_BHTD.shape[2] == 7
    for more in (x, (x,), {"layer 0": x}):
        with pytest.raises(UserError, match="per_layer_input"):
            before(layer, family, x, slice(0, 7), {"position_embeddings": tables, "per_layer_input": more})


def test_dropout_on_residuals_is_by_counter() -> None:
    """Phi-3 with resid_pdrop: in tiles the same entries are dropped as in one piece, forward and backward."""
    found = []
    for tile in (9, 64):
        model = prepared(model_of("phi3", resid_pdrop=0.3), tile)
        torch.manual_seed(3)
        found.append(step(model, batch(29)))
    torch.testing.assert_close(found[0][0].loss, found[1][0].loss, rtol=1e-6, atol=0)
    assert_same_gradients(found[0][1], found[1][1], 1e-5)
    assert not torch.allclose(found[0][0].loss, step(prepared(model_of("phi3")), batch(29))[0].loss, rtol=1e-4)


def test_granite_without_mamba_is_taken_and_with_one_mamba_layer_refused() -> None:
    pure = config_of("granitemoehybrid")
    check_config(pure.to_dict(), "granite")
    check_class(pure, "granite")
    mixed = config_of("granitemoehybrid", layer_types=["attention", "mamba"])
    with pytest.raises(UserError, match="has layers of type"):
        check_config(mixed.to_dict(), "granite")
    with pytest.raises(UserError, match="carry a state"):
        check_class(mixed, "granite")


def test_layers_without_a_rotary_embedding_stream() -> None:
    """Granite 4 has none at all (`position_embedding_type`): the layers are called without tables."""
    plain = model_of("granitemoehybrid", position_embedding_type=None)
    model = prepared(plain, heads=1)
    assert_parity(plain, model, batch(29))
    stats = levers(model).checkpointing.stats()  # type: ignore[union-attr]
    assert (stats.streamed, stats.passed_on) == (LAYERS, 0)


def test_calls_that_do_not_stream_are_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family of which only some layers are called as the streamed layer knows it: none is said to stream."""
    known = streamed._known_call
    monkeypatch.setattr(streamed, "_known_call", lambda layer, *given: known(layer, *given) and layer.self_attn.layer_idx > 0)
    model = model_of("phi3")
    install_attention(model)
    assert all("not of a form that streams" in (reason or "") for reason in Streaming().install(model))
