"""P1 for mixtures of experts: loss, balance loss and every gradient of a prepared model, whose layers stream, are those of
plain transformers; and experts are chosen once."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from megaspan.config import SFTConfig
from megaspan.data import Row
from megaspan.human import UserError
from megaspan.layers.routing import Router, find_router
from megaspan.model import levers, prepare
from megaspan.plan.keep import KeepPolicy, LayerKeep
from megaspan.trainer.share import Share
from tests.model.support import plan
from tests.models import assert_same_gradients, batch, gradients, tiny

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss")
OTHERS = ("olmoe", "qwen2_moe", "glm4_moe")
LAYERS = 3
ON, AGAIN = LayerKeep("device", "device"), LayerKeep(None, None)
KEEPS = {
    "device": KeepPolicy((ON,) * LAYERS),
    "host": KeepPolicy((LayerKeep("host", "host"),) * LAYERS),
    # The whole model is one segment: its last layers are run forward a second time.
    "again": KeepPolicy((ON, AGAIN, AGAIN)),
    "outputs": KeepPolicy((LayerKeep("host", None), LayerKeep(None, "host"), LayerKeep(None, "host"))),
}

torch.set_num_threads(1)


def model_of(family: str, **changes: Any) -> Any:
    balanced = {} if family == "glm4_moe" else {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    return tiny(family, layers=LAYERS, **(balanced | changes))


def prepared(family: str, keep: str = "device", tile: int = 9, heads: int | None = None, **changes: Any) -> Any:
    args = SFTConfig(max_length=256, gradient_checkpointing_kwargs={"offload": keep != "device"})
    by_hand = plan(offload=keep != "device", heads=heads)
    by_hand.keep, by_hand.layer_tile_tokens, by_hand.model.layers = KEEPS[keep], tile, LAYERS
    return prepare(model_of(family, **changes), args, by_hand)


def step(model: Any, data: dict[str, Tensor]) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    output = model(**data, use_cache=False)
    output.loss.backward()
    balance = output.get("aux_loss")
    return output.loss.detach(), None if balance is None else balance.detach(), gradients(model)


def assert_parity(plain: Any, model: Any, data: dict[str, Tensor]) -> None:
    want_loss, want_balance, want = step(plain, data)
    loss, balance, got = step(model, data)
    torch.testing.assert_close(loss, want_loss, rtol=1e-6, atol=0)
    if plain.config.model_type != "glm4_moe":
        assert balance is not None
        torch.testing.assert_close(balance, want_balance, rtol=1e-6, atol=0)
        assert balance > 0.5
    assert_same_gradients(got, want, 1e-4)


def stats_of(model: Any) -> Any:
    return levers(model).checkpointing.stats()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("length", "tile"), [(7, 3), (7, 64), (129, 50)])
def test_loss_balance_and_every_gradient_equal_plain_transformers(family: str, length: int, tile: int) -> None:
    model = prepared(family, tile=tile)
    for seed in (0, 1):
        assert_parity(model_of(family), model, batch(length, seed=seed))
    stats = stats_of(model)
    assert (stats.streamed, stats.attention_forwards, stats.passed_on) == (LAYERS, 2 * LAYERS, 0)
    line = ("experts", f"chosen once in {LAYERS} of {LAYERS} layers", "a balance loss is made of sums over tiles")
    assert line in list(levers(model).read_back())  # type: ignore[union-attr]


@pytest.mark.parametrize("family", OTHERS)
def test_other_families(family: str) -> None:
    """Shared experts, dense layers between, groups of experts with scores of their own."""
    model = prepared(family)
    assert_parity(model_of(family), model, batch(41))
    assert (stats_of(model).streamed, stats_of(model).passed_on) == (LAYERS, 0)
    assert stats_of(model).routed == (LAYERS if family == "olmoe" else LAYERS - 1)


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize(("family", "heads"), [("mixtral", 1), ("gpt_oss", None)])
def test_wherever_things_are_kept(family: str, keep: str, heads: int | None) -> None:
    model = prepared(family, keep, heads=heads)
    for seed in (0, 1):  # the second step uses the memory of the first
        assert_parity(model_of(family), model, batch(41, seed=seed))


@pytest.mark.parametrize("family", FAMILIES)
def test_sums_go_over_rows_and_leave_padding_out(family: str) -> None:
    """The balance loss is not the mean of those of the rows."""
    data = batch(23, rows=2)
    data["attention_mask"] = torch.ones(2, 23, dtype=torch.int64)
    data["attention_mask"][1, -9:] = 0
    data["labels"][data["attention_mask"] == 0] = -100
    assert_parity(model_of(family), prepared(family), data)


def test_accumulated_steps() -> None:
    plain, model = model_of("mixtral"), prepared("mixtral")
    for one in (plain, model):
        for seed in (0, 1):
            one(**batch(20 + seed, seed=seed), use_cache=False).loss.backward()
    assert_same_gradients(gradients(model), gradients(plain), 1e-4)


def test_rows_of_a_window_share_the_balance_loss_by_their_tokens() -> None:
    """Two rows of a step, run one after the other: the balance loss is their mean, not their sum."""
    model = prepared("qwen3_moe")
    rows = [batch(20, seed=1), batch(20, seed=2)]
    alone = [model(**row, use_cache=False) for row in rows]
    trained = [int(output.tokens) for output in alone]
    window = [model(**row, use_cache=False, num_items_in_batch=sum(trained)).loss.item() for row in rows]
    want = sum(output.loss.item() * count for output, count in zip(alone, trained, strict=True)) / sum(trained)
    assert sum(window) == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("length", [7, 129])
@pytest.mark.parametrize("family", FAMILIES)
def test_evaluation_has_the_balance_loss_too(family: str, length: int) -> None:
    plain, model = model_of(family).eval(), prepared(family).eval()
    with torch.no_grad():
        want, got = (one(**batch(length), use_cache=False) for one in (plain, model))
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(got.aux_loss, want.aux_loss, rtol=1e-6, atol=0)


def test_hooks_that_collect_router_logits_do_not_stop_the_fused_passes() -> None:
    """transformers leaves them on attention modules too, once logits were asked for."""
    model = prepared("qwen3_moe", output_router_logits=False)
    with torch.no_grad():
        model(batch(9)["input_ids"], output_router_logits=True)
    assert model.model.layers[0].self_attn._forward_hooks
    asked, layer = levers(model).checkpointing._halves[0], model.model.layers[0]  # type: ignore[union-attr]
    assert asked._untouched(layer, "self_attn")
    layer.self_attn.register_forward_hook(lambda *_: None)
    assert not asked._untouched(layer, "self_attn")
    assert stats_of(prepared("qwen3_moe")).fused_attentions == LAYERS


def test_asked_for_in_the_call() -> None:
    quiet = {"output_router_logits": False}
    plain, model = model_of("mixtral", **quiet), prepared("mixtral", **quiet)
    assert model(**batch(20)).aux_loss is None
    data: dict[str, Any] = batch(20) | {"output_router_logits": True}
    assert_parity(plain, model, data)
    loud = prepared("mixtral")
    assert loud(**batch(20), output_router_logits=False).aux_loss is None
    assert stats_of(model).passed_on == stats_of(loud).passed_on == 0


def test_a_layer_that_does_not_stream_adds_its_sums() -> None:
    model = prepared("mixtral")
    streaming = levers(model).checkpointing  # type: ignore[union-attr]
    general = streaming.general  # type: ignore[union-attr]
    model.model.layers[1].__dict__["_gradient_checkpointing_func"] = lambda function, *args: general._run(1, function, *args)
    streaming.reasons[1] = "a test"  # type: ignore[union-attr]
    assert_parity(model_of("mixtral"), model, batch(20))
    assert stats_of(model).streamed == LAYERS - 1


def test_a_call_that_is_passed_on_adds_its_sums() -> None:
    """Two rows at once."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    model, plain = prepared("mixtral"), model_of("mixtral")
    ids, parts = batch(20, rows=2)["input_ids"], []
    with levers(model).checkpointing.balancing(model) as balance:  # type: ignore[union-attr]
        hidden = model.model(ids, use_cache=False, output_router_logits=False).last_hidden_state
    parts.append((hidden, balance.loss(40)))
    out = plain.model(ids, use_cache=False)
    parts.append((out.last_hidden_state, load_balancing_loss_func(out.router_logits, 4, 2)))
    for hidden, loss in parts:
        (hidden.sum() + 50 * loss).backward()
    torch.testing.assert_close(parts[0][1], parts[1][1], rtol=1e-6, atol=0)
    assert_same_gradients(gradients(model.model), gradients(plain.model), 1e-4)
    assert stats_of(model).passed_on == LAYERS


@pytest.mark.parametrize("checkpoint", [True, False])
@pytest.mark.parametrize("way", ["attention_mask", "pad_to_multiple_of"])
def test_padding_does_not_count_in_the_balance_loss(way: str, checkpoint: bool) -> None:
    """P1 against transformers with an attention_mask: it leaves padding out of counts, probabilities and divisor."""
    model = prepared("qwen3_moe")
    if not checkpoint:
        model = prepare(model_of("qwen3_moe"), SFTConfig(max_length=256, gradient_checkpointing=False), plan(checkpoint=False))
    data = batch(30)
    data["labels"][:, 19:] = -100
    masked = data | {"attention_mask": (torch.arange(30) < 19)[None].long()}
    want_loss, want_balance, want = step(model_of("qwen3_moe"), masked)
    inputs: dict[str, Any] = masked
    if way == "pad_to_multiple_of":
        row = Row(data["input_ids"][0].numpy(), data["labels"][0].numpy(), (19,), 11, (19,))
        inputs = Share(torch.device("cpu")).inputs(row)
    loss, balance, got = step(model, inputs)
    torch.testing.assert_close(balance, want_balance, rtol=1e-6, atol=0)
    torch.testing.assert_close(loss, want_loss, rtol=1e-6, atol=0)
    assert_same_gradients(got, want, 1e-4)
    with torch.no_grad():
        evaluated = model(**inputs, use_cache=False).aux_loss
    torch.testing.assert_close(evaluated, want_balance, rtol=1e-6, atol=0)


def test_nor_in_a_packed_row() -> None:
    found = []
    for padding in (0, 7):
        data = {name: values[:, : 24 + padding].clone() for name, values in batch(31).items()}
        data["labels"][:, [0, 9]], data["labels"][:, 24:] = -100, -100
        row = Row(data["input_ids"][0].numpy(), data["labels"][0].numpy(), (9, 15), padding, (9, 15))
        found.append(step(prepared("qwen3_moe"), Share(torch.device("cpu")).inputs(row)))
    torch.testing.assert_close(found[1][:2], found[0][:2], rtol=1e-6, atol=0)
    assert_same_gradients(found[1][2], found[0][2], 1e-5)


@pytest.mark.parametrize("changes", [{"streamed": False}, {"checkpoint": False}])
def test_over_ranks_a_balance_loss_of_layers_that_run_whole_is_refused_when_the_model_is_prepared(changes: Any) -> None:
    args = SFTConfig(max_length=256, gradient_checkpointing=changes.get("checkpoint", True))
    object.__setattr__(args, "cp_size", 2)
    model = model_of("mixtral")
    with pytest.raises(UserError, match="on several ranks: its layers do not stream"):
        prepare(model, args, plan(**changes, layers=LAYERS))
    assert model.config._attn_implementation == "eager"
    assert not any("_gradient_checkpointing_func" in module.__dict__ for module in model.model.layers)
    prepare(model_of("mixtral", output_router_logits=False), args, plan(**changes, layers=LAYERS))
    prepare(model, args, plan(layers=LAYERS))


def test_without_checkpointing_the_loss_is_the_models_own_function() -> None:
    args = SFTConfig(max_length=256, gradient_checkpointing=False)
    model = prepare(model_of("mixtral"), args, plan(checkpoint=False))
    assert levers(model).settings.balancing is None  # type: ignore[union-attr]
    assert_parity(model_of("mixtral"), model, batch(20))


def test_a_loss_that_is_not_known_is_not_streamed_past(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.mixtral import modeling_mixtral

    own = modeling_mixtral.load_balancing_loss_func
    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", lambda *args: 3 * own(*args))
    model = prepared("mixtral")
    assert_parity(model_of("mixtral"), model, batch(20))
    assert levers(model).checkpointing.reasons == ["its configuration asks for output_router_logits"] * LAYERS  # type: ignore[union-attr]
    quiet = {"output_router_logits": False}
    data: dict[str, Any] = batch(20) | {"output_router_logits": True}
    model = prepared("mixtral", **quiet)
    assert_parity(model_of("mixtral", **quiet), model, data)
    assert (stats_of(model).streamed, stats_of(model).passed_on) == (LAYERS, LAYERS)


@pytest.mark.parametrize("keep", ["device", "again"])
@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_experts_are_those_of_the_forward_whatever_the_router_says_later(
    family: str, keep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise on what the router reads whenever a layer runs again: every layer's experts still get the forward's choice."""
    model = prepared(family, keep)
    seen: dict[int, list[Tensor]] = {}
    forward_over = False
    noise = torch.randn(64, generator=torch.Generator().manual_seed(0))

    def disturb(own: Any, _: Any, x: Tensor) -> Any:
        return own(x + noise if forward_over else x)

    def see(own: Any, experts: Any, *args: Any) -> Any:
        if id(experts) in places:  # and not a copy on which the router is looked for
            seen.setdefault(places[id(experts)], []).append(args[1])
        return own(*args)

    def exchange(kind: type, wrapper: Any) -> None:
        """Neither hooks nor a forward of the instance: a layer with those inside runs whole."""
        own = kind.forward
        monkeypatch.setattr(kind, "forward", lambda self, *args: wrapper(functools.partial(own, self), self, *args))

    places: dict[int, int] = {}
    for index, layer in enumerate(model.model.layers):
        router = find_router(layer)
        if isinstance(router, Router):
            gate, experts = layer.get_submodule(router.name), layer.mlp.experts
            places[id(experts)] = index
    exchange(type(gate), disturb)
    exchange(type(experts), see)
    loss = model(**batch(40), use_cache=False).loss
    forward_over = True
    loss.backward()
    assert seen.keys() == set(places.values())
    for index, chosen in seen.items():
        whole = torch.cat(chosen).split(40)
        assert len(whole) == (3 if keep == "again" and index < LAYERS - 1 else 2)
        assert all(torch.equal(whole[0], later) for later in whole[1:])
    layer = model.model.layers[-1]
    x = torch.randn(1, 40, 64)
    first, second = (layer.get_submodule(find_router(layer).name)(part[0])[2] for part in (x, x - noise))
    assert not torch.equal(first, second)  # the noise is enough to choose otherwise
