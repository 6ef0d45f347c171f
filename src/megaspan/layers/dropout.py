"""Dropout by counter: whether an entry is dropped is a hash of (step, layer, module, token, channel).

A generator's numbers depend on how the work is cut: a tile of 16,384 tokens draws other masks than one of 8,192, a layer that
is run again must put the generator back, and ranks that share a row would draw each their own. Here the mask of an entry is a
function of where it stands: the same in every tile, in the forward, in a recomputation and in the backward, on any layout and
device. So no mask is kept either: one of a 1,048,576 x 12,288 input is 12.9 GB, and a layer with adapters has seven.

The hash is integer arithmetic that wraps at 32 bits, which is the same bits on a CPU and on a GPU. Each token of a step gets a
word of 64 bits, and each channel of a module of a layer another; an entry mixes the halves of both in two rounds:

    h = token.low + channel.low;     h ^= h >> 16;  h *= 0x7FEB352D
    h += token.high + channel.high;  h ^= h >> 15;  h *= 0x846CA68B;   kept where h, as a signed number, is not below p's

Words of 32 bits would not do: of a million channels of a model some 200 would share theirs, and be dropped together for ever.
The words are made once (8 bytes for each token of the row, and for each channel of a model's dropouts), so that an entry costs
ten integer operations, in the pass that reads and writes it; the backward is the same pass over the gradient.

The number of a forward (`step_seed`) is one for all ranks that share a row, and another one for every row. Who trains on many
ranks gives it: `model(..., megaspan_seed=row_seed(args.seed, step, number))`, where `number` is the row's in the window of all
data ranks. It needs no word between ranks, and a run that goes on with other ranks than it began with draws what it would have
drawn. Where none is given it is drawn from torch's CPU generator, whose state a checkpoint holds.

Sources: random numbers by counter, Salmon et al., SC 2011; the words are SplitMix64 (Steele, Lea and Flood, OOPSLA 2014, with
Stafford's constants) over a key from BLAKE2; rounds and constants of an entry are those of Wellons' lowbias32 (2018).
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from megaspan.human import UserError
from megaspan.layers.fused import Fused

# Written as int64 and int32 have them: torch takes no constants past the sign bit.
_GOLDEN, _FIRST_64, _SECOND_64 = (x - 2**64 for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_FIRST_32, _SECOND_32 = 0x7FEB352D, 0x846CA68B - 2**32
# The row of a batch stands above the token in the counter.
_ROW_BIT = 40
# Entries at once: where nothing is compiled the pass has temporaries of 4 bytes an entry; indices of a kernel have 31 bits.
_PLAIN_ENTRIES, _COMPILED_ENTRIES = 2**22, 2**30
_RANDOM = re.compile(r"drop|jitter|noise")
# Settings of a model that act on its embeddings or on heads of other kinds, never inside a layer.
_OUTSIDE = re.compile(r"^(emb|classifier|cls|summary|token_class|seq_class)")

Words = tuple[Tensor, Tensor]


def counter_mask(
    step_seed: int,
    layer: int,
    module: str,
    first_token: int | Tensor,
    tokens: int,
    channels: int,
    p: float,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Which entries are kept: bool [tokens, channels]. Kept ones are to be multiplied by 1 / (1 - p).

    Args:
        step_seed: the number of this forward of this row; one for all layers.
        layer: index of the layer.
        module: the dropout's name inside the layer.
        first_token: of the row, the first token's number; or the numbers of all, int64 [tokens].
        tokens, channels: how many there are.
        p: probability that an entry is dropped.
        device: where the mask is wanted.
    """
    device = torch.device(device)
    token_words = _words(f"step {step_seed}", _counters(first_token, tokens, 1, device))
    channel_words = _words(_module_key(layer, module), torch.arange(channels, device=device))
    if p >= 1:
        return torch.zeros(tokens, channels, dtype=torch.bool, device=device)
    return _kept(token_words, channel_words, _threshold(p))


def row_seed(seed: int, step: int, row: int) -> int:
    """The number that dropout of a row's forward and backward is drawn from, below 2**62; the same in every layout.

    Args:
        seed: of the run.
        step: optimizer step.
        row: the row's number in the window, counted over all micro-batches and data ranks.
    """
    digest = hashlib.blake2b(f"seed {seed} step {step} row {row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def other_randomness(layer: nn.Module) -> str | None:
    """What in a training forward of `layer` may still draw from the random generators; None where nothing does.

    Named are dropout modules that are not by counter, and positive numbers called something with drop, jitter or noise on a
    module or in its configuration: transformers' layers read such numbers in their own code. A number of the configuration
    that only went into a dropout by counter, or that acts outside of layers, is none.
    """
    # Of the model's own: an adapter's rate is in peft's configuration, not in this one.
    covered = {module.p for name, module in layer.named_modules() if _is_covered(module) and "lora_dropout" not in name}
    configs: list[Any] = []
    for name, module in layer.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 and not _is_covered(module):
            return f"{name} ({type(module).__name__})"
        for attribute, value in vars(module).items():
            if isinstance(value, float) and value > 0 and _RANDOM.search(attribute):
                return f"{name}.{attribute} = {value}"
        config = getattr(module, "config", None)
        if config is not None and not any(config is each for each in configs):
            configs.append(config)
    for config in configs:
        for attribute, value in vars(config).items():
            named = isinstance(value, float) and value > 0 and _RANDOM.search(attribute) and not _OUTSIDE.search(attribute)
            if named and not ("drop" in attribute and value in covered):
                return f"its configuration's {attribute} = {value}"
    return None


@dataclass(frozen=True, eq=False)
class Place:
    """Where the computation is.

    Attributes:
        step_seed: the number of this forward of this row.
        layer: index of the layer.
        first_token: of the row, the first token's number, or the numbers of all tokens, int64 [tokens].
        tokens: how many tokens there are, None for not known.
        words: words of tokens that were made for this place, or, by their numbers, for all places of the step.
    """

    step_seed: int
    layer: int
    first_token: int | Tensor
    tokens: int | None
    words: dict[Any, Words]


@final
class DropoutHandle:
    """The dropouts of a model's layers that are by counter, and the place that they read.

    The place is not a thread's own: autograd's thread runs tiles too, but never while another one does.

    Args:
        fused: compiles the pass where that pays.

    Attributes:
        step_seed: the number of the latest forward, None where there was nothing to draw it for.
    """

    def __init__(self, fused: Fused | None = None) -> None:
        self.step_seed: int | None = None
        self._given: int | None = None
        self._drawn = 0
        self._fused = fused or Fused()
        self._place: Place | None = None
        self._modules: list[nn.Module] = []
        self._step: int | None = None
        self._step_words: dict[Any, Words] = {}
        self._channel_words: dict[Any, Words] = {}
        self._rates: dict[Any, tuple[Tensor, Tensor]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> DropoutHandle:
        return self  # a copied model runs under the same place, on its own modules

    def __len__(self) -> int:
        """How many modules are by counter."""
        return len(self._modules)

    @contextmanager
    def row(self, seed: int | None) -> Iterator[None]:
        """The forward inside takes `seed` (`row_seed`) as its number, further ones what follows from it; None: they draw.

        A call of a model whose batch is several stretches of tokens (padded rows) is several forwards.
        """
        before, self._given, self._drawn = self._given, seed, 0
        try:
            yield
        finally:
            self._given = before

    def draw(self) -> None:
        """A training forward of a row begins: takes the number that was given for it, or draws one from the CPU generator."""
        if not self._modules:
            self.step_seed = None
        elif self._given is None:
            self.step_seed = int(torch.randint(2**62, ()))
        else:
            self.step_seed = self._given if self._drawn == 0 else row_seed(self._given, 0, self._drawn)
            self._drawn += 1

    @contextmanager
    def at(self, step_seed: int | None, layer: int, first_token: int | Tensor = 0, tokens: int | None = None) -> Iterator[None]:
        """Everything inside is computed at this place; the one before comes back afterwards.

        Args:
            step_seed: a number drawn once for each forward of a row, the same for all its layers and on all ranks that share
                the row; the backward passes it again. None: no place.
            layer: index of the layer.
            first_token: of the row, the number of the first token at hand; or the numbers of all, int64 [tokens], where they
                are not neighbours. A number counts along the row, whatever its positions or documents are.
            tokens: how many tokens are at hand; with it, a module that sees some of them only is refused.
        """
        if step_seed is None:
            yield
            return
        if step_seed != self._step:
            self._step, self._step_words = step_seed, {}
        words = self._step_words if isinstance(first_token, int) else {}
        before, self._place = self._place, Place(step_seed, layer, first_token, tokens, words)
        try:
            yield
        finally:
            self._place = before

    @property
    def here(self) -> Place | None:
        """Where the computation is; None outside of `at`."""
        return self._place

    def at_tile(self, place: Place | None, tokens: slice) -> AbstractContextManager[None]:
        """`at` some of the tokens of a place, counted from its first; None: no place."""
        if place is None:
            return self.at(None, 0)
        first = place.first_token
        first = first + tokens.start if isinstance(first, int) else first[tokens]
        return self.at(place.step_seed, place.layer, first, tokens.stop - tokens.start)

    def cover(self, layer: nn.Module) -> str | None:
        """Takes the layer's dropouts that are not taken yet (an adapter that came later); returns what else draws, by name.

        Modules in a list are left: a list inside a layer is one of experts, whose inputs are some of the tokens.
        """
        experts = tuple(f"{name}." for name, module in layer.named_modules() if isinstance(module, nn.ModuleList))
        for name, module in layer.named_modules():
            if _is_plain(module) and not name.startswith(experts):
                module.__dict__["forward"] = functools.partial(_forward, module, self, name)
                self._modules.append(module)
        return other_randomness(layer)

    def remove(self) -> None:
        """Gives the modules their own code back."""
        for module in self._modules:
            module.__dict__.pop("forward", None)
        self._modules, self._channel_words, self._step_words, self._rates, self._step = [], {}, {}, {}, None

    def _dropped(self, module: nn.Dropout, name: str, x: Tensor) -> Tensor:
        place, p = self._place, module.p
        if not module.training or p == 0 or place is None:
            return nn.Dropout.forward(module, x)
        if p >= 1:
            return x * 0.0
        token_words, channel_words = self._token_words(place, name, x), self._words_of_channels(place.layer, name, x)
        run = functools.partial(self._run, token_words, channel_words, p)
        result: Tensor = _ByCounter.apply(x, run)
        return result

    def _run(self, token_words: Words, channel_words: Words, p: float, x: Tensor) -> Tensor:
        """x [..., channels] with the dropped entries at zero; outside any graph."""
        x_tC = x.reshape(-1, x.shape[-1]).detach()  # the compiler asks about a view's base; this is none
        tokens, channels = x_tC.shape
        rest = self._rate(p, x)
        once = max(1, (_COMPILED_ENTRIES if self._fused.compiles_on(x.device) else _PLAIN_ENTRIES) // channels)
        if tokens <= once:
            return self._formula(x_tC, token_words, channel_words, *rest).view(x.shape)
        y_tC = torch.empty_like(x_tC)
        for start in range(0, tokens, once):
            part = slice(start, start + once)
            y_tC[part] = self._formula(x_tC[part], (token_words[0][part], token_words[1][part]), channel_words, *rest)
        return y_tC.view(x.shape)

    def _formula(self, x_tC: Tensor, token_words: Words, channel_words: Words, threshold: Tensor, scale: Tensor) -> Tensor:
        if self._fused.compiles_on(x_tC.device):
            from torch._dynamo import mark_static

            for tensor, dim in ((x_tC, 1), *((word, 0) for word in channel_words)):
                mark_static(tensor, dim)  # one compilation for each width, instead of one with divisions by an open width
        open_dims = [(x_tC, 0), *((word, 0) for word in token_words)]
        result: Tensor = self._fused.run(_drop, (x_tC, *token_words, *channel_words, threshold, scale), open_dims)
        return result

    def _token_words(self, place: Place, name: str, x: Tensor) -> Words:
        if x.ndim == 4 and x.shape[1] == 1:
            x = x[:, 0]  # latents of MLA, which are viewed as one head
        if x.ndim not in (2, 3):
            raise UserError(
                f"the dropout {name} of layer {place.layer} works on something else than hidden states",
                found=f"a tensor of shape {tuple(x.shape)}",
                allowed="[batch, tokens, channels] or [tokens, channels]",
                do="Set its rate to 0",
            )
        rows, tokens = (x.shape[0], x.shape[1]) if x.ndim == 3 else (1, x.shape[0])
        known = place.tokens if isinstance(place.first_token, int) else place.first_token.shape[0]
        if known not in (None, tokens):
            raise UserError(
                f"the dropout {name} of layer {place.layer} sees some of the tokens only, and cannot tell which",
                found=f"{tokens} of {known} tokens",
                do="Set lora_dropout: 0, or leave the experts out of lora_target_modules",
            )
        key = (place.first_token if isinstance(place.first_token, int) else None, tokens, rows, x.device)
        if key not in place.words:
            place.words[key] = _words(f"step {place.step_seed}", _counters(place.first_token, tokens, rows, x.device))
        return place.words[key]

    def _rate(self, p: float, x: Tensor) -> tuple[Tensor, Tensor]:
        """Threshold and scale as tensors: numbers would be constants of a compilation each. In fp32, or the rounding of the
        scale to bf16 would be an error of up to 0.4 % in all that is kept."""
        wide = torch.promote_types(x.dtype, torch.float32)
        key = (p, wide, x.device)
        if key not in self._rates:
            threshold = torch.full((), _threshold(p), dtype=torch.int32, device=x.device)
            self._rates[key] = threshold, torch.full((), 1 / (1 - p), dtype=wide, device=x.device)
        return self._rates[key]

    def _words_of_channels(self, layer: int, name: str, x: Tensor) -> Words:
        key = (layer, name, x.shape[-1], x.device)
        if key not in self._channel_words:
            self._channel_words[key] = _words(_module_key(layer, name), torch.arange(x.shape[-1], device=x.device))
        return self._channel_words[key]


def install_dropout(layers: Iterable[nn.Module], fused: Fused | None = None) -> DropoutHandle:
    """Sets dropout by counter on every `nn.Dropout` with a rate inside `layers`; without a place they run their own code.

    Args:
        layers: a model's decoder layers.
        fused: compiles the pass where that pays.
    """
    handle = DropoutHandle(fused)
    for layer in layers:
        handle.cover(layer)
    return handle


class _ByCounter(torch.autograd.Function):
    """x with the dropped entries at zero; the gradient goes the same way. Keeps the words (8 bytes a token), and no mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.run = run
        return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _ByCounter.apply(grads[0], ctx.run), None


def _forward(module: nn.Dropout, handle: DropoutHandle, name: str, input: Tensor) -> Tensor:
    return handle._dropped(module, name, input)


def _drop(
    x_tC: Tensor, low_t: Tensor, high_t: Tensor, low_C: Tensor, high_C: Tensor, threshold: Tensor, scale: Tensor
) -> Tensor:
    kept = _kept((low_t, high_t), (low_C, high_C), threshold)
    return torch.where(kept, (x_tC.to(scale.dtype) * scale).to(x_tC.dtype), 0.0)


def _kept(token_words: Words, channel_words: Words, threshold: int | Tensor) -> Tensor:
    """The rounds of the module's docstring, int32; a shift of a signed number is cut to what an unsigned one would give."""
    h = token_words[0][:, None] + channel_words[0]
    h = (h ^ ((h >> 16) & 0xFFFF)) * _FIRST_32
    h = h + (token_words[1][:, None] + channel_words[1])
    h = (h ^ ((h >> 15) & 0x1FFFF)) * _SECOND_32
    return h >= threshold


@torch.no_grad()
def _words(key: str, counters: Tensor) -> Words:
    """SplitMix64 at these counters (int64): its low and its high half, int32 of the same length."""
    start = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little", signed=True)
    z = counters * _GOLDEN + start
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _FIRST_64
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _SECOND_64
    z = z ^ ((z >> 31) & (2**33 - 1))
    halves = z.view(torch.int32).view(-1, 2)
    return halves[:, 0].contiguous(), halves[:, 1].contiguous()


def _counters(first_token: int | Tensor, tokens: int, rows: int, device: torch.device) -> Tensor:
    """Numbers of the tokens of all rows, int64 [rows * tokens]."""
    if isinstance(first_token, int):
        numbers = torch.arange(first_token, first_token + tokens, device=device)
    else:
        numbers = first_token.to(device, torch.int64)
    if rows == 1:
        return numbers
    return ((torch.arange(rows, device=device) << _ROW_BIT)[:, None] + numbers).flatten()


def _module_key(layer: int, module: str) -> str:
    return f"layer {layer} {module}"


def _threshold(p: float) -> int:
    """The least of the 2**32 signed numbers that is kept."""
    return min(round(p * 2**32), 2**32 - 1) - 2**31


def _is_plain(module: nn.Module) -> bool:
    """A dropout with a rate that runs torch's own code."""
    return (
        isinstance(module, nn.Dropout)
        and module.p > 0
        and type(module).forward is nn.Dropout.forward
        and "forward" not in module.__dict__
    )


def _is_covered(module: nn.Module) -> bool:
    return isinstance(module, nn.Dropout) and getattr(module.__dict__.get("forward"), "func", None) is _forward
