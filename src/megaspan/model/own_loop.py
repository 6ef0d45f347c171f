"""What `prepare` cannot do for somebody's own loop: options that ask for another model, another machine, or another optimizer.

An `SFTConfig` describes a whole run; `prepare` reads those of its options that are levers on a model. Those of the loop
(learning rate, clipping, steps) are there for the loop to read. Others were once accepted here and had no effect, whatever the
loop did: an adapter that was not there (8B: 131 GB of states in place of 17), positions past the window that nothing extended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megaspan.human import UserError, format_bytes
from megaspan.model.limits import device_of

if TYPE_CHECKING:
    from megaspan.config import SFTConfig


def check_own_loop(model: torch.nn.Module, args: SFTConfig) -> None:
    """Refuses what would be ignored where there is a model and no trainer.

    Args:
        model: as `prepare` is given it: a transformers model, or a LoRA model of peft around one.
        args: the options.

    Raises:
        UserError: an option contradicts the model or the machine, or asks for the trainer's optimizer.
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
    if args.offload_optimizer:
        raise UserError(
            "offload_optimizer is for the trainer's optimizer, and prepare makes none",
            do="Remove it, or train with megaspan's SFTTrainer",
            option="offload_optimizer",
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
