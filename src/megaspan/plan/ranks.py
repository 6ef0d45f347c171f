"""How many ranks copy a model, share it, share a row's tokens and share its heads: what a plan needs to know of the mesh.

A plan is made for one rank: its part of a row, its shards of the states, and what it gathers of others for a moment. At
1,048,576 tokens of an 8B model on 8 GPUs that is 131,072 tokens and an eighth of 131 GB of states, but the keys of all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import TYPE_CHECKING

from megaspan.config.parallel import AXES, OPTIONS, resolve
from megaspan.human import UserError
from megaspan.plan.facts import Machine, ModelFacts, read_config

if TYPE_CHECKING:
    from megaspan.config import SFTConfig

NODE = 8  # GPUs of one machine, where nobody has said how many there are


def heads_of(config: SFTConfig) -> tuple[int, int] | None:
    """Query and KV heads of the model that a configuration names; None where none can be read, which others will say."""
    if config.model_name_or_path is None:
        return None
    try:
        raw = read_config(config.model_name_or_path, config.model_revision)
        facts = ModelFacts.from_config({**raw, **config.config_overrides})
    except UserError:
        return None
    return facts.heads, facts.kv_heads


def kv_heads_a_call(kv_heads: int, sp_size: int, wanted: int | None) -> int | None:
    """KV heads of a head group that sp ranks can share: `wanted` or a few more.

    Args:
        kv_heads: of the layer.
        sp_size: ranks; divides `kv_heads` or is a multiple of them (`config.parallel.check_heads`).
        wanted: KV heads that one rank is to work on at once, None for all.

    Returns:
        A multiple of `sp_size`, or None: all heads in one group, also where there are fewer KV heads than ranks.
    """
    return None if wanted is None or wanted * sp_size >= kv_heads else wanted * sp_size


@dataclass(frozen=True)
class RankSizes:
    """The mesh.

    Attributes:
        dp_replicate: ranks with a copy of the model.
        dp_shard: ranks that share the model and have rows of their own.
        cp: ranks that share a row's tokens.
        sp: ranks that share a row's heads.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    sp: int = 1

    @classmethod
    def of(cls, config: SFTConfig, ranks: int | None = None) -> RankSizes:
        """The sizes that a configuration asks for.

        Args:
            config: with its size options.
            ranks: number of processes; None takes as many as the sizes multiply to.

        Raises:
            UserError: the sizes' product cannot be `ranks`.
        """
        given = {option: getattr(config, option) for option in OPTIONS if option in config.model_fields_set}
        if ranks is None:
            ranks = prod(size or 1 for size in given.values())
        return cls(**resolve(given, ranks, heads=partial(heads_of, config)))

    @cached_property
    def total(self) -> int:
        """Ranks."""
        return self.dp_replicate * self.shard

    @cached_property
    def row(self) -> int:
        """Ranks that share a row."""
        return self.cp * self.sp

    @cached_property
    def shard(self) -> int:
        """Ranks over which each parameter is cut."""
        return self.dp_shard * self.row

    @property
    def data(self) -> int:
        """Rows that are worked on at a time."""
        return self.dp_replicate * self.dp_shard

    def slots(self, tokens: int) -> int:
        """Tokens of a row that a rank holds outside of attention, padding included."""
        shard = -(-tokens // self.cp)
        return -(-shard // self.sp)

    def more(self) -> RankSizes:
        """Twice the ranks, with twice the tokens shared."""
        return replace(self, cp=2 * self.cp)

    def flags(self) -> str:
        """How to start as many."""
        sizes = [f"--{axis}_size {size}" for axis, size in self._sizes().items()]
        return " ".join([f"--nproc {self.total}", *sizes])

    def __str__(self) -> str:
        """As the options that split."""
        split = " × ".join(f"{axis}_size {size}" for axis, size in self._sizes().items())
        return f"{self.total} ranks: {split}" if split else "one rank"

    def _sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES if getattr(self, axis) > 1}


def share_of(machine: Machine, ranks: int) -> Machine:
    """What each of so many ranks has of a machine, or of machines like it with `NODE` GPUs each; memory of a GPU is its own."""
    here = min(ranks, NODE)
    if here == 1:
        return machine
    source = f"{machine.host_source or 'the machine'}, for each of {here} ranks"
    host, cores = machine.host_bytes // here, max(1, machine.cores // here)
    return replace(machine, host_bytes=host, cores=cores, host_source=source, host_ranks=here)
