"""The choice of a kernel: first proven one wins, and nobody pays for a slower one without hearing of it."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from importlib.machinery import ModuleSpec
from typing import ClassVar

import pytest
import torch

from megaspan.attention import choose_kernel
from megaspan.attention.choose import KERNELS, choose_for
from megaspan.attention.kernel import Case, Kernel
from megaspan.attention.proof import SegmentProof, choose_proven, prove
from megaspan.attention.tiled import TiledMath

H200 = Case("cuda", (9, 0), torch.bfloat16, 128, 4096, 4096)


def _case(**changes):
    return Case(**({name: getattr(H200, name) for name in Case.__dataclass_fields__} | changes))


@pytest.fixture
def flash4(monkeypatch):
    """A machine with the package flash-attn-4."""
    for name in ("flash_attn", "flash_attn.cute"):
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture(autouse=True)
def _cudnn_there(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)


@pytest.mark.usefixtures("flash4")
@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "FlashAttention 4"),
        ({"window": 128}, "FlashAttention 4"),
        ({"softcap": 30.0, "queries": 512}, "FlashAttention 4"),
        ({"head_dim": 80}, "cuDNN"),
        ({"head_dim": 80, "window": 128}, "FlashAttention 2"),
        ({"head_dim": 80, "queries": 64}, "FlashAttention 2"),
        ({"head_dim": 80, "softcap": 30.0}, "tiled matrix products"),
        ({"head_dim": 320}, "tiled matrix products"),
        ({"dtype": torch.float32}, "tiled matrix products"),
        ({"capability": (8, 0)}, "cuDNN"),
        ({"capability": (12, 0)}, "cuDNN"),
        ({"capability": (7, 5)}, "tiled matrix products"),
        ({"capability": (8, 0), "deterministic": True}, "FlashAttention 2"),
        ({"segments": 2}, "FlashAttention 4"),
        ({"segments": 10_000, "window": 128, "queries": 512}, "FlashAttention 4"),
        ({"segments": 1, "causal": False}, "FlashAttention 4"),
        ({"segments": 2, "head_dim": 80}, "FlashAttention 2"),
        ({"segments": 2, "capability": (8, 0)}, "FlashAttention 2"),
        ({"segments": 1, "causal": False, "capability": (8, 0)}, "FlashAttention 2"),
        ({"segments": 1000, "deterministic": True}, "FlashAttention 4"),
        ({"segments": 2000, "deterministic": True}, "FlashAttention 2"),
        ({"segments": 70_000, "head_dim": 80}, "tiled matrix products"),
    ],
)
def test_the_first_proven_kernel_is_taken(changes, name):
    assert choose_for(_case(**changes)).name == name


@pytest.mark.usefixtures("flash4")
def test_the_loud_line_is_there_exactly_when_the_machine_could_do_better():
    assert choose_for(H200).loud is None
    assert choose_for(_case(capability=(8, 0))).loud is None
    loud = choose_for(_case(head_dim=80)).loud
    assert loud is not None
    assert "SLOWER" in loud
    assert "FlashAttention 4 is not proven right at head size 80" in loud


def test_a_missing_package_is_named_with_its_command():
    """R72: a fall-back to a slower kernel is never silent."""
    choice = choose_for(H200)
    assert choice.name == "cuDNN"
    assert "pip install 'megaspan[flash]'" in (choice.loud or "")
    assert "bfloat16" in choice.reason


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "CPU flash"),
        ({"window": 0}, "CPU flash"),
        ({"window": 64}, "CPU flash"),
        ({"window": 63}, "tiled matrix products"),
        ({"softcap": 0.0}, "CPU flash"),
        ({"softcap": 5.0}, "tiled matrix products"),
        ({"queries": 1}, "tiled matrix products"),
        ({"sinks": True}, "CPU flash"),
        ({"segments": 1000}, "CPU flash"),
        ({"segments": 3, "window": 63}, "tiled matrix products"),
        ({"segments": 3, "queries": 32}, "tiled matrix products"),
    ],
)
def test_on_the_cpu(options, name):
    """A window of 0, or one that hides nothing, is no window (R34)."""
    assert choose_kernel("cpu", torch.float32, 16, tokens=64, **options).name == name


def test_the_proof_measures_and_passes_over_a_wrong_kernel():
    """A kernel that is silently wrong (as FlashAttention 4's backward at head size 80) is found before the run."""

    class Wrong(Kernel):
        name = "wrong"

        def refusal(self, case):
            return None

        def forward(self, *args):
            return TiledMath().forward(*args)

        def backward(self, *args):
            dq, dk, dv = TiledMath().backward(*args)
            return dq, dk, dv * 1.05

    case = Case("cpu", (0, 0), torch.bfloat16, 32, 4096, 4096, window=512, softcap=4.0)
    assert prove(TiledMath(), case, torch.device("cpu")) < 1e-2
    assert prove(TiledMath(), replace(case, segments=2), torch.device("cpu")) < 1e-2
    assert prove(Wrong(), case, torch.device("cpu")) > 2e-2
    choice, kernels = choose_proven(case, False, torch.device("cpu"), (Wrong(), TiledMath()))
    assert choose_for(case, kernels=kernels).name == "tiled matrix products"  # also later, when layers choose for themselves
    assert choice.name == "tiled matrix products"
    assert "wrong computed wrong values on this machine" in (choice.loud or "")
    assert "measured error against fp32" in choice.reason


def test_the_reason_names_variable_lengths():
    assert "variable lengths" in choose_for(_case(segments=2)).reason
    assert "variable lengths" not in choose_for(H200).reason


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("documents of one token", {}),
        ("more than 256 segments", {"share": 1}),
        ("suffixes", {"share": 4}),
        ("keys that no query sees", {"window": 512}),
        ("the window", {"window": 512}),
        ("full segments", {"causal": False}),
    ],
)
def test_the_proof_finds_what_is_wrong_with_variable_lengths_only(what, changes):
    class Wrong(Kernel):
        name = "wrong"
        shares: ClassVar = set()

        def refusal(self, case):
            return None

        def forward(self, q, k, v, scoring, segments=None):
            self.shares.add(q.shape[1] // k.shape[1])
            window = scoring.window
            out, lse = TiledMath().forward(q, k, v, scoring, segments)
            for t, s in segments.ranges() if segments is not None else ():
                queries, keys = t.stop - t.start, s.stop - s.start
                alone = what == "documents of one token" and queries == keys == 1
                if alone or (what == "more than 256 segments" and len(segments) > 256):
                    out[t] = 0
                if (what == "suffixes" and keys > queries) or (what == "full segments" and not segments.causal):
                    out[t] = TiledMath().forward(q[t], k[s][:queries], v[s][:queries], scoring)[0]
                if what == "the window" and window:
                    out[t] = TiledMath().forward(q[t], k[s], v[s], replace(scoring, window=window + 20))[0]
            return out, lse

        def backward(self, d_out, q, k, v, out, lse, scoring, segments=None):
            dq, dk, dv = TiledMath().backward(d_out, q, k, v, out, lse, scoring, segments)
            for t, s in segments.ranges() if segments is not None and what == "keys that no query sees" else ():
                unseen = s.stop - s.start - (t.stop - t.start) - scoring.window + 1
                dk[s.start : s.start + max(unseen, 0)] = 1
            return dq, dk, dv

    case = Case("cpu", (0, 0), torch.float32, 32, 4096, 4096, **changes)
    cpu = torch.device("cpu")
    assert not case.plain or prove(Wrong(), case, cpu) < 1e-6
    case = replace(case, segments=2)
    assert prove(Wrong(), case, cpu) > 2e-2
    assert Wrong.shares == {case.share or 2}
    assert choose_proven(case, False, cpu, (Wrong(), TiledMath()))[0].name == "tiled matrix products"


def test_a_kernel_that_is_wrong_on_segments_still_runs_rows_alone():
    """Where no packed rows are expected kernels are tried when the first one comes, once for all layers of a kind."""
    tries = []

    class Wrong(Kernel):
        name, max_elements = "wrong", 7

        def refusal(self, case):
            return None

        def forward(self, q, k, v, scoring, segments=None):
            tries.append((segments is not None, q.shape[1] // k.shape[1]))
            out, lse = TiledMath().forward(q, k, v, scoring, segments)
            return out * (1 if segments is None else 2), lse

        def backward(self, *args):
            return TiledMath().backward(*args)

    case, wrong, last = Case("cpu", (0, 0), torch.float32, 16, 4096, 4096), Wrong(), TiledMath()
    proof = SegmentProof(case, False, torch.device("cpu"), (wrong, last))
    with torch.autocast("cpu", torch.bfloat16):  # of the model's forward; the proof is not in it
        kernels = proof.applied_to((wrong, last), 4)
    assert kernels[1] is last
    assert choose_for(case, kernels=kernels).kernel.limit(None) == 7
    assert choose_for(case, kernels=kernels).name == "wrong"
    assert choose_for(replace(case, segments=2), kernels=kernels).name == "tiled matrix products"
    assert "computed wrong values" in (choose_for(replace(case, segments=2), kernels=kernels).loud or "")
    assert set(tries) == {(True, 4)}
    found = len(tries)
    stand_in = TiledMath()  # what a rehearsal puts there stays
    assert proof.applied_to((stand_in, wrong), 4) == (stand_in, kernels[0])
    assert len(tries) == found


def test_every_kernel_has_a_name_and_the_last_takes_all():
    assert len({kernel.name for kernel in KERNELS}) == len(KERNELS)
    assert KERNELS[-1].refusal(_case(head_dim=7, softcap=1.0, window=3, queries=2)) is None
