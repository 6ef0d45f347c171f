"""Many attentions in one call against a mask written out in full: output, log-sum-exp and every gradient."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.attention import attend, attend_backward, attend_forward
from megaspan.attention.attend import backward_with, forward_with, settle
from megaspan.attention.cpu import CPUFlash
from megaspan.attention.flash2 import Flash2
from megaspan.attention.flash4 import Flash4
from megaspan.attention.kernel import Kernel, Scoring
from megaspan.attention.layout import lay_out
from megaspan.attention.mask import Mask
from megaspan.attention.rehearsal import StandIn
from megaspan.attention.segments import Segments
from megaspan.attention.slices import plan_slices
from megaspan.attention.tiled import TiledMath
from megaspan.human import UserError
from tests.attention.reference import dense, distance, draw, visible_in_segments

SMALL_TILES = TiledMath(key_tile=5, tile_elements=16 * 5 * 4)


def of(pairs, causal=True, device="cpu"):
    return Segments.of([t for t, _ in pairs], [s for _, s in pairs], device, causal)


def drawn(pairs, heads, groups, size=4, seed=0, dtype=torch.float64):
    return draw(sum(t for t, _ in pairs), sum(s for _, s in pairs), heads, groups, size, seed, dtype)


def both(inputs, d_out, function):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def check(pairs, causal, heads, groups, kernel, window=None, softcap=None, sinks=False, seed=0):
    q, k, v, d_out = drawn(pairs, heads, groups, seed=seed)
    sink = torch.linspace(-2, 3, heads, dtype=torch.float64)
    inputs = [q, k, v, sink] if sinks else [q, k, v]
    seen, segments = visible_in_segments(pairs, causal, window), of(pairs, causal)

    def ours(q, k, v, sink=None):
        return attend(q, k, v, scale=0.6, window=window, softcap=softcap, sink_H=sink, segments=segments, kernel=kernel)

    def wanted(q, k, v, sink=None):
        return dense(q, k, v, 0.6, None, softcap, sink, seen)

    for got, want in zip(both(inputs, d_out, ours), both(inputs, d_out, lambda *x: wanted(*x)[0]), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    sink = sink if sinks else None
    _, lse = attend_forward(
        q, k, v, scale=0.6, window=window, softcap=softcap, sink_H=sink, segments=segments, kernel=kernel
    )  # fmt: skip
    torch.testing.assert_close(lse, wanted(q, k, v, sink)[1], rtol=1e-10, atol=1e-12)


lengths = st.one_of(st.integers(1, 4), st.integers(1, 60))
causal_pairs = st.lists(st.tuples(lengths, st.integers(0, 20)).map(lambda x: (x[0], x[0] + x[1])), min_size=1, max_size=7)
heads_of = st.sampled_from([(8, 2), (28, 4), (12, 12), (3, 1)])


@settings(max_examples=80, deadline=None)
@given(
    pairs=causal_pairs,
    heads=heads_of,
    window=st.sampled_from([None, 0, 1, 2, 7, 19, 500]),
    softcap=st.sampled_from([None, 0.7]),
    sinks=st.booleans(),
    kernel=st.sampled_from([SMALL_TILES, TiledMath(key_tile=16, tile_elements=16 * 28 * 32), TiledMath()]),
    seed=st.integers(0, 99),
)
def test_causal_segments_are_the_mask_written_out(pairs, heads, window, softcap, sinks, kernel, seed):
    """P1 for packed rows and for the calls of a rank: suffixes, windows, soft caps, sinks, GQA; short segments share tiles."""
    check(pairs, True, *heads, kernel, window, softcap, sinks, seed)


@settings(max_examples=30, deadline=None)
@given(
    pairs=st.lists(st.tuples(lengths, lengths), min_size=1, max_size=6),
    heads=heads_of,
    softcap=st.sampled_from([None, 0.7]),
    kernel=st.sampled_from([SMALL_TILES, TiledMath()]),
)
def test_full_segments_see_all_their_keys(pairs, heads, softcap, kernel):
    check(pairs, False, *heads, kernel, softcap=softcap)


@pytest.mark.parametrize(("heads", "groups"), [(8, 2), (28, 4), (12, 12)])
@pytest.mark.parametrize(
    ("pairs", "causal"),
    [([(9, 9), (1, 1), (40, 40)], True), ([(1, 1)] * 70, True), ([(5, 9), (7, 2), (1, 30)], False), ([(6, 11)], False)],
)
def test_the_cpu_kernel_is_the_mask_written_out(pairs, causal, heads, groups):
    check(pairs, causal, heads, groups, CPUFlash(), sinks=True)


def test_the_oracle_and_the_cpu_kernel_agree_on_documents():
    pairs = [(n, n) for n in (300, 1, 17, 128, 1, 65)]
    q, k, v, d_out = drawn(pairs, 8, 2, 32, dtype=torch.float32)
    found = []
    for kernel in (CPUFlash(), TiledMath(), SMALL_TILES):
        out, lse = attend_forward(q, k, v, scale=0.2, segments=of(pairs), kernel=kernel)
        found.append([out, lse, *attend_backward(d_out, q, k, v, out, lse, scale=0.2, segments=of(pairs), kernel=kernel)[:3]])
    for other in found[1:]:
        assert max(distance(got, want) for got, want in zip(other, found[0], strict=True)) < 2e-6


@pytest.mark.parametrize("kernel", [CPUFlash(), TiledMath()], ids=lambda kernel: kernel.name)
def test_a_document_of_a_packed_row_is_what_it_is_alone(kernel):
    """P3: no token of another document enters, to the last bit."""
    lengths = (700, 3, 600)
    q, k, v, d_out = draw(1303, 1303, 4, 2, 16, dtype=torch.float32)
    packed = [attend_forward(q, k, v, scale=0.3, segments=Segments.documents(lengths, "cpu"), kernel=kernel)]
    packed.append(
        attend_backward(d_out, q, k, v, *packed[0], scale=0.3, segments=Segments.documents(lengths, "cpu"), kernel=kernel)[:3]
    )
    for own, _ in Segments.documents(lengths, "cpu").ranges():
        out, lse = attend_forward(q[own], k[own], v[own], scale=0.3, kernel=kernel)
        assert torch.equal(out, packed[0][0][own])
        assert torch.equal(lse, packed[0][1][:, own])
        grads = attend_backward(d_out[own], q[own], k[own], v[own], out, lse, scale=0.3, kernel=kernel)[:3]
        assert all(torch.equal(got, want[own]) for got, want in zip(grads, packed[1], strict=True))


@pytest.mark.parametrize("mask", [Mask(), Mask(window=8), Mask(chunk=16)], ids=["full", "window", "chunk"])
@pytest.mark.parametrize(("documents", "cp"), [([64], 4), ([40, 1, 23], 3), ([30, 9, 9, 9, 1, 1, 1], 2), ([8] * 9, 4)])
def test_the_calls_of_a_rank_are_segments(mask, documents, cp):
    """A call of `slices.py` becomes segments as it is, and counts the same pairs."""
    layout = lay_out(documents, cp)
    for rank in range(cp):
        for call in plan_slices(layout, mask, rank).calls:
            segments = Segments.of(call.query_lengths, call.key_lengths, "cpu")
            assert segments.query_starts.tolist() == np.cumsum([0, *call.query_lengths]).tolist()
            assert segments.key_starts.tolist() == np.cumsum([0, *call.key_lengths]).tolist()
            assert (segments.most_queries, segments.most_keys) == (call.query_lengths.max(), call.key_lengths.max())
            assert segments.plain == (len(call.query_lengths) == 1)
            assert segments.visible_pairs(call.window) == call.visible_pairs()
            pairs = list(zip(call.query_lengths.tolist(), call.key_lengths.tolist(), strict=True))
            assert segments.visible_pairs(call.window) == int(visible_in_segments(pairs, True, call.window).sum())
            assert call.queries.stop - call.queries.start == segments.queries
            assert call.keys.stop - call.keys.start == segments.keys
            check(pairs, True, 2, 1, TiledMath(), call.window)


@pytest.mark.parametrize(
    ("queries", "keys", "causal", "sentence"),
    [
        ([3, 0], [3, 4], True, "at least one query and one key"),
        ([3, 1], [3, 0], False, "at least one query and one key"),
        ([], [], True, "one at least"),
        ([3], [3, 3], True, "as many of both"),
        ([3, 2], [3, 1], True, "would see no key"),
        ([1, 1], [2**31 - 10, 10], False, "32 bits"),
    ],
)
def test_no_query_without_a_key_is_ever_made(queries, keys, causal, sentence):
    with pytest.raises(ValueError, match=sentence):
        Segments.of(queries, keys, "cpu", causal)


def test_segments_are_made_of_numpy_and_of_lists():
    one, other = Segments.documents(np.array([5, 2]), "cpu"), Segments.documents([5, 2], "cpu")
    assert one.query_lengths == other.query_lengths == (5, 2)
    assert one.query_starts.dtype == one.key_starts.dtype == torch.int32
    assert one.query_starts.tolist() == [0, 5, 7]
    assert list(one.ranges()) == [(slice(0, 5), slice(0, 5)), (slice(5, 7), slice(5, 7))]
    assert one.visible_pairs() == 15 + 3
    assert Segments.of([5, 2], [3, 4], "cpu", causal=False).visible_pairs() == 23


class _Watched(Kernel):
    """The tiled kernel, which notes what segments it was called with, and stops at tensors that are too large."""

    name = "watched"

    def __init__(self, max_elements=None):
        self.max_elements, self.seen, self.inner = max_elements, [], TiledMath()

    def refusal(self, case):
        return None

    def limit(self, segments):
        return self.max_elements if segments is not None else None

    def forward(self, *args):
        self.seen.append(args[-1])
        assert self.max_elements is None or all(x.numel() <= self.max_elements for x in args[:3])
        return self.inner.forward(*args)

    def backward(self, *args):
        self.seen.append(args[-1])
        return self.inner.backward(*args)


def test_one_causal_segment_is_an_ordinary_call():
    """Kernels are faster, proven longest, and more of them there are, without variable lengths."""
    q, k, v, d_out = drawn([(5, 9)], 4, 2)
    for pairs, causal, plain in (([(5, 9)], True, True), ([(5, 9)], False, False), ([(2, 4), (3, 5)], True, False)):
        kernel = _Watched()
        segments = of(pairs, causal)
        out, lse = attend_forward(q, k, v, scale=1.0, segments=segments, kernel=kernel)
        attend_backward(d_out, q, k, v, out, lse, scale=1.0, segments=segments, kernel=kernel)
        assert kernel.seen == [None if plain else segments] * 2
    assert settle(q, k, v, Scoring(1.0))[0].name == TiledMath.name  # a suffix
    assert settle(q[:5], k[:5], v[:5], Scoring(1.0), segments=of([(2, 2), (3, 3)]))[0].name == CPUFlash.name


def test_a_window_that_hides_nothing_in_any_document_is_none():
    q, k, v, _ = drawn([(5, 5), (9, 9)], 2, 1)
    segments = Segments.documents([5, 9], "cpu")
    assert settle(q, k, v, Scoring(1.0, 9), segments=segments)[1].window is None
    assert settle(q, k, v, Scoring(1.0, 8), segments=segments)[1].window == 8
    assert settle(q, k, v, Scoring(1.0, 9))[1].window == 9


def test_segments_that_do_not_fit_are_refused():
    q, k, v, _ = drawn([(5, 5), (9, 9)], 2, 1)
    for segments in (Segments.documents([5, 8], "cpu"), Segments.documents([15], "cpu"), of([(5, 6), (9, 9)])):
        with pytest.raises(UserError, match="another row"):
            attend_forward(q, k, v, scale=1.0, segments=segments)
    with pytest.raises(UserError, match="must be where q is"):
        attend_forward(q, k, v, scale=1.0, segments=Segments.documents([5, 9], "meta"))
    with pytest.raises(UserError, match="a window belongs to causal attention"):
        attend_forward(q, k, v, scale=1.0, window=3, segments=of([(5, 5), (9, 9)], causal=False))
    with pytest.raises(UserError, match="CPU flash aligns a suffix"):
        attend_forward(q[:13], k, v, scale=1.0, segments=of([(5, 5), (8, 9)]), kernel=CPUFlash())


@pytest.mark.parametrize(("limit", "calls"), [(10**9, 1), (8 * 4 * 19, 2), (4 * 4 * 19, 3), (2 * 4 * 19, 6), (4 * 19, 12)])
def test_segments_past_the_proven_size_are_split_by_heads(limit, calls):
    """R56 for variable lengths: the limit is on the longer of queries and keys, of all segments together."""
    pairs = [(4, 9), (1, 1), (9, 9)]
    q, k, v, d_out = drawn(pairs, 12, 3)
    kernel, segments = _Watched(limit), of(pairs)
    seen = visible_in_segments(pairs, True, 4)
    found = both([q, k, v], d_out, lambda *x: attend(*x, scale=0.5, window=4, segments=segments, kernel=kernel))
    wanted = both([q, k, v], d_out, lambda *x: dense(*x, 0.5, seen=seen)[0])
    assert kernel.seen == [segments] * (2 * calls)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_flash4_is_split_in_variable_lengths_only():
    segments = Segments.documents([5, 9], "cpu")
    assert Flash4().limit(None) is None
    assert Flash4().limit(segments) == Flash2().limit(segments) == Flash2().limit(None) == 2**31 - 1
    assert StandIn(Flash4()).limit(segments) == 2**31 - 1


@pytest.fixture
def cute(monkeypatch):
    """FlashAttention 4's interface as we read it, computed by the definition; remembers the options of each call."""
    calls = []

    def seen(q, options):
        starts = [options["cu_seqlens_q"], options["cu_seqlens_k"]]
        assert all(x.dtype == torch.int32 for x in starts)
        pairs = list(zip(*(x.diff().tolist() for x in starts), strict=True))
        assert options["max_seqlen_q"] >= max(t for t, _ in pairs)
        assert options["max_seqlen_k"] >= max(s for _, s in pairs)
        left, right = options.get("window_size_left"), options.get("window_size_right")
        assert (left is None) == (right is None)
        assert not (options["causal"] and left is not None)
        window = None if left is None else left + 1
        return visible_in_segments(pairs, options["causal"] or left is not None, window)

    def run(q, k, v, options):
        return dense(q, k, v, options["softmax_scale"], None, options.get("softcap"), None, seen(q, options))

    def forward(q, k, v, return_lse, **options):
        calls.append(options)
        return (*run(q, k, v, options), None, None, None)

    def backward(q, k, v, out, d_out, lse, **options):
        calls.append(options)
        assert lse.shape == (q.shape[1], q.shape[0])
        assert lse.is_contiguous()
        found = both([q, k, v], d_out, lambda *x: run(*x, options)[0])[1:]
        return [options[name].copy_(x) if name in options else x for name, x in zip(("dq", "dk", "dv"), found, strict=True)]

    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    module = sys.modules["flash_attn.cute.interface"]
    module._flash_attn_fwd, module._flash_attn_bwd = forward, backward
    return calls


@pytest.mark.parametrize(("window", "softcap", "causal"), [(None, None, True), (3, 0.7, True), (None, None, False)])
def test_how_flash4_is_called(cute, window, softcap, causal):
    """What of the adapter can be tested without its GPU: it speaks of the same segments."""
    pairs = [(4, 12), (1, 1), (9, 9)]
    q, k, v, d_out = drawn(pairs, 4, 2)
    scoring, segments = Scoring(0.5, window, softcap), of(pairs, causal)
    found = []
    for kernel in (Flash4(), TiledMath()):
        out, lse = kernel.forward(q, k, v, scoring, segments)
        found.append([out, lse, *kernel.backward(d_out, q, k, v, out, lse.t().contiguous().t(), scoring, segments)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)
    assert len(cute) == 2
    assert [(options["max_seqlen_q"], options["max_seqlen_k"]) for options in cute] == [(9, 12)] * 2


def test_flash4_writes_the_gradients_of_a_part_where_they_belong(cute, monkeypatch):
    pairs = [(n, n) for n in (4, 9, 1, 7, 3)]
    q, k, v, d_out = drawn(pairs, 4, 2)
    scoring, segments = Scoring(0.5), of(pairs)
    out, lse = Flash4().forward(q, k, v, scoring, segments)
    *found, _ = backward_with(Flash4(), d_out, q, k, v, out, lse, None, scoring, segments)
    parts = [options for options in cute if "dq" in options]
    assert len(parts) == len(segments)  # a segment of a few tokens takes a tile, of which there is room for none
    wanted = TiledMath().backward(d_out, q, k, v, out, lse, scoring, segments)
    for name, got, want in zip(("dq", "dk", "dv"), found, wanted, strict=True):
        torch.testing.assert_close(got, want)
        assert {options[name].untyped_storage().data_ptr() for options in parts} == {got.untyped_storage().data_ptr()}


@settings(max_examples=60, deadline=None)
@given(causal_pairs, st.integers(0, 300), st.integers(1, 2000))
def test_parts_are_all_segments_in_order(pairs, padding, most):
    whole = of(pairs)
    parts = whole.parts(padding, most)
    assert [n for part in parts for n in part.segments.query_lengths] == [t for t, _ in pairs]
    assert [n for part in parts for n in part.segments.key_lengths] == [s for _, s in pairs]
    ends = 0, 0
    for part, queries, keys in parts:
        assert (queries.start, keys.start) == ends
        ends = queries.stop, keys.stop
        assert part.query_starts.tolist() == [0, *np.cumsum(part.query_lengths)]
        assert part.key_starts.tolist() == [0, *np.cumsum(part.key_lengths)]
        assert (part.most_queries, part.most_keys) == (whole.most_queries, whole.most_keys)  # no other kernel is compiled
        sizes = [max(pair) + padding for pair in zip(part.query_lengths, part.key_lengths, strict=True)]
        assert sum(sizes) <= most or len(sizes) == 1
    assert ends == (whole.queries, whole.keys)
    assert whole.parts(padding, most) is parts  # made once


@pytest.mark.parametrize("limit", [None, 2 * 4 * 24], ids=["all heads", "heads apart"])
@pytest.mark.parametrize("window", [None, 3])
def test_a_backward_in_parts_is_the_backward(limit, window, monkeypatch):
    monkeypatch.setattr(TiledMath, "segment_padding", lambda self, device: 8)
    monkeypatch.setattr(TiledMath, "max_elements", limit)
    pairs, sink = [(n, n + 2) for n in (4, 9, 1, 7, 3)], torch.linspace(-1, 1, 4, dtype=torch.float64)
    q, k, v, d_out = drawn(pairs, 4, 2)
    kernel, scoring, segments = TiledMath(), Scoring(0.5, window), of(pairs)
    out, lse = forward_with(kernel, q, k, v, sink, scoring, segments)
    found = backward_with(kernel, d_out, q, k, v, out, lse, sink, scoring, segments)
    assert len(segments.parts(8, 34 + 34 // 32)) == 3
    monkeypatch.setattr(TiledMath, "segment_padding", lambda self, device: 0)
    for got, want in zip(found, backward_with(kernel, d_out, q, k, v, out, lse, sink, scoring, segments), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("window", "causal"), [(None, True), (3, True), (None, False)])
def test_how_flash2_is_called(monkeypatch, window, causal):
    """torch's operation computed by the definition."""

    def run(q, k, v, starts, longest, causal, scale, window_size_left=None, window_size_right=None):
        pairs = list(zip(*(x.diff().tolist() for x in starts), strict=True))
        assert longest == tuple(max(lengths) for lengths in zip(*pairs, strict=True))
        assert window_size_right == (None if window_size_left is None else 0)
        window = None if window_size_left is None else window_size_left + 1
        return dense(q, k, v, scale, seen=visible_in_segments(pairs, causal, window))

    def forward(q, k, v, starts_q, starts_k, most_q, most_k, dropout, causal, debug, *, scale, **window):
        assert (dropout, debug) == (0.0, False)
        return run(q, k, v, (starts_q, starts_k), (most_q, most_k), causal, scale, **window)

    def backward(d_out, q, k, v, out, lse, starts_q, starts_k, most_q, most_k, dropout, causal, *_, scale, **window):
        assert lse.is_contiguous()
        how = (starts_q, starts_k), (most_q, most_k), causal, scale
        return both([q, k, v], d_out, lambda *x: run(*x, *how, **window)[0])[1:]

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    pairs = [(4, 12), (1, 1), (9, 9)]
    q, k, v, d_out = drawn(pairs, 4, 2)
    for segments in (of(pairs, causal), None):
        found = []
        for kernel in (Flash2(), TiledMath()):
            out, lse = kernel.forward(q, k, v, Scoring(0.5, window), segments)
            found.append([out, lse, *kernel.backward(d_out, q, k, v, out, lse, Scoring(0.5, window), segments)])
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("window", [None, 3])
def test_the_shapes_that_flash2_returns(window):
    """The real operation on tensors without content."""
    pairs = [(4, 9), (1, 1), (9, 9)]
    q, k, v, d_out = (x.to("meta") for x in drawn(pairs, 8, 2, 64, dtype=torch.bfloat16))
    segments = of(pairs, device="meta")
    out, lse = Flash2().forward(q, k, v, Scoring(0.1, window), segments)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (8, 14), torch.float32)
    grads = Flash2().backward(d_out, q, k, v, out, lse, Scoring(0.1, window), segments)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


def test_a_rehearsal_takes_segments():
    pairs = [(4, 9), (1, 1), (9, 9)]
    q, k, v, d_out = drawn(pairs, 4, 2)
    stand_in = StandIn(TiledMath())
    out, lse = forward_with(stand_in, q, k, v, None, Scoring(1.0), of(pairs))
    grads = backward_with(stand_in, d_out, q, k, v, out, lse, None, Scoring(1.0), of(pairs))
    assert [x.shape for x in (out, lse, *grads[:3])] == [q.shape, (4, 14), q.shape, k.shape, v.shape]
    assert not any(x.any() for x in (out, lse, *grads[:3]))
