"""`wrap_lora`: a LoRA adapter by peft on a model whose own weights stay as they are.

At long lengths the adapter saves the optimizer's and the gradients' memory (8B: 96 GB of fp32 masters and moments down to
less than one), not the activations; the other levers hold with it, because they sit on the layers and on the forward of the
model inside.

LoRA: Hu et al., arXiv:2106.09685.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from megaspan.attention.seam import is_attention
from megaspan.human import UserError
from megaspan.model.load import LoadedModel, with_model
from megaspan.world.quiet import peft_at_work

if TYPE_CHECKING:
    from megaspan.config import SFTConfig

PEFT_INSTALL = "pip install 'megaspan[lora]'"

_UNPROVEN = {
    "use_dora": "weight-decomposed LoRA",
    "trainable_token_indices": "single trained embeddings",
    "layer_replication": "replicated layers",
    "target_parameters": "adapters on bare parameters",
    "lora_bias": "adapters with a bias",
    "alora_invocation_tokens": "activated LoRA",
    "corda_config": "CorDA",
    "eva_config": "EVA",
    "loftq_config": "LoftQ",
}
_UNCHANGED_BASE = (True, False, "gaussian", "orthogonal")


def wrap_lora(model: Any, config: SFTConfig, peft_config: Any = None) -> Any:
    """Put a LoRA adapter on a model; only the adapter (and `lora_modules_to_save`) trains afterwards.

    Args:
        model: a transformers model, or a `LoadedModel` around one; the same kind comes back.
        config: `lora_r`, `lora_alpha`, `lora_dropout`, `lora_target_modules`, `lora_modules_to_save`, `use_rslora`.
        peft_config: peft's own configuration, in place of the options.

    Raises:
        UserError: peft is missing, or the adapter is of a kind that is not proven exact.
    """
    if isinstance(model, LoadedModel):
        return with_model(model, wrap_lora(model.model, config, peft_config))
    check_peft(peft_config)
    if not isinstance(model, PreTrainedModel):
        raise UserError("only a transformers model can get an adapter", found=type(model).__name__)
    from peft import get_peft_model

    chosen = _options(config) if peft_config is None else peft_config
    do, name = _names_to_write(model), type(model).__name__  # of the model as it is without adapters
    try:
        with peft_at_work():
            # The adapter has the type of the weights around it; its fp32 masters live in the optimizer, like all others.
            wrapped = get_peft_model(model, chosen, autocast_adapter_dtype=False)
    except ValueError as error:
        if getattr(chosen, "target_parameters", None):
            raise _on_experts(name, do) from error
        first = str(error).splitlines()[0]
        raise UserError(f"peft cannot place the adapter: {first}", do=do) from error
    if getattr(chosen, "target_parameters", None):
        raise _on_experts(name, do)
    return wrapped


def _on_experts(name: str, do: str) -> UserError:
    """What is said of experts in one tensor: peft makes adapters on parameters of names such as `all-linear` or `up_proj`."""
    return UserError(
        f"lora_target_modules means the experts of {name} too, whose weights are parameters without a module, and adapters on "
        "bare parameters (target_parameters) are not proven exact under the levers",
        do=do,
    )


def _names_to_write(model: PreTrainedModel) -> str:
    """What `lora_target_modules` may be, also where experts are one tensor."""
    if not any(parameter.ndim > 2 for parameter in model.parameters()):
        return "Set lora_target_modules to all-linear, or to names of modules"
    attending = [module for module in model.modules() if is_attention(module)]
    linear = {
        name.rpartition(".")[2]: None
        for module in attending
        for name, part in module.named_modules()
        if isinstance(part, torch.nn.Linear)
    }
    return f"Write lora_target_modules: [{', '.join(linear)}]" if linear else "Set lora_target_modules to names of modules"


def check_peft(peft_config: Any = None) -> None:
    """Refuses an adapter without the package that makes it, and one of peft's own that is not proven.

    Raises:
        UserError: peft is missing, or as `check_adapter`.
    """
    if importlib.util.find_spec("peft") is None:
        raise UserError("use_peft needs the package peft, which is not installed", do=PEFT_INSTALL)
    if peft_config is not None:
        check_adapter(peft_config)


def _options(config: SFTConfig) -> Any:
    from peft import LoraConfig

    targets: Any = config.lora_target_modules
    saved = config.lora_modules_to_save
    if targets is not None and not isinstance(targets, str):
        targets = targets[0] if list(targets) == ["all-linear"] else list(targets)
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=targets,
        modules_to_save=list(saved) if saved else None,
        use_rslora=config.use_rslora,
        bias="none",
    )


def check_adapter(chosen: Any) -> None:
    """Refuse an adapter that the levers are not proven exact with.

    Args:
        chosen: peft's configuration of it.

    Raises:
        UserError: it is no LoRA, or one of the kinds that are not proven.
    """
    from peft import LoraConfig

    if not isinstance(chosen, LoraConfig):
        raise UserError("this kind of adapter is not supported", found=type(chosen).__name__, allowed="peft.LoraConfig")
    for name, what in _UNPROVEN.items():
        if getattr(chosen, name, None):
            raise UserError(f"{what} ({name}) is not proven exact under the levers", do=f"Leave {name} out of the LoraConfig")
    if chosen.init_lora_weights not in _UNCHANGED_BASE:
        raise UserError(
            "this start of the adapter changes the base model's weights, which the saved adapter would need",
            found=f"init_lora_weights={chosen.init_lora_weights}",
            allowed=", ".join(str(value) for value in _UNCHANGED_BASE),
        )
    if chosen.bias != "none":
        raise UserError("trained biases beside LoRA are not proven exact", found=f"bias={chosen.bias!r}", allowed="none")
