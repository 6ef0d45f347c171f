"""Streamed layers against plain transformers: loss and every gradient, for every family, in tiles that divide nothing."""

from __future__ import annotations

import copy

import pytest
import torch

from megaspan.attention import install as install_attention
from megaspan.attention.cpu import CPUFlash
from megaspan.attention.cudnn import CuDNN
from megaspan.attention.flash2 import Flash2
from megaspan.attention.flash4 import Flash4
from megaspan.attention.tiled import TiledMath
from megaspan.layers.dials import LayerPlan
from megaspan.layers.streamed import Streaming
from megaspan.layers.tile import GradientSums, tiles
from megaspan.plan.keep import KeepPolicy, LayerKeep
from tests.models import FAMILIES, assert_same_gradients, batch, gradients, tiny

MOE = ("gpt_oss", "qwen3_moe")


@pytest.fixture(autouse=True)
def _one_thread():
    """These models are too small to share between threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def policy(layers, place="host", stay=0, outputs=None):
    """Inputs and outputs at a place but for the last `stay` layers; of the last `outputs` layers, the others keep none."""
    there = ["device" if index >= layers - stay else place for index in range(layers)]
    kept = range(layers - (layers if outputs is None else outputs), layers)
    return KeepPolicy(tuple(LayerKeep(place, place if index in kept else None) for index, place in enumerate(there)))


def streamed(plain, plan=None, prove=False, offload=False, keep_on_device=0, keep_outputs=None, **options):
    """A copy of the model with megaspan's attention and streamed layers, and its `Streaming`."""
    model = copy.deepcopy(plain)
    install_attention(model)
    if offload or keep_outputs is not None:
        layers = plain.config.num_hidden_layers
        options["keep"] = policy(layers, "host" if offload else "device", keep_on_device, keep_outputs)
    streaming = Streaming(plan or LayerPlan(tile_tokens=5), **options)
    assert streaming.install(model, prove=prove) == [None] * plain.config.num_hidden_layers
    return model, streaming


def step(model, data):
    model.zero_grad()
    loss = model(**data, use_cache=False).loss
    loss.backward()
    return loss.detach(), gradients(model)


def assert_parity(plain, model, data, tolerance=1e-5):
    want_loss, want = step(plain, data)
    loss, got = step(model, data)
    torch.testing.assert_close(loss, want_loss, rtol=1e-6, atol=0)
    assert_same_gradients(got, want, tolerance)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("tokens", "tile"), [(2, 1), (7, 3), (7, 64), (129, 50)])
def test_loss_and_every_gradient_equal_plain_transformers(family, tokens, tile):
    """P1; 7 tokens in one tile, and tiles that divide no length."""
    plain = tiny(family)
    model, streaming = streamed(plain, LayerPlan(tile_tokens=tile))
    assert_parity(plain, model, batch(tokens), 1e-4 if family in MOE else 1e-5)
    stats = streaming.stats()
    assert (stats.streamed, stats.attention_forwards, stats.attention_backwards) == (2, 2, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_math_kernel_runs_forward_once_for_each_layer(family, monkeypatch):
    """P1 with the kernel that knows every kind of slice, in the place of the CPU's own; counted where it is called."""
    plain, calls = tiny(family), []
    model, _ = streamed(plain, LayerPlan(tile_tokens=50))
    for module in model.modules():
        if hasattr(module, "megaspan_kernels"):
            module.megaspan_kernels = (TiledMath(),)
    for name in ("forward", "backward"):
        own = getattr(TiledMath, name)
        monkeypatch.setattr(TiledMath, name, lambda *given, own=own, name=name: (calls.append(name), own(*given))[1])
    for kernel in (CPUFlash, CuDNN, Flash2, Flash4):
        monkeypatch.setattr(kernel, "forward", None)
    assert_parity(plain, model, batch(129), 1e-4 if family in MOE else 1e-5)
    assert calls == ["forward"] * 2 + ["backward"] * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_of_one_token(family):
    """P1 without a target to predict: the logits' squares instead of the loss."""
    plain = tiny(family)
    model, _ = streamed(plain)
    for one in (plain, model):
        one(batch(1)["input_ids"], use_cache=False).logits.square().sum().backward()
    assert_same_gradients(gradients(model), gradients(plain), 1e-4 if family in MOE else 1e-5)


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_longer_row(family):
    """P1 at 4,097 tokens, through kernel tiles of several sizes."""
    plain = tiny(family, max_position_embeddings=8192)
    model, _ = streamed(plain, LayerPlan(tile_tokens=1000))
    assert_parity(plain, model, batch(4097))


def test_a_batch_of_several_rows_is_checkpointed_and_exact():
    """A prepared model runs rows one by one; somebody's own loop may not."""
    plain = tiny("llama")
    model, streaming = streamed(plain, LayerPlan(tile_tokens=13))
    assert_parity(plain, model, batch(23, rows=3))
    assert (streaming.stats().attention_forwards, streaming.stats().passed_on) == (0, 2)


@pytest.mark.parametrize("keep_on_device", [0, 1, 5])
def test_inputs_and_outputs_on_the_host_change_no_bit(keep_on_device):
    """Offload on and off give the same bits, step after step, and everything moved comes back."""
    plain = tiny("qwen3", layers=5)
    here, _ = streamed(plain)
    there, streaming = streamed(plain, offload=True, keep_on_device=keep_on_device)
    streaming.reserve(torch.device("cpu"), 33 * 64 * 4)
    reserved = streaming.stats().host_bytes
    for tokens in (33, 12, 33):
        data = batch(tokens, seed=tokens)
        (want_loss, want), (loss, got) = step(here, data), step(there, data)
        assert torch.equal(loss, want_loss)
        assert all(torch.equal(got[name], want[name]) for name in want)
    stats = streaming.stats()
    moved = (33 + 12 + 33) * (5 - keep_on_device) * (64 + 4 * 16 + 4) * 4  # input, output, log-sum-exp
    assert stats.bytes_to_host == moved
    assert (moved > 0) == (0 < stats.bytes_to_device <= moved)  # the last two are still on the device when they are wanted
    assert stats.late == 0
    assert stats.host_bytes == reserved  # nothing grew after the reservation
    assert (reserved > 0) == (moved > 0)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("tile", [5, 64])
def test_fewer_kv_heads_a_call_change_nothing(group, tile):
    """Head groups that do not divide the heads, with sinks and windows; q, k, v are overwritten only where they are ours."""
    plain = tiny("gpt_oss", num_attention_heads=8, num_key_value_heads=4)
    model, _ = streamed(plain, LayerPlan(tile_tokens=tile, kv_heads_per_call=group))
    assert_parity(plain, model, batch(21), 1e-4)


def test_fused_norms_are_put_in_and_taken_out():
    plain = tiny("qwen3")
    model, streaming = streamed(plain, LayerPlan(tile_tokens=5, fused_norms=True))
    assert sum("forward" in module.__dict__ for module in model.modules()) == 2 * 4 + 1
    assert_parity(plain, model, batch(21), 1e-4)
    streaming.remove()
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("keep_outputs", [0, 1])
def test_outputs_that_are_not_kept_are_computed_again(keep_outputs):
    plain = tiny("qwen3", layers=3)
    model, streaming = streamed(plain, keep_outputs=keep_outputs, offload=True)
    assert_parity(plain, model, batch(21))
    assert streaming.stats().attention_forwards == 3 + 3 - keep_outputs
    assert streaming.stats().bytes_to_host == 21 * (3 * 64 + keep_outputs * (64 + 4)) * 4


def test_an_abandoned_step_leaves_nothing_behind():
    plain = tiny("qwen3")
    model, streaming = streamed(plain, offload=True)
    model(**batch(20), use_cache=False)
    streaming.discard()
    assert_parity(plain, model, batch(20))
    streaming.remove()
    assert not any("_gradient_checkpointing_func" in layer.__dict__ for layer in model.model.layers)
    assert_parity(plain, model, batch(20))


def test_layers_report_as_they_go():
    calls = []
    model, _ = streamed(tiny("qwen3"), on_layer=lambda phase, index: calls.append((phase, index)))
    step(model, batch(9))
    assert calls == [("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)]


@pytest.mark.parametrize("frozen", ["model.embed_tokens.weight", "self_attn", "mlp", "norm", "model.layers.0", "model"])
def test_frozen_weights_get_no_gradient_and_change_no_other(frozen):
    plain = tiny("gemma3")
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(not (frozen in name and name != "lm_head.weight"))
    model, _ = streamed(plain)
    assert_parity(plain, model, batch(17))


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["o_proj", "down_proj"], "all-linear"])
def test_lora_inside_streamed_layers(targets):
    """R63: every adapter matrix gets its gradient, equal to plain peft's; also where the input wants none."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(0)
    plain = peft.get_peft_model(tiny("qwen3"), config).train()
    model = copy.deepcopy(plain)
    install_attention(model)
    streaming = Streaming(LayerPlan(tile_tokens=5))
    assert streaming.install(model) == [None, None]
    assert_parity(plain, model, batch(17))
    assert all((gradient != 0).any() for gradient in gradients(model).values())
    assert streaming.stats().attention_forwards == 2


def test_dropout_draws_the_same_in_forward_and_backward():
    """With LoRA dropout the gradient is that of the very loss that was returned: finite differences under one seed."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=3, lora_dropout=0.4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny("qwen3"), config).train()
    install_attention(model)
    Streaming(LayerPlan(tile_tokens=5)).install(model)
    data = batch(17)

    def loss_with(seed):
        torch.manual_seed(seed)
        return model(**data, use_cache=False).loss

    loss = loss_with(3)
    loss.backward()
    assert loss_with(3).item() == loss.item() != loss_with(4).item()
    for name, parameter in model.named_parameters():
        if parameter.grad is None or "layers.0" not in name:
            continue
        direction = parameter.grad / parameter.grad.norm()
        losses = []
        for move in (5e-4, -1e-3):
            parameter.data.add_(direction, alpha=move)
            losses.append(loss_with(3).item())
        parameter.data.add_(direction, alpha=5e-4)
        assert (losses[0] - losses[1]) / 1e-3 == pytest.approx(parameter.grad.norm().item(), rel=0.02), name


def test_gradients_accumulate_over_micro_batches():
    plain = tiny("qwen3")
    model, _ = streamed(plain)
    for one in (plain, model):
        for seed in range(3):
            (one(**batch(9 + seed, seed=seed), use_cache=False).loss / 3).backward()
    assert_same_gradients(gradients(model), gradients(plain))


def test_two_forwards_before_their_backwards_and_a_scaled_loss():
    """R11: the incoming gradient is honoured, also when rows overlap."""
    plain = tiny("qwen3")
    model, _ = streamed(plain, offload=True)
    for one in (plain, model):
        losses = [one(**batch(length, seed=length), use_cache=False).loss for length in (11, 8)]
        (3 * losses[0] + 7 * losses[1]).backward()
    assert_same_gradients(gradients(model), gradients(plain))


def test_the_users_own_embeddings_are_not_overwritten_and_get_their_gradient():
    plain = tiny("qwen3")
    model, _ = streamed(plain)
    embeds = torch.randn(1, 12, 64)
    results = []
    for one in (plain, model):
        mine = embeds.clone().requires_grad_()
        one(inputs_embeds=mine, labels=batch(12)["labels"], use_cache=False).loss.backward()
        assert torch.equal(mine.detach(), embeds)
        results.append(mine.grad)
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_bf16_is_no_farther_from_fp32_than_plain_bf16(family):
    """All gradients together within 1.5 times plain bf16's distance: sums over tiles are fp32."""
    plain = tiny(family, dtype=torch.bfloat16)
    model, _ = streamed(plain, LayerPlan(tile_tokens=4))
    exact = copy.deepcopy(plain).float()
    want, other, got = (
        torch.cat([gradient.float().flatten() for gradient in step(one, batch(129))[1].values()])
        for one in (exact, plain, model)
    )
    assert (got - want).norm() <= 1.5 * (other - want).norm()


def test_under_autocast_the_backward_computes_as_the_forward_did():
    plain = tiny("qwen3")
    model, _ = streamed(plain)
    found = []
    for one in (plain, model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = one(**batch(17), use_cache=False).loss
        loss.backward()  # outside the autocast, as trainers do
        found.append(torch.cat([gradient.flatten() for gradient in gradients(one).values()]))
    exact = torch.cat([gradient.flatten() for gradient in step(tiny("qwen3"), batch(17))[1].values()])
    assert (found[1] - exact).norm() <= 1.5 * (found[0] - exact).norm()
    assert (found[1] - exact).norm() > 1e-4 * exact.norm()  # it did run in bf16


def test_evaluation_generation_and_foreign_calls_take_the_models_own_path():
    plain = tiny("qwen3")
    model, streaming = streamed(plain)
    ids = batch(9)["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(
        model.eval().generate(ids, max_new_tokens=5, do_sample=False),
        plain.eval().generate(ids, max_new_tokens=5, do_sample=False),
    )
    assert streaming.stats().attention_forwards == 0
    model.train(), plain.train()
    model.set_attn_implementation("eager")  # what `prepare` does for a call that needs a mask
    mask = torch.tensor([[1] * 7 + [0] * 2])
    data = batch(9) | {"attention_mask": mask}
    assert_parity(plain, model, data)
    assert streaming.stats().attention_forwards == 0


@pytest.mark.parametrize("family", MOE)
def test_router_logits_take_the_general_path_and_the_balance_loss_is_exact(family):
    plain = tiny(family, router_aux_loss_coef=0.5)
    model, streaming = streamed(plain)
    data = batch(17) | {"output_router_logits": True}
    assert_parity(plain, model, data, 1e-4)
    assert (streaming.stats().attention_forwards, streaming.stats().passed_on) == (0, 2)
    asked = tiny(family, router_aux_loss_coef=0.5, output_router_logits=True)
    model, streaming = streamed(asked)  # they stream inside `balancing`, as a prepared model's forward runs
    assert_parity(asked, model, batch(17), 1e-4)
    assert (streaming.stats().attention_forwards, streaming.stats().passed_on) == (0, 2)


def test_packed_positions_are_refused():
    """R26: an all-ones mask hides packed rows from transformers, not from us."""
    from megaspan.human import UserError

    model, _ = streamed(tiny("qwen3"))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    with pytest.raises(UserError, match="packed rows"):
        model(**batch(8), position_ids=positions, attention_mask=torch.ones(1, 8, dtype=torch.int64), use_cache=False)


def test_changing_a_late_token_reaches_no_earlier_position():
    """P2 through streamed layers in training mode."""
    model, _ = streamed(tiny("gemma3"), LayerPlan(tile_tokens=7))
    ids = batch(40)["input_ids"]
    changed = ids.clone()
    changed[0, 23] = (ids[0, 23] + 1) % 128
    differs = ((model(ids, use_cache=False).logits - model(changed, use_cache=False).logits).abs() > 1e-5).any(-1)[0].nonzero()
    assert differs[:, 0].tolist() == list(range(23, 40))


def test_no_tensor_of_the_mlp_is_as_long_as_the_row():
    """Forward and backward of a 512-token row in tiles of 32: nothing of MLP width is larger than a tile's."""
    from torch.utils._python_dispatch import TorchDispatchMode

    rows = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for value in result if isinstance(result, tuple | list) else [result]:
                if isinstance(value, torch.Tensor) and value.shape[-1:] == (96,) and value.ndim > 1 and value.shape[-2] != 64:
                    rows.add(value.shape[-2])
            return result

    model, _ = streamed(tiny("qwen3"), LayerPlan(tile_tokens=32))
    with Watch():
        model(**batch(512), use_cache=False).loss.backward()
    assert rows == {32}


@pytest.mark.parametrize(("tokens", "size", "lengths"), [(10, 3, [3, 3, 3, 1]), (10, 10, [10]), (1, 5, [1]), (11, 6, [6, 5])])
def test_tiles_are_even(tokens, size, lengths):
    assert [cut.stop - cut.start for cut in tiles(tokens, size)] == lengths


def test_long_tiles_are_multiples_of_128():
    cuts = tiles(100_003, 8192)
    assert {(cut.stop - cut.start) % 128 for cut in cuts[:-1]} == {0}
    assert max(cut.stop - cut.start for cut in cuts) <= 8192
    assert (cuts[0].start, cuts[-1].stop) == (0, 100_003)


def test_sums_over_tiles_keep_small_parts():
    """R55: 1,000 tiles of 1/256 after a tile of 1: bf16 sums would stay at 1."""
    parameter = torch.zeros(2, dtype=torch.bfloat16)
    sums = GradientSums([parameter, parameter])
    for index in range(1001):
        sums.add([torch.full((2,), 1.0 if index == 0 else 1 / 256, dtype=torch.bfloat16), None])
    total, nothing = sums.take()
    assert nothing is None
    assert total.dtype == torch.bfloat16
    torch.testing.assert_close(total.float(), torch.full((2,), 1 + 1000 / 256), rtol=4e-3, atol=0)


def test_fp32_gradients_of_bf16_weights_stay_fp32_where_asked():
    """A parameter with `grad_dtype` fp32 gets the fp32 sum, not one rounded to bf16."""
    plain = tiny("qwen3", dtype=torch.bfloat16)
    model, _ = streamed(plain)
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.grad_dtype = torch.float32
    step(model, batch(33))
    assert weight.grad.dtype == torch.float32
    assert not torch.equal(weight.grad, weight.grad.bfloat16().float())


def test_head_groups_that_ranks_share_are_counted_as_they_run():
    """What is reserved and written for attention's outputs: a group holds a KV head of each sp rank."""
    plain = tiny("llama", num_attention_heads=8, num_key_value_heads=4)
    for sp_size, groups in ((1, 4), (2, 2), (4, 1)):
        plan = LayerPlan(tile_tokens=5, kv_heads_per_call=1, sp_size=sp_size)
        _, streaming = streamed(plain, plan, keep=policy(2, "disk"))
        assert len(streaming.on_disk(4096)) == 2 + 2 * 2 * groups


def test_hooks_of_parameters_run_once():
    """In tiles a hook would run for each tile, and for their sum again: such a layer runs whole."""
    plain = tiny("qwen3")
    model, streaming = streamed(plain)
    _, got = step(plain, batch(23))
    for parameter in model.model.layers[0].parameters():
        parameter.register_hook(lambda gradient: 0.5 * gradient)
    of_hooked = "model.layers.0."
    want = {name: gradient * (0.5 if name.startswith(of_hooked) else 1) for name, gradient in got.items()}
    assert_same_gradients(step(model, batch(23))[1], want, 1e-5)
    assert streaming.stats().passed_on == 1


def test_a_rotary_module_that_is_trained_gets_its_gradient():
    """cos and sin are not among what a streamed layer gives gradients to: such layers run whole."""
    plain = tiny("llama")
    model, streaming = streamed(plain)
    for one in (plain, model):
        rotary = one.model.rotary_emb
        rotary.stretch = torch.nn.Parameter(torch.tensor(1.1))
        own = type(rotary).forward
        rotary.forward = lambda *given, r=rotary, own=own, **named: tuple(each * r.stretch for each in own(r, *given, **named))
    assert_parity(plain, model, batch(23))
    assert float(model.model.rotary_emb.stretch.grad) != 0
    assert streaming.stats().passed_on == 2


@pytest.mark.parametrize("part", ["mlp", "self_attn", "mlp.act_fn", ""])
def test_a_forward_that_is_exchanged_later_is_called_and_its_layer_runs_whole(part):
    plain = tiny("llama", layers=3)
    model, streaming = streamed(plain)
    assert streaming.now_whole() == {}
    for one in (plain, model):
        module = one.model.layers[1].get_submodule(part)
        own = module.forward

        def doubled(*given, own=own, **named):
            out = own(*given, **named)
            return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out

        module.forward = doubled
    assert_parity(plain, model, batch(23))
    assert streaming.stats().passed_on == 1
    assert streaming.now_whole() == {1: f"{part or 'it'} has a forward of somebody's own since prepare"}
