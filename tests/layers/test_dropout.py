"""The mask is the hash that it is said to be, looks random in every direction, and is the same however the work is cut."""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import shutil
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from megaspan.attention.layout import lay_out
from megaspan.human import UserError
from megaspan.layers.dropout import counter_mask, install_dropout, other_randomness, row_seed
from megaspan.layers.fused import Fused
from tests.models import tiny

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
NAME = "self_attn.q_proj.lora_dropout.default"


class Layer(nn.Module):
    """Two dropouts of unequal rates around a projection; `twice` runs through all of it."""

    def __init__(self, first: float = 0.3, second: float = 0.5) -> None:
        super().__init__()
        self.first, self.second, self.linear = nn.Dropout(first), nn.Dropout(second), nn.Linear(6, 10)

    def forward(self, x):
        return self.second(self.linear(self.first(x)).sin())


def mask_of(handle, layer, x, step=1, index=0, **place):
    """What `layer.first` keeps of x, read off a tensor of ones."""
    with handle.at(step, index, **place):
        return layer.first(torch.ones_like(x)) != 0


# --- the hash -------------------------------------------------------------------------------------------------------------


def by_hand(step, layer, module, token, channel, p):
    """The mask's definition in Python's own integers."""

    def word(key, counter):
        start = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
        z = (counter * 0x9E3779B97F4A7C15 + start) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        z ^= z >> 31
        return z % 2**32, z >> 32

    token_low, token_high = word(f"step {step}", token)
    channel_low, channel_high = word(f"layer {layer} {module}", channel)
    h = (token_low + channel_low) % 2**32
    h = (h ^ h >> 16) * 0x7FEB352D % 2**32
    h = (h + token_high + channel_high) % 2**32
    h = (h ^ h >> 15) * 0x846CA68B % 2**32
    return (h - 2**32 if h >= 2**31 else h) >= round(p * 2**32) - 2**31


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**62),
    st.integers(0, 200),
    st.sampled_from((NAME, "mlp.down_proj.lora_dropout.default", "")),
    st.one_of(st.integers(0, 2**21), st.integers(2**31 - 9, 2**31 + 9), st.integers(2**32, 2**40)),
    st.floats(0.01, 0.99),
)
def test_the_mask_is_its_definition(step, layer, module, first, p):
    """Also past 2**31 tokens, and past 2**31 entries of one module."""
    got = counter_mask(step, layer, module, first, 5, 13, p)
    want = [[by_hand(step, layer, module, first + token, channel, p) for channel in range(13)] for token in range(5)]
    assert got.tolist() == want


GOLDEN = ["0xdbdd7dee", "0xf72ff4af", "0xc9177dab", "0xf7fee9f9"]

SEED = 2125775838161842321  # of a row; may never change either


def test_the_mask_of_old_runs():
    """A resumed run draws on: these bits may never change."""
    rows = counter_mask(7, 3, NAME, 1_048_570, 4, 32, 0.3).to(torch.int64) << torch.arange(32)
    assert [hex(row) for row in rows.sum(1).tolist()] == GOLDEN


@pytest.mark.parametrize(("p", "share"), [(0.0, 1.0), (1.0, 0.0), (1e-12, 1.0), (1 - 1e-12, 0.0)])
def test_rates_at_the_ends(p, share):
    assert float(counter_mask(0, 0, NAME, 0, 64, 64, p).float().mean()) == share


# --- statistics; the seeds are fixed, so that these pass always or never ------------------------------------------------------

TOKENS, CHANNELS = 2048, 1024


def signs(step=5, layer=3, module=NAME, first=0, p=0.5):
    """Kept and dropped as numbers of mean 0 and variance 1."""
    kept = counter_mask(step, layer, module, first, TOKENS, CHANNELS, p).double()
    return (kept - (1 - p)) / math.sqrt(p * (1 - p))


def score(values):
    """How many standard deviations a mean of independent numbers (mean 0, variance 1) is from 0."""
    return abs(float(values.sum())) / math.sqrt(values.numel())


def chi_square(counts, expected, variance):
    """The same of the chi-square sum over cells."""
    sum_of_squares = float(((counts - expected) ** 2 / variance).sum())
    return (sum_of_squares - len(counts)) / math.sqrt(2 * len(counts))


@pytest.mark.parametrize("p", [0.01, 0.05, 0.3, 0.5, 0.9])
def test_the_rate_holds_in_all_for_each_token_and_for_each_channel(p):
    values = signs(p=p)
    assert score(values) < 3.5
    assert abs(chi_square(values.sum(1), 0, CHANNELS)) < 3.5
    assert abs(chi_square(values.sum(0), 0, TOKENS)) < 3.5


def test_tokens_and_channels_are_independent():
    """Pairs at many distances, and rectangles of four: what a sum of a token's and a channel's number would fail."""
    values, scores = signs(), []
    for dt in (0, 1, 2, 3, 8, 64, 1024):
        for dc in (0, 1, 2, 3, 8, 64, 512):
            here, there = values[dt:, dc:], values[: TOKENS - dt, : CHANNELS - dc]
            if dt or dc:
                scores.append(score(here * there))
            if dt and dc:
                scores.append(score(here * there * values[dt:, : CHANNELS - dc] * values[: TOKENS - dt, dc:]))
    assert max(scores) < 4
    assert sum(each**2 for each in scores) / len(scores) < 1.6


def test_eight_neighbours_take_all_256_patterns_alike():
    kept = counter_mask(5, 3, NAME, 0, TOKENS, CHANNELS, 0.5).to(torch.int64)
    for along in (kept, kept.t()):
        patterns = (along.reshape(-1, 8) << torch.arange(8)).sum(-1).bincount(minlength=256).double()
        expected = kept.numel() / 8 / 256
        assert abs(chi_square(patterns, expected, expected)) < 3.5


def test_layers_modules_and_steps_are_independent():
    """Also the next seed, and a step seen through two layers: the four of them together."""
    values = signs()
    others = [signs(step=6), signs(step=2**61), signs(layer=4), signs(module=NAME.replace("q_", "k_")), signs(first=TOKENS)]
    assert max(score(values * other) for other in others) < 3.5
    assert score(values * others[0] * others[2] * signs(step=6, layer=4)) < 3.5


# --- modules under a place --------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.data())
def test_any_cut_gives_the_same_output_and_gradient(tokens, data):
    """Tiles of any lengths in any order, forward and backward, against the whole row: the same entries dropped."""
    cuts = sorted({0, tokens, *data.draw(st.lists(st.integers(0, tokens), max_size=4))})
    tiles = data.draw(st.permutations([slice(*pair) for pair in itertools.pairwise(cuts)]))
    torch.manual_seed(0)
    layer, x, dy = Layer(), torch.randn(1, tokens, 6), torch.randn(1, tokens, 10)
    handle = install_dropout([layer])
    whole = x.clone().requires_grad_()
    with handle.at(9, 4):
        want = layer(whole)
    want.backward(dy)
    dx = torch.empty_like(x)
    for tile in tiles:
        part = x[:, tile].clone().requires_grad_()
        with handle.at(9, 4, tile.start, tile.stop - tile.start):
            got = layer(part)
        torch.testing.assert_close(got, want[:, tile])
        assert torch.equal(got == 0, want[:, tile] == 0)
        got.backward(dy[:, tile])  # outside the place: the backward needs none
        dx[:, tile] = part.grad
    torch.testing.assert_close(dx, whole.grad)
    assert torch.equal(dx == 0, whole.grad == 0)


def test_the_mask_is_that_of_the_function():
    layer, x = Layer(), torch.ones(1, 50, 6)
    handle = install_dropout([layer])
    want = counter_mask(8, 2, "first", 11, 50, 6, 0.3)
    with handle.at(8, 2, 11):
        got = layer.first(x)
    assert torch.equal(got[0], want / 0.7)
    assert torch.equal(mask_of(handle, layer, x, 8, 2, first_token=torch.arange(11, 61))[0], want)


def test_one_handle_for_all_layers_steps_and_modules():
    """What is kept between calls (words of tokens and of channels) is kept for what it belongs to."""
    layer, x = Layer(), torch.ones(1, 50, 6)
    handle = install_dropout([layer])
    for step, index, first in ((1, 0, 0), (1, 1, 0), (1, 1, 50), (2, 1, 0), (1, 0, 0)):
        with handle.at(step, index, first):
            outputs = layer.first(x), layer.second(x)
        for name, p, got in zip(("first", "second"), (0.3, 0.5), outputs, strict=True):
            assert torch.equal(got[0] != 0, counter_mask(step, index, name, first, 50, 6, p))


def test_tokens_that_are_not_neighbours():
    """Any layout of tokens over ranks: the mask is that of the numbers."""
    layer, x, order = Layer(), torch.ones(1, 30, 6), torch.randperm(30, generator=torch.Generator().manual_seed(0))
    handle = install_dropout([layer])
    whole = mask_of(handle, layer, x)
    assert torch.equal(mask_of(handle, layer, x, first_token=order), whole[:, order])
    assert torch.equal(mask_of(handle, layer, x[:, :7], first_token=order[:7]), whole[:, order[:7]])


@pytest.mark.parametrize(("documents", "cp", "sp"), [((41,), 2, 1), ((41,), 4, 1), ((3, 1, 30, 7), 2, 2), ((1,), 4, 1)])
def test_a_row_on_many_ranks_has_the_masks_of_one(documents, cp, sp):
    """Shards of a real layout, in tiles of 5 tokens, padding and ranks without a token included."""
    layer, row = Layer(), sum(documents)
    handle, layout = install_dropout([layer]), lay_out(documents, cp, sp_size=sp)
    whole, got = mask_of(handle, layer, torch.ones(1, row, 6), step=8, index=2)[0], {}
    for rank in range(cp):
        numbers = torch.from_numpy(layout.token_index(rank))
        numbers = torch.where(numbers < 0, row + torch.arange(len(numbers)), numbers)
        for part in range(sp):
            for tile in numbers[layout.part(part)].split(5):
                mask = mask_of(handle, layer, torch.ones(1, len(tile), 6), step=8, index=2, first_token=tile, tokens=len(tile))
                got |= dict(zip(tile.tolist(), mask[0], strict=True))
    assert torch.equal(torch.stack([got[token] for token in range(row)]), whole)


def test_rows_of_a_batch_have_masks_of_their_own():
    layer, x = Layer(), torch.ones(3, 40, 6)
    handle = install_dropout([layer])
    masks = mask_of(handle, layer, x)
    assert torch.equal(masks[:1], mask_of(handle, layer, x[:1]))
    for row, other in ((0, 1), (1, 2)):
        assert not torch.equal(masks[row], masks[other])
        assert not torch.equal(masks[row, 1:], masks[other, :-1])  # a token of the next row is not the row's next token


def test_a_large_input_is_worked_on_in_parts(monkeypatch):
    monkeypatch.setattr("megaspan.layers.dropout._PLAIN_ENTRIES", 40)
    layer, x = Layer(), torch.ones(1, 50, 6)
    handle = install_dropout([layer])
    assert torch.equal(mask_of(handle, layer, x)[0], counter_mask(1, 0, "first", 0, 50, 6, 0.3))


def test_checkpointed_layers_are_run_again_under_the_place_alone():
    """No generator is put back: the recomputation has the mask because it has the place."""
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(1, 20, 6, requires_grad=True)
    handle = install_dropout([layer])

    def run(x):
        with handle.at(3, 1):
            return layer(x)

    gradients = []
    for call in (run, lambda x: checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)):
        call(x).square().sum().backward()
        gradients.append((x.grad.clone(), layer.linear.weight.grad.clone()))
        x.grad = layer.linear.weight.grad = None
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_no_generator_is_used_and_no_mask_is_kept():
    layer, x = Layer(), torch.randn(1, 1000, 6, requires_grad=True)
    handle = install_dropout([layer])
    before, kept = torch.get_rng_state(), []
    with handle.at(3, 1), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        layer.first(x)
    assert torch.equal(before, torch.get_rng_state())
    assert kept == []


def test_the_gradient_is_that_of_the_output():
    layer, x = Layer(), torch.randn(1, 7, 6, dtype=torch.float64, requires_grad=True)
    handle = install_dropout([layer.double()])

    def under_place(x):
        with handle.at(3, 1):
            return layer(x)

    assert torch.autograd.gradcheck(under_place, [x])
    assert torch.autograd.gradgradcheck(under_place, [x])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_types_stay_and_are_rounded_once(dtype):
    layer, x = Layer(), torch.randn(1, 40, 6).to(dtype)
    handle = install_dropout([layer])
    with handle.at(1, 0):
        got = layer.first(x)
    assert got.dtype == dtype
    assert torch.equal(got, torch.where(got != 0, (x.double() * (1 / 0.7)).to(dtype), 0.0))


def test_a_dropped_entry_is_zero_whatever_it_was():
    layer, x = Layer(), torch.full((1, 40, 6), math.inf)
    handle = install_dropout([layer])
    with handle.at(1, 0):
        assert set(layer.first(x).unique().tolist()) == {0.0, math.inf}


def test_without_a_place_and_in_evaluation_the_module_is_its_own():
    layer, x = Layer(), torch.randn(1, 40, 6)
    plain = copy.deepcopy(layer)
    handle = install_dropout([layer])
    outputs = []
    for one in (plain, layer):
        torch.manual_seed(5)
        outputs.append(one.first(x))
    assert torch.equal(*outputs)
    layer.eval()
    with handle.at(1, 0):
        assert layer.first(x) is x


def test_places_nest_and_end_with_an_error():
    layer, x = Layer(), torch.ones(1, 40, 6)
    handle = install_dropout([layer])
    outer, inner = mask_of(handle, layer, x, 1, 0), mask_of(handle, layer, x, 2, 5, first_token=3)
    assert not torch.equal(outer, inner)
    with handle.at(1, 0):
        with handle.at(2, 5, 3):
            assert torch.equal(layer.first(x) != 0, inner)
        with pytest.raises(RuntimeError, match="abandoned"), handle.at(2, 5, 3):
            raise RuntimeError("abandoned")
        assert torch.equal(layer.first(x) != 0, outer)
    assert handle._place is None


def test_the_number_of_a_step_comes_from_the_generator_that_checkpoints_hold():
    layer = Layer()
    handle, seeds = install_dropout([layer]), []
    for _ in range(2):
        torch.manual_seed(3)
        handle.draw()
        seeds.append(handle.step_seed)
    handle.draw()
    assert seeds[0] == seeds[1] != handle.step_seed
    before, empty = torch.get_rng_state(), install_dropout([nn.Identity()])
    empty.draw()
    assert empty.step_seed is None
    assert torch.equal(before, torch.get_rng_state())
    with empty.at(empty.step_seed, 0):
        assert empty._place is None


def test_the_number_of_a_row_that_was_given():
    """On every rank the same, without a word and without a draw; later stretches of the same call get others."""
    handle, before = install_dropout([Layer()]), torch.get_rng_state()
    with handle.row(row_seed(42, 7, 3)):
        handle.draw()
        first = handle.step_seed
        handle.draw()
        second = handle.step_seed
    with handle.row(first):
        handle.draw()
        assert handle.step_seed == first == row_seed(42, 7, 3) != second
        handle.draw()
        assert handle.step_seed == second
    assert torch.equal(before, torch.get_rng_state())
    with handle.row(None):
        handle.draw()
    assert handle.step_seed not in (first, second)
    assert not torch.equal(before, torch.get_rng_state())


def test_numbers_of_rows_are_distinct_and_stay():
    numbers = {row_seed(*each) for each in itertools.product((0, 42), range(20), range(20))}
    assert len(numbers) == 800
    assert all(0 <= number < 2**62 for number in numbers)
    assert row_seed(42, 7, 3) == SEED


def test_two_steps_in_flight():
    """Words of tokens are kept for a step: a backward that comes after another forward must not take the other's."""
    layer, x = Layer(), torch.ones(1, 40, 6)
    handle = install_dropout([layer])
    first, second = mask_of(handle, layer, x, 1), mask_of(handle, layer, x, 2)
    assert not torch.equal(first, second)
    assert torch.equal(mask_of(handle, layer, x, 1), first)
    assert torch.equal(mask_of(handle, layer, x, 2), second)


def test_a_copied_model_runs_its_own_modules_under_the_same_place():
    layer, x = Layer(), torch.randn(1, 40, 6)
    handle = install_dropout([layer])
    twin = copy.deepcopy(layer)
    with torch.no_grad(), handle.at(1, 0):
        assert torch.equal(twin(x), layer(x))
        twin.first.p = 0.9
        assert (twin.first(x) == 0).sum() > (layer.first(x) == 0).sum()


def test_remove_gives_the_modules_back():
    layer = Layer()
    handle = install_dropout([layer])
    assert len(handle) == 2
    handle.remove()
    assert len(handle) == 0
    assert not any("forward" in module.__dict__ for module in layer.modules())
    with handle.at(1, 0):
        torch.manual_seed(0)
        first = layer.first(torch.ones(1, 40, 6))
        assert not torch.equal(first, layer.first(torch.ones(1, 40, 6)))


def test_only_dropouts_with_a_rate_and_torchs_own_code_are_taken():
    class Own(nn.Dropout):
        def forward(self, input):
            return 2 * input

    layer = nn.ModuleDict({"none": nn.Dropout(0.0), "own": Own(0.5), "alpha": nn.AlphaDropout(0.5), "one": nn.Dropout(0.5)})
    handle = install_dropout([layer])
    assert [name for name, module in layer.items() if "forward" in module.__dict__] == ["one"]
    assert other_randomness(layer) == "own (Own)"
    handle.remove()


def test_an_adapter_that_came_later_is_taken_too():
    layer = Layer()
    handle = install_dropout([layer])
    layer.third = nn.Dropout(0.2)
    assert other_randomness(layer) == "third (Dropout)"
    assert handle.cover(layer) is None
    assert len(handle) == 3


def test_modules_that_see_some_of_the_tokens_are_left_or_refused():
    """Experts in a list are left, and named; one that is not known by its place is refused when it is called."""
    layer = Layer()
    layer.experts = nn.ModuleList([nn.Dropout(0.1)])
    handle = install_dropout([layer])
    assert other_randomness(layer) == "experts.0 (Dropout)"
    with handle.at(1, 0, 0, 40):
        layer.first(torch.ones(40, 6))  # all tokens, without a batch
        with pytest.raises(UserError, match=r"first of layer 0 .*39 of 40 tokens.* lora_target_modules"):
            layer.first(torch.ones(39, 6))
        with pytest.raises(UserError, match=r"\(1, 2, 3, 4\)"):
            layer.first(torch.ones(1, 2, 3, 4))


# --- what else draws ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "found"),
    [
        ("qwen3", {}, None),
        ("gpt_oss", {}, None),
        ("llama", {"attention_dropout": 0.1}, "self_attn.attention_dropout = 0.1"),
        ("llama", {"embd_pdrop": 0.1, "classifier_dropout": 0.2}, None),
        ("llama", {"router_jitter_noise": 0.1}, "its configuration's router_jitter_noise = 0.1"),
    ],
)
def test_what_else_draws_is_named(family, changes, found):
    layer = tiny(family, **changes).model.layers[0]
    install_dropout([layer])
    assert other_randomness(layer) == found


def test_families_with_randomness_in_their_code_are_named():
    """Against the generator itself: whoever moves it in a training forward is named, and who is not named does not."""
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64,
              "num_key_value_heads": 2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}  # fmt: skip
    for family, own, named in (
        ("starcoder2", {"residual_dropout": 0.2}, "residual_dropout"),
        ("seed_oss", {"residual_dropout": 0.2, "attention_dropout": 0.0, "head_dim": 8}, "residual_dropout"),
        ("mixtral", {"router_jitter_noise": 0.1, "num_local_experts": 2}, "jitter_noise"),
        ("phimoe", {"num_local_experts": 2}, "jitter_noise"),
        ("phi3", {"resid_pdrop": 0.2, "embd_pdrop": 0.1}, None),
        ("phi", {"resid_pdrop": 0.2}, None),
        ("starcoder2", {}, None),
        ("mixtral", {"num_local_experts": 2}, None),
    ):
        with torch.random.fork_rng(devices=[]):
            config = AutoConfig.for_model(family, **common, **own)
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
            (layer,) = model.model.layers
            handle, drew = install_dropout([layer]), []
            with watched(layer, handle, drew):
                model(torch.arange(11)[None], use_cache=False)
        left = other_randomness(layer)
        assert (left is None) == (named is None), (family, left)
        assert named is None or named in left
        assert drew == [named is not None], family
        assert len(handle) == (family in ("phi", "phi3")) * {"phi": 1, "phi3": 2}.get(family, 0)


@contextmanager
def watched(layer, handle, drew):
    """Runs the layer under a place, and notes whether it has moved the generator."""
    own = layer.forward

    def forward(*args, **kwargs):
        before = torch.get_rng_state()
        with handle.at(1, 0):
            result = own(*args, **kwargs)
        drew.append(not torch.equal(before, torch.get_rng_state()))
        return result

    layer.forward = forward
    yield
    del layer.forward


# --- compiled -----------------------------------------------------------------------------------------------------------------


@needs_compiler
def test_compiled_is_the_same_bits_with_one_compilation_for_each_width():
    from torch._dynamo.utils import counters

    counters.clear()
    fused = Fused(("cpu",))
    compiled, plain = Layer(0.3, 0.5), Layer(0.3, 0.5)
    plain.load_state_dict(compiled.state_dict())
    handles = install_dropout([compiled], fused), install_dropout([plain])
    for tokens, first in ((24, 0), (7, 24), (129, 31), (1000, 5), (2, 1), (1, 3), (16, 2**33)):
        x, dy = torch.randn(1, tokens, 6), torch.randn(1, tokens, 10)
        found = []
        for layer, handle in zip((compiled, plain), handles, strict=True):
            leaf = x.clone().requires_grad_()
            with handle.at(2, 1, first):
                y = layer(leaf)
            y.backward(dy)
            found.append((y, leaf.grad))
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    with handles[0].at(2, 1):
        compiled.first(torch.ones(1, 12, 17))
    assert fused.reason is None
    assert fused.compiled == 1
    assert counters["stats"]["unique_graphs"] == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_has_the_bits_of_the_cpu():
    """The words, the plain pass, the compiled pass, and past 2**31 entries of one input."""
    want = counter_mask(3, 2, "first", 2**31 - 100, 700, 513, 0.3)
    assert torch.equal(counter_mask(3, 2, "first", 2**31 - 100, 700, 513, 0.3, "cuda").cpu(), want)
    layer, x = Layer(), torch.randn(1, 700, 513, dtype=torch.bfloat16)
    for fused in (Fused(()), Fused()):
        handle = install_dropout([layer], fused)
        with handle.at(3, 2, 2**31 - 100):
            got = layer.first(x.cuda().requires_grad_())
            got.sum().backward()
        assert torch.equal(got[0].cpu(), torch.where(want, (x[0].float() * (1 / 0.7)).bfloat16(), 0.0))
        assert fused.reason is None
        handle.remove()
    handle = install_dropout([layer], Fused())
    with handle.at(3, 2):
        got = layer.first(torch.ones(1, 2**21 + 10, 1025, device="cuda", dtype=torch.bfloat16))
    assert torch.equal((got[0, -10:] != 0).cpu(), counter_mask(3, 2, "first", 2**21, 10, 1025, 0.3))
