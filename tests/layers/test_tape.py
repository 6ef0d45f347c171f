"""What layers keep, wherever it waits and whatever is computed again, gives the same bits; and it is let go of."""

from __future__ import annotations

import copy
import errno
import functools
import gc
import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.attention import install as install_attention
from megaspan.human import UserError
from megaspan.layers.attending import Attending
from megaspan.layers.dials import LayerPlan
from megaspan.layers.stream import LayerRun
from megaspan.layers.streamed import Streaming
from megaspan.layers.tape import Stores, most_bytes, most_waiting
from megaspan.memory.aside import Aside
from megaspan.memory.disk import DiskTier
from megaspan.memory.offload import LayerInputs
from megaspan.plan.keep import PLACES, KeepPolicy, LayerKeep
from tests.memory.latedisk import LateDisk, empties
from tests.models import assert_same_gradients, batch, gradients, tiny

LAYERS = 5


def made(plain, policy=None, tile=5, heads=None, stream_back=False, disk=None, ahead=False):
    model = copy.deepcopy(plain)
    install_attention(model)
    return model, streamed(model, policy, tile, heads, stream_back, disk, ahead)


def streamed(model, policy=None, tile=5, heads=None, stream_back=False, disk=None, ahead=False):
    plan = LayerPlan(tile_tokens=tile, kv_heads_per_call=heads, stream_back=stream_back, project_ahead=ahead)
    streaming = Streaming(plan, policy, disk=disk)
    streaming.install(model, prove=False)
    return streaming


def step(model, data):
    model.zero_grad()
    loss = model(**data, use_cache=False).loss
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.fixture(scope="module")
def plain():
    torch.set_num_threads(1)
    return tiny("gemma3", layers=LAYERS, num_attention_heads=8, num_key_value_heads=4)


@pytest.fixture(scope="module")
def worn(plain):
    """A model for one policy after the other."""
    model = copy.deepcopy(plain)
    install_attention(model)
    return model


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    tier = DiskTier(tmp_path_factory.mktemp("disk"), threads=2)
    yield tier
    tier.close()


@pytest.fixture(scope="module")
def everything_here(plain):
    """Loss and gradients of a row, with everything kept on the device."""

    @functools.cache
    def found(tile, heads, tokens):
        return step(made(plain, tile=tile, heads=heads)[0], batch(tokens, seed=tokens))

    return found


kept = st.builds(LayerKeep, st.sampled_from([*PLACES, None]), st.sampled_from([*PLACES, None]))
first = st.builds(LayerKeep, st.sampled_from(PLACES), st.sampled_from([*PLACES, None]))
policies = st.builds(
    lambda start, rest, again, attends: KeepPolicy((start, *rest), again, attends),
    first,
    st.lists(kept, min_size=LAYERS - 1, max_size=LAYERS - 1),
    st.sampled_from(PLACES),
    st.sampled_from(PLACES),
)


@settings(max_examples=30, deadline=None)
@given(
    policy=policies,
    stream_back=st.booleans(),
    ahead=st.booleans(),
    heads=st.sampled_from([None, 3]),
    tile=st.sampled_from([5, 64]),
    lengths=st.sampled_from([(4, 12), (12, 4)]),  # three tiles and less than one; or all in one
)
def test_every_placement_and_segment_gives_the_same_bits(
    worn, everything_here, disk, policy, stream_back, ahead, heads, tile, lengths
):
    """Rows of changing length: same loss and gradients, to the bit, as with everything kept on the device."""
    streaming = streamed(worn, policy, tile, heads, stream_back, disk, ahead)
    try:
        for tokens in lengths:
            (want_loss, want), (loss, got) = everything_here(tile, heads, tokens), step(worn, batch(tokens, seed=tokens))
            assert torch.equal(loss, want_loss)
            assert all(torch.equal(got[name], want[name]) for name in want)
            assert empties(disk)
            assert streaming._stores.used == sum(store.staged_bytes for store in streaming._stores.all)
    finally:
        streaming.remove()
    stats = streaming.stats()
    again = sum(layer.output is None for layer in policy.layers)
    # An output that a segment's second run computes serves the backward too: never a third time.
    assert stats.attention_forwards == 2 * (LAYERS + again)
    assert stats.attention_backwards == 2 * LAYERS


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


HERE, THERE, AGAIN = LayerKeep("device", "device"), LayerKeep("host", "host"), LayerKeep("host", None)


@pytest.mark.parametrize(
    ("layer", "options", "wanted"),
    [
        (THERE, {}, 3 * LAYERS),  # of four groups the first one is made of tiles that come for the second half
        (AGAIN, {}, 7 * LAYERS),  # all of them to attend, and again to go back through it
        (HERE, {}, 0),  # nothing comes over the link
        (THERE, {"heads": None}, 0),
        (THERE, {"tile": 64}, 0),
        (THERE, {"stream_back": False}, 0),
        (THERE, {"ahead": False}, 0),
    ],
)
def test_head_groups_are_projected_aside_where_their_input_comes_by_tiles(plain, monkeypatch, layer, options, wanted):
    entered = []
    enter = Aside.__enter__
    monkeypatch.setattr(Aside, "__enter__", lambda self: (entered.append(1), enter(self))[1])
    model, _ = made(plain, KeepPolicy((layer,) * LAYERS), **({"heads": 1, "stream_back": True, "ahead": True} | options))
    step(model, batch(20))
    assert len(entered) == wanted


def test_an_error_beside_a_group_that_is_made_aside_leaves_nothing_under_way(plain, monkeypatch):
    """The step after it has the right gradients, and nothing holds what was being made."""
    model, streaming = made(plain, KeepPolicy((THERE,) * LAYERS), heads=1, stream_back=True, ahead=True)
    want = step(model, batch(20))[1]
    waited = []
    with monkeypatch.context() as patch:
        patch.setattr(Attending, "backward", lambda self: 1 // 0)
        patch.setattr(Stores, "wait", lambda self, events: waited.append(len(events)))
        with pytest.raises(ZeroDivisionError):
            step(model, batch(20))
        gc.collect()
    assert waited == [2, 3], (
        "output and log-sum-exp of the group in hand, and of the one that was being made with what it is made of"
    )
    streaming.discard()
    got = step(model, batch(20))[1]
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_fetch_that_fails_beside_a_group_that_is_made_aside_is_waited_for(plain, monkeypatch):
    """Out of memory while attention's output is fetched: what is being made of the next group goes back to the allocator."""
    model, streaming = made(plain, KeepPolicy((THERE,) * LAYERS), heads=1, stream_back=True, ahead=True)
    want = step(model, batch(20))[1]
    waited = []
    with monkeypatch.context() as patch:
        own = LayerInputs.copy_of

        def fails(self, saved, coming=None):
            if coming and coming[0] is streaming._stores.aside.done:
                raise torch.OutOfMemoryError("none left")
            return own(self, saved, coming)

        patch.setattr(LayerInputs, "copy_of", fails)
        patch.setattr(Stores, "wait", lambda self, events: waited.extend(events))
        with pytest.raises(torch.OutOfMemoryError):
            step(model, batch(20))
    assert waited == [streaming._stores.aside.done], "the group that was being made"
    streaming.discard()
    got = step(model, batch(20))[1]
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_second_run_of_a_layer_whose_output_was_kept_leaves_attention_out(plain):
    policy = KeepPolicy((LayerKeep("host", "host"), *[LayerKeep(None, "host")] * (LAYERS - 1)))
    model, streaming = made(plain, policy)
    step(model, batch(20))
    assert streaming.stats().attention_forwards == LAYERS


@pytest.mark.parametrize("heads", [None, 1])
def test_a_second_run_leaves_outputs_where_they_wait(plain, heads):
    """The device holds the output of the layer at work and, a layer ahead, of the one below: as many as the plan counts."""
    policy = KeepPolicy((LayerKeep("host", "host"), *[LayerKeep(None, "host")] * (LAYERS - 1)), "device")
    model, streaming = made(plain, policy, heads=heads)
    found = []

    def count(phase, index):
        if phase == "backward":
            kept = streaming._tape()._kept
            found.append([number for number, each in enumerate(kept) if any(part.tensor is not None for part in each._outputs)])

    streaming.general.on_layer = count
    step(model, batch(20))
    # Layer 4's is still there from the forward; then layers 0 to 3 run again; then each comes while the one above it works.
    assert found == [[4], [], [], [], [], [3], [2], [1], [0]]


def test_the_host_is_reserved_for_all_that_is_there_at_once_and_does_not_grow(plain):
    layers = LayerKeep("host", None), *[LayerKeep(None, None)] * (LAYERS - 1)
    assert most_waiting(KeepPolicy(layers), "host") == (LAYERS, LAYERS - 1)
    policy = KeepPolicy(layers, attends="host")
    assert most_waiting(policy, "host") == (LAYERS, LAYERS)
    model, streaming = made(plain, policy, stream_back=True)
    streaming.reserve(torch.device("cpu"), 33 * 64 * 4)
    reserved = streaming.stats().host_bytes
    assert reserved > 0
    for tokens in (33, 12, 33, 21, 30):
        step(model, batch(tokens))
        assert streaming.stats().host_bytes == reserved


@pytest.mark.parametrize("stream_back", [False, True])
@pytest.mark.parametrize("heads", [None, 1])
def test_what_waits_on_disk_takes_two_layers_of_host_memory(plain, tmp_path, stream_back, heads):
    """Reserved before the first step, host and disk; neither grows, and after each step nothing is left on the disk."""
    disk = DiskTier(tmp_path, threads=1)
    model, streaming = made(plain, KeepPolicy.everything(LAYERS, "disk"), heads=heads, stream_back=stream_back, disk=disk)
    streaming.reserve(torch.device("cpu"), 33 * 64 * 4)
    host, size = streaming.stats().host_bytes, disk.stats().file_bytes
    groups = 1 if heads is None else 4
    pages = 12288, -(-33 * 128 * 4 // groups // 4096) * 4096, 4096
    assert size == LAYERS * (pages[0] + groups * (pages[1] + pages[2]))
    assert host == 2 * size // LAYERS
    for number, tokens in enumerate((33, 12, 33, 21, 30)):
        before = disk.stats().bytes_written
        step(model, batch(tokens))
        stats = disk.stats()
        assert (streaming.stats().host_bytes, stats.file_bytes, stats.used) == (host, size, 0)
        # The last two layers may be back before they were written.
        assert stats.bytes_written - before >= (LAYERS - 2) * tokens * (64 * 4 + 128 * 4 + 8 * 4), number
        assert stats.bytes_written >= stats.bytes_read
    assert streaming.places() == {"input": {"disk": LAYERS}, "output": {"disk": LAYERS}}
    streaming.remove()
    disk.close()


@pytest.mark.parametrize(
    ("stream_back", "asked"), [(False, [0, 1, 2, 3, 3]), (True, [0, 0, 1, 2, 3])], ids=["whole", "by tiles"]
)
def test_the_disk_is_asked_before_a_layer_is_reached(plain, stream_back, asked):
    """Of five layers the upper two are still on the host. Whole ones leave it a layer ahead, and make room one sooner."""
    disk, found = LateDisk(chance=1), []
    model, streaming = made(plain, KeepPolicy.everything(LAYERS, "disk"), stream_back=stream_back, disk=disk)
    streaming.general.on_layer = lambda phase, index: found.append(disk.reads // 3) if phase == "backward" else None
    step(model, batch(20))
    assert found == asked
    assert not disk.living
    streaming.remove()


@pytest.mark.parametrize("stream_back", [False, True])
def test_a_segment_that_comes_from_the_disk_is_asked_for_ahead_too(plain, stream_back):
    """When layer 3's backward begins, the input from which layers 0 to 2 are run again is on its way."""
    disk, found = LateDisk(chance=1), []
    policy = KeepPolicy((LayerKeep("disk", None), *[LayerKeep(None, None)] * 2, *[LayerKeep("disk", "host")] * 2))
    model, streaming = made(plain, policy, stream_back=stream_back, disk=disk)
    streaming.general.on_layer = lambda phase, index: found.append(disk.reads) if phase == "backward" else None
    step(model, batch(20))
    # Layers 4, 3, 2; then 0 and 1 once more, before 1 and 0 themselves.
    assert found[1:3] == ([1, 1] if not stream_back else [0, 1])
    assert found[-1] == 1
    streaming.remove()


def test_rows_on_disk_whose_backwards_come_in_any_order(plain, disk):
    """Two forwards, then the first one's backward first; a third that never has one."""
    here, _ = made(plain)
    there, streaming = made(plain, KeepPolicy.everything(LAYERS, "disk"), stream_back=True, disk=disk)
    found = []
    for model in (here, there):
        model.zero_grad()
        losses = [model(**batch(tokens, seed=tokens), use_cache=False).loss for tokens in (21, 12, 30)]
        losses[0].backward()
        del losses[2]
        losses[1].backward()
        found.append(gradients(model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    gc.collect()
    step(there, batch(20))
    assert empties(disk)
    streaming.remove()


@pytest.mark.parametrize("stream_back", [False, True])
@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_a_disk_that_is_full_in_the_middle_of_a_step(plain, tmp_path, monkeypatch, stream_back, moment):
    """The step ends with the sentence; after `discard` nothing of it is left, and the next step gives the right bits."""
    disk = DiskTier(tmp_path, threads=1)
    policy = KeepPolicy((LayerKeep("disk", "disk"), *[LayerKeep(None, None)] * 2, *[LayerKeep("disk", "disk")] * 2), "disk")
    here, _ = made(plain)
    there, streaming = made(plain, policy, stream_back=stream_back, disk=disk)
    want, _ = step(here, batch(33)), step(there, batch(33))
    real, left = os.pwritev, 4 if moment == "forward" else 9

    def full(*arguments):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    monkeypatch.setattr(os, "pwritev", full)

    def steps():
        for _ in range(9):  # writes may be taken back before they happen
            step(there, batch(33))

    with pytest.raises(UserError, match="is full; the step was abandoned") as held:
        steps()
    monkeypatch.setattr(os, "pwritev", real)
    streaming.discard()
    assert empties(disk)
    assert streaming._stores.used == sum(store.staged_bytes for store in streaming._stores.all)
    loss, got = step(there, batch(33))
    assert torch.equal(loss, want[0])
    assert all(torch.equal(got[name], want[1][name]) for name in got)
    assert empties(disk)
    del held
    streaming.remove()
    disk.close()


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
    assert streaming._stores.used
    del loss
    gc.collect()
    step(model, batch(20))
    assert streaming._stores.used == 0


def test_inputs_and_outputs_share_the_hosts_memory():
    """36 equal layers in 11 graded segments: 12 pieces at once, where 11 inputs and 6 outputs apart would be 17."""
    starts, lengths = [], (6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1)
    for length in lengths:
        starts += [LayerKeep("host", None), *[LayerKeep(None, None)] * (length - 1)]
    policy = KeepPolicy(tuple(starts), attends="host")
    assert most_waiting(policy, "host") == (11, 6)
    assert most_bytes(policy, 1, 1) == 12
    assert most_bytes(replace(policy, attends="device"), 1, 1) == 11  # the last output of a segment is not on the host then


def test_the_arena_is_as_large_as_what_is_there_at_once(plain):
    policy = KeepPolicy((LayerKeep("host", None), *[LayerKeep(None, None)] * (LAYERS - 1)), attends="host")
    model, streaming = made(plain, policy, heads=1, stream_back=True)
    streaming.reserve(torch.device("cpu"), 33 * 64 * 4)
    inputs, outputs, _ = streaming._stores.sizes(33 * 64 * 4)
    arena = streaming._stores._link.arena
    assert arena.bytes == most_bytes(policy, inputs, 4 * outputs) == LAYERS * inputs + LAYERS * 4 * outputs
    step(model, batch(33))
    assert arena.peak <= arena.bytes == LAYERS * inputs + LAYERS * 4 * outputs


def test_a_group_leaves_the_device_before_the_next_but_one(plain, monkeypatch):
    """With `stream_back` no row of attention outputs is on the device in the forward, but a group or two."""
    policy = KeepPolicy((LayerKeep("host", "host"),) * LAYERS)
    model, _ = made(plain, policy, heads=1, stream_back=True)
    there, own = [], LayerRun._attend

    def attend(self, x, cuts, kept, place):
        parts = own(self, x, cuts, kept, place)
        there.append((len(parts), sum(saved.tensor is not None for saved in kept._outputs)))
        return parts

    monkeypatch.setattr(LayerRun, "_attend", attend)
    step(model, batch(20))
    assert there == [(0, 0)] * LAYERS


def test_a_second_backward_is_refused(plain):
    model, _ = made(plain)
    loss = model(**batch(9), use_cache=False).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()


class _Gelu(torch.nn.Module):
    """Not what the class has in this place, so that the layer does not stream."""

    def forward(self, x):
        return torch.nn.functional.gelu(x, approximate="tanh")


@pytest.mark.parametrize("why", ["a part", "a hook"])
@pytest.mark.parametrize("stream_back", [False, True])
def test_a_layer_that_runs_whole_finds_nothing_on_its_way_to_the_host(plain, stream_back, why):
    """It has no moment of its own at which sources are let go of."""
    model = copy.deepcopy(plain)
    install_attention(model)
    layer = model.model.layers[3]
    if why == "a part":
        layer.mlp.act_fn = _Gelu()
    else:
        layer.mlp.act_fn.register_forward_hook(lambda *_: None)  # is to see whole rows
    streaming = Streaming(LayerPlan(tile_tokens=5, stream_back=stream_back), KeepPolicy.everything(LAYERS, "host"))
    reasons = streaming.install(model)
    assert [reason is None for reason in reasons] == [True, True, True, why == "a hook", True]
    flying = []
    layer.self_attn.register_forward_pre_hook(
        lambda *_: flying.append(sum(len(each._in_flight) for each in streaming._stores.all))
    )
    step(model, batch(20))
    assert flying[0] == 0
    assert streaming.stats().streamed == LAYERS - (why == "a part")
