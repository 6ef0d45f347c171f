"""The two halves of a layer with their element-wise work in fused passes, for layers of the common form.

The general first half (`family.before`) is the live attention module, stopped at its attention call: right for every model,
and as slow as transformers' element-wise code. Most attention modules have one form: three projections, perhaps a norm over
the head size on q and k, rotary embedding by halves. For these the projections are called as the live modules they are
(adapters, biases and hooks on them stay), and what follows is one fused pass (`fused.py`). What attention is asked for
beside q, k and v (scale, window, soft cap, sinks) is still read off the live module's call, on one token of each row. A
gated MLP, down(act(gate(x)) * up(x)), gets its product fused likewise.

Nothing is taken on trust: each layer is tried against its own modules on random tokens, and one that differs, has other
parts, or is hooked or patched inside keeps the general path. The toy of `selfcheck.py` then compares all gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaspan.attention import AttentionCall
from megaspan.layers.family import Family, before, normed
from megaspan.layers.fused import ACTIVATIONS, FORMS, Fused, RmsNorm, activate, rms_norm
from megaspan.layers.norms import class_forward, epsilon_of, norm_epsilon
from megaspan.layers.tile import HOOKS, drawing, hooked

_PROJECTIONS, _HEAD_NORMS = ("q_proj", "k_proj", "v_proj"), ("q_norm", "k_norm")
_MLP = {"gate_proj", "up_proj", "down_proj"}
# Of tokens a trial has: so many that the compiler, which sees this length first, plans for long tiles.
_COMPILED_TOKENS, _PLAIN_TOKENS = 4096, 8
# Sizes of hidden states in a trial: a clamp bites at some, a bias shows at others.
_SCALES = (0.01, 1.0, 100.0, 10_000.0)


@dataclass(frozen=True)
class Halves:
    """What of a layer runs fused; facts only, so that a copied model runs its own modules.

    Attributes:
        fused: the compiled formulas.
        kinds: classes of the modules whose own code is replaced, by name inside the layer.
        attention: whether the first half is fused.
        norm: what q_norm and k_norm compute, None without them.
        activation: of the MLP, None where the MLP is not fused.
        reasons: why a part is not fused.
    """

    fused: Fused
    kinds: tuple[tuple[str, type], ...]
    attention: bool
    norm: RmsNorm | None
    activation: str | None
    reasons: tuple[str, ...]

    def ask(self, layer: Any, family: Family, x_BTE: Tensor, arguments: dict[str, Any]) -> AttentionCall | None:
        """What the layer asks attention for, read off one token of each row; None if the first half is not to be fused now."""
        tables = arguments["position_embeddings"]
        if not self.attention or tables is None or not self._untouched(layer, "self_attn"):
            return None
        with torch.no_grad():
            call = before(layer, family, x_BTE[:, :1], slice(0, 1), arguments)
        fits = all(table.ndim == 3 and table.shape[-1] == call.q_BHTD.shape[-1] for table in tables)
        own_sink = call.sink_H is None or any(call.sink_H is parameter for parameter in layer.self_attn.parameters())
        # One token cannot show a window that the mask and the layer disagree about: the general path looks at whole tiles.
        promised, tokens = arguments.get("attention_mask"), x_BTE.shape[1]
        if isinstance(promised, Tensor):
            fits = fits and promised.ndim == 0 and min(int(promised) or tokens, tokens) == min(
                call.scoring.window or tokens, tokens
            )  # fmt: skip
        return call if fits and own_sink else None

    def before(
        self,
        layer: Any,
        family: Family,
        asked: AttentionCall,
        x_BtE: Tensor,
        tokens: slice,
        arguments: dict[str, Any],
        heads: tuple[slice, slice] | None = None,
        into: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> AttentionCall:
        """`family.before`, fused; q, k, v lie in memory as [batch, t, heads, D], in `into` if given (outside a graph).

        `heads`: query heads and KV heads that are wanted; None for all.
        """
        attention, size, dtype = layer.self_attn, asked.q_BHTD.shape[-1], asked.q_BHTD.dtype
        hidden = normed(layer, family.before_attention, x_BtE)
        wanted = (None, None, None) if heads is None else (heads[0], heads[1], heads[1])
        q, k, v = (
            _projected(getattr(attention, name), hidden, part, size) for name, part in zip(_PROJECTIONS, wanted, strict=True)
        )
        cos, sin = (table[:, tokens] for table in arguments["position_embeddings"])
        weights = (attention.q_norm.weight, attention.k_norm.weight) if self.norm else None
        v = v.to(dtype) if into is None else into[2].copy_(v)
        q, k = self.fused.norm_and_rotate(q, k, (cos, sin), weights, self.norm, dtype, into[:2] if into else None)
        return replace(asked, q_BHTD=q.transpose(1, 2), k_BGSD=k.transpose(1, 2), v_BGSD=v.transpose(1, 2))

    def mlp(self, layer: Any) -> Callable[[Tensor], Any] | None:
        """The layer's MLP, fused if it is to be fused now; None where it has none of that name."""
        activation = self.activation
        if activation is None or not self._untouched(layer, "mlp"):
            return getattr(layer, "mlp", None)
        mlp: Any = layer.mlp
        return lambda x: mlp.down_proj(self.fused.gated(mlp.gate_proj(x), mlp.up_proj(x), activation))

    def _untouched(self, layer: Any, part: str) -> bool:
        """Whether the modules whose code is replaced are those that were tried, without hooks or patches."""
        for name, kind in self.kinds:
            if name.startswith(part):
                module: nn.Module = layer.get_submodule(name)
                patched = "forward" in module.__dict__ and not name.endswith("_norm")  # norms are patched by `norms.py`
                if type(module) is not kind or patched or hooked(module):
                    return False
                if self.norm is not None and name.endswith("_norm") and epsilon_of(module) != self.norm.epsilon:
                    return False
        return True


def _projected(projection: Any, hidden: Tensor, heads: slice | None, size: int) -> Tensor:
    """[..., heads, D] of a projection; of some heads only those are computed where it is a plain linear map."""
    if heads is None:
        return projection(hidden).unflatten(-1, (-1, size))
    plain = type(projection) is nn.Linear and "forward" not in projection.__dict__
    if not plain or any(getattr(projection, hooks) for hooks in HOOKS):
        return projection(hidden).unflatten(-1, (-1, size))[..., heads, :]
    rows = slice(heads.start * size, heads.stop * size)
    bias = None if projection.bias is None else projection.bias[rows]
    return F.linear(hidden, projection.weight[rows], bias).unflatten(-1, (-1, size))


def find_halves(layer: Any, family: Family, fused: Fused) -> Halves:
    """What of this layer can run fused, tried against its own modules; attention must be megaspan's already."""
    mlp = getattr(layer, "mlp", None)
    norm, activation = _head_norm(layer.self_attn, family.gated), _activation(mlp or layer)
    names = ["self_attn", *(f"self_attn.{name}" for name in _HEAD_NORMS if hasattr(layer.self_attn, name))]
    names += [] if mlp is None else ["mlp"]
    names += ["mlp.act_fn"] if isinstance(getattr(mlp, "act_fn", None), nn.Module) else []
    kinds = tuple((name, type(layer.get_submodule(name))) for name in names)
    halves = Halves(
        fused,
        kinds,
        attention=not isinstance(norm, str),
        norm=None if isinstance(norm, str) else norm,
        activation=activation if activation in ACTIVATIONS else None,
        reasons=tuple(reason for reason in (norm, activation) if isinstance(reason, str) and reason not in ACTIVATIONS),
    )
    for part, trial in (("attention", _try_attention), ("activation", _try_mlp)):
        if getattr(halves, part):
            try:
                differs = trial(layer, family, halves)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # somebody's module in a form that is not this one: it keeps its own code
                differs = f"did not run: {type(error).__name__}: {str(error)[:120]}"
            if differs:
                name = type(layer.self_attn if part == "attention" else layer.mlp).__name__
                off: Any = False if part == "attention" else None
                halves = replace(halves, **{part: off}, reasons=(*halves.reasons, f"{name} fused {differs}"))
    return halves


def _head_norm(attention: Any, gated: bool) -> RmsNorm | str | None:
    """The norm of q and k (None without), or why the module has not the common form; `gated`: with parts behind its kernel."""
    children = {name for name, _ in attention.named_children()}
    wanted, norms = {*_PROJECTIONS, "o_proj"}, set(_HEAD_NORMS)
    children = children & (wanted | norms) if gated else children
    if children not in (wanted, wanted | norms):
        return f"{type(attention).__name__} has other parts than q, k, v, o and norms of q and k"
    if children == wanted:
        return None
    found = {rms_norm_of(getattr(attention, name)) for name in _HEAD_NORMS}
    size = getattr(attention, "head_dim", None)
    if len(found) > 1 or None in found or any(getattr(attention, name).weight.shape != (size,) for name in _HEAD_NORMS):
        return f"{type(attention).__name__} has norms of q and k that are not RMSNorms over the head size"
    return found.pop()


def rms_norm_of(module: Any) -> RmsNorm | None:
    """Which RMSNorm a module of this class is, tried on a small vector in bf16, where the rounding shows; None for none."""
    epsilon = norm_epsilon(module)
    if epsilon is None:
        return None
    weight = torch.linspace(-1.5, 2.0, 16).bfloat16()
    x = torch.linspace(-3.0, 2.0, 5 * 16).reshape(5, 16).sin().bfloat16()
    got = class_forward(module, weight, x)
    with torch.no_grad():
        same = [form for form in FORMS if got is not None and torch.equal(got, rms_norm(x, weight, epsilon, form))]
    return RmsNorm(epsilon, same[0]) if same else None


@torch.no_grad()
def _activation(mlp: Any) -> str:
    """The name of a gated MLP's activation, or why the MLP is not one."""
    function = getattr(mlp, "act_fn", None)
    children = {name for name, _ in mlp.named_children()} - {"act_fn"}
    if children != _MLP or not callable(function):
        return f"{type(mlp).__name__} has other parts than gate, up, down and act_fn"
    if isinstance(function, nn.Module) and (any(True for _ in function.parameters()) or any(True for _ in function.buffers())):
        return f"{type(mlp).__name__} has an activation with weights"
    x = torch.linspace(-6.0, 6.0, 49)
    try:
        y = function(x)
        same = [name for name in ACTIVATIONS if torch.allclose(y, activate(x, name), rtol=1e-6, atol=1e-7)]
    except Exception:  # whatever it is, it is not one of these
        same = []
    return same[0] if same else f"{type(mlp).__name__} has an activation that is not known here"


def _try_attention(layer: Any, family: Family, halves: Halves) -> str | None:
    size = int(layer.self_attn.head_dim)
    x, family = _hidden(layer, halves.fused), replace(family, before_attention=None)  # a norm would undo the sizes of x
    tables = tuple(torch.randn(1, x.shape[1], size, device=x.device, dtype=x.dtype, generator=_seeded(x)) for _ in range(2))
    # Far positions: a module that scales by them does it there.
    positions = torch.arange(x.shape[1], device=x.device)[None] + 2**20
    arguments = {"position_embeddings": tables, "attention_mask": None, "position_ids": positions}
    asked = halves.ask(layer, family, x, arguments)
    if asked is None:
        return "is hooked or patched"
    whole = slice(0, x.shape[1])

    def outputs(call: AttentionCall) -> tuple[Tensor, ...]:
        return call.q_BHTD.transpose(1, 2), call.k_BGSD.transpose(1, 2), call.v_BGSD.transpose(1, 2)

    return _compare(
        x,
        lambda leaf: outputs(before(layer, family, leaf, whole, arguments)),
        lambda leaf: outputs(halves.before(layer, family, asked, leaf, whole, arguments)),
    )


def _try_mlp(layer: Any, family: Family, halves: Halves) -> str | None:
    if not halves._untouched(layer, "mlp"):
        return "is hooked or patched"
    fused: Any = halves.mlp(layer)
    return _compare(_hidden(layer, halves.fused), lambda leaf: (layer.mlp(leaf),), lambda leaf: (fused(leaf),))


def _compare(
    x: Tensor, wanted: Callable[[Tensor], tuple[Tensor, ...]], got: Callable[[Tensor], tuple[Tensor, ...]]
) -> str | None:
    """Outputs token by token and the gradient of x as a whole, in fp32; the backward is compiled here too, if it can be."""
    tolerance = max(2 * torch.finfo(x.dtype).eps, 1e-5)
    found = []
    for run in (wanted, got):
        leaf = x.detach().clone().requires_grad_()
        with torch.enable_grad(), drawing(0, x.device):
            outputs = run(leaf)
        weights = [torch.randn(each.shape, device=x.device, generator=_seeded(x)).to(each.dtype) for each in outputs]
        (gradient,) = torch.autograd.grad(outputs, [leaf], weights)
        found.append(([each.detach().flatten(2).float() for each in outputs], gradient.float()))
    (want, want_gradient), (have, gradient) = found
    for left, right in zip(have, want, strict=True):
        if not bool(((left - right).norm(dim=-1) <= tolerance * right.norm(dim=-1)).all()):
            return "differs from its own code"
    if not bool((gradient - want_gradient).norm() <= 8 * tolerance * want_gradient.norm()):
        return "has another gradient than its own code"
    return None


def _hidden(layer: Any, fused: Fused) -> Tensor:
    """Random hidden states of several sizes for a trial, without a draw from the run's generators."""
    parameter = next(each for each in layer.parameters() if each.is_floating_point())
    width = int(layer.self_attn.q_proj.in_features)
    tokens = _COMPILED_TOKENS if fused.compiles_on(parameter.device) and parameter.device.type == "cuda" else _PLAIN_TOKENS
    x = torch.randn(1, tokens, width, device=parameter.device, dtype=parameter.dtype, generator=_seeded(parameter))
    scales = torch.tensor(_SCALES, device=x.device, dtype=x.dtype).repeat(tokens // len(_SCALES))
    return x * scales[None, :, None]


def _seeded(like: Tensor) -> torch.Generator:
    return torch.Generator(like.device).manual_seed(0)
