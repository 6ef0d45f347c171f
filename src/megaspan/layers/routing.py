"""Experts: which ones each token takes is decided once, in the forward.

A mixture of experts sends each token to the k experts whose scores are highest. A layer that runs again in the backward scores
again, in tiles of another shape or with kernels that add in another order; where two experts are close, the second run may
choose the other one, and the gradient is then that of another function. At 1,048,576 tokens and 48 layers there are 400 million
such choices a step. So the choice is kept, one or two bytes for each token and expert chosen (8 MB a layer at 8 of 128
experts), and the second run takes the scores at the places that were chosen. The weights of the experts are not kept: given the
choice they are smooth functions of the scores, and the router's gradient needs the path through the scores anyway.

With a balance loss (`balance.py`) each tile's logits are summed too, and go into the backward with a gradient of their own.

What a router is, is found by running the layer's MLP, or its whole second half, on a few tokens and looking where `torch.topk`
is called (`find_router`). Letters: X experts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megaspan.layers.balance import Balance, Sums, probability_sum, sums_of
from megaspan.layers.family import Family, after, describe
from megaspan.layers.tile import drawing

_MLP = "mlp"
_TOPK = (torch.topk, Tensor.topk)
# Other functions that choose: on scores they would be a router that is not known here. `max` and `min` choose with a dim.
_CHOOSING = {"argmax", "argmin", "max", "min", "sort", "argsort", "msort", "kthvalue", "multinomial"}
_TRIAL_TOKENS = 7  # no size that anything else in a layer is likely to have


@dataclass(frozen=True)
class Router:
    """The router of a layer, facts only, so that a copied model runs its own modules.

    Attributes:
        name: of the module inside the layer in which experts are chosen.
        bytes_per_token: what keeping its choice takes.
        logits: which of its outputs are the logits that the balance loss reads; None where transformers names none.
        experts: how many experts those logits score, 0 without logits.
    """

    name: str
    bytes_per_token: int
    logits: int | None = None
    experts: int = 0


def find_router(layer: Any) -> Router | str | None:
    """The router of a decoder layer: None where its MLP chooses nothing, a reason where it chooses in a way not known here.

    To be called once for each layer, when it is decided whether it streams; a layer with a reason does not. Runs `layer.mlp`,
    or the second half where that is the layer's own code, on a few tokens, outside any graph and without a draw from the run's
    generators.
    """
    family = describe(layer)
    own = isinstance(family, Family) and family.own
    parameter = next(each for each in layer.parameters() if each.is_floating_point())
    projection = layer.self_attn.o_proj
    generator = torch.Generator(parameter.device).manual_seed(0)

    def random(width: int) -> Tensor:
        return torch.randn(1, _TRIAL_TOKENS, width, device=parameter.device, dtype=parameter.dtype, generator=generator)

    x, out = random(int(projection.out_features)), random(int(projection.in_features))
    part = layer if own else layer.mlp
    spy = _Spy(part, "" if own else _MLP)
    try:
        with torch.no_grad(), drawing(0, x.device), spy:
            if own:
                head = int(getattr(layer.self_attn, "head_dim", out.shape[-1]))
                after(layer, family, x, out.unflatten(-1, (-1, head)))  # type: ignore[arg-type]
            else:
                part(x)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # somebody's module: it is checkpointed whole, where it runs as it always does
        return f"{type(part).__name__} did not run on a trial: {type(error).__name__}: {str(error)[:120]}"
    finally:
        spy.remove()
    if spy.reason is not None:
        return f"{type(part).__name__} {spy.reason}"
    if not spy.choices:
        return None
    if len({choice.module for choice in spy.choices}) > 1:
        return f"{type(part).__name__} chooses experts in several modules"
    name = spy.choices[0].module
    if not name:
        return f"{type(part).__name__} chooses experts in its own code, outside any module"
    kept = sum(choice.a_token * choice.dtype.itemsize for choice in spy.choices)
    logits = _recorded_logits(layer, layer.get_submodule(name))
    scores = None if logits is None else spy.outputs[name][logits]
    if scores is None or scores.ndim != 2 or scores.shape[0] != _TRIAL_TOKENS:
        return Router(name, kept)
    return Router(name, kept, logits, scores.shape[1])


def chooses(module: nn.Module, x: Tensor) -> bool:
    """Whether a module chooses among something, run on `x`: as a router does among experts."""
    spy = _Spy(module)
    try:
        with spy:
            module(x)
    finally:
        spy.remove()
    return bool(spy.choices) or spy.reason is not None


@final
class Routing:
    """The choices of one layer in one forward of one row: kept when a tile runs first, taken again whenever it runs again.

    Lives as long as the layer's other kept tensors and stays on the device. The streamed layer makes one for each forward of a
    layer that has a `Router`, and runs the part of each tile that holds the MLP

    * inside `recording(layer, tokens)` in the forward, whose sums are then in `sums`,
    * inside `replaying(layer, tokens)` whenever the tile runs again: in the backward, and in a second forward of the layer.
      Tiles may be cut otherwise then.

    Args:
        router: from `find_router`.
        tokens: how many the row has, or its part on this rank, padding included.
        top_k: experts for each token in the balance loss, or None if that is not asked for.
        real_t: bool [tokens], which of them count in the balance loss (`Balance.real_t`); None for all.
    """

    def __init__(self, router: Router, tokens: int, top_k: int | None = None, real_t: Tensor | None = None) -> None:
        self._router, self._tokens, self._top_k, self._real_t = router, tokens, top_k, real_t
        self._chosen: list[Tensor] = []
        self._recorded = 0
        self.sums: Sums | None = None

    @property
    def recorded(self) -> bool:
        """Whether the forward is over: every token's choice is kept, and a second forward replays."""
        return self._recorded == self._tokens

    @contextmanager
    def recording(self, layer: nn.Module, tokens: slice) -> Iterator[list[Tensor]]:
        """Keeps what the router chooses for a tile, `tokens` of the row, and adds to `sums` if they are asked for.

        Yields an empty list.
        """
        mode = _Recording()
        logits: list[Tensor] = []
        with _within(layer, self._router, mode, logits.append):
            yield []
        for call, (indices, experts) in enumerate(mode.choices):
            indices_tk = indices.reshape(tokens.stop - tokens.start, -1)
            if call == len(self._chosen):
                self._chosen.append(indices_tk.new_empty((self._tokens, indices_tk.shape[1]), dtype=_small(experts)))
            self._chosen[call][tokens] = indices_tk
        self._recorded += tokens.stop - tokens.start
        if self._top_k is not None:
            for part in logits:
                found = sums_of(part.detach(), self._top_k, self._real(tokens))
                self.sums = found if self.sums is None else self.sums + found

    @contextmanager
    def replaying(self, layer: nn.Module, tokens: slice) -> Iterator[list[Tensor]]:
        """The router takes the kept choices.

        Yields a list which afterwards holds the sum of probabilities, fp32 [X], with its graph: one more output of the tile,
        whose gradient is that of the layer's sum. It stays empty without a balance loss and outside a graph.

        Raises:
            RuntimeError: the tile chooses otherwise often than in the forward.
        """
        probabilities: list[Tensor] = []
        logits: list[Tensor] = []
        mode = _Replaying([chosen[tokens] for chosen in self._chosen])
        with _within(layer, self._router, mode, logits.append):
            yield probabilities
        if mode.left:
            raise RuntimeError(f"the router of {type(layer).__name__} chose less often than in the forward")
        if self._top_k is not None and torch.is_grad_enabled():
            probabilities += [probability_sum(part, self._real(tokens)) for part in logits]

    def _real(self, tokens: slice) -> Tensor | None:
        """Which tokens of a tile count."""
        return None if self._real_t is None else self._real_t[tokens]

    def report(self, balance: Balance, probabilities_X: Tensor) -> None:
        """Adds what the forward found to `balance`.

        Args:
            balance: of the model's forward.
            probabilities_X: `sums.probabilities_X` as the layer's autograd function returned it, with its graph.
        """
        assert self.sums is not None
        balance.add(replace(self.sums, probabilities_X=probabilities_X))


@contextmanager
def watching(layer: nn.Module, router: Router, balance: Balance) -> Iterator[None]:
    """Adds to `balance` what the router of a layer says inside: without gradients, plainly run or checkpointed as a whole."""
    logits: list[Tensor] = []
    past = 0  # tokens seen before; tiles come in their order

    def add(logits_tX: Tensor) -> None:
        nonlocal past
        first, past = past, past + logits_tX.shape[0]
        real_t = None if balance.real_t is None else balance.real_t[first:past]
        balance.add(sums_of(logits_tX, balance.top_k, real_t))

    def seen(logits_tX: Tensor) -> None:
        # Of all tiles of all layers they would be too many. Under gradients not inside the layer: what is computed there once
        # would be missing when a checkpoint runs it a second time.
        if torch.is_grad_enabled():
            logits.append(logits_tX)
        else:
            add(logits_tX)

    with _within(layer, router, None, seen):
        yield
    for part in logits:
        add(part)


@contextmanager
def _within(layer: nn.Module, router: Router, mode: TorchFunctionMode | None, seen: Callable[[Tensor], None]) -> Iterator[None]:
    """The mode is on while the layer's router runs, and there alone: the many small operations of experts would pay for it.

    Each run's logits, if they are known, are `seen`.
    """
    module: Any = layer.get_submodule(router.name)
    own, before = module.forward, module.__dict__.get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        if mode is None:
            output = own(*args, **kwargs)
        else:
            with mode:
                output = own(*args, **kwargs)
        if router.logits is not None:
            seen(output[router.logits])
        return output

    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before


class _Recording(TorchFunctionMode):
    """Remembers every choice: indices as they were, and of how many."""

    def __init__(self) -> None:
        super().__init__()
        self.choices: list[tuple[Tensor, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _TOPK:
            self.choices.append((result.indices, _input(args, kwargs).shape[-1]))
        return result


class _Replaying(TorchFunctionMode):
    """Gives back the choices of a tile, in their order, with the scores that stand there now."""

    def __init__(self, chosen: list[Tensor]) -> None:
        super().__init__()
        self.left = list(reversed(chosen))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _TOPK:
            return func(*args, **(kwargs or {}))
        if not self.left:
            raise RuntimeError("a router chose more often than in the forward")
        scores = _input(args, kwargs)
        indices = self.left.pop().long().view(*scores.shape[:-1], -1)
        return torch.return_types.topk((scores.gather(-1, indices), indices))


@dataclass(frozen=True)
class _Choice:
    """One call of topk in a trial: in which module, how many indices it gives a token, and what holds one."""

    module: str
    a_token: int
    dtype: torch.dtype


class _Spy(TorchFunctionMode):
    """Finds out where in an MLP something is chosen, and how. `remove` takes its hooks off again."""

    def __init__(self, mlp: nn.Module, name: str = "") -> None:
        super().__init__()
        self.choices: list[_Choice] = []
        self.outputs: dict[str, Any] = {}
        self.reason: str | None = None
        self._inside: list[str] = [""]
        self._hooks: list[Any] = []
        for inside, module in mlp.named_modules(prefix=name):
            self._hooks.append(module.register_forward_pre_hook(self._entering(inside)))
            self._hooks.append(module.register_forward_hook(self._leaving(inside)))

    def remove(self) -> None:
        """Takes the hooks off the modules."""
        for hook in self._hooks:
            hook.remove()

    def _entering(self, name: str) -> Callable[..., None]:
        return lambda *_: self._inside.append(name)

    def _leaving(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._inside.pop()
            self.outputs[name] = output

        return leave

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, scores = getattr(func, "__name__", ""), _input(args, kwargs)
        if func in _TOPK:
            dim = args[2] if len(args) > 2 else (kwargs or {}).get("dim", -1)
            by_token = scores.ndim > 1 and (scores.shape[0] == _TRIAL_TOKENS or scores.shape[:2] == (1, _TRIAL_TOKENS))
            if dim not in (-1, scores.ndim - 1) or not by_token:
                self.reason = "chooses among something else than the experts of each token"
            self.choices.append(_Choice(self._inside[-1], result.indices.numel() // _TRIAL_TOKENS, _small(scores.shape[-1])))
        # Of the whole tensor or of two, `max` and `min` are numbers and no choice.
        elif name in _CHOOSING and scores.is_floating_point() and not (name in ("max", "min") and isinstance(result, Tensor)):
            self.reason = f"chooses by {name}, which cannot be kept"
        return result


def _input(args: Any, kwargs: Any) -> Any:
    """The tensor that a function was called with first."""
    return args[0] if args else (kwargs or {}).get("input")


def _small(experts: int) -> torch.dtype:
    """The smallest integers that hold an expert's number."""
    return torch.uint8 if experts <= 1 << 8 else torch.int16 if experts <= 1 << 15 else torch.int32


def _recorded_logits(layer: nn.Module, module: nn.Module) -> int | None:
    """Which output of the router transformers itself records as its logits."""
    # A sharded layer has a class of torch's in front of its own.
    files = dict.fromkeys(each.__module__ for each in type(layer).__mro__)
    for found in (value for file in files if file in sys.modules for value in vars(sys.modules[file]).values()):
        recorded = getattr(found, "_can_record_outputs", None)
        recorder = recorded.get("router_logits") if isinstance(recorded, dict) else None
        target = getattr(recorder, "target_class", None)
        if isinstance(target, type) and isinstance(module, target):
            return int(recorder.index)  # type: ignore[union-attr]
    return None
