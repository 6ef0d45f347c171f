"""Tiles of tokens, and gradients summed over them.

Everything in a decoder layer but attention works token by token, so it can run on 8,192 tokens at a time: the four MLP
tensors of an 8B model are 103 GB at 1,048,576 tokens and 0.8 GB on a tile. What must not suffer is the sum of the weight
gradients: adding 128 tiles in bf16 loses the small ones, so sums are fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module keeps somebody's hooks."""

# Rows of a matrix product in multiples of this keep the tensor cores full; only the last tile is uneven.
_MULTIPLE = 128


def tiles(tokens: int, tile_tokens: int) -> list[slice]:
    """Slices that cover `tokens`, none longer than `tile_tokens`, as equal as they can be: no tile of three tokens at the
    end."""
    count = -(-tokens // tile_tokens)
    size = -(-tokens // count)
    if tile_tokens % _MULTIPLE == 0:
        size = -(-size // _MULTIPLE) * _MULTIPLE
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def together(cuts: Sequence[slice], *rows: Iterable[Tensor]) -> Iterator[tuple[Any, ...]]:
    """Each cut with its tile of every row. `zip` holds the tiles that it gave until it has the next: three of each, not two."""
    each = [iter(row) for row in rows]
    for tokens in cuts:
        yield tokens, *[next(row) for row in each]


def hooked(module: nn.Module) -> bool:
    """Whether somebody's hook is on this very module.

    Those with which transformers collects outputs are not counted. They stay on a model for good after one call that asks for
    any (`output_router_logits`); a call that asks for attention's does not stream.
    """
    hooks = [hook for name in HOOKS for hook in getattr(module, name).values()]
    return any(getattr(hook, "__module__", "") != "transformers.utils.output_capturing" for hook in hooks)


def hooks_inside(module: nn.Module) -> str | None:
    """Where inside a module somebody's hook is, in words; None where there is none. Those of the module itself see its rows.

    In tiles a hook of a module inside would see each tile, in the forward and again in the backward, where it sees whole rows
    in plain transformers; one of a parameter's gradient would run for each tile, and for their sum again.
    """
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks:
            return f"a hook on the gradient of {name} is to run once"
    for name, each in module.named_modules():
        if each is not module and hooked(each):
            return f"a hook on {name} is to see whole rows"
    return None


def want_gradients(values: Iterable[object]) -> bool:
    """Whether a gradient is to go to one of the values or of what they hold, as to cos and sin of a trained rotary module."""
    given = [each for value in values for each in (value if isinstance(value, tuple | list) else (value,))]
    return any(isinstance(each, Tensor) and each.requires_grad for each in given)


def random_states(device: torch.device) -> list[Tensor]:
    """The states of the generators that code on this device draws from, to be compared."""
    there = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *there]


def drew(before: list[Tensor], device: torch.device) -> bool:
    """Whether anything was drawn since `random_states(device)` gave `before`."""
    return any(not torch.equal(was, now) for was, now in zip(before, random_states(device), strict=True))


@final
class GradientSums:
    """Gradients of some parameters, summed over tiles in fp32 (fp64 for fp64).

    Args:
        parameters: in the order in which gradients come and go.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._sums: list[Tensor | None] = [None] * len(parameters)
        self._added = [0] * len(parameters)

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Adds one tile's gradients; None is no gradient."""
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            total = self._sums[index]
            if total is None:
                self._sums[index] = gradient  # a single tile needs no fp32 copy
            elif self._added[index] == 1:
                self._sums[index] = total.to(torch.promote_types(total.dtype, torch.float32)) + gradient
            else:
                total.add_(gradient)
            self._added[index] += 1

    def take(self) -> list[Tensor | None]:
        """The sums in the dtype each parameter takes gradients in; this object lets go of them."""
        taken: list[Tensor | None] = []
        for index, parameter in enumerate(self._parameters):
            total, self._sums[index] = self._sums[index], None
            taken.append(None if total is None else total.to(getattr(parameter, "grad_dtype", None) or parameter.dtype))
        return taken


@contextmanager
def drawing(seed: int | None, device: torch.device) -> Iterator[None]:
    """Random numbers from `seed` inside, the generators as they were afterwards; without a seed nothing happens.

    A tile that is computed twice must drop the same entries twice, and tiles run in another order in the backward: so each
    tile's numbers depend on its seed alone.
    """
    if seed is None:
        yield
        return
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for each in devices:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(seed)
        yield
