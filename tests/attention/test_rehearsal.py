"""Stand-ins of attention kernels: shapes and bytes of the real ones, no arithmetic, chosen as those."""

from __future__ import annotations

from math import prod
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megaspan.attention import rehearsal
from megaspan.attention.attend import backward_with, forward_with
from megaspan.attention.context import ContextPlan, RowRanks
from megaspan.attention.cpu import CPUFlash
from megaspan.attention.cudnn import CuDNN
from megaspan.attention.flash2 import Flash2
from megaspan.attention.flash4 import Flash4
from megaspan.attention.kernel import Kernel, Scoring
from megaspan.attention.layout import lay_out
from megaspan.attention.mask import Mask
from megaspan.attention.rehearsal import Call, Pause, StandIn, scratch_of, skip_attention, visible_pairs
from megaspan.attention.seam import install
from megaspan.attention.tiled import TiledMath
from tests.gloo import run_ranks
from tests.models import tiny

GIB = 2**30


def tensors(t: int = 12, s: int = 12, heads: int = 4, groups: int = 2, size: int = 8, dtype: torch.dtype = torch.float32):
    draw = torch.Generator().manual_seed(0)
    shapes = ((t, heads, size), (s, groups, size), (s, groups, size))
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


def scratch_bytes(kernel: Kernel, call: Call, backward: bool = True) -> int:
    return sum(prod(shape) * dtype.itemsize for shape, dtype in scratch_of(kernel, call, backward))


class Largest(TorchDispatchMode):
    """Bytes of every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "empty" in str(func) or "zeros" in str(func):
            self.made += [leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kernel", [CPUFlash(), TiledMath()], ids=lambda kernel: kernel.name)
def test_results_have_the_shapes_types_and_strides_of_the_real_ones(kernel, dtype):
    q, k, v = tensors(dtype=dtype)
    scoring = Scoring(0.3)
    real, stand_in = (each.forward(q, k, v, scoring) for each in (kernel, StandIn(kernel)))
    assert [(x.shape, x.dtype) for x in stand_in] == [(x.shape, x.dtype) for x in real]
    real, stand_in = (each.backward(q, q, k, v, *real, scoring) for each in (kernel, StandIn(kernel)))
    assert [(x.shape, x.dtype) for x in stand_in] == [(x.shape, x.dtype) for x in real]
    assert all(bool(x.isfinite().all()) for x in stand_in)


def test_the_scratch_is_there_during_a_call(monkeypatch):
    monkeypatch.setitem(rehearsal._FORMULAS, CPUFlash, rehearsal._flash4)
    q, k, v = tensors()
    stand_in, seen = StandIn(CPUFlash()), Largest()
    out, lse = stand_in.forward(q, k, v, Scoring(1.0))
    with seen:
        stand_in.backward(q, q, k, v, out, lse, Scoring(1.0))
    wanted = [prod(shape) * dtype.itemsize for shape, dtype in scratch_of(CPUFlash(), Call(12, 12, 4, 2, 8, q.dtype, 0), True)]
    assert set(wanted) <= set(seen.made)
    assert len(wanted) == 5


def test_flash4_sums_all_three_gradients_in_fp32():
    """Qwen3-8B at 1,048,576 tokens: dq 16 GiB, dk and dv 4 GiB each, two numbers a query and head (flash-attn-4 4.0.0b36)."""
    call = Call(2**20, 2**20, 32, 8, 128, torch.bfloat16, 9)
    assert scratch_bytes(Flash4(), call) == 24 * GIB + 2 * 32 * 2**20 * 4
    assert scratch_bytes(Flash4(), call, backward=False) == 0
    one_group = Call(2**20, 2**20, 4, 1, 128, torch.bfloat16, 9)
    assert scratch_bytes(Flash4(), one_group) * 8 == scratch_bytes(Flash4(), call)
    no_sharing = Call(2**20, 2**20, 8, 8, 128, torch.bfloat16, 9)
    assert scratch_bytes(Flash4(), no_sharing) == 4 * GIB + 2 * 8 * 2**20 * 4, "keys with one query head each need no sums"


@pytest.mark.parametrize(
    ("size", "major", "rows", "columns", "rounded"),
    [(64, 9, 128, 128, 64), (96, 9, 64, 128, 96), (128, 9, 64, 128, 128), (192, 9, 64, 96, 192), (256, 9, 64, 48, 256),
     (128, 10, 128, 256, 128), (64, 10, 128, 128, 64)],
)  # fmt: skip
def test_flash4_rounds_up_to_its_tiles(size, major, rows, columns, rounded):
    found = scratch_of(Flash4(), Call(1, 1, 4, 2, size, torch.bfloat16, major), True)
    assert ((4, rows), torch.float32) in found
    assert ((4, rows * rounded), torch.float32) in found
    assert found.count(((2, columns * rounded), torch.float32)) == 2


def test_a_fixed_order_of_sums_costs_flash2_a_sum_for_each_group_of_processors():
    call = Call(1024, 1024, 32, 8, 128, torch.bfloat16, 9, 132)
    plain = scratch_bytes(Flash2(), call)
    fixed = scratch_bytes(Flash2(), Call(1024, 1024, 32, 8, 128, torch.bfloat16, 9, 132, True))
    assert fixed - plain == 4 * (1024 + 128) * 32 * 128 * 4
    assert plain == (1024 + 128) * 32 * 4 * 129 + 2 * 1024 * 32 * 128 * 2


def test_cudnn_pads_a_row_that_is_no_multiple_of_128():
    whole, odd = (Call(t, t, 32, 8, 128, torch.bfloat16, 9) for t in (1024, 1000))
    assert scratch_bytes(CuDNN(), odd) - scratch_bytes(CuDNN(), whole) == 1024 * (3 * 32 + 2 * 8) * 128 * 2
    assert scratch_bytes(CuDNN(), whole, backward=False) == 0


def test_calls_are_split_by_heads_as_the_real_kernels_are():
    q, k, v = tensors()
    real = TiledMath()
    object.__setattr__(real, "max_elements", 12 * 8 * 2)
    stand_in = StandIn(real)
    out, lse = forward_with(stand_in, q, k, v, None, Scoring(1.0))
    backward_with(stand_in, q, q, k, v, out, lse, None, Scoring(1.0))
    assert stand_in.calls == [2, 2]


def test_a_model_gets_a_stand_in_for_each_kernel_and_loses_it_with_the_next_install():
    model = tiny("gemma3")
    install(model)
    before = {name: module.megaspan_kernels for name, module in model.named_modules() if hasattr(module, "megaspan_kernels")}
    stand_ins = skip_attention(model)
    for name, module in model.named_modules():
        if name in before:
            assert [type(kernel) for kernel in module.megaspan_kernels] == [StandIn] * len(before[name])
            assert [kernel.real for kernel in module.megaspan_kernels] == list(before[name])
    ids = torch.randint(0, 100, (1, 40))
    model(input_ids=ids, labels=ids).loss.backward()
    layers = model.config.num_hidden_layers
    assert [sum(each.calls[way] for each in stand_ins) for way in (0, 1)] == [layers, layers]
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters() if parameter.grad is not None)
    again = skip_attention(model)
    assert not any(isinstance(each.real, StandIn) for each in again), "no stand-in for a stand-in"
    install(model)
    assert not any(isinstance(k, StandIn) for module in model.modules() for k in getattr(module, "megaspan_kernels", ()))


def test_a_model_without_our_attention_is_refused():
    with pytest.raises(ValueError, match="no attention of megaspan's"):
        skip_attention(tiny("llama"))


@given(t=st.integers(1, 20), before=st.integers(0, 9), window=st.none() | st.integers(1, 40))
def test_pairs_are_counted_one_by_one(t, before, window):
    wanted = sum(min(position, window or position) for position in range(before + 1, before + t + 1))
    assert visible_pairs(t, t + before, window) == wanted


def test_a_pause_is_attention_but_no_longer_than_copies_need_it():
    q, k, _ = tensors(t=64, s=64, heads=4, size=16)
    pause = Pause(forward=1e12, backward=5e11, cycles=1e9)
    operations = 4 * 4 * 16 * 64 * 65 / 2
    assert pause.seconds(q, k, Scoring(1.0), False) == pytest.approx(operations / 1e12)
    slow = Pause(forward=1e9, backward=1e9, cycles=1e9)
    assert slow.seconds(q, k, Scoring(1.0), True) == pytest.approx(2 * q.nbytes / 40e9)


def _over_ranks(rank: int, world: int, tokens: int, cp: bool) -> None:
    ranks = RowRanks(cp=dist.group.WORLD) if cp else RowRanks(sp=dist.group.WORLD)
    layout = lay_out([tokens], ranks.sizes[0], sp_size=ranks.sizes[1])
    plan = ContextPlan.of(layout, Mask(), ranks, "cpu")
    slots = layout.shard_tokens // ranks.sizes[1]
    q, k, v, out, d_out = (torch.randn(slots, heads, 16) for heads in (4, 2, 2, 4, 4))
    stand_in = StandIn(TiledMath())
    began: list[str] = []

    def seen(name):
        inner = getattr(dist, name)
        return patch.object(dist, name, lambda *given, **named: (began.append(name), inner(*given, **named))[1])

    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    with seen(gather), seen("all_to_all_single"):
        on_its_way, lse = plan.attend(plan.start(q, k, v), Scoring(scale=1.0), kernels=(stand_in,))
        got = on_its_way.land()
        going = plan.attend_backward(plan.start(q, k, v, out, d_out), lse, Scoring(scale=1.0), kernels=(stand_in,))
        gradients = going.land()
    assert [each.shape for each in (got, *gradients)] == [each.shape for each in (q, q, k, v)]
    assert not any(bool(each.any()) for each in (got, *gradients)), "zeros everywhere"
    assert stand_in.calls == [len(plan.calls)] * 2
    assert (gather in began) == cp
    assert "all_to_all_single" in began, "gradients or heads travel"


def test_stand_ins_take_the_real_kernels_place_on_many_ranks():
    """Every exchange runs; the kernels do not."""
    run_ranks(2, [(_over_ranks, (40, True)), (_over_ranks, (40, False))])
