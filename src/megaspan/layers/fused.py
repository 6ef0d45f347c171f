"""The element-wise work of a decoder layer as fused passes: q/k norm with rotary embedding, and the gated product of the MLP.

Written out in torch's operations, as transformers does, this work moves each element through memory five to ten times more
often than it must: measured on one H200, rotary embedding and q/k norms take 53 ms of a 4B layer at 131,072 tokens, where one
pass over q and k, three times forward and once back, is 4 ms. Each formula stands here once, as plain torch. On a GPU
`torch.compile` makes one kernel of it and one of its derivative; elsewhere the formula itself runs, with the bits of the module
that it stands for. A compiler that fails costs speed, never the run: the formula runs, and `Fused.reason` says why.

Only the number of tokens is left open to the compiler (R32: rows and tiles of any length share one compilation); heads, head
size and everything else are constants in the kernel.

Source: rotary embedding arXiv:2104.09864, RMSNorm arXiv:1910.07467, gated linear units arXiv:2002.05202.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class RmsNorm:
    """Which RMSNorm a module computes.

    Attributes:
        epsilon: added to the mean square.
        form: "plain" rounds to the input's dtype, then multiplies by the weight (Llama, Qwen); "late" multiplies, then rounds
            (OLMo 2); "plus one" multiplies by one plus the weight in fp32, then rounds (Gemma).
    """

    epsilon: float
    form: str


FORMS = ("plain", "late", "plus one")
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu")


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, form: str) -> Tensor:
    """RMSNorm over the last dimension in one of `FORMS`."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    if form == "plus one":
        return (wide * (1.0 + weight.float())).to(x.dtype)
    return (weight * wide).to(x.dtype) if form == "late" else weight * wide.to(x.dtype)


def activate(x: Tensor, activation: str) -> Tensor:
    """One of `ACTIVATIONS`."""
    if activation == "silu":
        return F.silu(x)
    if activation == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def norm_and_rotate(
    q_tHD: Tensor,
    k_tGD: Tensor,
    cos_tD: Tensor,
    sin_tD: Tensor,
    q_weight_D: Tensor | None,
    k_weight_D: Tensor | None,
    epsilon: float,
    form: str,
    dtype: torch.dtype,
    q_into: Tensor | None,
    k_into: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """q and k [..., t, heads, D], normed if there are weights, rotated by halves, in `dtype`; or written to q_into, k_into."""
    half = cos_tD.shape[-1] // 2
    cos = cos_tD.unsqueeze(-2)
    # rotate_half(x) * sin is x rolled by half a head, times sin with its first half negated: no second copy of x.
    sin = torch.cat((-sin_tD[..., :half], sin_tD[..., half:]), dim=-1).unsqueeze(-2)
    found = []
    for x, weight, into in ((q_tHD, q_weight_D, q_into), (k_tGD, k_weight_D, k_into)):
        x = x if weight is None else rms_norm(x, weight, epsilon, form)
        x = (x * cos + torch.roll(x, half, -1) * sin).to(dtype)
        found.append(x if into is None else into.copy_(x))
    return found[0], found[1]


def gated(gate_tF: Tensor, up_tF: Tensor, activation: str) -> Tensor:
    """The gated MLP's inner product: act(gate) * up."""
    return activate(gate_tF, activation) * up_tF


@final
class Fused:
    """The formulas above, compiled where that pays.

    Args:
        devices: device types on which they are compiled; on others the formulas run as they stand.
    """

    def __init__(self, devices: Sequence[str] = ("cuda",)) -> None:
        self.reason: str | None = None
        self._devices = tuple(devices)
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}

    @property
    def compiled(self) -> int:
        """How many of the formulas run compiled."""
        return 0 if self.reason else len(self._compiled)

    def compiles_on(self, device: torch.device) -> bool:
        """Whether the formulas are compiled on this device, as far as is known."""
        return self.reason is None and device.type in self._devices

    def norm_and_rotate(
        self,
        q_BtHD: Tensor,
        k_BtGD: Tensor,
        tables: tuple[Tensor, Tensor],
        weights: tuple[Tensor, Tensor] | None,
        norm: RmsNorm | None,
        dtype: torch.dtype,
        into: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        """q and k [batch, t, heads, D] for attention; tables cos, sin are [1 or batch, t, D]; `into` takes the results."""
        if tables[0].shape[0] == 1:  # a leading 1 would bring a stride that changes with the row
            tables = tables[0][0], tables[1][0]
        single = q_BtHD.shape[0] == 1 and tables[0].ndim == 2
        q, k = (q_BtHD[0], k_BtGD[0]) if single else (q_BtHD, k_BtGD)
        places = (None, None) if into is None else (into[0][0], into[1][0]) if single else into
        epsilon, form = (norm.epsilon, norm.form) if norm else (0.0, "")
        arguments = (q, k, *tables, *(weights or (None, None)), epsilon, form, dtype, *places)
        open_dims = [(part, part.ndim - 3) for part in (q, k, *places) if part is not None]
        q, k = self.run(norm_and_rotate, arguments, open_dims + [(table, table.ndim - 2) for table in tables])
        return (q[None], k[None]) if single else (q, k)

    def gated(self, gate_BtF: Tensor, up_BtF: Tensor, activation: str) -> Tensor:
        """act(gate) * up, [batch, t, MLP width]."""
        shape = gate_BtF.shape
        gate, up = gate_BtF.flatten(0, -2), up_BtF.flatten(0, -2)
        result: Tensor = self.run(gated, (gate, up, activation), [(gate, 0), (up, 0)])
        return result.view(shape)

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...], open_dims: list[tuple[Tensor, int]]) -> Any:
        """A formula of plain torch operations, compiled where that pays; also one that stands in another file (`dropout.py`).

        Args:
            function: the formula.
            arguments: its arguments, a tensor first.
            open_dims: tensors among them with the dim that is left open to the compiler: their number of tokens.
        """
        device, (first, dim) = arguments[0].device, open_dims[0]
        # The compiler makes a length of one a constant: it would compile everything again for it.
        if first.shape[dim] < 2 or not self.compiles_on(device):
            return function(*arguments)
        try:
            # These formulas say themselves where they round: one compilation serves with and without autocast.
            with torch.autocast(device.type, enabled=False):
                from torch._dynamo import maybe_mark_dynamic

                for tensor, dim in open_dims:
                    maybe_mark_dynamic(tensor, dim)
                if function not in self._compiled:
                    self._compiled[function] = torch.compile(function, fullgraph=True)
                return self._compiled[function](*arguments)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # no compiler, no Triton, a bug in either: the formula gives the same result
            self.reason = (
                f"not compiled: {type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error) else ''}"
            )
            return function(*arguments)
