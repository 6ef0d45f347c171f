"""Saving a model that is cut over ranks: one rank writes, the others hand it their parts.

A checkpoint of an 8B model is 115 GB. Gathered whole it would need a second copy of everything in the memory of one node, and
written by each rank on its own it would be eight files that only eight ranks can read. Here the writer asks for the parts in
the order in which the file has them, in pieces of 64 MiB: beside its shards a rank holds one piece, and the file is the one
that a single rank would have written. The disk is slower than the way between ranks (115 GB pass in seconds over NVLink).

Pieces are broadcast from the rank that holds them: every rank takes part in every one, in the same order, over the group that
gathers the parameters, so nothing hangs but on a rank that is gone. A writer that fails (a full disk) goes on taking pieces to
the end, and then says so: all ranks raise the same error, and no folder is left. If a rank dies, the group does, and the open
folder is removed, or cleared away by the next start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megaspan.layers.shards import Sharded, compute_dtype, sharded
from megaspan.store.adapter import base_of, is_adapter, is_resized
from megaspan.world.turns import error_told, told

PIECE_BYTES = 64 * 2**20
_Result = TypeVar("_Result")


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether the parameters of a model are cut over ranks, so that all of them have to save it together."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def writes() -> bool:
    """Whether this rank is the one that writes."""
    return dist.get_rank() == 0


def together(act: Callable[[], _Result]) -> _Result:
    """Runs `act` on the rank that writes, or in a process on its own; every rank returns its result, or raises its error.

    Args:
        act: its result can be sent to other ranks.

    Raises:
        UserError: `act` raised one.
        RuntimeError: on the other ranks, for anything else; the writer raises it as it is.
    """
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return act()
    result, failure = None, None
    if writes():
        try:
            result = act()
        except BaseException as error:
            failure = error
    return _agreed(result, failure)


@final
class Feed:
    """Parts of sharded tensors on their way to the rank that writes, in an order that all ranks know.

    Args:
        tensors: what is going to be written, in that order; whole ones pass by.
    """

    def __init__(self, tensors: Iterable[Any]) -> None:
        parts = [tensor for tensor in tensors if isinstance(tensor, Sharded)]
        # Where shards are replicated, the writer's own group has them all.
        self._parts = [part for part in parts if 0 in dist.get_process_group_ranks(part.group)]
        self._buffer: Tensor | None = None
        self._steps = ((part, piece) for part in self._parts for piece in self._pieces(part))
        self.pieces = 0

    def take(self, tensor: Sharded) -> Iterator[Tensor]:
        """On the writer: the whole tensor in pieces of bytes, in memory order; each is valid until the next is asked for.

        Raises:
            RuntimeError: another tensor is next.
        """
        for _ in range(self._count(tensor)):
            part, piece = next(self._steps)
            if part is not tensor:
                raise RuntimeError("sharded tensors are written in another order than they are sent")
            yield piece

    def drain(self) -> None:
        """Takes part in all pieces that are left: on the other ranks all of them, on the writer those after a failure."""
        for _ in self._steps:
            pass

    def _count(self, tensor: Sharded) -> int:
        size = _piece_elements(tensor)
        return sum(-(-count // size) for count in tensor.counts)

    def _pieces(self, part: Sharded) -> Iterator[Tensor]:
        size, rank = _piece_elements(part), part.group.rank()
        device = _device(part)
        if self._buffer is None or self._buffer.device != device:
            self._buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, device=device)
        for holder, count in enumerate(part.counts):
            for start in range(0, count, size):
                stop = min(start + size, count)
                piece = self._buffer[: (stop - start) * part.dtype.itemsize]
                if rank == holder:
                    piece.view(part.dtype).copy_(part.local.detach().reshape(-1)[start:stop])
                dist.broadcast(piece, src=dist.get_global_rank(part.group, holder), group=part.group)
                self.pieces += 1
                yield piece


def write_together(feed: Feed, write: Callable[[], _Result]) -> _Result:
    """Runs `write`, which takes what `feed` brings, on the rank that writes, while the others send.

    Raises:
        UserError: `write` raised one; on every rank.
        RuntimeError: on the other ranks, for anything else; the writer raises it as it is.
    """
    result, failure = None, None
    if writes():
        try:
            result = write()
        except BaseException as error:
            failure = error
    try:
        feed.drain()
    except BaseException as error:  # the group is gone: there is nobody to agree with
        raise (failure or error) from None
    return _agreed(result, failure)


@dataclass(frozen=True, eq=False)
class WholeState:
    """What a model is saved with.

    Attributes:
        tensors: each tensor once, whole or `Sharded`.
        names: the name among them for each of the model's names: of tied weights the same.
    """

    tensors: dict[str, Any]
    names: dict[str, str]

    def named(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state with these tensors in place of its own; tied ones are one object."""
        found = {name: tensors[name] for name in self.tensors}
        return {name: found[source] for name, source in self.names.items()}


def whole_state(model: torch.nn.Module, dtype: torch.dtype | None = None) -> WholeState:
    """The state of a sharded model as it is to be saved; of an adapter, what is trained and the embeddings.

    Args:
        model: a transformers or a peft model.
        dtype: of the saved weights of a transformers model, when it is not the one that is computed in.
    """
    tensors: dict[str, Any] = {}
    names: dict[str, str] = {}
    seen: dict[int, str] = {}
    adapter = is_adapter(model)
    base = base_of(model)
    words = {id(layer.weight) for layer in (base.get_input_embeddings(), base.get_output_embeddings()) if layer is not None}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if adapter and not tensor.requires_grad and not (id(tensor) in words and is_resized(base)):
            continue
        if id(tensor) not in seen:
            seen[id(tensor)] = name
            wanted = dtype if dtype is not None and not adapter and tensor.is_floating_point() else compute_dtype(tensor)
            tensors[name] = sharded(tensor, dtype=wanted)
        names[name] = seen[id(tensor)]
    return WholeState(tensors, names)


def gathered_objects(mine: Any) -> list[Any]:
    """What every rank has given, in the order of the ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def in_order(tensors: Mapping[str, Any]) -> Sequence[str]:
    """Names in the order of a safetensors file: widest elements first, so that every tensor of a mapped file is aligned."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def _agreed(result: Any, failure: BaseException | None) -> Any:
    box: list[Any] = [None]
    if writes():
        box = [(result, None if failure is None else told(failure))]
    dist.broadcast_object_list(box, src=0)
    if failure is not None:
        raise failure
    result, said = box[0]
    if said is not None:
        raise error_told(said, "the rank that writes failed")
    return result


def _piece_elements(part: Sharded) -> int:
    return PIECE_BYTES // part.dtype.itemsize


def _device(part: Sharded) -> torch.device:
    """Where pieces of a group travel: its backend's device. State that lies on the host passes through it."""
    if dist.get_backend(part.group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
