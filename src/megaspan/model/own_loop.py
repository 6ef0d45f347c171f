"""What `prepare` cannot do for somebody's own loop: options that ask for another model, another machine, or the trainer's loop.

An `SFTConfig` describes a whole run; `prepare` reads the few of its options that are levers on a model. Each of the others was
once accepted here and had no effect: an adapter that was not there (8B: 131 GB of states in place of 17), positions past the
model's window that nothing extended, a gradient norm that nobody clipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megaspan.human import UserError, format_bytes
from megaspan.model.limits import device_of

if TYPE_CHECKING:
    from megaspan.config import SFTConfig

TRAINERS = (
    "num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps",
    "warmup_ratio", "optim", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "offload_optimizer",
)  # fmt: skip
"""Options of the loop, which `prepare` has no part in."""


def check_own_loop(model: torch.nn.Module, args: SFTConfig) -> None:
    """Refuses what would be ignored where there is a model and no trainer.

    Args:
        model: as `prepare` is given it: a transformers model, or a LoRA model of peft around one.
        args: the options.

    Raises:
        UserError: an option contradicts the model or the machine, or belongs to the trainer's loop.
    """
    if args.use_peft and not getattr(model, "peft_config", None):
        raise UserError(
            "use_peft asks for an adapter, and this model has none: prepare puts levers on a model and no adapter",
            do="Call megaspan.model.wrap_lora(model, args) before prepare, or remove use_peft",
            option="use_peft",
        )
    if args.rope_parameters is not None:
        raise UserError(
            "rope_parameters are settled while a model is loaded, and prepare leaves the positions of this one as they are",
            got=args.rope_parameters,
            do="Load the model with the rope_parameters that megaspan plan prints, and remove them here",
            option="model_init_kwargs",
        )
    _check_dtype(model, args)
    if args.memory_limit and device_of(model).type != "cuda":
        raise UserError(
            "memory_limit is for a GPU, and this model is not on one",
            got=format_bytes(args.memory_limit),
            do="Remove it, or move the model to the GPU before prepare",
            option="memory_limit",
        )
    set_here = [name for name in TRAINERS if getattr(args, name) != type(args).model_fields[name].default]
    if set_here:
        one = len(set_here) == 1
        raise UserError(
            f"{', '.join(set_here)} {'is an option' if one else 'are options'} of the trainer's loop, which prepare is not",
            do=f"Leave {'it' if one else 'them'} out and let your own loop see to that, or train with megaspan's SFTTrainer",
            option=set_here[0],
        )


def _check_dtype(model: torch.nn.Module, args: SFTConfig) -> None:
    """Pure bf16 is a property of the weights that are there; null and float32 ask for masters, which an optimizer keeps."""
    held = next(part.dtype for part in model.parameters() if part.is_floating_point())
    if args.weights_dtype == "bfloat16" and held != torch.bfloat16:
        raise UserError(
            "dtype: bfloat16 asks for weights in bf16, and prepare leaves the weights of this model as they are",
            found=str(held).removeprefix("torch."),
            do="Load the model with dtype=torch.bfloat16, or remove dtype",
            option="dtype",
        )
