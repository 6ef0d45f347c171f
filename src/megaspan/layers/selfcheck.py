"""Whether streaming a model's layers is right is tried at load: a toy model of the same class, against its own plain self.

The streamed layer reads from a layer's module names what the layer does (`family.py`). A new transformers version, or a
model's own code, may do something else under the same names, and training would go on with a wrong gradient. So the live
model's class is built again with a hidden size of 32, random weights with no value that hides a mistake, and one row of 11
tokens runs through plain transformers (`eager` attention) and through streamed layers in tiles of 4: loss and every
parameter gradient must agree.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from megaspan.attention import install as install_attention
from megaspan.layers.checkpoint import checkpointed_layers
from megaspan.layers.tile import drew, random_states

_SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "sliding_window": 3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
Part: TypeAlias = tuple[str, type | str]
"""A module's name inside its layer, and its class or what else there is to say of it."""

_TOKENS, _TILE = 11, 4
_MOST_LAYERS = 8
# fp32 on both sides: right families are at 1e-6, a forgotten multiplier or norm is at 1e-2 or more.
_TOLERANCE = 1e-3


def prove_family(model: nn.Module, fused: bool = True) -> str | None:
    """None when streamed layers of this model's class, fused or not, compute what plain ones do, else what went wrong."""
    live = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # the CPU's alone: a GPU's numbers are not to move
            return _compare(toy_of(live), fused)
    except Exception as error:  # whatever somebody's model code raises at toy size: the general path is right, and says why
        return f"a toy {type(live).__name__} did not run: {type(error).__name__}: {str(error)[:200]}"


def replaced_parts(model: nn.Module, layers: Sequence[nn.Module]) -> list[str | None]:
    """For each layer, in words, a part that somebody has put there, or has given another forward; None where there is none.

    Such a part is not in the toy, so nothing is proven of it. Adapters of peft are looked through: they are linear maps beside
    others, and run in tiles like those.
    """
    live = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    with torch.random.fork_rng(devices=[]):
        toy = toy_of(live)
    known = {part for layer in checkpointed_layers(toy) for part in parts_of(layer)}
    return [next((_told(*part) for part in parts_of(layer) if part not in known), None) for layer in layers]


def exchanged(layer: nn.Module, before: frozenset[Part]) -> str | None:
    """What in a layer is not what it was, in words; None where all is."""
    return next((f"{_told(*part)} since prepare" for part in parts_of(layer) if part not in before), None)


def parts_of(layer: nn.Module, name: str = "") -> Iterator[Part]:
    """Names and classes of a module and all inside it, experts of a list as one."""
    module: Any = layer
    while type(module).__module__.startswith("peft."):
        module = getattr(module, "base_layer", None) or module.original_module
    forward = module.__dict__.get("forward")
    # A partial function tells nothing of itself, what it calls does; a callable object's class does.
    forward = getattr(forward, "func", forward)
    made_in = getattr(forward, "__module__", None) or ""
    own = forward is not None and not made_in.startswith("megaspan.")  # dropouts by counter, fused norms
    # FSDP2 makes another class of a layer's.
    kind = next(each for each in type(module).__mro__ if not issubclass(each, FSDPModule))
    yield name, "a forward of somebody's own" if own else kind
    for child, each in module.named_children():
        yield from parts_of(each, f"{name}.{'*' if child.isdigit() else child}".lstrip("."))


def _told(name: str, kind: type | str) -> str:
    what = kind if isinstance(kind, str) else f"a {kind.__name__}, which its class has not there"
    return f"{name or 'it'} {'has' if isinstance(kind, str) else 'is'} {what}"


def toy_of(live: PreTrainedModel) -> PreTrainedModel:
    """A model of the same class and the same kinds of layers, in toy sizes, with random weights."""
    config: Any = copy.deepcopy(live.config)
    text = config.get_text_config()
    for name, size in _SIZES.items():
        if name == "head_dim" and any(getattr(text, other, None) for other in ("qk_rope_head_dim", "v_head_dim")):
            continue  # other sizes are made of it, or differ from it as in the model itself
        with suppress(RuntimeError, ValueError, KeyError):  # a size of each layer's own refuses to be read as one
            if getattr(text, name, None) is not None:
                setattr(text, name, size)
    if getattr(live.config.get_text_config(), "num_key_value_heads", None) == live.config.get_text_config().num_attention_heads:
        text.num_key_value_heads = text.num_attention_heads
    layers = min(text.num_hidden_layers, _MOST_LAYERS)
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = list(text.layer_types)[:layers]
    for holder in (config, text):
        holder._attn_implementation = "eager"
        holder.output_router_logits = False
    with torch.device("cpu"):
        toy = type(live)(config).float().train()
    dropouts = [module for module in toy.modules() if isinstance(module, nn.modules.dropout._DropoutNd)]
    # Those of streamed layers are by counter. A rate that the configuration still names would be taken for another one's.
    for name, value in list(vars(text).items()):
        if "drop" in name and isinstance(value, float) and any(module.p == value for module in dropouts):
            setattr(text, name, 0.0)
    for module in dropouts:
        module.p = 0.0
    with torch.no_grad():
        for parameter in toy.parameters():
            if parameter.ndim < 2:
                parameter.add_(0.3 * torch.randn(parameter.shape))
            else:
                parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
    return toy


def _compare(plain: PreTrainedModel, fused: bool) -> str | None:
    from megaspan.layers.dials import LayerPlan
    from megaspan.layers.streamed import Streaming

    streamed = copy.deepcopy(plain)
    install_attention(streamed, prove=False)
    streaming = Streaming(LayerPlan(tile_tokens=_TILE, fused=fused))
    streaming.install(streamed, prove=False)
    ids = torch.randint(plain.config.get_text_config().vocab_size, (1, _TOKENS))
    before = random_states(ids.device)
    wanted = _gradients(plain, ids)
    if drew(before, ids.device):
        return f"{type(plain).__name__} draws random numbers in its own code, and would draw others in tiles"
    got = _gradients(streamed, ids)
    stats = streaming.stats()
    if stats.attention_forwards == 0 and not stats.passed_on:
        return "its layers were not reached through transformers' checkpointing"
    if stats.passed_on:
        return f"{stats.passed_on} calls of its layers are not of a form that streams"
    floor = 1e-6 * sum(float(tensor.square().sum()) for tensor in wanted.values()) ** 0.5
    for name, want in wanted.items():
        distance = float((got[name] - want).norm())
        if not distance <= max(_TOLERANCE * float(want.norm()), floor):
            return (
                f"a toy {type(plain).__name__} differs from plain transformers in {name} by {distance / float(want.norm()):.1e}"
            )
    return None


def _gradients(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    """The loss and the gradient of every parameter."""
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    zero = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"the loss": loss.detach(), **zero, **found}
