"""The two kernels that run here against the definition: output, log-sum-exp and every gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.attention import attend, attend_backward, attend_forward
from megaspan.attention.attend import head_splits
from megaspan.attention.cpu import CPUFlash
from megaspan.attention.kernel import Kernel
from megaspan.attention.tiled import TiledMath
from megaspan.human import UserError
from tests.attention.reference import dense, distance, draw, visible

SMALL_TILES = TiledMath(key_tile=3, tile_elements=16 * 3 * 4)


def _all_gradients(inputs, d_out, function):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return out.detach(), torch.autograd.grad(out, leaves, d_out)


@settings(max_examples=60, deadline=None)
@given(
    t=st.integers(1, 40),
    before=st.integers(0, 9),
    groups=st.integers(1, 3),
    share=st.integers(1, 3),
    window=st.sampled_from([None, 0, 1, 2, 5, 8, 17, 64]),
    softcap=st.sampled_from([None, 0.7]),
    sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_tiled_kernel_is_the_definition(t, before, groups, share, window, softcap, sinks, seed):
    """P1 for attention: suffix, window, soft cap, sinks, GQA, in tiles that divide nothing (R35, R36, R42)."""
    q, k, v, d_out = draw(t, t + before, groups * share, groups, 4, seed)
    sink = torch.linspace(0, 8, groups * share, dtype=torch.float64)
    inputs = [q, k, v, sink] if sinks else [q, k, v]

    def ours(q, k, v, sink=None):
        return attend(q, k, v, scale=0.6, window=window, softcap=softcap, sink_H=sink, kernel=SMALL_TILES)

    out, grads = _all_gradients(inputs, d_out, ours)
    want, want_grads = _all_gradients(inputs, d_out, lambda *x: dense(*x[:3], 0.6, window, softcap, *x[3:])[0])
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-12)
    for got, wanted in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)
    if sinks:
        assert (grads[3] != 0).all()
    _, lse = attend_forward(
        q, k, v, scale=0.6, window=window, softcap=softcap, sink_H=sink if sinks else None, kernel=SMALL_TILES
    )
    torch.testing.assert_close(lse, dense(q, k, v, 0.6, window, softcap, sink if sinks else None)[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("tokens", [1, 7, 129])
@pytest.mark.parametrize("sinks", [False, True])
def test_cpu_flash_is_the_definition(tokens, sinks):
    q, k, v, d_out = draw(tokens, tokens, 6, 2, 16)
    inputs = [q, k, v, torch.tensor([0.0, 2, 4, 8, -1, 1], dtype=torch.float64)][: 4 if sinks else 3]
    out, grads = _all_gradients(
        inputs, d_out, lambda *x: attend(*x[:3], scale=0.3, sink_H=x[3] if sinks else None, kernel=CPUFlash())
    )
    want, want_grads = _all_gradients(inputs, d_out, lambda *x: dense(*x[:3], 0.3, None, None, *x[3:])[0])
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-12)
    for got, wanted in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)


def test_the_choice_changes_no_value():
    """The same call through the CPU op and through the tiled kernel."""
    q, k, v, d_out = draw(65, 65, 4, 2, 8, dtype=torch.float32)
    results = []
    for kernel in (CPUFlash(), TiledMath(key_tile=16), None):
        out, lse = attend_forward(q, k, v, scale=0.4, kernel=kernel)
        results.append([out, lse, *attend_backward(d_out, q, k, v, out, lse, scale=0.4, kernel=kernel)[:3]])
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert distance(got, want) < 1e-6


def test_bf16_is_accumulated_in_fp32():
    """Three-way: our bf16 result is no farther from fp64 than 1.5 times plain bf16 attention."""
    q, k, v, d_out = draw(300, 300, 4, 2, 32, dtype=torch.bfloat16)
    want, want_grads = _all_gradients([x.double() for x in (q, k, v)], d_out.double(), lambda *x: dense(*x, 0.2)[0])
    plain, plain_grads = _all_gradients([q, k, v], d_out, lambda *x: dense(*x, 0.2)[0])
    out, grads = _all_gradients([q, k, v], d_out, lambda *x: attend(*x, scale=0.2, kernel=TiledMath(key_tile=64)))
    assert out.dtype == torch.bfloat16
    for got, other, reference in zip([out, *grads], [plain, *plain_grads], [want, *want_grads], strict=True):
        assert distance(got, reference) <= 1.5 * distance(other, reference)


def test_the_window_shows_484_pairs():
    """R34, R35: 64 tokens, window 8: 484 visible pairs (540 is off by one, 2,080 is no window); counted from the kernel."""
    q, k, _, _ = draw(64, 64, 1, 1, 64)
    for window, pairs in ((8, 484), (9, 540), (0, 2080), (None, 2080), (64, 2080)):
        values = torch.eye(64, dtype=torch.float64)[:, None, :]  # value j is the unit vector j: the output is the weights
        for kernel in (None, SMALL_TILES):
            weights, _ = attend_forward(q, k, values, scale=0.01, window=window, kernel=kernel)
            assert int((weights > 0).sum()) == pairs
        assert int(visible(64, 64, window).sum()) == pairs


@pytest.mark.parametrize(("first", "second", "merged"), [(0, 200, 200), (200, 0, 200), (-50, 60, 60), (-1e30, 5, 5)])
def test_partial_softmaxes_merge_without_overflow(first, second, merged):
    """R41: two key tiles of one key each, whose log-sum-exps lie far apart."""
    k = torch.tensor([first, second], dtype=torch.float32).reshape(2, 1, 1)
    q, v = torch.ones(1, 1, 1), torch.tensor([1.0, 2.0]).reshape(2, 1, 1)
    kernel = TiledMath(key_tile=1)
    out, lse = attend_forward(q, k, v, scale=1.0, kernel=kernel)
    assert lse.item() == pytest.approx(merged)
    grads = attend_backward(torch.ones(1, 1, 1), q, k, v, out, lse, scale=1.0, kernel=kernel)
    assert all(torch.isfinite(x).all() for x in (out, lse, *grads[:3]))


def test_no_tensor_grows_with_tokens_squared():
    """R31: the tiled kernel at 4,096 tokens allocates no tensor as large as one head's score matrix."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for value in result if isinstance(result, tuple | list) else [result]:
                if isinstance(value, torch.Tensor):
                    Largest.elements = max(Largest.elements, value.numel())
            return result

    q, k, v, d_out = draw(4096, 4096, 1, 1, 4, dtype=torch.float32)
    kernel = TiledMath(tile_elements=2**16)
    with Largest():
        out, lse = attend_forward(q, k, v, scale=1.0, window=2000, kernel=kernel)
        attend_backward(d_out, q, k, v, out, lse, scale=1.0, window=2000, kernel=kernel)
    assert Largest.elements < 4096 * 4096 / 16


@settings(max_examples=200, deadline=None)
@given(
    queries=st.integers(1, 50),
    extra=st.integers(0, 9),
    groups=st.integers(1, 6),
    share=st.integers(1, 8),
    limit=st.integers(1, 4000),
)
def test_head_splits_cover_everything_within_the_limit(queries, extra, groups, share, limit):
    keys, size, heads = queries + extra, 4, groups * share
    if keys * size > limit:
        with pytest.raises(UserError, match="larger than the attention kernel is proven for"):
            list(head_splits(queries, keys, heads, groups, size, limit))
        return
    splits = list(head_splits(queries, keys, heads, groups, size, limit))
    assert [h for heads_, _ in splits for h in range(heads_.start, heads_.stop)] == list(range(heads))
    for heads_, groups_ in splits:
        assert keys * size * (heads_.stop - heads_.start) <= limit
        owners = {h // share for h in range(heads_.start, heads_.stop)}
        assert owners == set(range(groups_.start, groups_.stop))
        assert (heads_.stop - heads_.start) % (groups_.stop - groups_.start) == 0


class _Limited(Kernel):
    """The tiled kernel, proven for so many elements only; counts its calls."""

    name = "limited"

    def __init__(self, max_elements):
        self.max_elements, self.calls, self.inner = max_elements, 0, TiledMath()

    def refusal(self, case):
        return None

    def forward(self, *args):
        self.calls += 1
        assert all(x.numel() <= self.max_elements for x in args if isinstance(x, torch.Tensor))
        return self.inner.forward(*args)

    def backward(self, *args):
        assert all(x.numel() <= self.max_elements for x in args if isinstance(x, torch.Tensor))
        return self.inner.backward(*args)


@pytest.mark.parametrize(("limit", "calls"), [(10**9, 1), (8 * 4 * 9, 2), (4 * 4 * 9, 3), (2 * 4 * 9, 6), (4 * 9, 12)])
def test_a_call_past_the_proven_size_is_split_by_heads(limit, calls):
    """R56: shapes past what a kernel is proven for give the same output and gradients, shared KV heads included."""
    q, k, v, d_out = draw(9, 9, 12, 3, 4)
    kernel = _Limited(limit)
    assert isinstance(kernel, Kernel)
    out, grads = _all_gradients([q, k, v], d_out, lambda *x: attend(*x, scale=0.5, window=4, kernel=kernel))
    want, want_grads = _all_gradients([q, k, v], d_out, lambda *x: dense(*x, 0.5, 4)[0])
    assert kernel.calls == calls
    torch.testing.assert_close(out, want)
    for got, wanted in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        (((4, 3, 8), (4, 2, 8), (4, 2, 8)), "no grouped-query attention"),
        (((4, 2, 8), (4, 2, 8), (4, 2, 4)), "no grouped-query attention"),
        (((5, 2, 8), (4, 2, 8), (4, 2, 8)), "last tokens of the keys"),
    ],
)
def test_shapes_that_are_no_attention_are_refused(shapes, sentence):
    with pytest.raises(UserError, match=sentence):
        attend_forward(*(torch.zeros(shape) for shape in shapes), scale=1.0)


def test_a_kernel_that_cannot_is_not_forced():
    q, k, v, _ = draw(8, 8, 2, 2, 4)
    with pytest.raises(UserError, match="CPU flash has no sliding windows"):
        attend_forward(q, k, v, scale=1.0, window=3, kernel=CPUFlash())
