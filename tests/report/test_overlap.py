"""Time of copies that nothing hides, against counting nanosecond by nanosecond."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megaspan.report.overlap import Overlap, device_spans, overlap

START = 1_795_975_499_179_275_368  # a clock's nanoseconds: 2**53 is far below, so floats of them would be wrong
SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=12)


@given(copies=SPANS, work=SPANS)
def test_it_is_what_counting_gives(copies, work):
    copied, worked = (
        {second for begun, length in spans for second in range(begun, begun + length)} for spans in (copies, work)
    )
    arrays = (
        np.array([(START + begun, START + begun + length) for begun, length in spans], np.int64) for spans in (copies, work)
    )
    found = overlap(*(array.reshape(-1, 2) for array in arrays))
    assert round(found.copying * 1e9, 3) == len(copied)
    assert round(found.exposed * 1e9, 3) == len(copied - worked)
    ends = [border for spans in (copies, work) for begun, length in spans for border in (begun, begun + length)]
    whole = max(ends) - min(ends) if ends else 0
    assert round(found.idle * 1e9, 3) == whole - len(copied | worked)


def event(name: str, begun: int, took: int, device: str = "CUDA", note: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        name=lambda: name,
        start_ns=lambda: begun,
        duration_ns=lambda: took,
        device_type=lambda: SimpleNamespace(name=device),
        is_user_annotation=lambda: note,
    )


def test_copies_are_told_from_work_and_from_waiting():
    copies, work = device_spans(
        [
            event("Memcpy HtoD (Pinned -> Device)", 10, 5),
            event("Memcpy DtoH (Device -> Pinned)", 20, 5),
            event("Memcpy DtoD (Device -> Device)", 30, 1),
            event("void gemm_kernel", 40, 2),
            event("Memset (Device)", 50, 3),
            event("Stream Wait Event", 0, 1000),
            event("Optimizer.step#AdamW.step", 0, 1000, note=True),
            event("cudaLaunchKernel", 0, 1000, device="CPU"),
        ]
    )
    assert copies.tolist() == [[10, 15], [20, 25]]
    assert work.tolist() == [[30, 31], [40, 42], [50, 53]]


def test_a_timeline_without_anything_is_not_an_error():
    nothing = device_spans([])
    assert overlap(*nothing) == Overlap(0.0, 0.0, 0.0)
