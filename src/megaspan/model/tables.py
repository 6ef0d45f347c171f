"""Embedding and output layer of a sharded model: gathered where they are used, their gradients reduced at once.

The tables of words are the largest single weights (8B: two of 1.2 GB in bf16, whose fp32 gradients are 2.5 GB each), and the
output layer is read by the loss outside of any module's forward. FSDP2's own units serve them badly: one that holds both stays
gathered from the embedding to the end of the backward, with the whole fp32 gradient of the output layer waiting for that of the
embedding (7.5 GB at 8B), a unit of two modules loses a tied table's second gradient in torch 2.11, and a unit around the output
layer alone is never entered. So a table is cut like every other parameter, but gathered by a few lines of its own:

* for the embedding's forward, which needs it no longer than that, and for the loss: at most twice a row, tied or not, and never
  in the backward (the chunked loss makes its gradients in the forward; the plain one keeps the table until its backward). The
  graph holds either leaf to the end of the backward, so where no backward reads it its memory is given back after the use
  (1.2 GB each at 8B; two ranks held 0.7 GiB of 36.9 of the 4B shape without need);
* each use gets a leaf of its own. When a backward has made the leaf's gradient, in fp32, it is reduced and scattered, and added
  to the gradient of the shard.

Sums, not means: the loss is divided by the tokens of all ranks already.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megaspan.layers.head import head_of
from megaspan.layers.shards import all_gather, as_sharded, compute_dtype, local, reduce_scatter, shard_group

_TABLES = "_megaspan_tables"


@final
class Table:
    """One sharded parameter that is gathered around each use of the modules that hold it.

    Args:
        parameter: a DTensor, cut over the last axis of its mesh, the same on all ranks of an axis before it.
        places: every module that holds it, with its name there.

    Attributes:
        gathers: how often it was gathered.
        reductions: how often a gradient of it was reduced.
    """

    def __init__(self, parameter: nn.Parameter, places: list[tuple[nn.Module, str]]) -> None:
        self.parameter, self.places = parameter, places
        self.gathers = self.reductions = 0
        self._depth, self._read_later = 0, False
        self._hooks = []
        for module, _ in places:
            # The backward of a look-up reads the numbers of the words alone.
            later = not isinstance(module, nn.Embedding)
            self._hooks.append(module.register_forward_pre_hook(lambda *_, later=later: self.enter(later)))
            self._hooks.append(module.register_forward_hook(lambda *_: self.leave(), always_call=True))

    def holds(self, tensor: Tensor | None) -> bool:
        """Whether this is the table's tensor, as it stands in its modules now."""
        return any(module._parameters[name] is tensor for module, name in self.places)

    def replace(self, parameter: nn.Parameter) -> None:
        """Puts another parameter in its place, as when memory is given to one without."""
        self.parameter = parameter
        self._put(parameter)

    def enter(self, read_later: bool = True) -> None:
        """Puts the whole table, in the type that is computed in, where its modules look for it.

        Args:
            read_later: a backward may read what is computed with.
        """
        self._depth += 1
        self._read_later |= read_later
        if self._depth == 1:
            self._put(self._gather())

    def leave(self) -> None:
        """Puts the shard back; where a backward reads the table, it lives on in the graph."""
        self._depth -= 1
        if self._depth == 0:
            module, name = self.places[0]
            whole = module._parameters[name]
            self._put(self.parameter)
            if not self._read_later and whole is not None and whole is not self.parameter:  # no memory for the whole: no whole
                whole.untyped_storage().resize_(0)
            self._read_later = False

    def reset(self) -> None:
        """Puts the shard back after a forward that was broken off."""
        self._depth, self._read_later = 0, False
        self._put(self.parameter)

    def _put(self, tensor: Tensor) -> None:
        for module, name in self.places:
            module._parameters[name] = tensor  # type: ignore[assignment]

    @property
    def _mesh(self) -> Any:
        assert isinstance(self.parameter, DTensor)
        return self.parameter.device_mesh

    @torch.no_grad()
    def _gather(self) -> nn.Parameter:
        rows, group = self.parameter.shape[0], shard_group(self._mesh)
        mine = _padded(local(self.parameter.detach()).to(compute_dtype(self.parameter)), -(-rows // group.size()))
        whole = mine.new_empty(mine.shape[0] * group.size(), *mine.shape[1:])
        all_gather(whole, mine.contiguous(), group)
        self.gathers += 1
        leaf = nn.Parameter(whole[:rows], requires_grad=self.parameter.requires_grad)
        if leaf.requires_grad:
            leaf.grad_dtype = torch.promote_types(leaf.dtype, torch.float32)
            leaf.register_post_accumulate_grad_hook(self._reduce)
        return leaf

    @torch.no_grad()
    def _reduce(self, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        mesh, group = self._mesh, shard_group(self._mesh)
        share = -(-gradient.shape[0] // group.size())
        total = gradient.new_empty(share, *gradient.shape[1:])
        reduce_scatter(total, _padded(gradient, share * group.size()).contiguous(), group)
        if mesh.ndim > 1:
            dist.all_reduce(total, group=mesh.get_group(0))
        self.reductions += 1
        mine = total[: local(self.parameter.detach()).shape[0]].to(self.parameter.dtype)
        if self.parameter.grad is None:
            self.parameter.grad = as_sharded(mine, self.parameter, mesh)
        else:
            local(self.parameter.grad).add_(mine)
        # As FSDP2 does for the gradients that it brings.
        for hook in (getattr(self.parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(self.parameter)


def keep_tables(model: Any, tables: list[Table]) -> None:
    """Notes the tables of a sharded transformers model on it."""
    model.__dict__[_TABLES] = tables


@contextmanager
def gathered_head(model: Any, read_later: bool = True) -> Iterator[None]:
    """Inside, what `head_of(model)` reads is whole; nothing happens where the model is not sharded.

    Args:
        model: the transformers model.
        read_later: a backward may read it; else its memory is free behind the block, whatever graph holds it.
    """
    tables: list[Table] | None = model.__dict__.get(_TABLES)
    if tables is None:
        yield
        return
    head = head_of(model)
    wanted = [head.weight_VE, head.bias_V, *(factor for delta in head.deltas for factor in (delta.a_RE, delta.b_VR))]
    with ExitStack() as stack:
        for table in tables:
            if any(table.holds(tensor) for tensor in wanted):
                stack.callback(table.leave)
                table.enter(read_later)
        yield


def _padded(tensor: Tensor, rows: int) -> Tensor:
    """The tensor with rows of zeros behind it; itself where it has that many."""
    missing = rows - tensor.shape[0]
    return tensor if missing == 0 else torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
