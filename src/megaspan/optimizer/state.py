"""The optimizer's state by parameter name, the same wherever it lies: what a checkpoint holds.

    step, exp_avg, exp_avg_sq, master                                   torch's AdamW
    step, state1, state2, absmax1, absmax2, master                      8 bits (32: without absmax)

Tensors on the host are saved from there, and a state that was saved from one place is copied into any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from megaspan.human import UserError
from megaspan.layers.shards import Sharded
from megaspan.optimizer.conveyor import pieces
from megaspan.optimizer.trained import Rule, Trained


def state_of(trained: Trained, rule: Rule) -> dict[str, Any]:
    """Step and moments once there are some, and the master: the live tensors, in the parameter's shape.

    Of a sharded parameter they are `Sharded`; a shard that is its own master is given as one, so that the state is the same as
    on one device.
    """
    state: dict[str, Any] = {}
    if trained.stepped:
        entries = rule.entries(trained)
        state |= {"step": trained.step}
        state |= {name: trained.whole(moment, entries[name].span) for name, moment in trained.moments.items()}
    if trained.master is not None:
        state["master"] = trained.whole(trained.master)
    elif trained.is_master:
        state["master"] = trained.whole(trained.weight)
    return state


def load_state(
    here: Mapping[str, Trained], saved: Mapping[str, Mapping[str, Any]], rule: Rule, make_moments: Callable[[Trained], None]
) -> None:
    """Copies a saved state into the live one; weights with masters are set to them.

    Tensors of the saved state are whole (of a sharded parameter this rank takes its part, and of a memory-mapped file reads no
    more), or `Sharded` over the same ranks.

    Raises:
        UserError: it is of other parameters, or of another kind of optimizer; nothing was changed.
    """
    check_same(here, saved, rule)
    for name, trained in here.items():
        state = saved[name]
        trained.stepped = "step" in state
        if trained.stepped:
            make_moments(trained)
            trained.step.copy_(state["step"])
        else:
            trained.step.zero_()
        entries = rule.entries(trained)
        for key, moment in trained.moments.items():
            if trained.stepped:
                moment.copy_(_part(state[key], trained.whole(moment, entries[key].span)).reshape(moment.shape))
            else:
                moment.zero_()
        if trained.is_master:
            trained.weight.copy_(_part(state["master"], trained.whole(trained.weight)))
        if trained.master is not None:
            trained.master.copy_(_part(state["master"], trained.whole(trained.master)).reshape(trained.master.shape))
            weight, master = trained.weight, trained.shaped(trained.master)
            if trained.on_host:
                for cut in pieces(weight.numel()):
                    weight.view(-1)[cut].copy_(master.view(-1)[cut])
            else:
                weight.copy_(master)


def _part(saved: Any, here: Any) -> Tensor:
    """This rank's part of a saved tensor."""
    if isinstance(saved, Sharded):
        return saved.local
    whole: Tensor = saved
    return here.of(whole) if isinstance(here, Sharded) else whole


def check_same(here: Mapping[str, Trained], saved: Mapping[str, Mapping[str, Any]], rule: Rule) -> None:
    """Compares a saved state with what is trained here, by names and shapes alone.

    Raises:
        UserError: it is of other parameters, or of another kind of optimizer.
    """
    missing, unknown = here.keys() - saved.keys(), saved.keys() - here.keys()
    for name, trained in here.items():
        shapes = {key: trained.whole_shape(entry) for key, entry in rule.entries(trained).items()}
        state = saved.get(name, {})
        moments = state.keys() - {"step", "master"}
        if moments and moments != shapes.keys():
            if "state1" in moments & shapes.keys():  # both are adamw_8bit
                raise _other_bits(name, alone="absmax1" in moments)
            raise UserError(
                f"the checkpoint's optimizer keeps {', '.join(sorted(moments))} of {name}",
                found=f"optim with {', '.join(sorted(shapes))} here",
                do="Set optim to what that run had: adamw_8bit and the others do not continue each other",
            )
        for key, value in state.items():
            if key != "step" and tuple(value.shape) != (wanted := shapes.get(key, tuple(trained.parameter.shape))):
                raise UserError(f"the checkpoint's optimizer has {name} of shape {tuple(value.shape)}", found=f"{wanted} here")
        if not missing and ("master" in state) != (trained.master is not None or trained.is_master):
            made, now = ("with", "without") if "master" in state else ("without", "with")
            raise UserError(
                f"the checkpoint was made {made} fp32 masters, and this run is {now}",
                do="Give dtype and bf16 the values that the checkpoint's run had, on the same kind of device",
            )
    if missing or unknown:
        raise UserError(
            f"the checkpoint's optimizer trains other parameters: {len(missing)} are missing, {len(unknown)} unknown",
            found=", ".join(sorted(missing | unknown)[:3]),
            do="Resume with the model and the LoRA settings of that run",
        )


def _other_bits(name: str, *, alone: bool) -> UserError:
    """Moments of 8 bits and of 32 under one `optim`: ranks that share a weight share no run of 256 of its moments."""
    there, here = ("8", "32") if alone else ("32", "8")
    return UserError(
        f"the checkpoint keeps the moments of {name} in {there} bits, and this run in {here}: with adamw_8bit a process "
        "alone keeps 8 bits and several ranks 32 where a row of a weight is no multiple of 256 numbers",
        do=f"Resume {'in one process' if alone else 'on several ranks'}, as that run was",
    )
