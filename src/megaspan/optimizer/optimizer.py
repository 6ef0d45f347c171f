"""AdamW with fp32 masters, clipping and a schedule, without a second copy of anything.

A step at a million tokens moves weights by amounts far below what bf16 can hold (8 bits: an update under 1/256 of a weight is
lost), so bf16 parameters get fp32 masters: AdamW works on those, and the parameters are their rounded copies. Gradients
accumulate in fp32 as well, on the parameter itself (`parameter.grad_dtype = torch.float32`; a torch that lacks it is refused,
because gradients would be summed in bf16), and AdamW reads them in place. Bytes per trained parameter, and for 4B of them:

    masters     2 weight + 4 master + 4 gradient + 8 moments = 18    67 GiB
    fp32        4 weight + 4 gradient + 8 moments            = 16    60 GiB
    bfloat16    2 weight + 2 gradient + 4 moments            =  8    30 GiB   (every update rounded, as in TRL's one-GPU runs)

All but the weight may lie elsewhere (`StatePlan`): a gradient is used up in the backward ("update"), or goes to the host when
it is complete ("host"); masters and moments lie on the host and come in pieces. Every placement gives the same bits on the CPU.

With everything on the device a step needs nothing above it with the fused AdamW, and some four times the largest parameter, in
fp32, with the loop (`adamw_torch`, and always on the CPU).

Source: Micikevicius et al. 2018, "Mixed Precision Training", arXiv 1710.03740; Lv et al. 2023, "Full Parameter Fine-tuning for
Large Language Models with Limited Resources", arXiv 2306.09782 (updates in the backward).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megaspan.config import SFTConfig
from megaspan.human import UserError
from megaspan.optimizer.adamw import TorchAdamW
from megaspan.optimizer.collect import HostGradients, norm_of, on_any_rank, total_norm
from megaspan.optimizer.conveyor import Conveyor
from megaspan.optimizer.eight_bit import EightBitAdamW
from megaspan.optimizer.place import describe, lay_out
from megaspan.optimizer.schedule import LearningRate, decayed_names
from megaspan.optimizer.state import check_same, load_state, state_of
from megaspan.optimizer.trained import Rule, Trained
from megaspan.optimizer.update import Update
from megaspan.plan.states import StatePlan


class NonFiniteGradient(RuntimeError):
    """The gradient holds an infinity or a NaN. The message says whether something was updated before it came."""


class Optimizer:
    """AdamW over the trained parameters of a model, tied ones once.

    Args:
        model: its parameters are where they will be trained; those with `requires_grad` are taken.
        config: `optim`, `learning_rate`, `weight_decay`, `adam_*`, `lr_scheduler_*`, `warmup_*` and `weights_dtype`: "bfloat16"
            keeps bf16 parameters as they are, anything else gives them masters.
        total_steps: length of the schedule.
        states: where gradients, moments and masters lie; None: on the device, but for what `offload_optimizer` says.
        backend: streams and events for tests; None takes torch's.

    Attributes:
        steps: optimizer steps so far, skipped ones included.
        updating: an update has begun and is not complete: weights are between two steps and must not be saved.
        states: where things lie.
        precision, reason: what the parameters are kept in, and what that means, for the run header.

    Raises:
        UserError: nothing is trained, the schedule does not take its arguments, or the host has no room.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: SFTConfig,
        total_steps: int,
        *,
        states: StatePlan | None = None,
        backend: Any = None,
    ) -> None:
        self.states = states or StatePlan("device", "host" if config.offload_optimizer else "device")
        if self.states.gradients == "update" and config.max_grad_norm > 0:
            raise ValueError("parameters cannot be updated in the backward when the norm of all gradients is wanted first")
        self._trained = {trained.name: trained for trained in _trained(model, config)}
        device = next(iter(self._trained.values())).weight.device
        self._rule: Rule = (EightBitAdamW if config.optim == "adamw_8bit" else TorchAdamW)(config, device)
        self._rates = LearningRate(config, total_steps)
        self._conveyor = Conveyor(device, backend=backend)
        self._update, self._host = Update(self._rule, self._conveyor), HostGradients(self._conveyor)
        self._room = lay_out(self._trained.values(), self._rule, self.states, masters=config.weights_dtype != "bfloat16")
        self.steps = 0
        self.updating = False
        self.precision, self.reason = describe(self._trained.values(), self._rule, self.states, self._room)
        if config.offload_optimizer and self.states.moments == "device":
            self.reason += "; offload_optimizer moves nothing here: on a CPU all memory is the host's"
        self._last = False
        self._norms: dict[str, Tensor] = {}  # in the order in which gradients were complete
        self._updated: set[str] = set()  # in this backward
        self._stop: Tensor | None = None
        self._norm: Tensor | None = None
        self._factor: Tensor | None = None
        self._factor_scale = 1.0
        self._hooks = []
        if self.states.gradients != "device":
            for trained in self._trained.values():
                hook = partial(self._gradient_came, trained)
                self._hooks.append(trained.parameter.register_post_accumulate_grad_hook(hook))

    @property
    def learning_rate(self) -> float:
        """The rate that the next step will use."""
        return self._rates.at(self.steps)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that masters, moments and gradients take (pinned where there is a GPU)."""
        return self._room.bytes

    @property
    def seconds_pinning(self) -> float:
        """Time spent getting the host memory."""
        return self._room.seconds_pinning

    @property
    def state_bytes(self) -> int:
        """Bytes of the whole state, as a checkpoint holds it, once every parameter has been updated."""
        total = 0
        for trained in self._trained.values():
            for entry in self._rule.entries(trained).values():
                total += torch.Size(trained.whole_shape(entry)).numel() * entry.dtype.itemsize
            if trained.master is not None or trained.is_master:
                total += trained.parameter.numel() * trained.target_dtype.itemsize
        return total

    def last_row(self) -> None:
        """The backward of the window's last row comes next: gradients are complete when it brings them.

        Without this call everything is right as well, but gradients wait for `clip` and `step`.
        """
        self._last = True

    def settle(self) -> None:
        """Lets go of gradients that have gone to the host; called between layers. The device waits, not the host."""
        self._conveyor.land()

    def zero_grad(self) -> None:
        """Drops all gradients, wherever they are, and with them what `clip` found."""
        self._conveyor.land()
        for trained in self._trained.values():
            trained.parameter.grad = None
            trained.has_gathered = False
        self._last = False
        self._norms.clear()
        self._updated.clear()
        self._norm = self._factor = self._stop = None

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """L2 norm of all gradients together, fp32 scalar on the CPU (0 where there is none); waits for the device.

        Of sharded parameters it is the norm over all ranks, the same on each; every rank has to call it.
        Squares are summed in fp32 (fp64 for fp64) tensor by tensor, whatever the gradients are kept in.
        """
        for name, trained in self._trained.items():
            if trained.gradient is not None:  # not taken in the backward: all of them, or tied ones, or an earlier row's
                self._norms[name] = norm_of(self._host.add(trained))
            elif trained.has_gathered and name not in self._norms:
                self._norms[name] = self._host.norm(trained)
        norms = [(trained, self._norms[name]) for name, trained in self._trained.items() if name in self._norms]
        self._norm = total_norm(norms, next(iter(self._trained.values())).weight.device).cpu()
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
        """Updates what is not updated yet and moves the schedule on; gradients stay, scaled and clipped, until `zero_grad`.

        Args:
            scale: multiplies the gradients first; the one that `clip` was told, if it was called.

        Raises:
            NonFiniteGradient: the gradient is not finite; nothing was changed, unless the message says so.
        """
        norm = self.gradient_norm() if self._norm is None else self._norm
        if not math.isfinite(float(norm)):
            raise self._not_finite(together=True)  # the norm is that of all ranks
        factor = torch.tensor(1.0) if self._factor is None else self._factor
        if self._factor is not None and scale != self._factor_scale:
            raise ValueError(f"clip was told a scale of {self._factor_scale}, step one of {scale}")
        if self._updated and float(factor) * scale != 1.0:
            raise ValueError("gradients that were used in the backward cannot be clipped or scaled any more")
        applied = None if float(factor) * scale == 1.0 else factor * scale if scale != 1.0 else factor
        todo = [each for each in self._trained.values() if each.gradient is not None or each.has_gathered]
        self.updating = True
        self._update(todo, self.learning_rate, factor=applied)
        self._conveyor.land()
        self.updating = False
        self._norm = self._factor = None
        self._updated.clear()
        self.skip()

    def skip(self) -> None:
        """Moves the schedule on without an update: a step that has not one trained token."""
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, by parameter name: references to the live tensors, not copies.

        Raises:
            RuntimeError: an update is half done, and a state between two steps must never be saved.
        """
        if self.updating:
            raise RuntimeError("an update has begun and is not complete: there is no state to save")
        self._conveyor.wait()
        return {
            "steps": self.steps,
            "parameters": {name: state_of(trained, self._rule) for name, trained in self._trained.items()},
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Whether `load_state_dict` would take this; changes nothing.

        Raises:
            UserError: the state is of other parameters or of another kind of optimizer.
        """
        check_same(self._trained, state["parameters"], self._rule)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where `state_dict` was taken, bit for bit, wherever things lay then; weights with masters are set to them.

        Raises:
            UserError: the state is of other parameters or of another kind of optimizer.
        """
        self._conveyor.wait()
        load_state(self._trained, state["parameters"], self._rule, self._update.make_moments)
        self.steps, self.updating = int(state["steps"]), False

    def close(self) -> None:
        """Takes the hooks off the model and gives the host memory back; harmless when called twice, the end of its use."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._conveyor.wait()
        self._room.close()

    @torch.no_grad()
    def _gradient_came(self, trained: Trained, parameter: Tensor) -> None:
        """A backward has added to `parameter.grad`, on whichever thread runs it."""
        if trained.name in self._updated or (self._last and trained.name in self._norms):
            raise RuntimeError(f"a second gradient of {trained.name} came after the window's last row")
        if self.states.gradients == "update":
            if self._last and not trained.tied:
                self._update_now(trained)
        elif not (self._last and trained.tied):  # the last gradient of a tied table waits on the device for its other half
            norm = self._host.take(trained, last=self._last)
            if norm is not None:
                self._norms[trained.name] = norm

    def _update_now(self, trained: Trained) -> None:
        """Updates one parameter inside the backward, unless its gradient or an earlier one is not finite."""
        gradient = trained.gradient
        assert gradient is not None
        norm = self._norms[trained.name] = norm_of(gradient)
        if self._rule.heeds:  # the device looks: asking here would make the host wait for it at each parameter
            bad = (~torch.isfinite(norm)).to(torch.float32)
            self._stop = bad if self._stop is None else torch.maximum(self._stop, bad)
        elif not math.isfinite(float(norm)):
            raise self._not_finite()
        self.updating = True
        self._updated.add(trained.name)
        self._update([trained], self.learning_rate, stop=self._stop)
        trained.parameter.grad = None

    def _not_finite(self, *, together: bool = False) -> NonFiniteGradient:
        """What to raise; `together` where all ranks are here, of which only some may hold a part that is not finite."""
        self._conveyor.wait()
        count, order = len(self._trained), list(self._norms)
        bad = [name for name in order if not math.isfinite(float(self._norms[name]))]
        # From the first bad gradient on, nothing is updated.
        before: Collection[str] = self._updated & set(order[: order.index(bad[0])] if bad else order)
        names = [name for name in bad if not self._is_finite(self._trained[name])]
        if together:
            before = on_any_rank(before, self._trained)
            names = sorted(on_any_rank(names, self._trained), key=order.index)
        self.updating = bool(before)
        where = f"{len(names)} of {count} parameters, first {names[0]}" if names else "the sum of squares overflows"
        said = "nothing was updated"
        if before:
            said = f"{len(before)} of {count} parameters had been updated in this backward, so nothing of this step is saved"
        return NonFiniteGradient(f"the gradient is not finite ({where}); {said}")

    @staticmethod
    def _is_finite(trained: Trained) -> bool:
        """Whether a gradient whose norm is not finite is itself: fp32 does not hold the squares of large numbers."""
        gradient = trained.gathered if trained.has_gathered else trained.gradient
        return gradient is not None and bool(torch.isfinite(gradient).all())


def _trained(model: torch.nn.Module, config: SFTConfig) -> list[Trained]:
    """The parameters to train, in the order of the model."""
    decayed = decayed_names(model)
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    found = [
        Trained(
            name=name,
            parameter=parameter,
            decay=config.weight_decay if name in decayed else 0.0,
            tied=uses[id(parameter)] > 1,
            embedding=id(parameter) in tables,
            step=torch.zeros(()),
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    if not found:
        raise UserError("no parameter of the model is trained", do="Set requires_grad, or use_peft: true to train adapters")
    return found
