"""Collectives on a timeline: what of them runs while nothing is computed."""

from __future__ import annotations

import pytest

from benchmarks import communication
from tests.report.test_overlap import event

MS = 1_000_000


def test_collectives_are_told_from_computation_and_copies():
    found = communication.seen(
        [
            event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 0, 10 * MS),
            event("void gemm_kernel", 4 * MS, 10 * MS),
            event("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 20 * MS, 5 * MS),
            event("ncclDevKernel_SendRecv", 22 * MS, 5 * MS),
            event("Memcpy DtoH (Device -> Pinned)", 26 * MS, 4 * MS),
            event("Memcpy DtoD (Device -> Device)", 40 * MS, 1 * MS),
            event("nccl:all_gather_into_tensor", 0, 100 * MS, note=True),
            event("ncclAllGather", 0, 100 * MS, device="CPU"),
            event("Stream Wait Event", 0, 1000 * MS),
        ]
    )
    assert found["busy"] == pytest.approx(0.017)
    assert found["exposed"] == pytest.approx(0.011), "4 before the product, 7 after it"
    assert found["copies_exposed"] == pytest.approx(0.003)
    assert found["idle"] == pytest.approx(0.041 - 0.014 - 0.010 - 0.001)
    assert found["span"] == pytest.approx(0.041)
    assert found["kinds"] == {
        "AllGather": [1, 0.01, pytest.approx(0.004)],
        "ReduceScatter": [1, 0.005, pytest.approx(0.005)],
        "SendRecv": [1, 0.005, pytest.approx(0.005)],
    }
    told = communication.sentence(found, 0.1)
    assert "collectives 17 ms a step, 11 ms of them (11.00 %) while nothing is computed" in told
    assert "1 SendRecv 5 ms, 5 ms of them bare" in told


def test_a_timeline_without_anything_is_not_an_error():
    assert communication.seen([])["busy"] == 0.0
    assert "0 ms" in communication.sentence(communication.seen([]), 1.0)
