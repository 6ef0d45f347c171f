"""The sizes of the mesh: how many ranks copy the model, share it, share a row's tokens and share its heads.

Names and order are those of accelerate's `ParallelismConfig`. A wrong product surfaces elsewhere as an index error deep in
mesh code, or as a size that was accepted, printed and not applied (cases R92, R93); here it is one sentence with the sizes that
work, said before a process waits for another. One size may be left open: `dp_shard_size` takes the ranks that the others
leave, since sharding the states is what the model of such a run needs in any case (16 bytes a parameter).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import TypeAlias

from megaspan.config.retype import capital, retyped
from megaspan.human import UserError

Again: TypeAlias = Callable[[int | None, Mapping[str, int]], str]
Heads: TypeAlias = Callable[[], tuple[int, int] | None]
AXES = ("dp_replicate", "dp_shard", "cp", "sp")
OPTIONS = tuple(f"{axis}_size" for axis in AXES)


def _unknown() -> None:
    return None


def resolve(
    given: Mapping[str, int | None],
    ranks: int,
    *,
    open_shard: bool = True,
    most: int | None = None,
    again: Again = retyped,
    heads: Heads = _unknown,
) -> dict[str, int]:
    """The size of every axis for `ranks` ranks.

    Args:
        given: sizes by option name; an absent one or None is not given.
        ranks: number of processes.
        open_shard: `dp_shard_size`, where it is not given, is what the others leave; else it is 1, as in accelerate's files.
        most: processes that this machine can run; None for any number.
        again: what to type or write for a number of processes, or for that number and other sizes.
        heads: query and KV heads of the model, None where it has not said: asked only when there is something to suggest, so
            that no size is suggested which the model refuses next.

    Returns:
        Sizes by axis, in mesh order; their product is `ranks`.

    Raises:
        UserError: the product cannot be `ranks`; with what to type.
    """
    sizes = {axis: given.get(f"{axis}_size") for axis in AXES}
    takes_rest = sizes["dp_shard"] is None and open_shard
    others = prod(size or 1 for size in sizes.values())
    if takes_rest and ranks % others == 0:
        sizes["dp_shard"] = ranks // others
    found = {axis: size or 1 for axis, size in sizes.items()}
    if prod(found.values()) == ranks:
        return found
    told = " × ".join(f"{axis}_size {size}" for axis, size in found.items() if size > 1 or given.get(f"{axis}_size"))
    needs = f"{others} process{'es' if others != 1 else ''}"
    known = heads()
    legal = None if known is None else legal_sp(*known)
    splits = legal is None or found["sp"] in legal
    remedies = [again(others, {})] if splits and (most is None or others <= most) else []
    remedies.append(again(ranks, _that_fit(given, ranks, takes_rest, legal)))
    if remedies[0].startswith("type "):
        remedies[1:] = [words.removeprefix("type ") for words in remedies[1:]]
    fit = "all sizes 1" if ranks == 1 else f"sizes whose product {'divides' if takes_rest else 'is'} {ranks}"
    what = f"{told or 'all sizes 1'} {'take' if not told or '×' in told else 'takes'} {needs}" + (
        ", or a multiple of that" if takes_rest and others > 1 else ""
    )
    allowed = f"{f'{others}, {2 * others}, {3 * others}, … processes' if takes_rest else needs}, or {fit}"
    if known is not None and legal is not None and not splits:
        what += f", and this model has {known[0]} query and {known[1]} KV heads, which that does not split"
        here = [size for size in legal if ranks % size == 0]
        allowed = fit if here == [1] and ranks == 1 else f"{fit}, with sp_size {', '.join(map(str, here))}"
    raise UserError(what, got=ranks, allowed=allowed, do=capital(", or ".join(remedies)))


def _that_fit(
    given: Mapping[str, int | None], ranks: int, takes_rest: bool, legal: tuple[int, ...] | None = None
) -> dict[str, int]:
    """The size options to change, and their new sizes, near to those given, for a product of `ranks`; sp one of `legal`."""
    fitting: dict[str, int] = {}
    left = ranks
    for axis in ("sp", "cp", "dp_replicate", "dp_shard"):  # who shares a row is kept as long as it can be
        wish = given.get(f"{axis}_size") or 1
        is_rest = axis == "dp_shard"
        sizes = legal if axis == "sp" and legal is not None else divisors(left)
        size = left if is_rest else max(size for size in sizes if size <= wish and left % size == 0)
        left //= size
        if size != wish and not (is_rest and takes_rest):
            fitting[f"{axis}_size"] = size
    return fitting


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    return tuple(size for size in range(1, number + 1) if number % size == 0)


def legal_sp(heads: int, kv_heads: int) -> tuple[int, ...]:
    """The sp sizes that split these heads: divisors of the query heads that divide the KV heads or are a multiple of them."""
    return tuple(sp for sp in divisors(heads) if kv_heads % sp == 0 or sp % kv_heads == 0)


def check_heads(sp_size: int, heads: int, kv_heads: int, cp_size: int | None = None, again: Again = retyped) -> None:
    """Refuses an sp_size that does not split the heads of a model.

    Args:
        sp_size: the size.
        heads: query heads of the model.
        kv_heads: its KV heads.
        cp_size: beside it, where that is known: it takes what sp_size cannot.
        again: as for `resolve`.

    Raises:
        UserError: with the sizes that do, and what to type.
    """
    if sp_size not in (legal := legal_sp(heads, kv_heads)):
        nearest = max(size for size in legal if sp_size % size == 0)
        sizes = {"sp_size": nearest} | ({} if cp_size is None else {"cp_size": cp_size * (sp_size // nearest)})
        raise UserError(
            f"sp_size splits heads, and this model has {heads} query and {kv_heads} KV heads",
            got=sp_size,
            allowed=", ".join(map(str, legal)),
            do=f"Use cp_size for the rest, which splits tokens and takes any number of GPUs: {again(None, sizes)}",
            option="sp_size",
        )
