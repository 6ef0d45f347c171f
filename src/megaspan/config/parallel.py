"""The sizes of the mesh: how many ranks copy the model, share it, share a row's tokens and share its heads.

Names and order are those of accelerate's `ParallelismConfig`. A wrong product surfaces elsewhere as an index error deep in
mesh code, or as a size that was accepted, printed and not applied (cases R92, R93); here it is one sentence with the sizes that
work, said before a process waits for another. One size may be left open: `dp_shard_size` takes the ranks that the others
leave, since sharding the states is what the model of such a run needs in any case (16 bytes a parameter).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from megaspan.human import UserError

AXES = ("dp_replicate", "dp_shard", "cp", "sp")
OPTIONS = tuple(f"{axis}_size" for axis in AXES)


def resolve(
    given: Mapping[str, int | None], ranks: int, *, open_shard: bool = True, start: str = "start {} processes"
) -> dict[str, int]:
    """The size of every axis for `ranks` ranks.

    Args:
        given: sizes by option name; an absent one or None is not given.
        ranks: number of processes.
        open_shard: `dp_shard_size`, where it is not given, is what the others leave; else it is 1, as in accelerate's files.
        start: how to start another number of processes, in words.

    Returns:
        Sizes by axis, in mesh order; their product is `ranks`.

    Raises:
        UserError: the product cannot be `ranks`; with the numbers and what to write.
    """
    sizes = {axis: given.get(f"{axis}_size") for axis in AXES}
    if sizes["dp_shard"] is None and open_shard:
        others = prod(size or 1 for size in sizes.values())
        if ranks % others == 0:
            sizes["dp_shard"] = ranks // others
    found = {axis: size or 1 for axis, size in sizes.items()}
    if prod(found.values()) == ranks:
        return found
    told = " × ".join(f"{axis}_size {size}" for axis, size in found.items() if size > 1 or given.get(f"{axis}_size"))
    processes = f"{ranks} process{'es' if ranks != 1 else ''}"
    raise UserError(f"{processes}, but {told or 'all sizes 1'} = {prod(found.values())}", do=_remedy(found, ranks, start))


def _remedy(found: Mapping[str, int], ranks: int, start: str) -> str:
    others = prod(size for axis, size in found.items() if axis != "dp_shard")
    words = start.format(prod(found.values()))
    if ranks % others == 0:
        return f"Write dp_shard_size: {ranks // others}, or {words}"
    return (
        f"{words[0].upper()}{words[1:]}, or choose sizes whose product divides {ranks}: {', '.join(map(str, divisors(ranks)))}"
    )


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    return tuple(size for size in range(1, number + 1) if number % size == 0)


def legal_sp(heads: int, kv_heads: int) -> tuple[int, ...]:
    """The sp sizes that split these heads: divisors of the query heads that divide the KV heads or are a multiple of them."""
    return tuple(sp for sp in divisors(heads) if kv_heads % sp == 0 or sp % kv_heads == 0)


def check_heads(sp_size: int, heads: int, kv_heads: int) -> None:
    """Refuses an sp_size that does not split the heads of a model.

    Raises:
        UserError: with the sizes that do.
    """
    if sp_size not in (legal := legal_sp(heads, kv_heads)):
        raise UserError(
            f"sp_size splits heads, and this model has {heads} query and {kv_heads} KV heads",
            got=sp_size,
            allowed=", ".join(map(str, legal)),
            do="Use cp_size for the rest: it splits tokens and takes any number of GPUs",
            option="sp_size",
        )
