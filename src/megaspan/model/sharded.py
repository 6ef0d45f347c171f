"""`load_sharded`: from `model_name_or_path` to a model whose every rank holds its shards, and never more.

The order of `load_model`, with the model built on the meta device, LoRA put on it there, cut, and only then filled: an 8B model
in fp32 is 33 GB that no rank and no node ever holds whole. Adapters are small and real from the start, with the values that
peft draws on one device.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import GenerationConfig

from megaspan.model.fill import fill_pretrained, fill_random, skeleton
from megaspan.model.kinds import unwrap
from megaspan.model.load import LoadedModel, apply_rope, live_dtype, loaded
from megaspan.model.lora import wrap_lora
from megaspan.model.shard import materialise, shard
from megaspan.model.source import Source, apply_overrides, commit_of, find_source, read_config, unreadable
from megaspan.rope import resolve_rope

if TYPE_CHECKING:
    from megaspan.config import SFTConfig


def load_sharded(config: SFTConfig, device: torch.device | str, device_mesh: Any, peft_config: Any = None) -> LoadedModel:
    """Load the model and the tokenizer that `config` names, cut over the mesh; called by all ranks.

    Args:
        config: as for `load_model`; with `use_peft` (or `peft_config`) a LoRA adapter is put on it.
        device: where the shards go.
        device_mesh: as for `shard`.
        peft_config: peft's own configuration of the adapter.

    Returns:
        The model in training mode, to be prepared. Weights for a given seed are those of `load_model` on one device of the
        same kind; those of a LoRA adapter too, where all ranks have the same random state as that one process.

    Raises:
        UserError: as `load_model`, `wrap_lora` and `shard`.
    """
    device = torch.device(device)
    source = find_source(config)
    model_config = read_config(source, trust_remote_code=config.trust_remote_code)
    commit = commit_of(source, model_config)
    apply_overrides(model_config, config.config_overrides)
    rope = resolve_rope(model_config.to_dict(), config.rope_parameters, config.max_length, config.allow_past_window)
    apply_rope(model_config, rope)
    compute = live_dtype(config, device)
    try:
        plain, model = (skeleton(model_config, compute, trust_remote_code=config.trust_remote_code) for _ in range(2))
    except Exception as error:  # whatever transformers' constructors do with values that do not go together
        raise unreadable(source, error) from error
    if peft_config is not None or config.use_peft:
        model = _with_adapter(model, config, peft_config)
    shard(model, device_mesh, masters=config.weights_dtype != "bfloat16", compute=compute)
    materialise(model, device)
    unused = 0
    if source.kind == "shape":
        fill_random(model, plain, config.seed, device)
    else:
        unused = _fill(model, plain, source, device)
    return loaded(model, config, source, commit, rope, unused)


def _fill(model: nn.Module, plain: Any, source: Source, device: torch.device) -> int:
    try:
        unused = fill_pretrained(model, plain, source, device)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise unreadable(source, error) from error
    inner: Any = unwrap(model)
    if inner.can_generate():
        with suppress(OSError):  # as from_pretrained: there is none, and the one made of the model's configuration stays
            inner.generation_config = GenerationConfig.from_pretrained(
                source.place, revision=source.revision or "main", local_files_only=source.cache_only
            )
    return unused


def _with_adapter(model: Any, config: SFTConfig, peft_config: Any) -> Any:
    _make_hollow(model)
    wrapped = wrap_lora(model, config, peft_config)
    empty: dict[nn.Parameter, nn.Parameter] = {}
    for module in wrapped.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and _is_hollow(parameter):
                if parameter not in empty:  # tied weights stay one
                    empty[parameter] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
                module._parameters[name] = empty[parameter]
    return wrapped


def _make_hollow(model: nn.Module) -> None:
    """Weights of one element, seen at every place: peft puts adapters where the weights are, and on the meta device they would
    lose their values."""
    hollow: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in hollow:
                    one = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                    hollow[parameter] = nn.Parameter(one, requires_grad=parameter.requires_grad)
                module._parameters[name] = hollow[parameter]


def _is_hollow(parameter: torch.Tensor) -> bool:
    return parameter.untyped_storage().nbytes() < parameter.numel() * parameter.element_size()
