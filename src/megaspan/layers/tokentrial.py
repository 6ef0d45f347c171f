"""Whether a live module works token by token: it is tried, nothing is believed of a class or a name.

What works on each token alone may run in tiles, forward and backward. A tile's second run must find what its first one found:
such a module draws and chooses nothing, changes no buffer, and reads no weights but its own. Tried are a few hundred tokens:
others in a part of the row, the same ones in another order, a part alone, with the module's weights and with random ones, for
a path whose weight is zero now may be trained to open. All of that is done to a copy: a module that counts what it has seen has
seen nothing.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from megaspan.layers.routing import chooses
from megaspan.layers.tile import drawing, drew, random_states

_TOKENS, _PART, _STEP = 257, 100, 3
"""Tokens of the trial, of its first part, and the step of its shuffle: more than a block or a lag that an MLP would have."""

_ROUNDINGS = {torch.float64: 1000.0, torch.float32: 1000.0}
"""Relative distance, in units of the type's resolution, that a token may have from itself in other company: kernels may add in
another order. 4 in 16 bits, where sums are wider than what is left of them."""


def why_not(module: nn.Module, width: int, like: Tensor, tried: set[str]) -> str | None:
    """Why a module does not work token by token, in words that follow its name; None where it does.

    Args:
        module: takes hidden states. In the place of weights that are sharded it is tried with random ones: nothing is sent, so
            a rank may try alone.
        width: of the hidden states.
        like: their device and type.
        tried: structures that were tried with other weights than they have, one for all layers of a model: random weights of an
            8B model's MLP take a second on a CPU, and its layers are alike.
    """
    if "forward" in module.__dict__:
        return "has a forward of somebody's own"
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    if len(parameters) != 1 or parameters[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return "takes more than hidden states"
    try:
        generator = torch.Generator(like.device).manual_seed(0)
        x, other = (torch.randn(1, _TOKENS, width, device=like.device, dtype=like.dtype, generator=generator) for _ in range(2))
        part = _copied(module).eval()
        with torch.no_grad():
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


def _copied(module: nn.Module) -> nn.Module:
    """A copy with whole weights: random ones where they are sharded."""
    made = copy.deepcopy(module)
    for each in made.modules():
        for name, parameter in each.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                whole = torch.empty(parameter.shape, device=parameter.device, dtype=parameter.dtype)
                random = _random(whole, torch.Generator(whole.device).manual_seed(2))
                setattr(each, name, nn.Parameter(random, parameter.requires_grad))
    return made


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
