"""Parameters counted on a model that is there, or on one without memory that is built to be counted.

The planner knows a few dozen families by their configuration (`plan/families.py`). Any other one it would count like Llama,
and be wrong by what makes the family another one: GPT-NeoX has no gate in its MLP, so that a Llama of its sizes has a quarter
more, and with it model states, FLOP and the longest row that fits. Here nothing is known of a family: a parameter is a
parameter, and a matrix in a layer multiplies every token. A live model is counted in milliseconds. For `megaspan plan`, which
has a configuration alone, the class is built on the meta device, after two to four seconds of imports; so that is done for
families that the planner does not know, and for no others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from megaspan.attention.seam import is_attention
from megaspan.human import UserError
from megaspan.layers.checkpoint import checkpointed_layers
from megaspan.layers.dropout import other_randomness
from megaspan.layers.family import describe
from megaspan.layers.selfcheck import prove_family
from megaspan.model.fill import skeleton
from megaspan.model.kinds import unwrap
from megaspan.model.source import apply_overrides, find_source, read_config
from megaspan.plan.facts import Counts, ModelFacts
from megaspan.plan.families import Experts

if TYPE_CHECKING:
    from megaspan.config import SFTConfig

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "experts_per_token", "moe_k", "moe_topk")


def facts_of(model: PreTrainedModel) -> ModelFacts:
    """Facts of a live model, with the parameters that it has.

    Args:
        model: from transformers, without peft around it (adapters inside do not count); sharded or not.
    """
    facts = ModelFacts.from_config(model.config.to_dict())
    return facts.counted(count(model, prove=not facts.known))


def counts_of(config: SFTConfig) -> Counts | None:
    """What the model that `config` names will have, built on the meta device; None where it cannot be built there.

    Raises:
        UserError: there is no such model, or it is of a kind that is not trained here.
    """
    model_config = read_config(find_source(config), trust_remote_code=config.trust_remote_code)
    apply_overrides(model_config, config.config_overrides)
    try:
        return count(skeleton(model_config, torch.float32, trust_remote_code=config.trust_remote_code))
    except UserError:
        raise
    except Exception:  # whatever a class does in its constructor that wants memory: the plan says that it estimates
        return None


def count(model: Any, *, prove: bool = True) -> Counts:
    """Counts the parameters of a model, live or on the meta device.

    Args:
        model: from transformers, peft around it or not.
        prove: try on a toy of its class whether its layers stream (about half a second); else they are said not to.
    """
    inner = unwrap(model)
    layers = checkpointed_layers(inner)
    dense = not any(_share(name, parameter, inner.config) < 1 for name, parameter in _own(inner))
    experts = None if dense else _experts(layers, inner.config)
    return Counts(
        parameters=sum(parameter.numel() for _, parameter in _own(inner)),
        layers=tuple(sum(parameter.numel() for _, parameter in _own(layer)) for layer in layers),
        linear=tuple(round(_linear(layer, inner.config)) for layer in layers),
        gated=not dense or not layers or _is_gated(layers[0], inner.config),
        streamed=prove and (dense or experts is not None) and _streams(inner, layers),
        experts=experts,
    )


def _own(module: nn.Module) -> list[tuple[str, Any]]:
    """Parameters of the model itself, each once: of an adapter neither its matrices nor its copies of whole modules."""
    return [
        (name, parameter)
        for name, parameter in module.named_parameters()
        if "lora_" not in name and ".modules_to_save." not in f".{name}"
    ]


def _linear(layer: nn.Module, config: Any) -> float:
    """Weights of a module that multiply every token, experts by how many of them a token visits."""
    return sum(parameter.numel() * _share(name, parameter, config) for name, parameter in _own(layer) if parameter.ndim >= 2)


def _share(name: str, parameter: Any, config: Any) -> float:
    """Which part of a parameter a token meets: of experts, in one tensor or in a list of modules, the active ones."""
    if parameter.ndim < 3 and ".experts." not in f".{name}":
        return 1.0
    count, active = _numbers(config)
    return min(1.0, active / count) if count and active else 1.0


def _numbers(config: Any) -> tuple[int, int]:
    """Experts, and those that a token visits; 0 where the configuration does not say, the most where it says of each layer."""
    text = config.get_text_config()
    count, active = (next((n for key in keys if (n := getattr(text, key, None))), 0) for keys in (_EXPERTS, _ACTIVE))
    most, met = (max(n) if isinstance(n, list | tuple) else int(n) for n in (count, active))
    return most, met


def _experts(layers: Any, config: Any) -> Experts | None:
    """The mixture of experts as its matrices show it; None where they are not three of one width each, alike in all layers."""
    count, active = _numbers(config)
    row, found, sparse = int(config.get_text_config().hidden_size), set(), []
    for layer in layers:
        attending = tuple(
            f"{name}." for name, part in layer.named_children() if any(is_attention(each) for each in part.modules())
        )
        sizes = {True: 0, False: 0}  # of experts, and beside them
        for name, matrix in _own(layer):
            if matrix.ndim >= 2 and not name.startswith(attending):
                sizes[_share(name, matrix, config) < 1] += matrix.numel()
        sparse.append(sizes[True] > 0)
        if sparse[-1]:
            found.add((sizes[True], sizes[False]))
    if len(found) != 1:
        return None
    inside, beside = found.pop()
    width, rest = divmod(inside, count * 3 * row)
    # Beside the experts stand the router, a row for each, and perhaps a shared expert with a gate of one row.
    shared = max(0, beside - count * row) // (3 * row)
    return None if rest else Experts(count, active, width, shared, tuple(sparse))


def _is_gated(layer: nn.Module, config: Any) -> bool:
    """Whether what is no attention in a layer has three matrices of the MLP's width and not two."""
    text = config.get_text_config()
    parts = [part for part in layer.children() if not any(is_attention(module) for module in part.modules())]
    width = int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
    return sum(_linear(part, config) for part in parts) > 2.5 * text.hidden_size * width


def _streams(model: PreTrainedModel, layers: Any) -> bool:
    """Whether all layers are of a form that streams, and are found to on a toy of the class."""
    if any(isinstance(describe(layer), str) or other_randomness(layer) for layer in layers):
        return False
    return prove_family(model) is None or prove_family(model, fused=False) is None
