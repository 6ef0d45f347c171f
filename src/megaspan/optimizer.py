"""AdamW with fp32 masters, clipping and a schedule, without a second copy of anything.

A step at a million tokens moves weights by amounts far below what bf16 can hold (8 bits: an update under 1/256 of a weight is
lost), so bf16 parameters get fp32 masters: AdamW works on those, and the parameters are their rounded copies. Gradients
accumulate in fp32 as well, on the parameter itself (`parameter.grad_dtype = torch.float32`; a torch that lacks it is refused,
because gradients would be summed in bf16), and AdamW reads them in place. Bytes per trained parameter, and for 4B of them:

    masters     2 weight + 4 master + 4 gradient + 8 moments = 18    67 GiB
    fp32        4 weight + 4 gradient + 8 moments            = 16    60 GiB
    bfloat16    2 weight + 2 gradient + 4 moments            =  8    30 GiB   (every update rounded, as in TRL's one-GPU runs)

A step needs nothing above that with the fused AdamW, and some four times the largest parameter, in fp32, with the loop
(`adamw_torch`, and always on the CPU). torch's `foreach` variant would hold whole copies and is never used.

Source: Micikevicius et al. 2018, "Mixed Precision Training", arXiv 1710.03740; Loshchilov & Hutter 2019, arXiv 1711.05101.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from megaspan.config import SFTConfig
from megaspan.human import UserError, format_bytes

_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(^|[._])norm(\.|$)")
_HALF = (torch.bfloat16, torch.float16)


class NonFiniteGradient(RuntimeError):
    """The gradient holds an infinity or a NaN; nothing was updated."""


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


class Optimizer:
    """AdamW over the trained parameters of a model, tied ones once.

    Args:
        model: its parameters are where they will be trained; those with `requires_grad` are taken.
        config: `optim`, `learning_rate`, `weight_decay`, `adam_*`, `lr_scheduler_*`, `warmup_*` and `weights_dtype`: "bfloat16"
            keeps bf16 parameters as they are, anything else gives them masters.
        total_steps: length of the schedule.

    Attributes:
        steps: optimizer steps so far, skipped ones included.
        precision, reason: what the parameters are kept in, and what that means, for the run header.

    Raises:
        UserError: nothing is trained, or the schedule does not take its arguments.
    """

    def __init__(self, model: torch.nn.Module, config: SFTConfig, total_steps: int) -> None:
        self._parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not self._parameters:
            raise UserError("no parameter of the model is trained", do="Set requires_grad, or use_peft: true to train adapters")
        self._masters: dict[str, torch.nn.Parameter] = {}
        if config.weights_dtype != "bfloat16":
            for name, parameter in self._parameters.items():
                if parameter.dtype in _HALF:
                    self._masters[name] = _master(parameter)
        decayed = decayed_names(model)
        names = [
            (config.weight_decay, [name for name in self._parameters if name in decayed]),
            (0.0, [name for name in self._parameters if name not in decayed]),
        ]
        groups = [{"params": [self._target(name) for name in group], "weight_decay": decay} for decay, group in names if group]
        self._order = [name for _, group in names for name in group]
        device = next(iter(self._parameters.values())).device
        self._adamw = torch.optim.AdamW(
            groups,
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            fused=config.optim == "adamw_torch_fused" and device.type == "cuda",
            foreach=False,
        )
        self._schedule = _schedule(self._adamw, config, total_steps)
        self.steps = 0
        self.precision, self.reason = self._describe()
        self._norm: torch.Tensor | None = None
        self._factor: torch.Tensor | None = None
        self._factor_scale = 1.0

    @property
    def learning_rate(self) -> float:
        """The rate that the next step will use."""
        return float(self._adamw.param_groups[0]["lr"])

    def zero_grad(self) -> None:
        """Drops all gradients, and with them what `clip` found."""
        for parameter in self._parameters.values():
            parameter.grad = None
        self._norm = self._factor = None

    def gradient_norm(self) -> torch.Tensor:
        """L2 norm of all gradients together, fp32 scalar on the CPU (0 where there is none); waits for the device.

        Squares are summed in fp32 (fp64 for fp64) tensor by tensor, whatever the gradients are kept in.
        """
        norms = [
            torch.linalg.vector_norm(parameter.grad, dtype=torch.promote_types(parameter.grad.dtype, torch.float32))
            for parameter in self._parameters.values()
            if parameter.grad is not None
        ]
        total = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        self._norm = total.cpu()
        return self._norm

    def clip(self, max_norm: float, scale: float = 1.0) -> float:
        """Finds the factor that brings the norm of the gradients down to `max_norm`; `step` applies it.

        Equal to `torch.nn.utils.clip_grad_norm_`: min(1, max_norm / (norm + 1e-6)).

        Args:
            max_norm: the limit; 0 never clips.
            scale: what `step` will multiply the gradients by.

        Returns:
            The norm of the scaled gradients before clipping; it may be infinite or NaN, and then `step` refuses.
        """
        norm = self.gradient_norm() * scale
        self._factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0) if max_norm > 0 else None
        self._factor_scale = scale
        return float(norm)

    @torch.no_grad()
    def step(self, scale: float = 1.0) -> None:
        """Updates the weights and moves the schedule on; gradients stay, scaled and clipped, until `zero_grad`.

        Args:
            scale: multiplies the gradients first; the one that `clip` was told, if it was called.

        Raises:
            NonFiniteGradient: the gradient is not finite, so nothing was changed.
        """
        norm = self.gradient_norm() if self._norm is None else self._norm
        if not math.isfinite(float(norm)):
            raise NonFiniteGradient(self._not_finite())
        factor = torch.tensor(1.0) if self._factor is None else self._factor
        if self._factor is not None and scale != self._factor_scale:
            raise ValueError(f"clip was told a scale of {self._factor_scale}, step one of {scale}")
        if float(factor) * scale != 1.0:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor * scale if scale != 1.0 else factor)
        for name, master in self._masters.items():
            master.grad = self._parameters[name].grad
        self._adamw.step()
        for name, master in self._masters.items():
            master.grad = None
            self._parameters[name].copy_(master)
        self._norm = self._factor = None
        self.skip()

    def skip(self) -> None:
        """Moves the schedule on without an update: a step that has not one trained token."""
        self.steps += 1
        self._set_learning_rate()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, by parameter name: references to the live tensors, not copies."""
        return {
            "steps": self.steps,
            "parameters": {
                name: dict(self._adamw.state.get(self._target(name), {}))
                | ({"master": self._masters[name].detach()} if name in self._masters else {})
                for name in self._parameters
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where `state_dict` was taken, bit for bit; parameters with masters are set to them.

        The moments may be taken over as they are: do not use `state` afterwards.

        Raises:
            UserError: the state is of other parameters.
        """
        parameters: Mapping[str, Mapping[str, Any]] = state["parameters"]
        self._check_same(parameters)
        moments = {
            number: {key: value for key, value in parameters[name].items() if key != "master"}
            for number, name in enumerate(self._order)
            if "step" in parameters[name]
        }
        self._adamw.load_state_dict({"state": moments, "param_groups": self._adamw.state_dict()["param_groups"]})
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(parameters[name]["master"])
                self._parameters[name].copy_(master)
        self.steps = int(state["steps"])
        self._set_learning_rate()

    def _target(self, name: str) -> torch.nn.Parameter:
        """What AdamW works on."""
        return self._masters.get(name, self._parameters[name])

    def _set_learning_rate(self) -> None:
        # The schedules are functions of the step alone, so there is no state to keep in step with.
        schedule = self._schedule
        for group, base, function in zip(self._adamw.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
            group["lr"] = base * function(self.steps)

    def _check_same(self, parameters: Mapping[str, Mapping[str, Any]]) -> None:
        missing, unknown = self._parameters.keys() - parameters.keys(), parameters.keys() - self._parameters.keys()
        for name, parameter in self._parameters.items():
            for key, value in parameters.get(name, {}).items():
                if key != "step" and value.shape != parameter.shape:
                    raise UserError(
                        f"the checkpoint's optimizer has {name} of shape {tuple(value.shape)}",
                        got=f"{tuple(parameter.shape)} here",
                    )
            if not missing and ("master" in parameters[name]) != (name in self._masters):
                made, here = ("with", "without") if "master" in parameters[name] else ("without", "with")
                raise UserError(
                    f"the checkpoint was made {made} fp32 masters, and this run is {here}",
                    do="Give dtype and bf16 the values that the checkpoint's run had, on the same kind of device",
                )
        if missing or unknown:
            raise UserError(
                f"the checkpoint's optimizer trains other parameters: {len(missing)} are missing, {len(unknown)} unknown",
                got=", ".join(sorted(missing | unknown)[:3]),
                do="Resume with the model and the LoRA settings of that run",
            )

    def _not_finite(self) -> str:
        names = [
            name
            for name, parameter in self._parameters.items()
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
        ]
        where = (
            f"{len(names)} of {len(self._parameters)} parameters, first {names[0]}" if names else "the sum of squares overflows"
        )
        return f"the gradient is not finite ({where}); nothing was updated"

    def _describe(self) -> tuple[str, str]:
        count = sum(parameter.numel() for parameter in self._parameters.values())
        size = 0
        for name, parameter in self._parameters.items():
            target = self._target(name)
            size += parameter.nbytes + 3 * target.nbytes + (target.nbytes if target is not parameter else 0)
        states = f"{count:,} trained parameters take {format_bytes(size)} with gradients and moments"
        if self._masters:
            return "bf16 weights with fp32 masters", f"gradients accumulate in fp32; {states}"
        if any(parameter.dtype in _HALF for parameter in self._parameters.values()):
            return "pure bf16 weights", f"dtype: bfloat16, so updates are rounded to 8 bits; {states}"
        return "fp32 weights", states


def _master(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """An fp32 copy of a half-precision parameter, whose own gradient accumulates in fp32 from now on."""
    if not hasattr(parameter, "grad_dtype"):
        raise UserError(
            f"torch {torch.__version__} cannot keep fp32 gradients of bf16 weights", do="Install torch 2.11 or newer"
        )
    parameter.grad = None  # a gradient of another type forbids the change
    parameter.grad_dtype = torch.float32
    return torch.nn.Parameter(parameter.detach().float())


def _schedule(adamw: torch.optim.Optimizer, config: SFTConfig, total_steps: int) -> LambdaLR:
    try:
        schedule = get_scheduler(
            config.lr_scheduler_type,
            adamw,
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
    return schedule
