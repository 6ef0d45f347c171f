"""`shard`: a model's parameters cut over all ranks that share a row or rows, each layer whole only while it works.

An 8B model in fp32 with AdamW and gradients is 131 GB; over 8 ranks 16 GB each. Each decoder layer is a unit of FSDP2: gathered
in bf16 before its forward and its backward, let go of after, its gradients reduced in fp32 and scattered over the ranks. What
is left of the decoder (its last norm, a LoRA of the embedding) is the root unit; word tables are gathered by `tables.py`.

Gradients are sums over ranks, not means: the loss of a rank is the sum over its own tokens, divided by the tokens of all.
Reductions are plain sums on every backend: the scaled kind that torch takes for another divisor than the number of ranks is not
there under gloo, and costs nothing to leave out.

The unit is the decoder and not the model around it: FSDP2 changes the class of what it wraps, and transformers, peft and
`prepare` go by the class of the model; peft also calls the model's `forward` past its hooks, but the decoder's with them.

Source: torch.distributed.fsdp.fully_shard (FSDP2); Zhao et al. 2023, "PyTorch FSDP", arXiv 2304.11277.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megaspan.human import UserError
from megaspan.layers.checkpoint import checkpointed_layers
from megaspan.layers.shards import as_sharded, computes_in, local, rows_of, shard_group
from megaspan.model.forward import backbone_of
from megaspan.model.kinds import unwrap
from megaspan.model.tables import Table, keep_tables

Model = TypeVar("Model", bound=nn.Module)
_SHARDS = "_megaspan_shards"
_REPLICATE, _SHARD = "dp_replicate", "shard"


@dataclass(eq=False)
class Shards:
    """How a model is cut; `shards(model)` returns it.

    Attributes:
        mesh: one axis "shard", or "dp_replicate" before it.
        compute: the type of gathered weights.
        masters: trained parameters are fp32 shards, gathered in `compute`.
        units: FSDP2's units: the layers in order, the decoder last.
        tables: embedding and output layers.
    """

    mesh: Any
    compute: torch.dtype
    masters: bool
    units: list[FSDPModule] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        """Over how many ranks each parameter is cut."""
        return int(shard_group(self.mesh).size())


def shard(model: Model, device_mesh: Any, *, masters: bool, compute: torch.dtype) -> Model:
    """Cuts every parameter of a transformers model, or of a LoRA model of peft around one, over the ranks; in place.

    Before or after `prepare`. A model on the meta device gets no memory here: `materialise` gives it to the shards.

    Args:
        model: with weights on the mesh's device, equal on all ranks, or on the meta device.
        device_mesh: with an axis "shard" (flattened where it spans several), and "dp_replicate" where shards are replicated.
        masters: trained parameters become fp32 (fp64 for fp64) shards, gathered in `compute`; else all are in `compute`.
        compute: the type of products. Frozen parameters are always kept in it.

    Raises:
        UserError: the model was sharded before, or holds weights in fp32 that `compute` would round.
    """
    inner = unwrap(model)
    if shards(model) is not None:
        raise UserError("the model was sharded before")
    _check_types(inner, compute)
    cut = Shards(sharding_mesh(device_mesh), compute, masters)
    decoder = backbone_of(inner)
    tables = _find_tables(inner, decoder)
    policy = MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=torch.promote_types(compute, torch.float32), cast_forward_inputs=False
    )
    kept_whole = {parameter for parameter, _ in tables}
    for module in [*checkpointed_layers(inner), decoder]:
        for parameter in module.parameters():
            if parameter not in kept_whole and not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(_kept_in(parameter, cut)).contiguous()
        # Resharded after the forward, the root too: outside of a step every parameter is its shard.
        unit: Any = fully_shard(module, mesh=cut.mesh, mp_policy=policy, reshard_after_forward=True, ignored_params=kept_whole)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        cut.units.append(unit)
    for parameter, places in tables:
        cut.tables.append(Table(_cut(parameter, cut), places))
        cut.tables[-1].reset()
    inner.__dict__[_SHARDS] = cut
    keep_tables(inner, cut.tables)
    _note_types(model, cut)
    if not any(local(parameter).is_meta for parameter in model.parameters()):
        _sum_in_fp32(cut)
    return model


def shards(model: nn.Module) -> Shards | None:
    """How this model is cut, or None where it is not."""
    found: Shards | None = unwrap(model).__dict__.get(_SHARDS)
    return found


def materialise(model: nn.Module, device: torch.device | str) -> None:
    """Gives memory, not values, to shards on the meta device. Buffers are left as they are."""
    cut = shards(model)
    assert cut is not None
    fresh: dict[nn.Parameter, nn.Parameter] = {}
    tables = {table.parameter: table for table in cut.tables}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or not local(parameter).is_meta:
                continue
            if parameter not in fresh:
                rows = torch.empty_like(local(parameter.detach()), device=device)
                fresh[parameter] = nn.Parameter(as_sharded(rows, parameter, cut.mesh), requires_grad=parameter.requires_grad)
            module._parameters[name] = fresh[parameter]
    for parameter, table in tables.items():
        if parameter in fresh:
            table.replace(fresh[parameter])
    _note_types(model, cut)
    _sum_in_fp32(cut)


def reset(model: nn.Module) -> None:
    """Lets go of gathered weights after a forward or backward that was broken off, so that every parameter is its shard."""
    cut = shards(model)
    if cut is None:
        return
    for table in cut.tables:
        table.reset()
    root: Any = cut.units[-1]
    known = hasattr(root, "reset_iter_state")  # torch 2.13
    if cut.mesh.device_type == "cuda":
        torch.cuda.synchronize()  # reductions that are under way
    if known:
        root.reset_iter_state()
    for unit in cut.units:
        _reset_unit(unit, known)


def sharding_mesh(device_mesh: Any) -> Any:
    """The mesh that FSDP2 is given: the axis "shard", behind "dp_replicate" where that is longer than one.

    Raises:
        UserError: the mesh has no such axis.
    """
    import warnings

    names = tuple(device_mesh.mesh_dim_names or ())
    replicated = _REPLICATE in names and device_mesh[_REPLICATE].size() > 1
    wanted = (_REPLICATE, _SHARD) if replicated else (_SHARD,)
    if names == wanted:
        return device_mesh
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a flattened axis will have to be kept by whoever made it; torch 2.13 still has it
        try:
            return device_mesh[wanted]
        except KeyError as error:
            raise UserError(
                "the device mesh has no axis to cut parameters over", found=", ".join(names), allowed=" and ".join(wanted)
            ) from error


def _find_tables(model: Any, decoder: nn.Module) -> list[tuple[nn.Parameter, list[tuple[nn.Module, str]]]]:
    """Word embeddings, and every parameter outside of the decoder, with the places where they stand."""
    inside = set(decoder.modules())
    words = {module.weight for module in inside if isinstance(module, nn.Embedding)}
    found: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and (parameter in words or module not in inside):
                found.setdefault(parameter, []).append((module, name))
    return list(found.items())


def _kept_in(parameter: Tensor, cut: Shards) -> torch.dtype:
    """The type of a parameter's shard."""
    return torch.promote_types(cut.compute, torch.float32) if cut.masters and parameter.requires_grad else cut.compute


def _cut(parameter: nn.Parameter, cut: Shards) -> nn.Parameter:
    """The shard of a whole parameter."""
    group = shard_group(cut.mesh)
    whole = parameter.detach()
    rows = whole[rows_of(whole.shape[0], group.size(), group.rank())].to(_kept_in(parameter, cut), copy=True)
    if not rows.is_meta:
        rows = rows.to(cut.mesh.device_type)
    return nn.Parameter(as_sharded(rows.contiguous(), whole, cut.mesh), requires_grad=parameter.requires_grad)


def _note_types(model: nn.Module, cut: Shards) -> None:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            computes_in(parameter, cut.compute)


def _sum_in_fp32(cut: Shards) -> None:
    """From now on the gradients that autograd makes of gathered weights are fp32, rounded nowhere before the reduction.

    A gathered parameter is one object for good, made by the first gathering.
    """
    if cut.compute not in (torch.bfloat16, torch.float16):
        return
    for unit in cut.units:
        unit.unshard()
        for parameter in unit.parameters():  # type: ignore[attr-defined]
            # Under the root unit other units' parameters and the tables are still shards.
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                parameter.grad_dtype = torch.float32
        unit.reshard()


def _reset_unit(unit: Any, known: bool) -> None:
    """Drops the gradients of gathered weights that were not reduced yet, which torch's own reset forgets; on torch 2.11, which
    has none (`known`), what that does for one unit as well."""
    state = unit._get_fsdp_state()
    group = state._fsdp_param_group
    for parameter in group.fsdp_params if group is not None else ():
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None
        parameter.unsharded_accumulated_grad = None
    if known:
        return
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    if group is not None:
        group.wait_for_unshard()  # of a gathering that was started ahead
        group._training_state = TrainingState.IDLE
        group._post_forward_indices.clear()
        group._partial_reduce_output = group._post_reduce_event = group._all_reduce_state = None
        unit.reshard()
    state._training_state = TrainingState.IDLE
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    state._comm_ctx.post_forward_order.clear()
    state._comm_ctx.all_gather_state = state._comm_ctx.reduce_scatter_state = None


def _check_types(model: Any, compute: torch.dtype) -> None:
    """Refuses families that want single weights in fp32: a unit is gathered in one type."""
    wanted = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    if compute in (torch.float32, torch.float64):
        return
    names = [name for name, _ in model.named_parameters() if any(part in name for part in wanted)]
    if names:
        raise UserError(
            f"{type(model).__name__} wants {names[0]} in fp32, and sharded layers are gathered in one type",
            found=str(compute).removeprefix("torch."),
            do="Set bf16: false (fp32 throughout), or train on one GPU",
        )
