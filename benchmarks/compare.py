"""megaspan beside TRL on the same GPUs in one go: `python -m benchmarks.compare --shape qwen3-4b --tokens 65536 131072`.

Each case is a process of its own for each GPU (see `case.py`). Quoted is the median of the second and later steps (the first
warms kernels up and has no optimizer state yet), peak memory by `torch.cuda.max_memory_allocated`, and the ratio to TRL at the
same length. On one GPU TRL runs at its default and at its fastest settings (FlashAttention 4 where it is installed, kept
attention outputs), on several with its context parallelism as its guide has it, with expandable segments as the guide
recommends, so that none is a straw man. Running out of memory is a result.

Several GPUs: `--cp 2`, or several layouts one after the other, `--layouts one cp2 sp2`. Seconds are the slowest rank's, the
peak is the fullest rank's, host memory is the sum. TRL under FSDP2 always keeps fp32 masters, so both sides keep them where any
layout takes several GPUs, unless `--no-masters` says otherwise for megaspan alone.

Packed rows: `--documents 64` runs rows of 64 documents that do not see each other beside the same rows without masks.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.communication import sentence
from benchmarks.layouts import Layout, add_arguments, layout_of, layouts_of
from benchmarks.outcome import Outcome
from benchmarks.running import run_case
from megaspan.human import format_bytes, format_tokens, parse_bytes, parse_tokens
from megaspan.plan.seconds import has_flash4

PEERS: dict[str, dict[str, Any]] = {
    "trl-default": {"attention": "sdpa"},
    "trl-offload": {"attention": "sdpa", "offload": True},
    "trl-selective": {"attention": "sdpa", "selective": True},
    "trl-flash4": {"attention": "flash_attention_4"},
    "trl-flash4-offload": {"attention": "flash_attention_4", "offload": True},
}
# On several GPUs; TRL's context parallelism takes SDPA only.
PEERS_CP: dict[str, dict[str, Any]] = {
    "trl-cp": {"attention": "sdpa"},
    "trl-cp-offload": {"attention": "sdpa", "offload": True},
    "trl-cp-selective": {"attention": "sdpa", "selective": True},
}
FASTEST = ("trl-flash4", "trl-selective")


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-4b", help="a shape that ships with megaspan, or a folder with a config.json")
    parser.add_argument("--tokens", nargs="+", type=parse_tokens, default=[65_536, 131_072], help="row lengths: 65536, 128k")
    parser.add_argument("--layers", type=int, default=0, help="this many layers instead of the shape's own")
    parser.add_argument("--steps", type=int, default=3, help="steps a case, at least 2, or 1 with --warm")
    parser.add_argument("--warm", type=parse_tokens, default=0, help="tokens of a first row that compiles and is not measured")
    parser.add_argument("--offload", choices=("on", "off", "both"), default="on", help="megaspan's layer inputs in host memory")
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=(*PEERS, "trl-fastest", *PEERS_CP),
        help="what to run beside megaspan: trl-cp… on several GPUs, the others on one (trl-fastest is FlashAttention 4, where "
        "installed, and selective checkpointing); by default trl-default and trl-fastest, or trl-cp",
    )
    parser.add_argument("--documents", type=int, default=0, help="rows of so many documents that do not see each other")
    parser.add_argument(
        "--unmasked", action=argparse.BooleanOptionalAction, default=True, help="with --documents: the same rows without masks"
    )
    parser.add_argument("--layouts", nargs="+", type=Layout.read, help="several layouts: one cp2 sp2 cp4xsp2 dp2")
    add_arguments(parser)
    parser.add_argument(
        "--memory-limit", "--limit", dest="limit", type=parse_bytes, default=0, help="GPU memory of every case, such as 80GiB"
    )
    parser.add_argument(
        "--masters",
        action=argparse.BooleanOptionalAction,
        help="fp32 masters in place of pure bf16 weights; the default where a layout takes several GPUs",
    )
    parser.add_argument(
        "--profile", action="store_true", help="a step more under the profiler: communication that nothing hides"
    )
    parser.add_argument("--timeout", type=float, default=1800, help="seconds a case may take")
    parser.add_argument("--json", type=Path, help="file for all measurements")
    parser.add_argument("--tiny", action="store_true", help="a toy shape on whatever is there, in seconds: tries the code only")
    made = parser.parse_args(given)
    if made.tiny:
        made.shape, made.tokens, made.layers, made.steps, made.timeout = "tiny", [256], 0, 2, 300
    if made.steps < 1 + (not made.warm):
        parser.error("--steps: the second step is the one to quote, so at least 2, or 1 after a first row with --warm")
    if not (made.unmasked or made.documents):
        parser.error("--no-unmasked: without --documents there are no other rows")
    made.layouts = layouts_of(parser, made)
    several = max(layout.ranks for layout in made.layouts) > 1
    one = min(layout.ranks for layout in made.layouts) == 1
    if made.peers and not made.unmasked:
        parser.error("--no-unmasked: TRL runs rows without masks")
    if made.peers is None:
        made.peers = [] if not made.unmasked else ["trl-default", "trl-fastest"] * one + ["trl-cp"] * several
    for name in made.peers:
        if not (several if name in PEERS_CP else one):
            parser.error(f"--peers {name}: no layout takes {'several GPUs' if name in PEERS_CP else 'one GPU'}")
    if made.masters is None:
        made.masters = several
    return made


def cases(args: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """Every case by name, peers first, so that the ratio's denominator exists when megaspan's line is printed."""
    common = {
        "shape": args.shape,
        "layers": args.layers,
        "steps": args.steps,
        "warm": args.warm,
        "limit": args.limit,
        "masters": args.masters,
    }
    made = []
    masks = [0] * args.unmasked + [args.documents] * bool(args.documents)
    for tokens in args.tokens:
        asked: set[str] = set()
        for layout in args.layouts:
            here = common | {"tokens": tokens, "layout": layout.name}
            for name, options in peers_of(args, layout):
                beside = Layout(cp=layout.ranks)
                if f"{name} {beside.name}" not in asked:  # one for all layouts of so many GPUs
                    made.append((name, {"system": "trl", **options, **here, "layout": beside.name}))
                asked.add(f"{name} {beside.name}")
            for documents, offload in product(masks, {"on": (True,), "off": (False,), "both": (False, True)}[args.offload]):
                name = " ".join(["megaspan", *[layout.name] * (layout.ranks > 1)])
                name += f", {documents} documents" * bool(documents)
                name += ", inputs on the device" * (not offload)
                ours = {"system": "megaspan", "offload": offload, "documents": documents, "profile": args.profile}
                made.append((name, ours | here))
    return made


def peers_of(args: argparse.Namespace, layout: Layout) -> list[tuple[str, dict[str, Any]]]:
    """TRL's settings to be run on as many GPUs as a layout takes."""
    names = dict.fromkeys(name for wish in args.peers for name in (FASTEST if wish == "trl-fastest" else (wish,)))
    known = PEERS_CP if layout.ranks > 1 else PEERS
    plain = {"attention": "sdpa", "offload": False, "selective": False}
    return [(name, plain | known[name]) for name in names if name in known and ("flash4" not in name or has_flash4())]


def beside(outcome: Outcome, others: list[Outcome]) -> str:
    """Ratios to what was measured beside it: TRL on as many GPUs, megaspan on one, the same rows without masks."""
    found, layout, case = [], layout_of(outcome.case), outcome.case
    documents = case.get("documents", 0)
    done = [each for each in others if each.seconds and not each.failed and each.case["tokens"] == case["tokens"]]
    done.sort(key=lambda each: each.case["system"] == "megaspan")
    default = "trl-cp" if layout.ranks > 1 else "trl-default"
    for each in done:
        ratio, there = (outcome.seconds or 0.0) / (each.seconds or 1.0), layout_of(each.case)
        if each.name == default and there.ranks == layout.ranks and not documents:
            found.append(f"{ratio / layout.rows:.2f} x time")
            if each.most("peak_bytes"):
                found[-1] += f", {outcome.most('peak_bytes') / each.most('peak_bytes'):.2f} x memory"
        if case["system"] != "megaspan" or each.case["system"] != "megaspan" or each.case.get("offload") != case.get("offload"):
            continue
        if layout.ranks > there.ranks == 1 and each.case.get("documents", 0) == documents:
            found.append(f"{layout.rows / ratio:.2f} x as fast as one GPU")
        if there == layout and each.case.get("documents", 0) < documents:
            found.append(f"{1 / ratio:.2f} x as fast as without masks")
    return "; ".join(found)


def line_of(outcome: Outcome, others: list[Outcome]) -> tuple[str, ...]:
    """One row of the table."""
    tokens = format_tokens(outcome.case["tokens"])
    if outcome.seconds is None or outcome.failed:
        return (outcome.name, tokens, outcome.failed or "no step", "", "", "", "", outcome.why[:60])
    sizes = (outcome.most("peak_bytes"), outcome.least_peak, outcome.most("reserved_bytes"), outcome.most("host_bytes"))
    gib = [f"{size / 2**30:.1f}" if size else "–" for size in sizes]
    if layout_of(outcome.case).ranks == 1:
        gib[1] = ""
    return (outcome.name, tokens, f"{outcome.seconds:.2f}", *gib, beside(outcome, others))


def show(outcomes: list[Outcome], args: argparse.Namespace) -> str:
    """The table, as plain text of fixed columns."""
    device = next((outcome.device for outcome in outcomes if outcome.device), "no device")
    precision = "fp32" if device == "CPU" else "bf16 with fp32 masters" if args.masters else "bf16 weights and optimizer"
    layers = f", {args.layers} layers" if args.layers else ""
    limit = f", limit {format_bytes(args.limit)}" if args.limit else ""
    lines = [("case", "tokens", "s/step", "peak GiB", "least", "reserved", "host GiB", "to TRL's default, and to one GPU")]
    lines += [line_of(outcome, outcomes) for outcome in outcomes]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    table = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    told = [
        f"{outcome.name}: {sentence(outcome.facts['communication'], outcome.seconds)}"
        for outcome in outcomes
        if "communication" in outcome.facts
    ]
    return "\n".join([f"{args.shape}{layers} on {device}, {precision}{limit}", *table, *told])


def environment() -> dict[str, str]:
    """Versions of what was measured."""
    found = {}
    for name in ("megaspan", "torch", "transformers", "accelerate", "trl", "flash-attn-4"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def heard(result: dict[str, Any]) -> None:
    """Shows a step as it comes: what a command that is stopped had found is not lost."""
    if "step" in result:
        print(f"  step {result['step']}: {result['seconds']:.2f} s", file=sys.stderr, flush=True)


def main(given: list[str] | None = None) -> int:
    """Run every case and print the table; 1 when megaspan itself failed."""
    args = arguments(given)
    if not args.tiny and not torch.cuda.is_available():
        print("benchmarks.compare: there is no GPU here; --tiny tries the code on the CPU", file=sys.stderr)
        return 2
    outcomes = []
    for name, case in cases(args):
        print(f"{name}, {format_tokens(case['tokens'])} tokens …", file=sys.stderr, flush=True)
        outcomes.append(run_case(name, case, args.timeout, heard))
        print("  " + "  ".join(line_of(outcomes[-1], [])[2:]), file=sys.stderr, flush=True)
        if args.json:
            args.json.write_text(
                json.dumps({"versions": environment(), "cases": [outcome.as_dict() for outcome in outcomes]}, indent=1) + "\n"
            )
    print(show(outcomes, args))
    return int(any(outcome.failed for outcome in outcomes if outcome.case["system"] == "megaspan"))


if __name__ == "__main__":
    sys.exit(main())
