"""The learning rate of each step and the parameters that decay, as transformers has them.

The schedules are functions of the step's number alone, so a resumed run needs that number and nothing else.
"""

from __future__ import annotations

import math
import re

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from megaspan.config import SFTConfig
from megaspan.human import UserError

_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(^|[._])norm(\.|$)")


def decayed_names(model: torch.nn.Module) -> set[str]:
    """Names of the parameters that weight decay applies to: all but biases and norms, as in transformers."""
    norms = (torch.nn.LayerNorm, torch.nn.RMSNorm)
    inside_norms = {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, norms)
        for name in module._parameters
    }
    return {name for name, _ in model.named_parameters() if not _NOT_DECAYED.search(name.lower())} - inside_norms


def warmup_steps(config: SFTConfig, total_steps: int) -> int:
    """Steps of warm-up: a number from 1, a share of all steps (rounded up) below; `warmup_ratio` is always a share."""
    if config.warmup_ratio:
        return math.ceil(total_steps * config.warmup_ratio)
    return int(config.warmup_steps) if config.warmup_steps >= 1 else math.ceil(total_steps * config.warmup_steps)


class LearningRate:
    """The rate of every step, by transformers' schedules.

    Args:
        config: `learning_rate`, `lr_scheduler_*` and `warmup_*`.
        total_steps: length of the schedule.

    Raises:
        UserError: the schedule does not take its arguments, or needs more than the number of the step.
    """

    def __init__(self, config: SFTConfig, total_steps: int) -> None:
        # transformers makes a schedule only around an optimizer; this one holds a number that nobody trains.
        holder = torch.optim.SGD([torch.zeros(())], lr=config.learning_rate)
        try:
            schedule = get_scheduler(
                config.lr_scheduler_type,
                holder,
                num_warmup_steps=warmup_steps(config, total_steps),
                num_training_steps=total_steps,
                scheduler_specific_kwargs=dict(config.lr_scheduler_kwargs or {}),
            )
        except (TypeError, ValueError) as error:
            raise UserError(
                f"lr_scheduler_type {config.lr_scheduler_type} does not take lr_scheduler_kwargs as given: {error}",
                got=config.lr_scheduler_kwargs,
            ) from error
        if not isinstance(schedule, LambdaLR):
            raise UserError(
                "lr_scheduler_type needs something other than the number of the step",
                got=config.lr_scheduler_type,
                allowed="linear, cosine, cosine_with_min_lr, constant_with_warmup and the like",
            )
        self._base, self._factor = schedule.base_lrs[0], schedule.lr_lambdas[0]

    def at(self, step: int) -> float:
        """The rate of optimizer step `step`, counted from 0."""
        return float(self._base * self._factor(step))
