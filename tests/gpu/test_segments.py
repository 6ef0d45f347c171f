"""On a GPU: kernels of variable lengths against fp32, past 2**31 elements, and what a packed row costs.

    python -m pytest tests/gpu/test_segments.py -m gpu -s

prints one JSON line for each kernel and case, and the times (`-k times`), beside what it asserts.
"""

from __future__ import annotations

import json
import time

import pytest
import torch

from megaspan.attention.attend import backward_with, forward_with, settle
from megaspan.attention.choose import KERNELS, case_of, choose_for
from megaspan.attention.flash2 import Flash2
from megaspan.attention.flash4 import Flash4
from megaspan.attention.kernel import Scoring
from megaspan.attention.proof import TOLERANCE, choose_proven, prove
from megaspan.attention.segments import Segments
from megaspan.attention.tiled import TiledMath
from tests.gpu.test_attention import distance, draw, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def packed(size=128, window=None, softcap=None, **more):
    return case_of("cuda", torch.bfloat16, size, window, softcap, 4096, 4096, 2, **more)


# What this machine can run of the kernels that take segments, the tiled one aside: it is what they are compared with.
GPU_KERNELS = (
    [kernel for kernel in KERNELS[:-1] if kernel.refusal(packed()) is None] if torch.cuda.is_available() else []
)  # fmt: skip


def documents(tokens, count, seed=0):
    """Lengths of so many documents, few long and many short ones."""
    sizes = torch.randn(count, generator=torch.Generator().manual_seed(seed)).mul(1.2).exp()
    lengths = (sizes / sizes.sum() * (tokens - count)).long() + 1
    lengths[lengths.argmax()] += tokens - lengths.sum()
    return lengths.tolist()


def squares(lengths):
    return [(n, n) for n in lengths]


# name: (queries, keys) of the segments, query heads, KV heads, head size, window, soft cap, sinks
CASES = {
    "documents, one token too": (squares([300, 1, 595, 128]), 8, 2, 128, None, None, False),
    "one token each": (squares([1] * 300), 8, 2, 128, None, None, False),
    "short ones, fewer than 256": (squares([3, 17, 1, 40, 64] * 20), 8, 2, 128, None, None, False),
    "more than 256": (squares([5, 1, 130, 64] * 100), 8, 2, 128, None, None, False),
    "suffixes": ([(512, 1024), (1, 700), (100, 100), (300, 301)], 8, 2, 128, None, None, False),
    "suffixes, more than 256": ([(3, 70), (1, 1), (64, 200)] * 120, 8, 2, 128, None, None, False),
    "window": (squares([300, 1, 595, 128]), 8, 2, 128, 64, None, False),
    "window of 1": (squares([300, 1, 595, 128]), 8, 2, 128, 1, None, False),
    "window on suffixes": ([(512, 767), (1, 256), (100, 100), (300, 555)], 8, 2, 128, 256, None, False),
    "window on suffixes, keys unseen": ([(512, 1024), (1, 700), (100, 400)], 8, 2, 128, 64, None, False),
    "soft cap": (squares([300, 1, 595, 128]), 8, 2, 128, None, 30.0, False),
    "soft cap and window on suffixes": ([(512, 700), (60, 90)], 8, 4, 256, 100, 50.0, False),
    "sinks": (squares([300, 1, 595, 128]), 8, 2, 64, None, None, True),
    "sinks and window on suffixes": ([(512, 639), (1, 128), (100, 100)], 8, 2, 64, 128, None, True),
    "28 heads on 4": (squares([300, 1, 595, 128]), 28, 4, 128, None, None, False),
    "12 heads on 12": (squares([300, 1, 595, 128]), 12, 12, 128, None, None, False),
    "12 on 12, suffixes, more than 256": ([(3, 70), (1, 1), (64, 200)] * 120, 12, 12, 128, None, None, False),
    "12 on 12, window, keys unseen": ([(512, 1024), (1, 700), (100, 400)], 12, 12, 128, 64, None, False),
    "32 heads on 1": (squares([300, 1, 595, 128]), 32, 1, 128, None, None, False),
    **{f"head size {size}": ([(300, 300), (1, 1), (500, 700)], 8, 2, size, None, None, False)
       for size in (64, 80, 96, 192, 256)},
    **{f"{count} documents of {tokens}": (squares(documents(tokens, count)), 8, 2, 128, None, None, False)
       for tokens, count in ((4096, 12), (16384, 40), (32768, 90))},
}  # fmt: skip


def case_errors(kernel, pairs, heads, groups, size, window=None, softcap=None, sinks=False, causal=True):
    """Relative errors of output, dq, dk, dv (and dsink), and the largest difference where the wanted value is nearly zero."""
    segments = Segments.of([t for t, _ in pairs], [s for _, s in pairs], "cuda", causal)
    q, k, v, d_out = draw(segments.queries, segments.keys, heads, groups, size)
    sink = torch.linspace(-1, 8, heads, device="cuda") if sinks else None
    scoring = Scoring(size**-0.5, window, softcap)

    def results(kernel, *tensors):
        chosen, how = settle(*tensors[:3], scoring, kernel, segments=segments)
        out, lse = forward_with(chosen, *tensors[:3], sink, how, segments)
        grads = backward_with(chosen, tensors[3], *tensors[:3], out, lse, sink, how, segments)
        return [out, lse, *(x for x in grads if x is not None)]

    got, want = results(kernel, q, k, v, d_out), results(TiledMath(), *(x.float() for x in (q, k, v, d_out)))
    return [(distance(x, y), float((x.float() - y.float()).abs().max())) for x, y in zip(got, want, strict=True)]


@pytest.mark.parametrize("kernel", GPU_KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("case", CASES)
def test_a_kernel_is_right_wherever_it_does_not_refuse(kernel, case):
    if (refusal := kernel.refusal(packed(*CASES[case][3:6]))) is not None:
        pytest.skip(refusal.reason)
    errors = case_errors(kernel, *CASES[case])
    print(
        json.dumps({"kernel": kernel.name, "case": case, "out lse dq dk dv (dsink)": [f"{error:.1e}" for error, _ in errors]})
    )
    # Documents of one token have no dq and dk: only the size of what comes back can be compared.
    assert all(error < 1e-2 or largest < 1e-3 for error, largest in errors)


@pytest.mark.parametrize("kernel", GPU_KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("pairs", [[(512, 1024)], [(300, 100), (1, 700), (64, 64)]], ids=["one", "several"])
def test_segments_that_see_all_their_keys(kernel, pairs):
    errors = case_errors(kernel, pairs, 8, 2, 128, causal=False)
    print(json.dumps({"kernel": kernel.name, "case": f"full {pairs}", "errors": [f"{error:.1e}" for error, _ in errors]}))
    assert all(error < 1e-2 for error, _ in errors)


@pytest.mark.parametrize("kernel", GPU_KERNELS, ids=lambda kernel: kernel.name)
def test_a_fixed_order_repeats_to_the_last_bit(kernel):
    """`full_determinism` on packed rows; and the values are those of the free order."""
    segments = Segments.documents(documents(8192, 30), "cuda")
    tensors = draw(8192, 8192, 8, 2, 128)

    def results():
        out, lse = forward_with(kernel, *tensors[:3], None, Scoring(0.1), segments)
        return [out, lse, *backward_with(kernel, tensors[3], *tensors[:3], out, lse, None, Scoring(0.1), segments)[:3]]

    free = results()
    torch.use_deterministic_algorithms(True)
    try:
        first, second = results(), results()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert max(distance(x, y) for x, y in zip(first, free, strict=True)) < 5e-3


@pytest.mark.parametrize("kernel", GPU_KERNELS, ids=lambda kernel: kernel.name)
def test_slices_of_heads_give_what_the_whole_gives(kernel):
    """Head groups are slices in memory: neither contiguous, nor at the start; and log-sum-exps come back from the host."""
    segments = Segments.of([300, 1, 339], [400, 1, 339], "cuda")
    q, k, v, d_out = draw(640, 740, 8, 4, 128)
    scoring = Scoring(0.1)
    out, lse = forward_with(kernel, q, k, v, None, scoring, segments)
    whole = backward_with(kernel, d_out, q, k, v, out, lse, None, scoring, segments)
    heads, kv = slice(4, 6), slice(2, 3)
    part_out, _ = forward_with(kernel, q[:, heads], k[:, kv], v[:, kv], None, scoring, segments)
    part = backward_with(
        kernel, d_out[:, heads], q[:, heads], k[:, kv], v[:, kv], out[:, heads], lse[heads], None, scoring, segments
    )
    assert distance(part_out, out[:, heads]) < 2e-3
    for got, want in zip(part[:3], (whole[0][:, heads], whole[1][:, kv], whole[2][:, kv]), strict=True):
        assert distance(got, want) < 5e-3


@pytest.mark.parametrize("split", [True, False], ids=["split by heads", "in one call"])
@pytest.mark.parametrize("kernel", [Flash4(), Flash2()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(("tokens", "heads", "groups"), [(600_064, 32, 8), (4_300_032, 4, 1)])
def test_past_two_to_the_31_elements(kernel, tokens, heads, groups, split):
    """R56: right where a tensor has more than 2**31 elements. In one call only FlashAttention 4 is asked, to learn whether its
    limit in `flash4.py` can go: what it prints decides, it asserts nothing."""
    if kernel.name not in {each.name for each in GPU_KERNELS} or torch.cuda.get_device_properties(0).total_memory < 100 * 2**30:
        pytest.skip("needs the package, and 100 GiB")
    if not split and isinstance(kernel, Flash2):
        pytest.skip("FlashAttention 2 is always split")
    q, k, v, d_out = draw(tokens, tokens, heads, groups, 128)
    segments = Segments.documents([tokens // 2, 1, 77, tokens - tokens // 2 - 78], "cuda")
    scoring, tail = Scoring(128**-0.5, 256), 1024
    if split:
        out, lse = forward_with(kernel, q, k, v, None, scoring, segments)
        got = [out, *backward_with(kernel, d_out, q, k, v, out, lse, None, scoring, segments)[:3]]
    else:
        out, lse = kernel.forward(q, k, v, scoring, segments)
        got = [out, *kernel.backward(d_out, q, k, v, out, lse, scoring, segments)]
    got = [x[-256:].clone() for x in got]
    want = run(TiledMath(), *(x[-tail:].float() for x in (q, k, v, d_out)), scoring)
    errors = [distance(x, y[-256:]) for x, y in zip(got, want, strict=True)]
    print(json.dumps({"kernel": kernel.name, "tokens": tokens, "heads": heads, "split": split, "errors": errors}))
    assert not split or max(errors) < 1e-2


@pytest.mark.parametrize("share", [1, 4])
@pytest.mark.parametrize("window", [None, 128])
def test_the_kernels_chosen_for_packed_rows_prove_themselves(share, window):
    """And how long that takes, kernels being compiled: it is paid when a run with packed rows begins."""
    case = packed(window=window, share=share)
    torch.cuda.synchronize()
    began = time.perf_counter()
    choice, _ = choose_proven(case, False, torch.device("cuda"))
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    again = time.perf_counter()
    error = prove(choice.kernel, case, torch.device("cuda"))
    torch.cuda.synchronize()
    print(json.dumps({"share": share, "window": window, "reason": choice.reason, "seconds": round(seconds, 2),
                      "compiled": round(time.perf_counter() - again, 3)}))  # fmt: skip
    assert error <= TOLERANCE
    assert choice.kernel is choose_for(case).kernel


def seconds_of(kernel, tensors, segments, steps=5):
    """Median seconds of forward and backward."""
    q, k, v, d_out = tensors
    scoring, found = Scoring(128**-0.5), []
    for _ in range(steps + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        out, lse = forward_with(kernel, q, k, v, None, scoring, segments)
        torch.cuda.synchronize()
        middle = time.perf_counter()
        backward_with(kernel, d_out, q, k, v, out, lse, None, scoring, segments)
        torch.cuda.synchronize()
        found.append((middle - start, time.perf_counter() - middle))
    return [sorted(part)[steps // 2] for part in zip(*found[2:], strict=True)]


@pytest.mark.parametrize("kernel", GPU_KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("count", [1, 8, 64, 1300])
def test_times_of_a_packed_row(kernel, count):
    """131,072 tokens of 32/8 heads of 128 in so many documents: seconds, TFLOP/s of visible pairs, and the peak."""
    tokens = 131_072
    tensors = draw(tokens, tokens, 32, 8, 128)
    segments = Segments.documents(documents(tokens, count), "cuda")
    forward, backward = seconds_of(kernel, tensors, segments)
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    seconds_of(kernel, tensors, segments, steps=1)
    peak, operations = torch.cuda.max_memory_allocated() - held, 4 * 32 * 128 * segments.visible_pairs()
    found = {"kernel": kernel.name, "documents": count, "longest": segments.most_queries,
             "forward ms": round(forward * 1e3, 2), "backward ms": round(backward * 1e3, 2),
             "forward TFLOP/s": round(operations / forward / 1e12),
             "backward TFLOP/s": round(2.5 * operations / backward / 1e12),
             "peak GiB above the inputs": round(peak / 2**30, 2)}  # fmt: skip
    print(json.dumps(found))
    if count >= 8:
        whole = sum(seconds_of(kernel, tensors, None, steps=3))
        assert forward + backward < whole
