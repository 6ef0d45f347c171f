"""Whether an exchange between two GPUs hides behind attention: `python -m benchmarks.hiding --tokens 131072`.

Half of a head group's numbers go to the other GPU while an attention kernel runs, as in a streamed layer: begun just before
the kernel, waited for after it. Told are seconds of each alone, of both together, and after how much of attention the exchange
was done, with NCCL's streams in attention's rank and before it. An attention kernel queues thousands of blocks; a collective of
equal rank may get its first processor behind the last of them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from benchmarks.record import Record
from benchmarks.start import end_with_parent
from megaspan.attention.choose import KERNELS
from megaspan.attention.kernel import Kernel, Scoring
from megaspan.human import parse_tokens

RANKS = 2
HEADS, GROUPS, SIZE = 8, 2, 128  # of a rank in one of two head groups of the 4B shape on two GPUs


def main(given: list[str] | None = None) -> int:
    """Prints one line a priority and size of the exchange; returns 0, and 2 without two GPUs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hiding", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=parse_tokens, default=131_072)
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 256, 512], help="sizes of the exchange, half of it travels")
    parser.add_argument("--ctas", type=int, nargs="+", default=[0, 8, 16], help="most blocks of a collective; 0 is NCCL's own")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file that results are appended to, a line each")
    made = parser.parse_args(given)
    if (here := torch.cuda.device_count()) < RANKS:
        found = "only one" if here else "no GPU"
        print(f"benchmarks.hiding: {RANKS} NVIDIA GPUs are needed, and there is {found}", file=sys.stderr)
        return 2
    record = Record(made.json, command="hiding", **vars(made))
    told = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(_rank, (made, told), nprocs=RANKS)
    while not told.empty():
        record.write(**told.get())
    return 0


def _rank(rank: int, made: argparse.Namespace, told: Any) -> None:
    end_with_parent()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571"}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=RANKS, device_id=torch.device("cuda", rank))
    kernel = next(kernel for kernel in KERNELS if kernel.installed())
    shapes = (HEADS, GROUPS, GROUPS)
    q, k, v = (torch.randn(made.tokens, heads, SIZE, device="cuda", dtype=torch.bfloat16) for heads in shapes)
    for first, ctas in product((False, True), made.ctas):
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=first)
        if ctas:
            options.config.max_ctas = ctas
        group = dist.new_group(pg_options=options)
        for mib in made.mib:
            leaves = torch.randn(RANKS, mib * 2**19 // RANKS, device="cuda", dtype=torch.bfloat16)
            found = _measured(kernel, (q, k, v), leaves, group, made.repeats)
            if rank == 0:
                told.put({"kernel": kernel.name, "mib": mib, "before attention": first, "ctas": ctas, **found})
    dist.destroy_process_group()


def _measured(kernel: Kernel, qkv: tuple[torch.Tensor, ...], leaves: torch.Tensor, group: Any, repeats: int) -> dict[str, Any]:
    """Milliseconds, medians: `attention`, `exchange`, both `together`, and after how long the exchange was done: `arrival`."""
    q, k, v = qkv
    arrives, side = torch.empty_like(leaves), torch.cuda.Stream()
    scoring = Scoring(SIZE**-0.5)

    def attention() -> None:
        kernel.forward(q, k, v, scoring, None)

    def exchange() -> Any:
        return dist.all_to_all_single(arrives, leaves, group=group, async_op=True)

    arrival = torch.cuda.Event(enable_timing=True)

    def both() -> None:
        work = exchange()
        attention()
        with torch.cuda.stream(side):
            work.wait()
            arrival.record()
        work.wait()

    alone = _milliseconds(attention, repeats), _milliseconds(lambda: exchange().wait(), repeats)
    arrivals: list[float] = []
    together = _milliseconds(both, repeats, lambda begun: arrivals.append(begun.elapsed_time(arrival)))
    sent = leaves.nbytes / RANKS
    return {
        "attention": alone[0],
        "exchange": alone[1],
        "exchange GB/s": sent / alone[1] / 1e6,
        "together": together,
        "arrival": statistics.median(arrivals[2:]),
    }


def _milliseconds(run: Callable[[], object], repeats: int, after: Callable[[Any], None] | None = None) -> float:
    """Median of `repeats` runs by the device's clock, after two that compile; all ranks begin together."""
    found = []
    for _ in range(2 + repeats):
        dist.barrier()
        torch.cuda.synchronize()
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        run()
        ended.record()
        torch.cuda.synchronize()
        found.append(begun.elapsed_time(ended))
        if after is not None:
            after(begun)
    return statistics.median(found[2:])


if __name__ == "__main__":
    sys.exit(main())
