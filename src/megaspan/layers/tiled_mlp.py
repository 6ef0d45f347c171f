"""The MLP of a layer that runs whole under checkpointing, in tiles of tokens.

A layer that does not stream runs again in its backward, and its MLP then holds four to seven tensors of its width for the whole
row: 76 GB for a 4B model at 1,048,576 tokens, more than all the rest of the layer. But an MLP works token by token. So its
forward is set to one that goes over tiles (`tokenwise.py`): the MLP's wide tensors are there for one tile at a time, forward
and backward, and its weight gradients are summed in fp32. It costs nothing where nothing behind the MLP is needed again (most
families): the layer's second run stops before the MLP, whose tiles then run a second time each, as they would have in it.

Nothing is believed of a class or a name. A part of a layer is taken if it holds two matrices and no attention, and if the live
module, on a few tokens, is found to work token by token (with its weights and with random ones), to draw and to choose nothing
(experts are chosen once for each run, so a mixture of experts stays whole), and to read no weights but its own. Weights are
gathered once for each run of the layer, whatever the tiles are.

Source: the tiled MLP of ALST, arXiv 2506.13996.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megaspan.attention.seam import is_attention
from megaspan.layers.dropout import DropoutHandle
from megaspan.layers.reuse import Reuse
from megaspan.layers.routing import chooses
from megaspan.layers.tile import drawing, drew, hooks_inside, random_states
from megaspan.layers.tokenwise import by_tiles

_TOKENS, _PART, _STEP = 11, 4, 3
"""Tokens of the trial, of its first part, and the step of its shuffle."""

_ROUNDINGS = {torch.float64: 1000.0, torch.float32: 1000.0}
"""Relative distance, in units of the type's resolution, that a token may have from itself in other company: kernels may add in
another order. 4 in 16 bits, where sums are wider than what is left of them."""


@final
class Tiling:
    """What the tiled MLPs of one model share.

    Args:
        tile_tokens: most tokens of a tile.
        dropout: tells dropouts where they are.

    Attributes:
        allowed: False while a layer runs that draws random numbers in its own code, which a second run of a tile would not
            draw again.
    """

    def __init__(self, tile_tokens: int, dropout: DropoutHandle) -> None:
        self.tile_tokens, self.dropout, self.reuse, self.allowed = tile_tokens, dropout, Reuse(), True

    def __deepcopy__(self, memo: dict[int, Any]) -> Tiling:
        return self  # a copied model runs its own modules, one after the other with these


@final
class TiledForward:
    """The forward of a module that works token by token, for its `__dict__`.

    Args:
        module: takes hidden states and nothing else.
        tiling: how.
    """

    def __init__(self, module: nn.Module, tiling: Tiling) -> None:
        self._module, self._tiling = module, tiling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output: in tiles for one row [1, T, E] that is longer than a tile, else as always."""
        module, tiling = self._module, self._tiling
        own = type(module).forward
        given = [*args, *kwargs.values()]
        x = given[0] if len(given) == 1 and tiling.allowed else None
        tiled = isinstance(x, Tensor) and x.ndim == 3 and x.shape[0] == 1 and x.shape[1] > tiling.tile_tokens
        if not tiled or hooks_inside(module) is not None:
            return own(module, *args, **kwargs)
        assert x is not None
        place = tiling.dropout.here

        def on_tile(tile: Tensor, tokens: slice) -> Tensor:
            with tiling.dropout.at_tile(place, tokens):
                result: Tensor = own(module, tile)
            return result

        # Read anew: a sharded layer's parameters are gathered ones now.
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return by_tiles(x, on_tile, tiling.tile_tokens, trained, tiling.reuse)


def find_mlps(layer: nn.Module, width: int, tried: set[str] | None = None) -> tuple[list[str], list[str]]:
    """Parts of a layer that can run in tiles, by name, and why other parts like them cannot.

    A sharded layer's weights are to be gathered. Runs each part on 11 tokens, without dropout.

    Args:
        layer: a decoder layer.
        width: of its hidden states.
        tried: parts that were tried with other weights than they have, one for all layers of a model: random weights of an 8B
            model's MLP take a second on a CPU, and its layers are alike.
    """
    tried = set() if tried is None else tried
    found, reasons = [], []
    for name, part in layer.named_children():
        matrices = [parameter for parameter in part.parameters() if parameter.ndim >= 2 and parameter.is_floating_point()]
        if len(matrices) < 2 or any(is_attention(module) for module in part.modules()):
            continue
        reason = _why_not(part, width, matrices[0], tried)
        if reason is None:
            found.append(name)
        else:
            reasons.append(f"{name} ({type(part).__name__}) {reason}")
    if not found and not reasons:
        reasons.append(f"{type(layer).__name__} has no part with two matrices beside its attention")
    return found, reasons


def _why_not(part: nn.Module, width: int, matrix: Tensor, tried: set[str]) -> str | None:
    """Why a part cannot run in tiles; None where it can."""
    if "forward" in part.__dict__:
        return "has a forward of somebody's own"
    parameters = list(inspect.signature(type(part).forward).parameters.values())[1:]
    if len(parameters) != 1 or parameters[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return "takes more than hidden states"
    generator = torch.Generator(matrix.device).manual_seed(0)
    x, other = (torch.randn(1, _TOKENS, width, device=matrix.device, dtype=matrix.dtype, generator=generator) for _ in range(2))
    try:
        with torch.no_grad(), _evaluating(part):
            if chooses(part, x):
                return "chooses experts"
            if (reason := _in_training(part, x) or _mixes(part, x, other)) is not None:
                return reason
            if _reads_others(part, x):
                return "reads weights that are not its own"
            if (structure := _structure(part)) not in tried:
                reason = _mixes_with_other_weights(part, x, other)
                tried |= {structure} if reason is None else set()
            return reason
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # somebody's module: it runs whole, as it always does
        return f"did not run on a trial: {type(error).__name__}: {str(error)[:120]}"


def _in_training(part: nn.Module, x: Tensor) -> str | None:
    """What a part does in training that a second run of a tile would do again, or otherwise: change a buffer, as statistics of
    a batch do, or draw random numbers in its own code. Dropout modules are by counter (`dropout.py`) and stay off."""
    buffers = {name: buffer.clone() for name, buffer in part.named_buffers()}
    part.train()
    for module in part.modules():
        module.training = not isinstance(module, nn.modules.dropout._DropoutNd)
    with drawing(0, x.device):
        before = random_states(x.device)
        part(x)
        draws = drew(before, x.device)
    changed = [name for name, buffer in part.named_buffers() if not torch.equal(buffer, buffers[name])]
    for name, buffer in part.named_buffers():
        buffer.copy_(buffers[name])
    part.eval()
    if draws:
        return "draws random numbers in its own code"
    return "changes its buffers in training" if changed else None


def _reads_others(part: nn.Module, x: Tensor) -> bool:
    """Whether a gradient would go to a tensor that is neither the part's input nor a parameter of its own: tiles give none."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        y = part(leaf)
    own = {id(leaf), *(id(parameter) for parameter in part.parameters())}
    nodes, seen = [y.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and id(node.variable) not in own:
            return True
        nodes += [next_node for next_node, _ in node.next_functions]
    return False


def _mixes_with_other_weights(part: nn.Module, x: Tensor, other: Tensor) -> str | None:
    """`_mixes` with random weights in the place of the part's own: a path whose weight is zero now may be trained to open.

    Twice, the second time with all signs turned, for what a gate closes to one side.
    """
    generator, tried = torch.Generator(x.device).manual_seed(1), False
    weights = {name: _random(parameter, generator) for name, parameter in part.named_parameters()}
    for sign in (1, -1):
        changed = {name: weight * sign for name, weight in weights.items()}

        def run(row: Tensor, changed: dict[str, Tensor] = changed) -> Tensor:
            result: Tensor = functional_call(part, changed, (row,))
            return result

        y = run(x)
        if not bool(y.isfinite().all()):
            continue  # weights that no training would reach
        tried = True
        if (reason := _mixes(run, x, other)) is not None:
            return f"{reason} with other weights than it has now"
    return None if tried else "gives no numbers with random weights, so it cannot be tried with other ones"


def _random(parameter: Tensor, generator: torch.Generator) -> Tensor:
    """Weights of a size at which outputs are of the size of inputs; of vectors and numbers none is near zero."""
    values = torch.empty(parameter.shape, device=parameter.device, dtype=parameter.dtype)
    if not parameter.is_floating_point():
        return parameter.detach()
    if parameter.ndim >= 2:
        return values.uniform_(-1, 1, generator=generator) * (3 / parameter.shape[-1]) ** 0.5
    return values.uniform_(0.25, 1, generator=generator)


def _structure(part: nn.Module) -> str:
    """What two parts have in common that run the same code: classes, plain attributes, shapes."""
    told = []
    for name, module in part.named_modules():
        plain = {key: value for key, value in vars(module).items() if isinstance(value, bool | int | float | str | None)}
        plain.pop("layer_idx", None)
        told.append((name, type(module), sorted(plain.items())))
    return repr((told, [(name, tuple(parameter.shape)) for name, parameter in part.named_parameters()]))


def _mixes(part: Callable[[Tensor], Tensor], x: Tensor, other: Tensor) -> str | None:
    """Why a part does not work token by token; None where it does.

    Other tokens in the second part of the row, then in the first; the same ones in another order; the first part alone.
    """
    y = part(x)
    if not isinstance(y, Tensor) or y.shape != x.shape:
        return "returns something else than hidden states"
    order = torch.arange(_TOKENS, device=x.device) * _STEP % _TOKENS
    allowed = _ROUNDINGS.get(x.dtype, 4.0) * torch.finfo(x.dtype).eps
    first = torch.cat([x[:, :_PART], other[:, _PART:]], dim=1)
    second = torch.cat([other[:, :_PART], x[:, _PART:]], dim=1)
    pairs = (
        (part(first)[:, :_PART], y[:, :_PART]),
        (part(second)[:, _PART:], y[:, _PART:]),
        (part(x[:, order]), y[:, order]),
        (part(x[:, :_PART]), y[:, :_PART]),
    )
    return None if all(_distance(got, want) <= allowed for got, want in pairs) else "does not work token by token"


def _distance(got: Tensor, want: Tensor) -> float:
    """Relative, of the token that is farthest; infinite where either has a NaN."""
    distance = (got - want).double().norm(dim=-1) / want.double().norm(dim=-1).clamp(min=1e-30)
    return float(distance.nan_to_num(nan=float("inf")).max())


@contextmanager
def _evaluating(part: nn.Module) -> Iterator[None]:
    training = [module for module in part.modules() if module.training]
    part.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
