"""LoRA on long rows beside TRL: `python -m benchmarks.adapter --tokens 131072 --memory-limit 80GiB`.

Full steps of an adapter of rank 16 on all linear layers of the 8B shape, the base model in bf16. TRL runs with FlashAttention 4
and offload, its fastest setting that fits. A short row comes first and compiles; the rows after it are measured.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.compare import PEERS, show
from benchmarks.outcome import Outcome
from benchmarks.record import Record, wants_a_gpu
from megaspan.human import parse_bytes, parse_tokens


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapter", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-8b", help="a shape that ships with megaspan, or a folder with a config.json")
    parser.add_argument("--tokens", type=parse_tokens, default=131_072)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=0, help="this many layers instead of the shape's own")
    parser.add_argument("--steps", type=int, default=1, help="measured steps")
    parser.add_argument("--warm", type=parse_tokens, default=4096, help="tokens of the first row, which is not measured")
    parser.add_argument("--memory-limit", dest="limit", type=parse_bytes, default=80 * 2**30)
    parser.add_argument("--peers", nargs="*", default=["trl-flash4-offload"], choices=tuple(PEERS))
    parser.add_argument("--timeout", type=float, default=1800, help="seconds a case may take")
    parser.add_argument("--json", type=Path, help="file that results are appended to, a line each")
    parser.add_argument("--tiny", action="store_true", help="a toy shape on whatever is there, in seconds: tries the code only")
    made = parser.parse_args(given)
    if made.tiny:
        made.shape, made.tokens, made.layers, made.warm, made.limit, made.rank, made.timeout = "tiny", 256, 0, 64, 0, 2, 300
        made.peers = ["trl-default"]  # FlashAttention 4 runs on a GPU only
    made.masters = False
    return made


def cases(args: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """TRL's cases and megaspan's."""
    common = {
        "shape": args.shape, "tokens": args.tokens, "layers": args.layers, "steps": args.steps, "warm": args.warm,
        "limit": args.limit, "lora": args.rank, "selective": False,
    }  # fmt: skip
    peers = [(name, common | {"system": "trl", "attention": "sdpa", "offload": False} | PEERS[name]) for name in args.peers]
    return [*peers, ("megaspan", common | {"system": "megaspan", "offload": True})]


def ratios(outcomes: list[Outcome]) -> dict[str, Any]:
    """megaspan's seconds and peak over each peer's."""
    ours, found = outcomes[-1], {}
    for peer in outcomes[:-1]:
        if ours.seconds and peer.seconds and not (ours.failed or peer.failed):
            memory = ours.most("peak_bytes") / peer.most("peak_bytes") if peer.most("peak_bytes") else None
            found[peer.name] = {"time": ours.seconds / peer.seconds, "memory": memory}
    return found


def main(given: list[str] | None = None) -> int:
    """Run the cases; 1 when megaspan failed."""
    args = arguments(given)
    if wants_a_gpu("adapter", args.tiny):
        return 2
    record = Record(args.json, command="adapter", **vars(args))
    outcomes = [record.case(name, case, args.timeout) for name, case in cases(args)]
    record.write(ratios=ratios(outcomes))
    print(show(outcomes, args))
    return int(bool(outcomes[-1].failed))


if __name__ == "__main__":
    sys.exit(main())
