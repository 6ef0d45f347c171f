"""A module that works token by token, run in tiles: the norm between the last layer and the head, an MLP (`tiled_mlp.py`).

transformers' RMSNorm of a whole row makes fp32 copies: at 1,048,576 tokens of an 8B model 40 GiB around a norm whose input and
output have 8 each, more than a streamed layer needs. In tiles it needs these two alone, and the gradient of its input takes the
place of the incoming one where nobody else reads that. Whether it works token by token is tried (`tokentrial.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from megaspan.layers.reuse import Reuse
from megaspan.layers.shards import local
from megaspan.layers.tile import GradientSums, hooks_inside, tiles
from megaspan.layers.tokentrial import why_not

OnTile: TypeAlias = Callable[[Tensor, slice], Tensor]
"""A function of some tokens [batch, n, E] to the same shape, told which tokens of the row they are."""


def tile_final_norm(model: nn.Module, tile_tokens: int, reuse: Reuse) -> nn.Module | str:
    """Runs the norm behind the last layer in tiles; the changed module, or why none is.

    Its `forward` is set on the module's `__dict__`; take it from there to undo this.
    """
    language_model = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    backbone = None if language_model is None else language_model.get_decoder()
    norms = [] if backbone is None else [each for each in backbone.children() if type(each).__name__.endswith("Norm")]
    if language_model is None or len(norms) != 1:
        return f"the model has {len(norms)} norms behind its layers"
    (norm,) = norms
    width = language_model.config.get_text_config().hidden_size
    like = next((parameter for parameter in norm.parameters()), next(model.parameters()))
    reason = why_not(norm, width, local(like), set())
    if reason is not None:
        return f"{type(norm).__name__} {reason}"
    norm.__dict__["forward"] = functools.partial(_forward, norm, tile_tokens, reuse)
    return norm


def by_tiles(x_BTE: Tensor, function: OnTile, tile_tokens: int, parameters: Sequence[Tensor], reuse: Reuse) -> Tensor:
    """`function` of the row, [batch, T, E], in tiles forward and backward; differentiable by the row and by `parameters`.

    Inside a checkpoint the row is saved before `function` runs: a second run, for the backward, that needs nothing behind it
    stops there, and each tile is computed again once, in its own backward.

    Args:
        x_BTE: the row.
        function: works token by token, and gives the same whenever it is called.
        tile_tokens: most tokens of a tile.
        parameters: all that `function` reads and that want a gradient.
        reuse: tells whether the memory of the incoming gradient is free.
    """
    saved = None
    if torch.is_grad_enabled() and x_BTE.requires_grad:
        x_BTE = _Saved.apply(x_BTE)
        saved = x_BTE.grad_fn
    cuts = tiles(x_BTE.shape[1], tile_tokens)
    result: Tensor = _TokenWise.apply(x_BTE, saved, function, cuts, parameters, reuse, *parameters)
    return result


def _forward(module: nn.Module, tile_tokens: int, reuse: Reuse, x_BTE: Tensor) -> Tensor:
    own = functools.partial(type(module).forward, module)
    if x_BTE.ndim != 3 or x_BTE.shape[1] <= tile_tokens or hooks_inside(module) is not None or _weights_made(module):
        return own(x_BTE)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    cuts = tiles(x_BTE.shape[1], tile_tokens)
    result: Tensor = _TokenWise.apply(x_BTE, None, lambda tile, _: own(tile), cuts, parameters, reuse, *parameters)
    return result


def _weights_made(module: nn.Module) -> bool:
    """Whether a weight is computed before each forward, as pruning does: its graph goes back once, not once a tile."""
    return any(isinstance(value, Tensor) and value.requires_grad for value in vars(module).values())


class _Saved(torch.autograd.Function):
    """Its input, saved: torch saves what a function asks for when its forward is over, and this one's is over at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]


class _TokenWise(torch.autograd.Function):
    """A function of each token alone, [batch, T, E] to the same shape, and its parameters' gradients.

    Its input is `saved`, by the node before it in the graph, which is still there when this one's backward runs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        saved: Any,
        function: OnTile,
        cuts: list[slice],
        parameters: Sequence[Tensor],
        reuse: Reuse,
        *_: Tensor,
    ) -> Tensor:
        if saved is None:
            ctx.save_for_backward(x)
        kind = x.device.type
        ctx.autocast = {"enabled": torch.is_autocast_enabled(kind), "dtype": torch.get_autocast_dtype(kind)}
        ctx.saved, ctx.function, ctx.cuts, ctx.parameters, ctx.reuse = saved, function, cuts, parameters, reuse
        y: Tensor | None = None
        for tokens in cuts:
            tile = function(x[:, tokens], tokens)
            y = tile.new_empty(x.shape) if y is None else y
            y[:, tokens] = tile
        assert y is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        mine = ctx.reuse.allows(gradients)
        (x,) = (ctx if ctx.saved is None else ctx.saved).saved_tensors
        (dy,), parameters = gradients, ctx.parameters
        sums = GradientSums(parameters)
        wants_x = ctx.needs_input_grad[0]
        dx = (dy if mine and dy.dtype == x.dtype else torch.empty_like(x)) if wants_x else None
        for tokens in ctx.cuts:
            tile = x[:, tokens].detach().requires_grad_(wants_x)
            with torch.enable_grad(), torch.autocast(x.device.type, cache_enabled=False, **ctx.autocast):
                out = ctx.function(tile, tokens)
            leaves = [tile, *parameters] if wants_x else parameters
            found = list(torch.autograd.grad(out, leaves, dy[:, tokens], allow_unused=True)) if leaves else []
            if dx is not None:
                dx[:, tokens] = found.pop(0)
            sums.add(found)
            del tile, out, found
        return (dx, None, None, None, None, None, *sums.take())
