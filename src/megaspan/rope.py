"""Rotary positions of the live model: what it really computes with, read back and checked against the published recipe.

A configuration can say YaRN while the model rotates by something else: after a meta-device load the frequency buffer is
uninitialised memory, `model.to(torch.bfloat16)` rounds it to 8 bits (a million positions then collapse to 1,793 phases), a lost
`rope_theta` falls back to 10,000. None of these raises; the first loss is about 10 instead of 4.3. So the buffers are read from
the module that the layers call, and compared with a fresh fp32 computation of the same settings by transformers.

Two kinds of scaling have tables that depend on the longest position of a call (`tables_of_row`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megaspan.human import UserError
from megaspan.plan.rope_math import RopeChoice, resolve_rope, yarn_attention_factor

if TYPE_CHECKING:
    import torch

__all__ = [
    "RopeChoice",
    "RopeEntry",
    "RopeReadback",
    "read_back",
    "require_exact",
    "resolve_rope",
    "tables_of_row",
    "yarn_attention_factor",
]

_FULL = "full_attention"
# The table is recomputed on the CPU in fp32; a GPU's own power function differs from it in the last bits.
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class RopeEntry:
    """One rotary table of a live model.

    Attributes:
        name: the module's path in the model.
        layer_type: the layers that use it, or None for all.
        rope_type: the kind of scaling.
        theta: the base frequency: the configuration's when the table is `exact`, else what its first two values imply.
        factor: how many times slower than unscaled the slowest frequency turns.
        attention_factor: the number that cos and sin are multiplied by.
        dtype: the table's type as text.
        first, last: the fastest and slowest frequency in radians a token.
        exact: the live table equals the fp32 recomputation of its own configuration.
    """

    name: str
    layer_type: str | None
    rope_type: str
    theta: float
    factor: float
    attention_factor: float
    dtype: str
    first: float
    last: float
    exact: bool

    def __str__(self) -> str:
        which = f" ({self.layer_type})" if self.layer_type else ""
        state = "equals its configuration" if self.exact else "DIFFERS from its configuration"
        return (
            f"{self.rope_type}{which}: theta {self.theta:,.0f}, factor {self.factor:.4g}, "
            f"attention {self.attention_factor:.4f}, inv_freq {self.dtype} {self.first:.4g} … {self.last:.4g}, {state}"
        )


@dataclass(frozen=True)
class RopeReadback:
    """Every rotary table of a live model; the properties speak of the layers that attend to everything."""

    entries: tuple[RopeEntry, ...]

    @property
    def main(self) -> RopeEntry:
        """The table of the full-attention layers."""
        return next((entry for entry in self.entries if entry.layer_type in (None, _FULL)), self.entries[0])

    @property
    def theta(self) -> float:
        """Base frequency."""
        return self.main.theta

    @property
    def factor(self) -> float:
        """Scaling factor of the slowest frequency."""
        return self.main.factor

    @property
    def attention_factor(self) -> float:
        """Factor on cos and sin."""
        return self.main.attention_factor

    @property
    def first(self) -> float:
        """Fastest frequency."""
        return self.main.first

    @property
    def last(self) -> float:
        """Slowest frequency."""
        return self.main.last

    @property
    def dtype(self) -> str:
        """Type of the table."""
        return self.main.dtype

    @property
    def exact(self) -> bool:
        """Whether every table equals the recomputation of its configuration."""
        return all(entry.exact for entry in self.entries)

    def __str__(self) -> str:
        return "; ".join(str(entry) for entry in self.entries) if self.entries else "no rotary module"


def read_back(model: torch.nn.Module) -> RopeReadback:
    """Read every rotary table of the live model. Models without one give an empty read-back."""
    entries: list[RopeEntry] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if config is None or getattr(config, "rope_parameters", None) is None or id(module) in seen:
            continue
        seen.add(id(module))
        for buffer, table in module.named_buffers(recurse=False):
            if buffer == "inv_freq" or (buffer.endswith("_inv_freq") and "original" not in buffer):
                layer_type = None if buffer == "inv_freq" else buffer.removesuffix("_inv_freq")
                entries.append(_entry(name, module, config, layer_type, table))
    return RopeReadback(tuple(entries))


def require_exact(readback: RopeReadback) -> RopeReadback:
    """Stop before step 1 when the live model does not rotate by its own configuration.

    Raises:
        UserError: a table differs from the fp32 recomputation.
    """
    for entry in readback.entries:
        if not entry.exact:
            raise UserError(
                f"the rotary table {entry.name} of the loaded model is not what its configuration says",
                found=str(entry),
                do="Load the model with from_pretrained or from_config, and cast it by dtype= there, not by model.to(dtype)",
            )
    return readback


@contextmanager
def tables_of_row(model: torch.nn.Module, longest: int | None = None) -> Iterator[None]:
    """Inside, tables that depend on the longest position of a call are those of one row, and of nothing that ran before.

    `longrope` takes its long factors where a call has a position past the original window; `dynamic` makes its base from the
    longest position, and keeps it for shorter rows that come later. Of a shard's positions each rank would make tables of its
    own, and after other rows than before (another number of data ranks, a resumed run) the same row would have other ones.

    Args:
        model: a transformers model, or one around it.
        longest: the longest position in the whole row, where the calls inside see a part of it; None where they see all.
    """
    changed = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        by_layer = isinstance(kinds, dict)
        kinds = kinds if isinstance(kinds, dict) else {None: kinds}
        if not any(_by_length(kind) for kind in kinds.values()):
            continue
        for layer_type, kind in kinds.items():
            if "dynamic" in str(kind):
                _forget(module, f"{layer_type}_" if by_layer else "")
        if longest is not None and "forward" not in module.__dict__:
            module.__dict__["forward"] = functools.partial(_with_longest, module.forward, longest)
            changed.append(module)
    try:
        yield
    finally:
        for module in changed:
            del module.__dict__["forward"]


def _by_length(kind: Any) -> bool:
    """As transformers tells them apart."""
    return isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")


def _forget(module: Any, prefix: str) -> None:
    """Puts a table of the kind `dynamic` back to what it is before the first call."""
    original: torch.Tensor = getattr(module, f"{prefix}original_inv_freq")
    current: torch.Tensor = getattr(module, f"{prefix}inv_freq")
    module.register_buffer(f"{prefix}inv_freq", original.to(current.device, copy=True), persistent=False)
    setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def _with_longest(
    own: Callable[..., Any], longest: int, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """The tables of positions [batch, tokens] in a row whose longest position stands elsewhere: one token more, cut off."""
    import torch

    tokens = position_ids.shape[-1]
    more = torch.nn.functional.pad(position_ids, (0, 1), value=longest)
    tables = own(x, more, *args, **kwargs)
    return tables.narrow(1, 0, tokens) if isinstance(tables, torch.Tensor) else tuple(t.narrow(1, 0, tokens) for t in tables)


def _entry(name: str, module: Any, config: Any, layer_type: str | None, table: torch.Tensor) -> RopeEntry:
    import torch

    settings = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
    kind = str(settings["rope_type"])
    prefix = f"{layer_type}_" if layer_type else ""
    live = table.detach().to("cpu", torch.float64)
    scale = float(getattr(module, f"{prefix}attention_scaling", 1.0))
    exact = table.dtype == torch.float32 and any(
        expected.shape == live.shape
        and torch.allclose(live, expected.double(), rtol=_TOLERANCE, atol=0.0)
        and abs(scale - attention) <= _TOLERANCE * attention
        for expected, attention in _recomputed(module, config, kind, layer_type)
    )
    dims = 2 * live.numel()
    theta = float(settings["rope_theta"])
    if not exact:
        ratio = float(live[1] / live[0]) if live.numel() > 1 else float("nan")
        theta = ratio ** (-dims / 2) if ratio > 0 else float("nan")
    last = float(live[-1])
    unscaled_last = theta ** (-(dims - 2) / dims)
    factor = unscaled_last / last if last else float("inf")
    return RopeEntry(
        name, layer_type, kind, theta, factor, scale, str(table.dtype).removeprefix("torch."), float(live[0]), last, exact
    )


def _recomputed(module: Any, config: Any, kind: str, layer_type: str | None) -> list[tuple[torch.Tensor, float]]:
    """The tables that these settings can give, in fp32 on the CPU: two for longrope, which switches by length."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    where: dict[str, Any] = {"layer_type": layer_type} if layer_type else {}
    cpu = torch.device("cpu")
    with cpu:
        if kind == "default":
            return [module.compute_default_rope_parameters(config, **where)]
        settings = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
        lengths: list[int | None] = [None]
        if kind == "longrope":
            lengths.append(int(settings["original_max_position_embeddings"]) + 1)
        elif kind == "dynamic":
            lengths.append(int(module.max_seq_len_cached))
        return [ROPE_INIT_FUNCTIONS[kind](config, cpu, seq_len=length, **where) for length in lengths]
