"""What layers keep, wherever it waits and whatever is computed again, gives the same bits; and it is let go of."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.attention import install as install_attention
from megaspan.layers.stream import LayerPlan
from megaspan.layers.streamed import Streaming
from megaspan.layers.tape import host_slots
from megaspan.plan.keep import KeepPolicy, LayerKeep
from tests.models import assert_same_gradients, batch, gradients, tiny

PLACES = ("device", "host")
LAYERS = 5


def made(plain, policy=None, tile=5, heads=None, stream_back=False):
    model = copy.deepcopy(plain)
    install_attention(model)
    plan = LayerPlan(tile_tokens=tile, kv_heads_per_call=heads, stream_back=stream_back)
    streaming = Streaming(plan, policy)
    streaming.install(model, prove=False)
    return model, streaming


def step(model, data):
    model.zero_grad()
    loss = model(**data, use_cache=False).loss
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.fixture(scope="module")
def plain():
    torch.set_num_threads(1)
    return tiny("gemma3", layers=LAYERS, num_attention_heads=8, num_key_value_heads=4)


kept = st.builds(LayerKeep, st.sampled_from([*PLACES, None]), st.sampled_from([*PLACES, None]))
first = st.builds(LayerKeep, st.sampled_from(PLACES), st.sampled_from([*PLACES, None]))
policies = st.builds(
    lambda start, rest, again: KeepPolicy((start, *rest), again),
    first,
    st.lists(kept, min_size=LAYERS - 1, max_size=LAYERS - 1),
    st.sampled_from(PLACES),
)


@settings(max_examples=25, deadline=None)
@given(policy=policies, stream_back=st.booleans(), heads=st.sampled_from([None, 1, 3]), tile=st.sampled_from([5, 64]))
def test_every_placement_and_segment_gives_the_same_bits(plain, policy, stream_back, heads, tile):
    """Rows of changing length: same loss and gradients, to the bit, as with everything kept on the device."""
    here, _ = made(plain, tile=tile, heads=heads)
    there, streaming = made(plain, policy, tile, heads, stream_back)
    for tokens in (21, 8, 33, 8):
        data = batch(tokens, seed=tokens)
        (want_loss, want), (loss, got) = step(here, data), step(there, data)
        assert torch.equal(loss, want_loss)
        assert all(torch.equal(got[name], want[name]) for name in want)
    stats = streaming.stats()
    again = sum(layer.output is None for layer in policy.layers)
    # An output that a segment's second run computes serves the backward too: never a third time.
    assert stats.attention_forwards == 4 * (LAYERS + again)
    assert stats.attention_backwards == 4 * LAYERS
    assert all(store.arena.used == 0 for store in streaming._stores.all)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
@pytest.mark.parametrize("heads", [1, 2])
def test_segments_head_groups_and_tiles_are_exact(family, heads):
    """P1 against plain transformers with everything at once: one kept input, no kept output, one KV head at a time."""
    plain = tiny(family, layers=3, num_attention_heads=8, num_key_value_heads=4)
    policy = KeepPolicy((LayerKeep("host", None), LayerKeep(None, "host"), LayerKeep(None, None)))
    model, _ = made(plain, policy, heads=heads, stream_back=True)
    data = batch(19)
    (want_loss, want), (loss, got) = step(plain, data), step(model, data)
    torch.testing.assert_close(loss, want_loss, rtol=1e-6, atol=0)
    assert_same_gradients(got, want, 1e-4 if family == "gpt_oss" else 1e-5)


def test_a_second_run_of_a_layer_whose_output_was_kept_leaves_attention_out(plain):
    policy = KeepPolicy((LayerKeep("host", "host"), *[LayerKeep(None, "host")] * (LAYERS - 1)))
    model, streaming = made(plain, policy)
    step(model, batch(20))
    assert streaming.stats().attention_forwards == LAYERS


def test_the_host_is_reserved_for_all_that_is_there_at_once_and_does_not_grow(plain):
    policy = KeepPolicy((LayerKeep("host", None), *[LayerKeep(None, None)] * (LAYERS - 1)))
    assert host_slots(policy, computed_again=False) == (LAYERS, LAYERS - 1)
    assert host_slots(policy, computed_again=True) == (LAYERS, LAYERS)
    model, streaming = made(plain, policy, stream_back=True)
    streaming.reserve(torch.device("cpu"), 33 * 64 * 4)
    reserved = streaming.stats().host_bytes
    assert reserved > 0
    for tokens in (33, 12, 33, 21, 30):
        step(model, batch(tokens))
        assert streaming.stats().host_bytes == reserved


def test_something_between_two_layers_is_not_left_out_of_the_second_run(plain):
    """A hook that changes hidden states between layers: the layer after it keeps its input, whatever the policy says."""
    both = []
    for model in (plain, made(plain, KeepPolicy((LayerKeep("host", None), *[LayerKeep(None, None)] * (LAYERS - 1))))[0]):
        handle = model.model.layers[1].register_forward_hook(lambda module, inputs, out: out * 1.5 + 0.1)
        both.append(step(model, batch(15)))
        handle.remove()
    (want_loss, want), (loss, got) = both
    torch.testing.assert_close(loss, want_loss, rtol=1e-6, atol=0)
    assert_same_gradients(got, want, 1e-5)


def test_gradients_that_somebody_else_holds_are_not_overwritten(plain):
    """A hook keeps the gradient of a hidden state, and a branch shares another: both stay what they were."""
    model, streaming = made(plain)
    data, seen, kept = batch(21), [], []

    def watch(module, inputs, out):
        out.register_hook(kept.append)
        out.register_hook(lambda gradient: seen.append(gradient.clone()))
        return out

    handle = model.model.layers[2].register_forward_hook(watch)
    step(model, data)
    assert torch.equal(kept[0], seen[0])
    assert streaming.stats().reused == LAYERS - 1
    handle.remove()
    shared = [
        module.model.layers[2].register_forward_hook(lambda module, inputs, out: out + inputs[0].square())
        for module in (plain, model)
    ]
    (want_loss, want), (loss, got) = step(plain, data), step(model, data)
    for each in shared:
        each.remove()
    torch.testing.assert_close(loss, want_loss, rtol=1e-6, atol=0)
    assert_same_gradients(got, want, 1e-5)


def test_a_forward_without_a_backward_gives_its_memory_back(plain):
    policy = KeepPolicy((LayerKeep("host", "host"),) * LAYERS)
    model, streaming = made(plain, policy)
    loss = model(**batch(20), use_cache=False).loss
    assert any(store.arena.used for store in streaming._stores.all)
    del loss
    gc.collect()
    step(model, batch(20))
    assert all(store.arena.used == 0 for store in streaming._stores.all)


def test_a_second_backward_is_refused(plain):
    model, _ = made(plain)
    loss = model(**batch(9), use_cache=False).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()
