"""Checkpointing, with and without offload, changes memory and nothing else: every gradient is bit-equal on the CPU."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel
from transformers.modeling_layers import GradientCheckpointingLayer

from megaspan.human import UserError
from megaspan.layers.checkpoint import Checkpointing, checkpointed_layers
from megaspan.layers.dropout import counter_mask, other_randomness
from tests.models import HIDDEN, batch, gradients, tiny

LAYERS = 4
R64_LENGTHS = (64, 8, 64, 33, 1)


class Layer(GradientCheckpointingLayer):
    """A residual layer with the ways of being called that real ones have; it counts and records."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)
        self.finished = 0
        self.seen: list[list[SDPBackend]] = []
        self.inputs: list[StorageWeakRef] = []

    def forward(self, hidden_states: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, None]:
        self.seen.append(_cur_sdpa_kernel_backends(with_priority=True))
        self.inputs.append(StorageWeakRef(hidden_states.untyped_storage()))
        branch = torch.tanh(self.linear(hidden_states) * (1.0 if scale is None else scale))
        self.finished += 1  # after the last tensor that the backward needs
        return hidden_states + branch, None


class Stack(torch.nn.Module):
    def __init__(
        self, layers: int = LAYERS, call: Callable[[Layer, torch.Tensor], Any] = lambda layer, hidden: layer(hidden)
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.call = torch.nn.ModuleList([Layer() for _ in range(layers)]), call

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = self.call(layer, hidden)[0]
        return hidden


def checkpointed(model: Any, *arguments: Any, **options: Any) -> tuple[Any, Checkpointing]:
    """A copy of `model` with checkpointing on."""
    model, checkpointing = copy.deepcopy(model), Checkpointing(*arguments, **options)
    checkpointing.install(model)
    return model, checkpointing


def step(model: Any, length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**batch(length, seed=seed, ignored=0.0), use_cache=False).loss.backward()
    return gradients(model)


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    assert any(bool(tensor.any()) for tensor in want.values())
    different = [name for name in want if not torch.equal(got[name], want[name])]
    assert not different


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "qwen3_moe"])
def test_gradients_are_bit_equal_at_changing_lengths(family: str, offload: bool) -> None:
    """R64 scaled down: five steps of other lengths; a pool that is overwritten shows from the second step on."""
    plain = tiny(family, layers=LAYERS)
    model, checkpointing = checkpointed(plain, offload, 1)
    held = []
    for seed, length in enumerate((*R64_LENGTHS[:-1], 2)):
        assert_equal(step(model, length, seed), step(plain, length, seed))
        held.append(checkpointing.stats().host_bytes)
    stats = checkpointing.stats()
    assert (stats.layers, stats.moved) == (LAYERS, LAYERS - 1 if offload else 0)
    assert set(held) == {(LAYERS - 1) * 64 * HIDDEN * 4 if offload else 0}


@pytest.mark.parametrize("keep", [0, 1, 3, LAYERS, 99])
def test_bytes_moved_are_exact(keep: int) -> None:
    """P4, R65: layers x tokens x hidden x bytes per element, and the last `keep_on_device` inputs never move."""
    model, checkpointing = checkpointed(tiny("qwen3", layers=LAYERS), True, keep)
    step(model, 32)
    step(model, 32)
    moved = max(0, LAYERS - keep)
    assert checkpointing.stats().bytes_to_host == 2 * moved * 32 * HIDDEN * 4
    assert checkpointing.stats().late == 0


def test_inputs_leave_the_device_during_the_forward() -> None:
    """What the lever is for: after the forward, only the last inputs (in flight, kept) are alive; without it, all are."""
    for offload, keep, alive in ((False, 0, 8), (True, 0, 2), (True, 3, 3)):
        model, _ = checkpointed(Stack(8), offload, keep)
        output = model(torch.randn(1, 16, HIDDEN, requires_grad=True) * 1.0)
        assert sum(not layer.inputs[0].expired() for layer in model.layers) == alive, (offload, keep)
        del output


def test_two_forwards_then_their_backwards_in_any_order() -> None:
    plain = tiny("llama", layers=LAYERS)
    model, checkpointing = checkpointed(plain, True, 1)
    first, second = batch(40, seed=1), batch(24, seed=2)
    want_model = copy.deepcopy(plain)
    for order in ((0, 1), (1, 0), None):
        model.zero_grad()
        want_model.zero_grad()
        for one, prepared in ((want_model, False), (model, True)):
            losses = [one(**first).loss, one(**second).loss]
            if order is None:
                (losses[0] + losses[1]).backward()
            else:
                for which in order:
                    losses[which].backward()
            assert not prepared or checkpointing._inputs.arena.used == 0  # type: ignore[union-attr]
        assert_equal(gradients(model), gradients(want_model))


def test_evaluation_and_failures_in_between_change_nothing() -> None:
    """A forward without backward, no_grad inside and out, a step abandoned in the forward and one in the backward."""
    plain = tiny("qwen3", layers=LAYERS)
    fail: tuple[str, int] | None = None

    def on_layer(phase: str, index: int) -> None:
        if (phase, index) == fail:
            raise KeyboardInterrupt

    model, checkpointing = checkpointed(plain, True, 1, on_layer)
    want = step(plain, 48)
    assert_equal(step(model, 48), want)
    held = checkpointing.stats().host_bytes
    loss = model(**batch(48, seed=5)).loss  # never used, still alive
    with torch.no_grad():
        model(**batch(48, seed=6))
        with torch.enable_grad():
            model(**batch(48, seed=7))
    model.eval()(**batch(48, seed=8))
    model.train()
    for where in (("forward", 2), ("backward", 1), ("backward", LAYERS - 1)):
        fail = where
        with pytest.raises(KeyboardInterrupt):
            step(model, 48)
        checkpointing.discard()
    fail = None
    assert_equal(step(model, 48), want)
    assert checkpointing.stats().host_bytes <= 2 * held
    with pytest.raises(RuntimeError, match="abandoned"):
        loss.backward()


def test_second_backward() -> None:
    """With offload it is refused by a sentence that says what to do; without, it gives the same gradients again."""
    model, _ = checkpointed(Stack(), True)
    hidden = torch.randn(1, 8, HIDDEN)
    loss = model(hidden).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"second backward.*Run the forward again.*gradient_checkpointing=False"):
        loss.backward()
    model, _ = checkpointed(Stack(), False)
    loss = model(hidden).sum()
    loss.backward(retain_graph=True)
    once = gradients(model)
    loss.backward()
    assert_equal(gradients(model), {name: 2 * tensor for name, tensor in once.items()})


def test_a_layer_used_twice_and_an_input_used_by_two() -> None:
    """Double use in one graph: shared layers (the index runs backwards) and branches."""

    def twice(model: Stack, hidden: torch.Tensor) -> torch.Tensor:
        for layer in (*model.layers, *model.layers):
            hidden = layer(hidden)[0]
        return model.layers[1](hidden)[0] * model.layers[2](hidden)[0]

    plain = Stack()
    model, _ = checkpointed(plain, True, 1)
    grads = []
    for one in (plain, model):
        hidden = torch.linspace(-1, 1, 16 * HIDDEN).view(1, 16, HIDDEN).requires_grad_()  # a leaf as layer input
        twice(one, hidden).square().sum().backward()
        grads.append(gradients(one) | {"hidden": hidden.grad})
    assert_equal(grads[1], grads[0])


def test_dropout_is_the_same_in_the_recomputation() -> None:
    """The recomputation draws the numbers of the forward, and only layers that draw any save the generator's state."""
    plain = tiny("llama", layers=LAYERS, attention_dropout=0.3)
    assert "attention_dropout" in other_randomness(plain.model.layers[0])
    assert other_randomness(tiny("llama").model.layers[0]) is None
    model, _ = checkpointed(plain, True, 1)
    torch.manual_seed(3)
    want = step(plain, 32)
    torch.manual_seed(3)
    assert_equal(step(model, 32), want)
    torch.manual_seed(4)
    with pytest.raises(AssertionError):
        assert_equal(step(plain, 32), want)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_lora_gradients_arrive_in_every_layer(dropout: float) -> None:
    """R63: with frozen weights and embeddings only the first layer got gradients elsewhere."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    settings = peft.LoraConfig(
        r=4, lora_dropout=dropout, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    plain = peft.get_peft_model(tiny("qwen3", layers=LAYERS), settings)
    model, checkpointing = checkpointed(plain, True, 1)
    torch.manual_seed(1)
    got = step(model, 32)
    seed = checkpointing.dropout.step_seed
    assert (seed is None) == (dropout == 0)
    for index, layer in enumerate(plain.base_model.model.model.layers):
        for name, module in layer.named_modules():
            if isinstance(module, torch.nn.Dropout):
                module.forward = functools.partial(_masked, seed, index, name, dropout)
    assert_equal(got, step(plain, 32))
    b_matrices = [tensor for name, tensor in got.items() if "lora_B" in name]
    assert len(b_matrices) == 3 * LAYERS
    assert all(bool(tensor.any()) for tensor in b_matrices)


def _masked(seed: int, index: int, name: str, p: float, x: torch.Tensor) -> torch.Tensor:
    """Dropout by counter in plain torch."""
    return torch.where(counter_mask(seed, index, name, 0, x.shape[1], x.shape[2], p), x * (1 / (1 - p)), 0.0)


def test_autocast_holds_in_the_recomputation() -> None:
    """R62: the backward runs after the forward's scope has been left."""
    plain = tiny("qwen3", layers=LAYERS)
    model, checkpointing = checkpointed(plain, True)
    grads = []
    for one in (plain, model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = one(**batch(32), use_cache=False).loss
        loss.backward()
        grads.append(gradients(one))
    assert_equal(grads[1], grads[0])
    assert checkpointing.stats().bytes_to_host > 0


def test_attention_settings_hold_in_the_recomputation() -> None:
    """R62: a forward under one choice of kernels is not recomputed under another, and the choice outside is left alone."""
    model, _ = checkpointed(Stack(), True)
    chosen = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(chosen, set_priority=True):
        output = model(torch.randn(1, 8, HIDDEN))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        output.sum().backward()
        assert _cur_sdpa_kernel_backends(with_priority=True) == [SDPBackend.FLASH_ATTENTION]
    assert [layer.seen for layer in model.layers] == [[chosen, chosen]] * LAYERS


def test_only_the_hidden_states_move() -> None:
    """Other tensors (cos, sin, masks), by name or by place, stay; so does the order of the arguments."""
    scale = torch.tensor(0.5)
    plain = Stack(call=lambda layer, hidden: layer(hidden, scale))
    grads = []
    hidden = torch.randn(1, 32, HIDDEN)
    for call in (lambda layer, hidden: layer(hidden, scale), lambda layer, hidden: layer(hidden, scale=scale)):
        model, checkpointing = checkpointed(Stack(call=call), True)
        model(hidden).sum().backward()
        grads.append(gradients(model))
        assert checkpointing.stats().bytes_to_host == LAYERS * hidden.nbytes
    plain(hidden).sum().backward()
    for got in grads:
        assert_equal(got, gradients(plain))


def test_hidden_states_passed_by_name_move_too() -> None:
    model, checkpointing = checkpointed(Stack(call=lambda layer, hidden: layer(hidden_states=hidden)), True)
    hidden = torch.randn(1, 32, HIDDEN)
    model(hidden).sum().backward()
    assert checkpointing.stats().bytes_to_host == LAYERS * hidden.nbytes
    plain = Stack()
    plain(hidden).sum().backward()
    assert_equal(gradients(model), gradients(plain))


def test_the_recomputation_stops_early() -> None:
    """A layer runs again only as far as the backward needs it."""
    model, _ = checkpointed(Stack(), True)
    model(torch.randn(1, 8, HIDDEN)).sum().backward()
    assert [(len(layer.seen), layer.finished) for layer in model.layers] == [(2, 1)] * LAYERS


def test_on_layer_tells_every_boundary() -> None:
    calls: list[tuple[str, int]] = []
    model, checkpointing = checkpointed(
        tiny("llama", layers=3), True, on_layer=lambda phase, index: calls.append((phase, index))
    )
    step(model, 16)
    assert calls == [*(("forward", index) for index in (0, 1, 2)), *(("backward", index) for index in (2, 1, 0))]
    checkpointing.on_layer = None
    step(model, 16)
    assert len(calls) == 6


def test_reserve_takes_the_memory_before_the_first_step() -> None:
    """`seconds from command to step 1` can say how long pinning took, apart from the step."""
    model, checkpointing = checkpointed(tiny("llama", layers=LAYERS), True, 1)
    checkpointing.reserve(torch.device("cpu"), 64 * HIDDEN * 4)
    before = checkpointing.stats()
    assert before.host_bytes == (LAYERS - 1) * 64 * HIDDEN * 4
    step(model, 64)
    assert checkpointing.stats().host_bytes == before.host_bytes
    assert checkpointing.stats().seconds_pinning == before.seconds_pinning > 0


def test_the_host_limit_reaches_the_arena() -> None:
    model, _ = checkpointed(tiny("llama", layers=LAYERS), True, host_limit=4096)
    with pytest.raises(UserError, match="host_memory"):
        step(model, 64)


def test_remove_restores_the_model() -> None:
    model = tiny("llama")
    before = [dict(module.__dict__) for module in model.modules()]
    checkpointing = Checkpointing(True)
    checkpointing.install(model)
    with pytest.raises(RuntimeError, match="installed already"):
        checkpointing.install(model)
    step(model, 16)
    checkpointing.remove()
    assert checkpointing.stats().host_bytes == checkpointing.stats().layers == 0
    for module, kept in zip(model.modules(), before, strict=True):
        assert {name: module.__dict__.get(name) for name in kept if "checkpoint" in name} == {
            name: value for name, value in kept.items() if "checkpoint" in name
        }
        assert ("_gradient_checkpointing_func" in module.__dict__) == ("_gradient_checkpointing_func" in kept)
    checkpointing.install(model)
    step(model, 16)
    assert checkpointing.stats().layers == 2


def test_generation_is_untouched() -> None:
    """Without gradients nothing is checkpointed, and the cache works (in evaluation mode, as everywhere)."""
    plain = tiny("qwen3").eval()
    model, checkpointing = checkpointed(plain, True)
    ids = batch(12)["input_ids"]
    settings = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(model.generate(ids, **settings), plain.generate(ids, **settings))
    assert checkpointing.stats().bytes_to_host == 0


def test_a_copy_of_the_model_works() -> None:
    """Reference models are made by deepcopy; pinned memory and streams cannot be copied and are shared."""
    model, _ = checkpointed(tiny("llama", layers=LAYERS), True)
    want = step(model, 32)
    other = copy.deepcopy(model)
    assert_equal(step(other, 32), want)


def test_layers_inside_layers_are_not_checkpointed_twice() -> None:
    model = Stack(2)
    model.layers[0].inner = Layer()
    assert checkpointed_layers(model) == list(model.layers)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(UserError, match=r"Linear has no layers.*gradient_checkpointing: false"):
        Checkpointing(True).install(torch.nn.Linear(2, 2))


def test_a_frozen_stack_keeps_nothing() -> None:
    """Nothing to train below: no backward comes, and the host memory is free again after the forward."""
    model, checkpointing = checkpointed(Stack(), True)
    model.requires_grad_(False)
    model(torch.randn(1, 8, HIDDEN))
    checkpointing.discard()
    assert checkpointing._inputs is None or checkpointing._inputs.arena.used == 0
