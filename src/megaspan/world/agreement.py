"""Ranks that decide from the same numbers, and compare what they decided.

Several ranks plan for the weakest of them (`agree`), and before the first step they compare digests of what they decided
(`same_everywhere`): two ranks with different plans run different sequences of collectives, and wait for each other for ever.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megaspan.human import UserError
from megaspan.plan.facts import Machine
from megaspan.world.host import lines_of

if TYPE_CHECKING:
    import torch


def agree(machine: Machine) -> Machine:
    """What every rank can count on: the least device memory, and the least share of a node's host memory and cores.

    All ranks of an initialised process group (gloo or nccl) must call it, and all get the same. One rank gets `machine` back.
    """
    if not _several():
        return machine
    facts = {name: getattr(machine, name) for name in ("device_name", "device_bytes", "host_bytes", "cores", "host_source")}
    said = [json.loads(text) for text in _everywhere(json.dumps(facts | {"node": node()}))]
    ranks = Counter(each["node"] for each in said)
    weakest = min(said, key=lambda each: each["device_bytes"])
    tightest = min(said, key=lambda each: each["host_bytes"] // ranks[each["node"]])
    share = ranks[tightest["node"]]
    return Machine(
        device_name=weakest["device_name"],
        device_bytes=weakest["device_bytes"],
        host_bytes=tightest["host_bytes"] // share,
        cores=max(1, min(each["cores"] // ranks[each["node"]] for each in said)),
        host_source=f"{tightest['host_source']}, for each of {share} ranks" if share > 1 else tightest["host_source"],
        host_ranks=share,
    )


def same_everywhere(name: str, digest: str) -> None:
    """Compares a digest over all ranks, before the first step that would hang if they differed.

    Args:
        name: what the digest is of, in words that begin a sentence, such as "the plan".
        digest: any text, best a short one.

    Raises:
        UserError: on every rank, naming those that differ from most.
    """
    if not _several():
        return
    said = _everywhere(digest)
    usual = Counter(said).most_common(1)[0][0]  # of two equally common ones, the lower rank's
    odd = [rank for rank, text in enumerate(said) if text != usual]
    if odd:
        others = ", ".join(f"rank {rank} has {said[rank][:16]}" for rank in odd[:4]) + ", …" * (len(odd) > 4)
        others += f", rank {said.index(usual)} has {usual[:16]}"
        raise UserError(
            f"{name} differs between ranks: {others}; they would wait for each other",
            do="Start every rank with the same options, files and package versions (megaspan env prints them)",
        )


def summed(values: Sequence[float]) -> list[float]:
    """The sum of every rank's numbers, place by place, in fp64: the same bits on all ranks. All of them must call it."""
    return [math.fsum(each) for each in zip(*_all_numbers(values), strict=True)] if _several() else list(values)


def largest(values: Sequence[float]) -> list[float]:
    """The largest of every rank's numbers, place by place. All ranks must call it."""
    return [max(each) for each in zip(*_all_numbers(values), strict=True)] if _several() else list(values)


def node() -> str:
    """Names what shares one host memory: ranks of one boot of one machine that see the same host name (one container)."""
    boot = "".join(lines_of(Path("/proc/sys/kernel/random/boot_id")))
    return hashlib.sha256(f"{boot} {platform.node()}".encode()).hexdigest()[:16]


def _several() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _exchange_device() -> torch.device:
    """Where small things travel: on the host, unless a script's own process group knows GPUs alone."""
    import torch
    import torch.distributed as dist

    on_host = "cpu:" in str(dist.get_backend_config())
    return torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())


def _all_numbers(values: Sequence[float]) -> list[list[float]]:
    import torch
    import torch.distributed as dist

    mine = torch.tensor(list(values), dtype=torch.float64, device=_exchange_device())
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return [each.tolist() for each in found]


def _everywhere(text: str) -> list[str]:
    """Every rank's text, in order of rank. Bytes in tensors: torch's own exchange of objects would unpickle them."""
    import torch
    import torch.distributed as dist

    device = _exchange_device()
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device))
    lengths = [int(size) for size in sizes]
    mine = torch.zeros(max(*lengths, 1), dtype=torch.uint8, device=device)
    mine[: len(data)] = data.to(device)
    texts = [torch.empty_like(mine) for _ in lengths]
    dist.all_gather(texts, mine)
    return [bytes(each[:length].tolist()).decode() for each, length in zip(texts, lengths, strict=True)]
