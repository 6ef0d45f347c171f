"""`prepare` against plain transformers: loss and every gradient (P1), calls without labels (R59), generation, undoing."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from megaspan.human import UserError
from megaspan.layers.family import describe
from megaspan.layers.fused import Fused
from megaspan.layers.halves import find_halves
from megaspan.layers.shards import computes_in
from megaspan.model import LongOutput, levers, prepare, unprepare
from megaspan.plan.keep import KeepPolicy, LayerKeep
from tests import models
from tests.model.support import plan, settings, step
from tests.models import FAMILIES, assert_same_gradients, batch, tiny, tiny_config

LENGTH = 37


def assert_parity(family: str, how: SimpleNamespace, inputs: dict[str, Any], args: Any = None, **overrides: Any) -> None:
    """The same step of a plain model and of a prepared one, in fp32."""
    plain, long = tiny(family, **overrides), tiny(family, **overrides)
    want_loss, want = step(plain, **inputs)
    got_loss, got = step(prepare(long, args or settings(), how), **inputs)
    assert got_loss == pytest.approx(want_loss, rel=1e-6)
    assert_same_gradients(got, want, 1e-4 if family in ("gpt_oss", "qwen3_moe") else 1e-5)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_the_plain_models(family: str, tied: bool) -> None:
    """P1: soft caps (Gemma 2), multiplier (Cohere), divider (Granite), sinks (gpt-oss), windows, experts, biases."""
    assert_parity(family, plan(), batch(LENGTH), tied=tied)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_as_near_to_fp32_as_the_plain_model(family: str) -> None:
    """All gradients together no farther from fp32 than 1.5 x the plain bf16 run (P1).

    With this seed bf16 sends no token to another expert than fp32 does, with either attention; one that moves counts for more
    than all rounding.
    """
    models = [tiny(family, dtype=torch.bfloat16, seed=1) for _ in range(3)]
    runs = [models[0].float(), models[1], prepare(models[2], settings(), plan())]
    (want_loss, want), *others = (step(model, **batch(LENGTH, seed=1)) for model in runs)
    distances = []
    for loss, gradients in others:
        assert loss == pytest.approx(want_loss, rel=2e-2)
        distances.append(sum(float((gradients[name].float() - want[name]).square().sum()) for name in want) ** 0.5)
    assert distances[1] <= 1.5 * distances[0]


def test_kernels_are_chosen_and_proven_for_what_masters_are_gathered_in() -> None:
    """Sharded weights are fp32 masters, which no fast kernel computes in; a case in fp32 proves nothing about bf16."""
    model = tiny("qwen3")
    for parameter in model.parameters():
        computes_in(parameter, torch.bfloat16)
    placed = levers(prepare(model, settings(), plan()))
    assert placed is not None
    assert "bfloat16" in placed.kernel.reason


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("first", [1, 2])
def test_layers_below_all_trained_ones_have_no_backward(family: str, first: int) -> None:
    """Frozen lower layers (or LoRA on upper ones): nothing is kept of them, and two rows may be on their way at once."""
    more = {"output_router_logits": True} if family == "qwen3_moe" else {}
    found = []
    for prepared in (False, True):
        model = tiny(family, layers=3, **more)
        for part in (model.model.embed_tokens, *model.model.layers[:first]):
            part.requires_grad_(False)
        if prepared:
            prepare(model, settings(), plan(checkpoint=True, offload=True, layers=3))
        first_row, second_row = (model(**batch(LENGTH, seed=seed)).loss for seed in (0, 1))
        second_row.backward()
        first_row.backward()
        found.append((float(first_row.detach()), models.gradients(model)))
    (want_loss, want), (got_loss, got) = found
    assert got_loss == pytest.approx(want_loss, rel=1e-6)
    assert_same_gradients(got, want, 1e-4 if family == "qwen3_moe" else 1e-5)


@pytest.mark.parametrize("loss_type", ["chunked_nll", "nll"])
@pytest.mark.parametrize("checkpoint", ["none", "device", "host"])
def test_every_lever_alone(loss_type: str, checkpoint: str) -> None:
    how = plan(checkpoint=checkpoint != "none", offload=checkpoint == "host")
    assert_parity("gemma2", how, batch(LENGTH), settings(loss_type=loss_type))


@pytest.mark.parametrize("items", [None, 50, torch.tensor(50)], ids=["mean", "int", "tensor"])
def test_the_sum_is_divided_by_the_number_of_items(items: Any) -> None:
    inputs = batch(LENGTH) if items is None else batch(LENGTH) | {"num_items_in_batch": items}
    assert_parity("qwen3", plan(), inputs)


def test_accumulation_by_token_count_is_one_large_batch() -> None:
    """R7 on one device: two micro-batches of different length, divided by their common count, equal the plain model's."""
    parts = [batch(LENGTH, seed=1), batch(11, seed=2)]
    total = sum(int((part["labels"][:, 1:] != -100).sum()) for part in parts)
    plain, long = tiny("qwen3"), prepare(tiny("qwen3"), settings(), plan())
    got: dict[str, torch.Tensor] = {}
    want: dict[str, torch.Tensor] = {}
    for part in parts:
        for model, sums in ((plain, want), (long, got)):
            for name, gradient in step(model, **part, num_items_in_batch=total)[1].items():
                sums[name] = sums.get(name, 0) + gradient
    assert_same_gradients(got, want)


def test_shifted_labels_win() -> None:
    inputs = batch(LENGTH)
    shifted = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
    model = prepare(tiny("llama"), settings(), plan())
    want = step(model, **inputs)
    got = step(model, input_ids=inputs["input_ids"], labels=torch.zeros_like(shifted), shift_labels=shifted)
    assert got[0] == want[0]
    assert shifted.equal(torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:])  # not written to


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt_oss", "qwen3_moe"])
def test_several_rows_do_not_see_each_other(family: str) -> None:
    assert_parity(family, plan(), batch(LENGTH, rows=3))


def test_a_mask_of_ones_changes_nothing() -> None:
    assert_parity("mistral", plan(), batch(LENGTH) | {"attention_mask": torch.ones(1, LENGTH, dtype=torch.int64)})


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_cut_away_exactly(side: str) -> None:
    inputs = batch(LENGTH, rows=2)
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, slice(0, 9) if side == "left" else slice(-9, None)] = 0
    inputs["labels"][mask == 0] = -100
    if side == "left":
        inputs["labels"][1, 9] = -100
    assert_parity("gemma3", plan(), inputs | {"attention_mask": mask})


def test_padding_on_the_left_needs_positions_without_rotary_ones() -> None:
    """Families with learned positions count padding differently."""
    mask, inputs = torch.ones(1, LENGTH, dtype=torch.int64), batch(LENGTH)
    mask[0, :9] = 0
    inputs["labels"][0, :10] = -100
    model = prepare(tiny("qwen3"), settings(), plan())
    model.config.rope_parameters = None
    with pytest.raises(UserError, match="Give position_ids"):
        model(**inputs, attention_mask=mask)
    model(**inputs, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))


def test_a_refused_model_is_left_as_it_was() -> None:
    """GPT-2 on its own layers: attention finds none that it knows, after it has begun."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 128, "n_positions": 256, "n_embd": 64, "n_layer": 1, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)).eval()
    before, how = model(**batch(LENGTH)).logits, model.config._attn_implementation
    with pytest.raises(UserError):
        prepare(model, settings(), plan())
    assert model.config._attn_implementation == how != "megaspan"
    assert model(**batch(LENGTH)).logits.equal(before)


def test_packed_documents_do_not_see_each_other() -> None:
    """Positions that start again are documents, as for plain transformers (which looks for them where there is no cache)."""
    positions = torch.cat([torch.arange(10), torch.arange(20), torch.arange(LENGTH - 30)])[None]
    assert_parity("gemma3", plan(), batch(LENGTH) | {"position_ids": positions, "use_cache": False})


def test_positions_that_only_count_are_passed_on() -> None:
    assert_parity("qwen3", plan(), batch(LENGTH) | {"position_ids": torch.arange(1000, 1000 + LENGTH)[None]})


def test_embeddings_in_place_of_tokens_get_their_gradient() -> None:
    inputs = batch(LENGTH)
    found = []
    for model in (tiny("qwen3"), prepare(tiny("qwen3"), settings(), plan())):
        embeds = torch.randn(1, LENGTH, 64, generator=torch.Generator().manual_seed(3), requires_grad=True)
        model(inputs_embeds=embeds, labels=inputs["labels"]).loss.backward()
        found.append(embeds.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_no_label_is_no_loss_and_no_gradient() -> None:
    inputs = batch(LENGTH)
    inputs["labels"].fill_(-100)
    for extra in ({}, {"num_items_in_batch": 0}, {"num_items_in_batch": torch.tensor(5)}):
        model = prepare(tiny("qwen3"), settings(), plan())
        output = model(**inputs, **extra)
        output.loss.backward()
        assert float(output.loss.detach()) == 0.0
        assert int(output.tokens) == 0
        assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


def test_the_output_counts_what_it_trained() -> None:
    inputs, plain = batch(LENGTH), tiny("gemma2").eval()
    with torch.no_grad():
        logits = plain(**inputs).logits[0, :-1].float()
        output = prepare(tiny("gemma2"), settings(), plan()).eval()(**inputs)
    labels = inputs["labels"][0, 1:]
    kept = labels != -100
    assert isinstance(output, LongOutput)
    assert output.logits is None
    assert int(output.tokens) == int(kept.sum())
    assert int(output.correct) == int((logits.argmax(1) == labels)[kept].sum())
    wanted = torch.distributions.Categorical(logits=logits[kept]).entropy().sum()
    assert float(output.entropy) == pytest.approx(float(wanted), rel=1e-5)


def test_evaluation_builds_no_graph() -> None:
    model = prepare(tiny("qwen3"), settings(), plan()).eval()
    with torch.no_grad():
        output = model(**batch(LENGTH))
    assert not output.loss.requires_grad
    assert float(output.loss) == pytest.approx(float(tiny("qwen3")(**batch(LENGTH)).loss.detach()), rel=1e-6)
    stats = levers(model).checkpointing.stats()
    assert (stats.attention_forwards, stats.bytes_to_host) == (2, 0)  # in tiles, as in training, and nothing is kept
    assert not any(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_without_labels_the_logits_are_the_plain_models(family: str) -> None:
    """R59: scale and cap are still there."""
    ids = batch(LENGTH)["input_ids"]
    model = prepare(tiny(family), settings(), plan())
    step(model, **batch(LENGTH))
    torch.testing.assert_close(model(ids).logits, tiny(family)(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_generation_after_training_steps(family: str, training: bool) -> None:
    """Also in training mode, where transformers 5.17 would lose the cache under checkpointing; past the window of 8."""
    ids = batch(12)["input_ids"]
    plain = tiny(family).eval()
    model = prepare(tiny(family), settings(), plan()).train(training)
    if training:
        step(model, **batch(LENGTH))
    how = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    assert model.generate(ids, **how).equal(plain.generate(ids, **how))
    step(model, **batch(LENGTH))


def test_generation_of_a_padded_batch() -> None:
    """Left padding needs a mask, which long attention has not: these calls run on the attention that the model had."""
    ids = batch(12, rows=2)["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    how = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    model = prepare(tiny("gemma3").eval(), settings(), plan())
    assert model.generate(ids, **how).equal(tiny("gemma3").eval().generate(ids, **how))
    assert model.config._attn_implementation == "megaspan"


def test_a_cache_of_fixed_size() -> None:
    """Its empty places need a mask: a call runs on the attention that the model had, `generate()` asks for another cache."""
    from transformers import StaticCache

    model = prepare(tiny("llama").eval(), settings(), plan())
    ids, cache = batch(12)["input_ids"], StaticCache(config=model.config, max_cache_len=20)
    got = model(ids, past_key_values=cache).logits
    torch.testing.assert_close(got, tiny("llama").eval()(ids).logits, rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match=r"dynamic\) cache"):
        model.generate(ids, max_new_tokens=6, pad_token_id=0, cache_implementation="static")


def test_two_models_of_one_configuration_share_nothing() -> None:
    from transformers import AutoModelForCausalLM

    config = tiny_config("gemma3")
    one, other = (AutoModelForCausalLM.from_config(config, attn_implementation="eager") for _ in range(2))
    prepare(one, settings(), plan())
    assert other.config._attn_implementation == "eager"
    padded = torch.ones(1, LENGTH)
    padded[:, :3] = 0
    assert other(batch(LENGTH)["input_ids"], attention_mask=padded).logits.shape == (1, LENGTH, 128)


def test_preparing_twice() -> None:
    args, how = settings(), plan()
    model = prepare(tiny("qwen3"), args, how)
    forward = model.forward
    assert prepare(model, args, how) is model
    assert prepare(model, settings()) is model
    assert model.forward == forward
    with pytest.raises(UserError, match="prepared before"):
        prepare(model, settings(loss_type="nll"))


def test_unprepare_restores() -> None:
    model, plain = tiny("gemma2"), tiny("gemma2")
    attributes, names = [set(vars(module)) for module in model.modules()], [name for name, _ in model.named_parameters()]
    assert unprepare(model) is model
    unprepare(prepare(model, settings(), plan()))
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert names == [name for name, _ in model.named_parameters()]
    assert levers(model) is None
    want, got = step(plain, **batch(LENGTH)), step(model, **batch(LENGTH))
    assert got[0] == want[0]
    assert all(got[1][name].equal(want[1][name]) for name in names)
    assert model(**batch(LENGTH)).logits is not None


def test_a_copy_of_a_prepared_model_is_its_own() -> None:
    model = prepare(tiny("qwen3"), settings(), plan())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    loss, gradients = step(twin, **batch(LENGTH))
    assert loss == pytest.approx(float(tiny("qwen3")(**batch(LENGTH)).loss.detach()), rel=1e-6)
    assert all(gradient.any() for gradient in gradients.values())


def test_a_saved_model_is_a_plain_one(tmp_path: Any) -> None:
    """P5: nothing of the levers is in the folder."""
    from transformers import AutoModelForCausalLM

    model = prepare(tiny("gemma3"), settings(), plan())
    model.save_pretrained(tmp_path)
    assert "megaspan" not in (tmp_path / "config.json").read_text()
    ids = batch(LENGTH)["input_ids"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    torch.testing.assert_close(again(ids).logits, tiny("gemma3")(ids).logits)


@pytest.mark.parametrize("checkpoint", [True, False])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_the_routers_balance_loss_is_transformers_own(family: str, checkpoint: bool) -> None:
    """T-moe: included if and only if `output_router_logits`, with its gradient, over all rows of the batch."""
    overrides = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    assert_parity(family, plan(checkpoint=checkpoint), batch(LENGTH, rows=2), **overrides)
    model = prepare(tiny(family, **overrides), settings(), plan())
    assert float(model(**batch(LENGTH)).aux_loss.detach()) > 0.5
    assert model(**batch(LENGTH), output_router_logits=False).aux_loss is None


def test_the_routers_balance_loss_leaves_padding_out() -> None:
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, -9:] = 0
    inputs = batch(LENGTH, rows=2)
    inputs["labels"][mask == 0] = -100
    assert_parity("qwen3_moe", plan(), inputs | {"attention_mask": mask}, output_router_logits=True)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"past_key_values": object()}, "past_key_values"),
        ({"logits_to_keep": 1}, "logits_to_keep"),
        ({"nonsense": 1}, "nonsense"),
        ({"labels": torch.zeros(1, 5, dtype=torch.int64)}, "do not fit"),
        ({"input_ids": None}, "need either"),
        ({"inputs_embeds": torch.zeros(1, LENGTH, 64)}, "need either"),
        ({"attention_mask": torch.zeros(1, LENGTH)}, "only a padding token|no token"),
    ],
)
def test_what_a_long_forward_cannot_honour_is_refused(extra: dict[str, Any], words: str) -> None:
    model = prepare(tiny("qwen3"), settings(), plan())
    with pytest.raises(UserError, match=words):
        model(**(batch(LENGTH) | extra))


def test_a_tuple_on_request() -> None:
    model = prepare(tiny("qwen3"), settings(), plan())
    output = model(**batch(LENGTH), return_dict=False, use_cache=True, output_attentions=False)
    assert isinstance(output, tuple)
    assert float(output[0].detach()) == float(model(**batch(LENGTH)).loss.detach())


def test_a_row_past_the_positions_is_refused() -> None:
    """R52."""
    with pytest.raises(UserError, match=r"300 tokens is longer than the 64 positions"):
        prepare(tiny("qwen3", max_position_embeddings=64), settings(max_length=300), plan())
    model = prepare(tiny("qwen3", max_position_embeddings=64), settings(max_length=64), plan())
    with pytest.raises(UserError, match="rope_parameters: auto"):
        model(**batch(65))
    prepare(tiny("qwen3", max_position_embeddings=64), settings(max_length=300, allow_past_window=True), plan())(**batch(65))


def test_documents_of_a_packed_row_have_positions_of_their_own() -> None:
    model = prepare(tiny("qwen3", max_position_embeddings=64), settings(max_length=64), plan())
    positions = torch.arange(90)[None] % 45
    assert float(model(**batch(90), position_ids=positions).loss.detach()) > 0
    with pytest.raises(UserError, match="90 tokens is longer"):
        model(**batch(45), position_ids=positions[:, :45] + 45)


def test_without_a_plan_the_planner_makes_one() -> None:
    model = prepare(tiny("qwen3"), settings())
    assert levers(model).plan.loss_tile_tokens == levers(model).settings.tile_tokens > 0
    assert levers(model).checkpointing is not None
    assert levers(prepare(tiny("qwen3"), settings(gradient_checkpointing=False))).checkpointing is None
    want = float(tiny("qwen3")(**batch(LENGTH)).loss.detach())
    assert step(model, **batch(LENGTH))[0] == pytest.approx(want, rel=1e-6)
    levers(model).reserve(model, 256)
    assert levers(model).checkpointing.stats().host_bytes >= 256 * 64 * 4


@pytest.mark.parametrize("key", ["output_hidden_states", "output_attentions"])
def test_a_model_that_keeps_everything_is_refused(key: str) -> None:
    model = tiny("qwen3")
    setattr(model.config, key, True)
    with pytest.raises(UserError, match=key):
        prepare(model, settings(), plan())


def test_full_logits_that_cannot_fit_are_refused() -> None:
    """R58."""
    how = plan()
    how.host_limit = 256 * 128 * 20 - 1
    with pytest.raises(UserError, match="newer TRL means the chunked one"):
        prepare(tiny("qwen3"), settings(loss_type="nll"), how)
    how.host_limit += 1
    model = prepare(tiny("qwen3"), settings(loss_type="nll"), how)
    model(**batch(256))
    with pytest.raises(UserError, match="257 x 128 x 20"):
        model(**batch(257, ignored=0.0))


def test_a_model_whose_attention_does_more_is_refused() -> None:
    """A score bias hidden in a module that long attention never asks."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def odd(module: Any, query: Any, key: Any, value: Any, mask: Any, **rest: Any) -> Any:
        return sdpa_attention_forward(module, query, key, value * 1.01, mask, **rest)

    AttentionInterface.register("odd_attention", odd)
    model = tiny("llama")
    model.set_attn_implementation("odd_attention")
    with pytest.raises(UserError, match="does something in its attention"):
        prepare(model, settings(), plan())
    assert model.config._attn_implementation == "odd_attention"
    assert "forward" not in vars(model)


def test_other_peoples_changes_are_refused() -> None:
    model = tiny("llama")
    original = model.forward
    model.forward = lambda *args, **kwargs: original(*args, **kwargs)
    with pytest.raises(UserError, match="replaced already"):
        prepare(model, settings(), plan())
    del model.forward
    prepare(model, settings(), plan())
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    with pytest.raises(UserError, match="wrapped again"):
        unprepare(model)
    with pytest.raises(UserError, match="only transformers models"):
        prepare(torch.nn.Linear(2, 2), settings(), plan())


def test_a_hook_on_the_output_layer_is_refused_before_and_after() -> None:
    """The loss reads the layer's weight and never calls it, so that the hook would not run."""
    model = tiny("llama")
    handle = model.lm_head.register_forward_hook(lambda _module, _args, output: output * 2)
    with pytest.raises(UserError, match="a hook on lm_head is to see whole rows"):
        prepare(model, settings(), plan())
    handle.remove()
    prepare(model, settings(), plan())
    model(**batch(LENGTH))
    handle = model.lm_head.register_full_backward_hook(lambda *_: None)
    with pytest.raises(UserError, match="a hook on lm_head is to see whole rows"):
        model(**batch(LENGTH))
    handle.remove()
    model(**batch(LENGTH))


def smoothed(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    """A loss of somebody's own."""
    shifted, labels = logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1)
    return torch.nn.functional.cross_entropy(shifted, labels, label_smoothing=0.1)


def test_another_loss_function_is_refused_before_and_after() -> None:
    """By transformers' own setter; the tiles' loss would pass it over."""
    model = tiny("llama")
    model.loss_function = smoothed
    with pytest.raises(UserError, match=r"loss function of LlamaForCausalLM is smoothed, .* would not be called"):
        prepare(model, settings(), plan())
    del model._loss_function
    prepare(model, settings(), plan())
    model(**batch(LENGTH))
    model.loss_function = smoothed
    with pytest.raises(UserError, match="loss function of LlamaForCausalLM is smoothed"):
        model(**batch(LENGTH))
    assert model(input_ids=batch(LENGTH)["input_ids"]).logits is not None
    model.loss_function = ForCausalLMLoss
    model(**batch(LENGTH))


def test_checkpointing_switched_on_elsewhere_is_refused() -> None:
    model = prepare(tiny("llama"), settings(), plan())
    model._set_gradient_checkpointing(True, torch.utils.checkpoint.checkpoint)
    with pytest.raises(UserError, match="gradient_checkpointing=False"):
        model(**batch(LENGTH))


def test_the_header_reads_back_what_is_on_the_model() -> None:
    seen: list[tuple[str, int]] = []
    model = prepare(tiny("gemma3"), settings(), plan(keep=0), on_layer=lambda phase, layer: seen.append((phase, layer)))
    lines = {(label, value) for label, value, _ in levers(model).read_back()}
    assert ("loss", "chunked_nll, 7 tokens of logits at once") in lines
    assert any(label == "attention" for label, _ in lines)
    assert any("host" in value for label, value in lines if label == "layer inputs")
    assert ("layers", "2 of 2 streamed") in lines
    step(model, **batch(LENGTH))
    assert seen == [("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)]
    assert levers(model).checkpointing.stats().moved == 2
    levers(model).on_layer = None
    step(model, **batch(LENGTH))
    assert len(seen) == 4


def test_the_header_counts_attention_that_runs_twice_layer_by_layer() -> None:
    """Outputs that are kept need not be those of the last layers."""
    how = plan()
    how.keep = KeepPolicy((LayerKeep("host", None), LayerKeep(None, "host"), LayerKeep(None, None), LayerKeep(None, "host")))
    state: Any = levers(prepare(tiny("qwen3", layers=4), settings(), how))
    reasons = [reason for label, _, reason in state.read_back() if label == "layers"]
    assert reasons == ["attention runs forward twice in 2 layers, once in the others; the rest in tiles of 9 tokens"]


def test_the_header_says_what_streamed_layers_do_without() -> None:
    class CentredNorm(Olmo2RMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> Any:
            return super().forward(hidden_states - hidden_states.mean(1, keepdim=True))

    model: Any = tiny("olmo2")
    model.model.norm.__class__ = CentredNorm
    state: Any = levers(prepare(model, settings(), plan()))
    streamed, unfused, norm = [(value, reason) for label, value, reason in state.read_back() if label == "layers"]
    assert streamed[0] == "2 of 2 streamed"
    assert unfused[0] == "element-wise work is not fused"
    assert unfused[1].startswith("Olmo2Attention has norms of q and k")
    assert norm == ("the norm behind them runs whole", "CentredNorm does not work token by token")


def test_the_header_says_which_layers_run_whole_for_somebodys_hooks() -> None:
    """As hooks come and go: a gradient's is to run once, a module's to see whole rows."""
    model: Any = prepare(tiny("qwen3", layers=3), settings(), plan(layers=3))
    hooks = [
        model.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: gradient),
        model.model.layers[2].self_attn.q_norm.register_forward_hook(lambda *_: None),
    ]

    def lines() -> list[tuple[str, str]]:
        state = levers(model)
        assert state is not None
        return [(value, reason) for label, value, reason in state.read_back() if label == "layers"]

    streamed, row, gradient = lines()
    assert streamed[0] == "1 of 3 streamed"
    assert gradient[0] == row[0] == "1 of 3 checkpointed whole"
    assert gradient[1].endswith("a hook on the gradient of mlp.up_proj.weight is to run once")
    assert row[1].endswith("a hook on self_attn.q_norm is to see whole rows")
    model(**batch(20)).loss.backward()
    state: Any = levers(model)
    assert state.checkpointing.stats().passed_on == 2
    for hook in hooks:
        hook.remove()
    assert [value for value, _ in lines()] == ["3 of 3 streamed"]


@pytest.mark.parametrize("kind", ["numpy", "random", "generator"])
def test_random_numbers_that_torch_does_not_hold_are_refused_where_layers_run_again(kind):
    import random

    import numpy

    own = torch.Generator().manual_seed(3)
    draws = {"numpy": numpy.random.rand, "random": random.random, "generator": lambda: float(torch.rand((), generator=own))}
    draw = draws[kind]

    class Noisy(torch.nn.Module):
        def __init__(self, mlp):
            super().__init__()
            self.mlp = mlp

        def forward(self, x):
            return self.mlp(x) * (1 + draw()) if self.training else self.mlp(x)

    model = tiny("llama")
    model.model.layers[1].mlp = Noisy(model.model.layers[1].mlp)
    with pytest.raises(UserError, match=r"Noisy .*draws random numbers outside torch's generators"):
        prepare(model, settings(), plan(checkpoint=True))
    prepare(model, settings(), plan(checkpoint=False))


def test_torchs_own_random_numbers_are_not_refused_and_not_used_up():
    model = tiny("llama")
    model.model.layers[1].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.3))
    model.eval()
    state = torch.get_rng_state()
    prepare(model, settings(), plan(checkpoint=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(
    ("family", "module", "name", "value"),
    [
        ("qwen3", "model.layers.0.input_layernorm", "variance_epsilon", 0.3),
        ("qwen3", "model.layers.0.self_attn.k_norm", "variance_epsilon", 0.3),
        ("gemma2", "model.layers.1.pre_feedforward_layernorm", "eps", 0.3),
        ("cohere", "", "logit_scale", 0.3),
    ],
)
def test_a_number_that_is_set_after_prepare_is_the_one_that_counts(
    family: str, module: str, name: str, value: float, streamed: bool
) -> None:
    plain, long = tiny(family), prepare(tiny(family), settings(), plan(streamed=streamed))
    before, _ = step(long, **batch(LENGTH))
    for model in (plain, long):
        setattr(model.get_submodule(module), name, value)
    (want_loss, want), (got_loss, got) = step(plain, **batch(LENGTH)), step(long, **batch(LENGTH))
    assert got_loss == pytest.approx(want_loss, rel=1e-6)
    assert abs(got_loss - before) > 1e-4
    assert_same_gradients(got, want)


def test_fused_norms_of_queries_and_keys_see_another_epsilon() -> None:
    layer = prepare(tiny("qwen3"), settings(), plan()).model.layers[0]
    halves = find_halves(layer, describe(layer), Fused())  # type: ignore[arg-type]
    assert halves._untouched(layer, "self_attn")
    layer.self_attn.q_norm.variance_epsilon = 0.3
    assert not halves._untouched(layer, "self_attn")


def test_layers_that_the_configuration_does_not_tell_of_are_refused() -> None:
    fewer, twice = tiny("qwen3", layers=3), tiny("qwen3", layers=3)
    fewer.model.layers = fewer.model.layers[:2]
    twice.model.layers[2] = twice.model.layers[0]
    for model in (fewer, twice):
        with pytest.raises(UserError, match="has 2 layers of its own, and its configuration tells of 3"):
            prepare(model, settings())
        assert levers(model) is None
    fewer.config.num_hidden_layers = 2
    prepare(fewer, settings())


def test_a_mask_that_numbers_documents_is_refused() -> None:
    model = prepare(tiny("qwen3"), settings(), plan())
    mask = torch.ones(1, LENGTH, dtype=torch.int64)
    model(**batch(LENGTH), attention_mask=mask.float())
    mask[0, 20:] = 2
    with pytest.raises(UserError, match=r"other values than 0 and 1.*give position_ids that start again"):
        model(**batch(LENGTH), attention_mask=mask)


def test_a_batch_without_rows_is_refused() -> None:
    model = prepare(tiny("qwen3"), settings(), plan())
    with pytest.raises(UserError, match=r"a batch has rows of tokens; got \(37,\); allowed: \(rows, tokens\)"):
        model(**{name: tensor[0] for name, tensor in batch(LENGTH).items()})
