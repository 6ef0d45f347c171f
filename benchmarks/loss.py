"""The chunked loss alone against its floor: `python -m benchmarks.loss` (131,072 x 151,936 x 2,560 in bf16 on a GPU).

Prints, for each tile, the peak above the inputs and the seconds of forward and backward; the floor is three matrix products at
the rate that one large product reaches on the same device in the same run. The full-logits loss runs where it fits.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megaspan.human import format_bytes, format_tokens, parse_tokens
from megaspan.layers.head import Head
from megaspan.layers.loss import linear_cross_entropy, loss_bytes, plain_cross_entropy
from megaspan.plan.logits import loss_tile


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loss", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=parse_tokens, default=131_072)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=2560)
    parser.add_argument(
        "--tiles", type=int, nargs="*", help="tokens a tile; by default the chosen one, its half and its double"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true", help="toy sizes: tries the code only")
    made = parser.parse_args(given)
    if made.tiny:
        made.tokens, made.vocab, made.hidden, made.repeats = 512, 1000, 64, 1
    if not made.tiles:
        chosen = loss_tile(made.vocab)
        made.tiles = [chosen // 2, chosen, 2 * chosen]
    return made


def measure(work: Callable[[], object], device: torch.device, repeats: int) -> tuple[float, int]:
    """Seconds (the best of `repeats`, after one to warm up) and peak bytes above what was there before."""
    cuda = device.type == "cuda"
    best, peak = float("inf"), 0
    for turn in range(repeats + 1):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        begun = time.perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize()
            peak = max(peak, torch.cuda.max_memory_allocated() - before)
        if turn:
            best = min(best, time.perf_counter() - begun)
    return best, peak


def product_rate(device: torch.device, dtype: torch.dtype, hidden: int, vocab: int, repeats: int) -> float:
    """Operations a second of one large product of the head's shape."""
    rows = min(16_384, 2**31 // vocab)
    left, right = (
        torch.randn(rows, hidden, device=device, dtype=dtype),
        torch.randn(hidden, vocab, device=device, dtype=dtype),
    )
    out = torch.empty(rows, vocab, device=device, dtype=dtype)
    seconds, _ = measure(lambda: torch.mm(left, right, out=out), device, repeats)
    return 2.0 * rows * hidden * vocab / seconds


def main(given: list[str] | None = None) -> int:
    """Measure every tile and print the table."""
    args = arguments(given)
    if not args.tiny and not torch.cuda.is_available():
        print("benchmarks.loss: there is no GPU here; --tiny tries the code on the CPU", file=sys.stderr)
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    hidden_tE = torch.randn(args.tokens, args.hidden, device=device, dtype=dtype, requires_grad=True)
    weight_VE = (torch.randn(args.vocab, args.hidden, device=device, dtype=dtype) * args.hidden**-0.5).requires_grad_()
    labels_t = torch.randint(args.vocab, (args.tokens,), device=device)
    rate = product_rate(device, dtype, args.hidden, args.vocab, args.repeats)
    floor = 3 * 2.0 * args.tokens * args.vocab * args.hidden / rate

    def step(tile: int) -> None:
        hidden_tE.grad = weight_VE.grad = None
        function = linear_cross_entropy if tile else plain_cross_entropy
        function(hidden_tE, Head(weight_VE), labels_t, tile_tokens=tile).loss.backward()
        hidden_tE.grad = weight_VE.grad = None

    results: list[dict[str, Any]] = []
    for tile in [*args.tiles, 0]:
        planned = loss_bytes(args.tokens, args.hidden, args.vocab, tile, element_bytes=dtype.itemsize) if tile else 0
        name = f"tiles of {format_tokens(tile)}" if tile else "all logits at once"
        try:
            seconds, peak = measure(lambda tile=tile: step(tile), device, args.repeats)  # type: ignore[misc]
        except torch.OutOfMemoryError:
            results.append({"case": name, "tile": tile, "failed": "out of memory"})
            hidden_tE.grad = weight_VE.grad = None
            continue
        results.append({"case": name, "tile": tile, "seconds": seconds, "peak_bytes": peak, "planned_bytes": planned})
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{format_tokens(args.tokens)} tokens x {args.vocab:,} words x {args.hidden:,}, {dtype}, on {where}")
    print(f"floor: 3 products at {rate / 1e12:.3g} TFLOP/s (measured) = {floor:.3f} s")
    for each in results:
        if "failed" in each:
            print(f"{each['case']:22}  {each['failed']}")
        else:
            peak = format_bytes(each["peak_bytes"]) if each["peak_bytes"] else "–"
            plan = f", planned {format_bytes(each['planned_bytes'])}" if each["planned_bytes"] else ""
            print(f"{each['case']:22}  {each['seconds']:.3f} s ({each['seconds'] / floor:.2f} x floor)  peak {peak}{plan}")
    if args.json:
        args.json.write_text(json.dumps({"device": where, "floor_seconds": floor, "cases": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
