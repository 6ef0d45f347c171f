"""Where masters, moments and gradients are put at the start, and what the run header says of it.

The header is written from the live tensors: what is pinned is asked of torch, and bytes are those that the arena holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from megaspan.human import UserError, format_bytes
from megaspan.layers.shards import shard_ranks
from megaspan.optimizer.conveyor import pieces
from megaspan.optimizer.room import HostRoom
from megaspan.optimizer.trained import HALF, Rule, Trained
from megaspan.optimizer.update import host_sizes
from megaspan.plan.states import StatePlan


@torch.no_grad()
def lay_out(trained: Iterable[Trained], rule: Rule, states: StatePlan, *, masters: bool) -> HostRoom:
    """Makes the masters, and the moments and gradients that will lie on the host; returns the memory they are in.

    Args:
        trained: parameters without state.
        rule: says which moments they have.
        states: where to put what.
        masters: bf16 parameters get fp32 masters, and gradients in fp32.

    Raises:
        UserError: the host has no room, or this torch cannot keep fp32 gradients of bf16 weights.
    """
    trained = list(trained)
    on_device = next(iter(trained)).weight.device
    state, gradients = states.moments == "host", states.gradients == "host"
    for each in trained:
        if rule.steps_on_device:
            each.step = each.step.to(on_device)
        if (state or gradients) and not each.weight.is_contiguous():
            raise UserError(
                f"{each.name} does not lie in one piece in memory, so its state cannot be cut into pieces for the host",
                do="Set offload_optimizer: false, or save the model anew so that it is loaded in one piece",
            )
        if masters and each.parameter.dtype in HALF:
            if shard_ranks(each.parameter, alone=True) is not None:
                raise ValueError(f"{each.name} is a half-precision shard; masters are made when the model is sharded")
            _take_fp32_gradients(each.parameter)
            each.master = each.weight.new_empty(0, dtype=torch.float32) if state else each.weight.float()
    room = HostRoom(host_sizes(rule, trained, state=state, gradients=gradients), pinned=on_device.type == "cuda")
    for each in trained:
        weight = each.weight
        each.on_host = state
        if state and each.master is not None:
            each.master = room.take(weight.numel(), torch.float32)
            for cut in pieces(weight.numel()):  # converted on the device, a piece at a time
                each.master[cut].copy_(weight.view(-1)[cut].float())
        if state:
            each.moments = {name: room.take(entry.count, entry.dtype) for name, entry in rule.entries(each).items()}
        if gradients:
            each.gathered = room.take(weight.numel(), each.gradient_dtype)
    return room


def _take_fp32_gradients(parameter: torch.nn.Parameter) -> None:
    """From now on the gradient of a half-precision parameter is summed in fp32."""
    if not hasattr(parameter, "grad_dtype"):
        raise UserError(
            f"torch {torch.__version__} cannot keep fp32 gradients of bf16 weights", do="Install torch 2.11 or newer"
        )
    parameter.grad = None  # a gradient of another type forbids the change
    parameter.grad_dtype = torch.float32


def describe(trained: Collection[Trained], rule: Rule, states: StatePlan, room: HostRoom) -> tuple[str, str]:
    """What the parameters are kept in, and where the rest lies, for the header."""
    count = sum(each.parameter.numel() for each in trained)
    ranks = max((group.size() for each in trained if (group := shard_ranks(each.parameter)) is not None), default=1)
    device = 0
    for each in trained:
        weight = each.weight
        moments = sum(entry.bytes for entry in rule.entries(each).values())
        master = 0 if each.master is None else each.master.nbytes
        device += weight.nbytes + (0 if each.on_host else moments + master)
        device += weight.numel() * each.gradient_dtype.itemsize * (states.gradients == "device")
    has_masters = any(each.master is not None or each.is_master for each in trained)
    said = ["gradients accumulate in fp32"] if has_masters else []
    precision = "fp32 weights"
    if has_masters:
        precision = "bf16 weights with fp32 masters"
    elif any(each.parameter.dtype in HALF for each in trained):
        precision = "pure bf16 weights"
        said = ["dtype: bfloat16, so updates are rounded to 8 bits"]
    if any(entry.dtype == torch.uint8 for each in trained for entry in rule.entries(each).values()):
        said.append("moments of 8 bits (bitsandbytes), those of embeddings and small tensors of 32")
    first = next(iter(trained))
    gathered = first.gathered
    if states.gradients == "update":
        said.append("each weight is updated in the backward when its gradient is complete, and the gradient dropped")
    elif gathered is not None:
        said.append(f"gradients go to {_memory(gathered)} when they are complete")
    if first.on_host:
        what = "masters and moments" if has_masters else "moments"
        said.append(f"{what} lie in {_memory(next(iter(first.moments.values())))} and are updated in pieces on the device")
    parts = [name for name, there in (("gradients", states.gradients == "device"), ("moments", not first.on_host)) if there]
    took = f"{count:,} trained parameters take {format_bytes(device)}" + (f" with {' and '.join(parts)}" if parts else "")
    took += f" on each of {ranks} ranks" if ranks > 1 else ""
    if room.bytes:
        took += f" on the device, {format_bytes(room.bytes)} on the host"
    return precision, "; ".join([*said, took])


def _memory(tensor: Tensor) -> str:
    return "pinned host memory" if torch.cuda.is_available() and tensor.is_pinned() else "host memory"
