"""A module that works token by token, run in tiles: the norm between the last layer and the head.

transformers' RMSNorm of a whole row makes fp32 copies: at 1,048,576 tokens of an 8B model 40 GiB around a norm whose input and
output have 8 each, more than a streamed layer needs. In tiles it needs these two alone, and the gradient of its input takes the
place of the incoming one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from megaspan.layers.reuse import Reuse
from megaspan.layers.tile import GradientSums, tiles


def tile_final_norm(model: nn.Module, tile_tokens: int, reuse: Reuse) -> nn.Module | None:
    """Runs the norm behind the last layer in tiles; the changed module, or None where there is not exactly one.

    Its `forward` is set on the module's `__dict__`; take it from there to undo this.
    """
    language_model = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    backbone = None if language_model is None else language_model.get_decoder()
    norms = [] if backbone is None else [each for each in backbone.children() if type(each).__name__.endswith("Norm")]
    if len(norms) != 1 or "forward" in norms[0].__dict__:
        return None
    (norm,) = norms
    norm.__dict__["forward"] = functools.partial(_forward, norm, tile_tokens, reuse)
    return norm


def _forward(module: nn.Module, tile_tokens: int, reuse: Reuse, x_BTE: Tensor) -> Tensor:
    own = functools.partial(type(module).forward, module)
    if x_BTE.ndim != 3 or x_BTE.shape[1] <= tile_tokens:
        return own(x_BTE)
    cuts = tiles(x_BTE.shape[1], tile_tokens)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return _TokenWise.apply(x_BTE, own, cuts, parameters, reuse, *parameters)


class _TokenWise(torch.autograd.Function):
    """A function of each token alone, [batch, T, E] to the same shape, and its parameters' gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        function: Callable[[Tensor], Tensor],
        cuts: list[slice],
        parameters: list[Tensor],
        reuse: Reuse,
        *_: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x)
        kind = x.device.type
        ctx.autocast = {"enabled": torch.is_autocast_enabled(kind), "dtype": torch.get_autocast_dtype(kind)}
        ctx.function, ctx.cuts, ctx.parameters, ctx.reuse = function, cuts, parameters, reuse
        y: Tensor | None = None
        for tokens in cuts:
            tile = function(x[:, tokens])
            y = tile.new_empty(x.shape) if y is None else y
            y[:, tokens] = tile
        assert y is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        mine = ctx.reuse.allows(gradients)
        (dy,), (x,), parameters = gradients, ctx.saved_tensors, ctx.parameters
        sums = GradientSums(parameters)
        wants_x = ctx.needs_input_grad[0]
        dx = (dy if mine and dy.dtype == x.dtype else torch.empty_like(x)) if wants_x else None
        for tokens in ctx.cuts:
            tile = x[:, tokens].detach().requires_grad_(wants_x)
            with torch.enable_grad(), torch.autocast(x.device.type, cache_enabled=False, **ctx.autocast):
                out = ctx.function(tile)
            leaves = [tile, *parameters] if wants_x else parameters
            found = list(torch.autograd.grad(out, leaves, dy[:, tokens], allow_unused=True)) if leaves else []
            if dx is not None:
                dx[:, tokens] = found.pop(0)
            sums.add(found)
        return (dx, None, None, None, None, *sums.take())
