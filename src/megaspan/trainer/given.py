"""A model that a script gives as an object, for the first time or again.

A second trainer on the same model goes on from its weights, on one process and on several alike: what the first one put on it
is taken off, shards stay where they are, and fp32 masters, which live in an optimizer that is gone, begin at the weights as
they are multiplied. What cannot be gone on with (an adapter inside, another cut) is said in a sentence.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megaspan import world
from megaspan.config import SFTConfig
from megaspan.human import UserError
from megaspan.layers.shards import compute_dtype, is_master, local
from megaspan.model import LoadedModel, adopt_model, unprepare
from megaspan.model.shard import Shards, shards


def check_given(model: torch.nn.Module, args: SFTConfig) -> None:
    """Refuses, before any text is read, a model that is not what the options ask for.

    Raises:
        UserError: `bf16` asks for products in another type than that of the model's weights, or there is an adapter inside.
    """
    dtype = _dtype(model)
    if args.bf16 is not None and args.bf16 != (dtype == torch.bfloat16):
        asked, had = ("bfloat16", str(dtype).removeprefix("torch.")) if args.bf16 else ("float32", "bfloat16")
        raise UserError(
            f"bf16: {str(args.bf16).lower()} asks for products in {asked}, and the model that was given is of another type",
            found=had,
            allowed=asked,
            do=f"Load it with dtype=torch.{asked}" + (", masters in fp32 are kept beside it" if args.bf16 else ""),
            option="bf16",
        )
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is not None and any(isinstance(module, tuners.BaseTunerLayer) for module in model.modules()):
        raise UserError(
            "there is an adapter inside the model that was given: an earlier trainer or add_adapter has put it there",
            do="Load the base model anew; to go on with the adapter, use train(resume_from_checkpoint=True)",
        )


def adopt(model: Any, args: SFTConfig, ranks: world.Ranks, axes: world.DeviceAxes | None) -> LoadedModel:
    """The model, free of what an earlier trainer has put on it but its cut over the ranks.

    Raises:
        UserError: it is cut in another way than this run cuts it.
    """
    unprepare(model)
    cut = shards(model)
    if cut is not None:
        _check_cut(cut, args, axes)
        with torch.no_grad():
            for parameter in model.parameters():
                if is_master(parameter):
                    rows = local(parameter)
                    rows.copy_(rows.to(compute_dtype(parameter)))
    loaded = adopt_model(model, args, ranks.device)
    ranks.mesh.check_heads(loaded.facts.heads, loaded.facts.kv_heads)
    return loaded


def compared(model: torch.nn.Module) -> str:
    """A digest of what all ranks must have been given alike: up to 1,024 values of each weight, or the fact of the cut."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        if isinstance(parameter, DTensor):
            digest.update(b"cut before")
        else:
            flat = parameter.detach().reshape(-1)
            digest.update(flat[:: max(1, flat.numel() // 1024)].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _check_cut(cut: Shards, args: SFTConfig, axes: world.DeviceAxes | None) -> None:
    before = _told(cut.mesh)
    here = "one process" if axes is None else _told(axes.fsdp)
    if before != here:
        raise UserError(
            f"an earlier trainer has cut the model that was given over {before}, and this run is on {here}",
            do="Load the model anew for this run, or keep dp_replicate_size as it was",
        )
    masters = args.weights_dtype != "bfloat16"
    if cut.masters != masters:
        kept = ("with fp32 masters", "in pure bf16")
        raise UserError(
            f"an earlier trainer keeps the model that was given {kept[not cut.masters]}, and this run asks for it "
            f"{kept[not masters]}",
            do="Load the model anew for this run, or leave dtype as it was",
            option="dtype",
        )


def _told(mesh: Any) -> str:
    *copies, ranks = mesh.shape
    told = "1 rank" if ranks == 1 else f"{ranks} ranks"
    return f"{told} in each of {copies[0]} copies" if copies else told


def _dtype(model: torch.nn.Module) -> torch.dtype:
    return next(compute_dtype(parameter) for parameter in model.parameters() if parameter.is_floating_point())
