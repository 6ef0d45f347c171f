"""Attention that is rehearsed: every tensor that the real kernel allocates, none of its arithmetic.

At a million tokens of an 8B model attention is 1,900 of a step's 2,000 seconds, but none of the step's memory that could not be
had without it. So a rehearsal puts a stand-in before each kernel that `install` left on the model's layers. It is chosen as the
real one would be, and takes from the same allocator what that one takes: the output and its log-sum-exp, the three gradients,
and the scratch that lives only inside a call. Of the peak of a layer's backward that scratch is a large part: FlashAttention 4
sums dq, dk and dv in fp32, 26 GB at a million tokens of 32 heads of 128 over 8 KV heads. All results are zeros, so whatever
follows stays finite and the optimizer steps.

What a kernel allocates was read in its source: FlashAttention 4 in `flash_attn/cute/interface.py` of flash-attn-4 4.0.0b36,
FlashAttention 2 in torch's `flash_api.cpp`. cuDNN's source is closed: its workspace is taken to be dq in fp32 and two numbers
for each query and head; `benchmarks/rehearse.py` compares it with real steps.

Copies to and from the host hide behind attention. For a step whose copies are to be timed, a `Pause` leaves the device waiting
in attention's place: for as long as attention would take, but no longer than copies could need it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from megaspan.attention.cudnn import CuDNN
from megaspan.attention.flash2 import Flash2
from megaspan.attention.flash4 import Flash4
from megaspan.attention.kernel import Case, Given, Kernel, Refusal, Scoring
from megaspan.attention.mask import Mask
from megaspan.attention.segments import Segments
from megaspan.attention.tiled import TiledMath

# Bytes a second that a host link reaches at least; 53e9 was measured on an H200.
_SLOW_LINK = 40e9


@dataclass(frozen=True)
class Pause:
    """How long the device waits in attention's place.

    Attributes:
        forward: operations a second of the real kernel, forward.
        backward: and backward.
        cycles: clock cycles of the device a second.
        beside: bytes that cross the link beside each call of a layer's backward, besides its share of input and output.
    """

    forward: float
    backward: float
    cycles: float
    beside: int = 0

    def seconds(
        self,
        q_tHD: Tensor,
        k_sGD: Tensor,
        scoring: Scoring,
        backward: bool,
        segments: Segments | None = None,
        reads: bool = False,
    ) -> float:
        """Seconds of a call, cut at what its share of a layer's input and output takes over a slow link: twice its queries.

        With `reads`, where the layer's backward is at work, and `beside`.
        """
        t, s = q_tHD.shape[0], k_sGD.shape[0]
        pairs = visible_pairs(t, s, scoring.window) if segments is None else segments.visible_pairs(scoring.window)
        operations = 4.0 * q_tHD.shape[1] * q_tHD.shape[2] * pairs
        seconds = 2.5 * operations / self.backward if backward else operations / self.forward
        return min(seconds, (2 * q_tHD.nbytes + self.beside * reads) / _SLOW_LINK)


@final
class StandIn(Kernel):
    """Takes the cases of a real kernel, and its memory, and returns zeros.

    Args:
        real: the kernel it stands in for.
        pause: how long the device waits in a call; None for not at all.

    Attributes:
        calls: forward and backward calls so far.
        paused: seconds that the device was told to wait so far.
        reads: a layer's backward is at work, which reads its input; whoever hears of it says so.
    """

    def __init__(self, real: Kernel, pause: Pause | None = None) -> None:
        self.real, self.pause = real, pause
        self.name, self.max_elements = real.name, real.max_elements
        self.calls = [0, 0]
        self.paused = 0.0
        self.reads = False

    def installed(self) -> bool:
        """As the real kernel."""
        return self.real.installed()

    def limit(self, segments: Segments | None) -> int | None:
        """As the real kernel."""
        return self.real.limit(segments)

    def segment_padding(self, device: torch.device) -> int:
        """As the real kernel."""
        return self.real.segment_padding(device)

    def refusal(self, case: Case) -> Refusal | None:
        """As the real kernel."""
        return self.real.refusal(case)

    def forward(
        self, q_tHD: Tensor, k_sGD: Tensor, v_sGD: Tensor, scoring: Scoring, segments: Segments | None = None
    ) -> tuple[Tensor, Tensor]:
        """Zeros in the place of output and log-sum-exp, see `Kernel.forward`."""
        self.calls[0] += 1
        t, heads, size = q_tHD.shape
        scratch = [q_tHD.new_empty(shape, dtype=dtype) for shape, dtype in self._scratch(q_tHD, k_sGD, segments, False)]
        out, lse = q_tHD.new_zeros(t, heads, size), q_tHD.new_zeros(heads, t, dtype=_sum_dtype(q_tHD))
        self._wait(q_tHD, k_sGD, scoring, False, segments)
        del scratch
        return out, lse

    def backward(
        self,
        d_out_tHD: Tensor,
        q_tHD: Tensor,
        k_sGD: Tensor,
        v_sGD: Tensor,
        out_tHD: Tensor,
        lse_Ht: Tensor,
        scoring: Scoring,
        segments: Segments | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Zeros in the place of the three gradients, see `Kernel.backward`."""
        return self._backward(q_tHD, k_sGD, v_sGD, lse_Ht, scoring, segments)

    @override
    def backward_into(
        self, into: tuple[Tensor, Tensor, Tensor], given: Given, scoring: Scoring, segments: Segments | None = None
    ) -> None:
        """The same there; of kernels that write into tensors of their own those are here too."""
        _, q_tHD, k_sGD, v_sGD, _, lse_Ht = given
        in_place = type(self.real).backward_into is not Kernel.backward_into
        found = self._backward(q_tHD, k_sGD, v_sGD, lse_Ht, scoring, segments, into if in_place else None)
        for place, gradient in zip(into, found, strict=True):
            if place is not gradient:
                place.copy_(gradient)

    def _backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse_Ht: Tensor,
        scoring: Scoring,
        segments: Segments | None,
        into: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.calls[1] += 1
        lse = lse_Ht.contiguous()  # as every real kernel asks for it
        scratch = [q.new_empty(shape, dtype=dtype) for shape, dtype in self._scratch(q, k, segments, True)]
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v)) if into is None else (x.zero_() for x in into)
        self._wait(q, k, scoring, True, segments)
        del scratch, lse
        return dq, dk, dv

    def _scratch(self, q: Tensor, k: Tensor, segments: Segments | None, backward: bool) -> list[Shape]:
        capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (0, 0)
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 0
        deterministic = torch.are_deterministic_algorithms_enabled()
        sizes = q.shape[0], k.shape[0], q.shape[1], k.shape[1], q.shape[2]
        call = Call(*sizes, q.dtype, capability[0], processors, deterministic, len(segments) if segments is not None else 0)
        return scratch_of(self.real, call, backward)

    def _wait(self, q_tHD: Tensor, k_sGD: Tensor, scoring: Scoring, backward: bool, segments: Segments | None) -> None:
        if self.pause is not None and q_tHD.is_cuda:
            seconds = self.pause.seconds(q_tHD, k_sGD, scoring, backward, segments, self.reads)
            torch.cuda._sleep(int(seconds * self.pause.cycles))
            self.paused += seconds


def skip_attention(model: nn.Module, pause: Pause | None = None) -> tuple[StandIn, ...]:
    """Puts a stand-in before every kernel of a model that `install` has been through; `unprepare` takes them off again.

    Returns:
        The stand-ins, one for each kernel.

    Raises:
        ValueError: megaspan's attention is not on the model.
    """
    stand_ins: dict[int, StandIn] = {}
    found = [module for module in model.modules() if "megaspan_kernels" in module.__dict__]
    if not found:
        raise ValueError("the model has no attention of megaspan's to skip")
    for module in found:
        kernels: tuple[Kernel, ...] = module.__dict__["megaspan_kernels"]
        real = [kernel.real if isinstance(kernel, StandIn) else kernel for kernel in kernels]
        module.__dict__["megaspan_kernels"] = tuple(stand_ins.setdefault(id(one), StandIn(one, pause)) for one in real)
    return tuple(stand_ins.values())


def cycles_per_second(device: torch.device) -> float:
    """Clock cycles a second of a CUDA device, measured."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 20_000_000
    with torch.cuda.device(device):
        for _ in range(2):  # the first wakes the clock
            began.record()
            torch.cuda._sleep(cycles)
            ended.record()
            ended.synchronize()
    return cycles / (began.elapsed_time(ended) / 1e3)


def visible_pairs(queries: int, keys: int, window: int | None) -> int:
    """Pairs of a query and a key that it sees; the queries are the last of the keys."""
    return int(Mask(window).visible_pairs(np.array([keys - queries]), np.array([keys]))[0])


# What kernels allocate inside a call.

Shape = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Call:
    """Sizes of one call.

    Attributes:
        t: queries.
        s: keys.
        heads: query heads.
        groups: KV heads.
        size: head size.
        dtype: of q, k and v.
        major: first number of the device's compute capability, 0 on a CPU.
        processors: the device's multiprocessors, 0 on a CPU.
        deterministic: sums in a fixed order.
        segments: segments of a call of variable lengths: each begins a tile of its own in the sums. 0 for other calls.
    """

    t: int
    s: int
    heads: int
    groups: int
    size: int
    dtype: torch.dtype
    major: int
    processors: int = 0
    deterministic: bool = False
    segments: int = 0


def scratch_of(kernel: Kernel, call: Call, backward: bool) -> list[Shape]:
    """Shapes and types of what a kernel holds inside a call beside its arguments and results; empty where nothing is known."""
    formula = _FORMULAS.get(type(kernel))
    return formula(call, backward) if formula is not None else []


def _flash4(call: Call, backward: bool) -> list[Shape]:
    if not backward:
        return []
    rows, columns, multiple = _flash4_tile(call)
    t, size = _up(call.t + call.segments * rows, rows), _up(call.size, multiple)
    # Dot products of output and gradient, and the log-sum-exp to base 2.
    shapes: list[Shape] = [((call.heads, t), torch.float32)] * 2
    if call.major == 10 and call.size == 256:  # a kernel of its own, without sums in memory
        return shapes
    tile = 2 * columns if call.major == 10 and call.size >= 128 else columns  # two thread blocks share a tile
    s = _up(call.s + call.segments * tile, tile)
    shapes.append(((call.heads, t * size), torch.float32))
    shared = call.heads > call.groups
    if shared:
        shapes += [((call.groups, s * size), torch.float32)] * 2
    if call.deterministic:
        shapes.append(((call.heads, t // rows, 2), torch.int32))
        shapes += [((call.groups, s // columns, 2), torch.int32)] * (2 * shared)
    return shapes


def _flash4_tile(call: Call) -> tuple[int, int, int]:
    """Queries and keys of a tile of the backward, and what the head size is rounded up to."""
    if call.major != 9:
        return 128, 128, 32
    if call.size <= 64:
        return 128, 128, 32
    if call.size <= 128:
        return 64, 128, 32
    return 64, 96 if call.size <= 192 else 48, 64


def _flash2(call: Call, backward: bool) -> list[Shape]:
    if not backward:
        return []
    t, size = call.t + 128 * max(1, call.segments), _up(call.size, 32 if call.size <= 128 else 64)
    # In a fixed order every group of processors sums dq in a tensor of its own.
    sums = -(-call.processors // call.heads) if call.deterministic else 1
    shapes: list[Shape] = [((call.heads, t), torch.float32), ((sums, t, call.heads, size), torch.float32)]
    if call.heads > call.groups:  # keys and values get a gradient for each query head first
        shapes += [((call.s, call.heads, call.size), call.dtype)] * 2
    return shapes


def _cudnn(call: Call, backward: bool) -> list[Shape]:
    t = _up(call.t, 128)
    padded: list[Shape] = []
    if t != call.t:  # the adapter pads: q, k, v, and in the backward the output and its gradient
        padded = [((t, call.heads, call.size), call.dtype)] * (3 if backward else 1)
        padded += [((t, call.groups, call.size), call.dtype)] * 2
    if not backward:
        return padded
    sums: list[Shape] = [((call.heads, t), torch.float32)] * 2 + [((t, call.heads, call.size), torch.float32)]
    return padded + sums


def _tiled(call: Call, backward: bool) -> list[Shape]:
    sums = torch.float64 if call.dtype == torch.float64 else torch.float32
    tile = min(TiledMath().tile_elements, call.heads * call.t * call.s)
    tiles: list[Shape] = [((tile,), sums)] * (3 if backward else 2)
    return [*tiles, *([((call.groups, call.s, call.size), sums)] * 2 if backward else [])]


_FORMULAS: dict[type[Kernel], Callable[[Call, bool], list[Shape]]] = {
    Flash4: _flash4, Flash2: _flash2, CuDNN: _cudnn, TiledMath: _tiled,
}  # fmt: skip


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
