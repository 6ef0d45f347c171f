"""Seconds of a layer from few layers: `python -m benchmarks.depth --tokens 1048576 --layers 2 4 --memory-limit 80GiB`.

A step at a million tokens of a whole 8B model lasts half an hour, one of two layers two minutes. Steps with several numbers of
layers give step = a + b x layers. Left alone, a planner would let two layers run with the room of thirty-six, so they get the
dials of the whole model's plan (tiles, heads a call, what comes back in tiles, where the optimizer's states lie). Layers of the
whole differ in what they keep, so each kind of layer that its plan has gets its own line, and the whole depth is
a + the sum of b over its layers. A short row comes first and compiles. On several GPUs (`--cp 8`) seconds are the slowest
rank's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.case import KINDS, dials_of, kind_of, settings
from benchmarks.compare import PEERS, PEERS_CP
from benchmarks.layouts import Layout, add_arguments, layouts_of
from benchmarks.outcome import Outcome
from benchmarks.record import Record, option, wants_a_gpu
from megaspan import world
from megaspan.human import format_bytes, format_seconds, format_tokens, parse_bytes, parse_tokens
from megaspan.plan import Machine, Plan, plan_command


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.depth", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-8b", help="a shape that ships with megaspan, or a folder with a config.json")
    parser.add_argument("--tokens", type=parse_tokens, default=1_048_576)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4], help="numbers of layers, at least two of them")
    parser.add_argument("--steps", type=int, default=1, help="measured steps a case; the median is taken")
    parser.add_argument("--warm", type=parse_tokens, default=4096, help="tokens of the first row, which is not measured")
    parser.add_argument("--memory-limit", dest="limit", type=parse_bytes, default=0, help="GPU memory, such as 80GiB")
    parser.add_argument("--host-memory", dest="host", type=parse_bytes, default=0, help="host memory, such as 128GiB")
    parser.add_argument(
        "--kinds",
        nargs="*",
        choices=("plan", *KINDS),
        help="kinds of layers, or plan: as planned for so few; by default those of the whole",
    )
    parser.add_argument("--clip", type=float, default=1.0, help="max_grad_norm; 0 does not clip")
    parser.add_argument(
        "--masters",
        action=argparse.BooleanOptionalAction,
        help="fp32 masters in place of pure bf16 weights; the default on several GPUs",
    )
    add_arguments(parser)
    parser.add_argument("--offload", choices=("on", "off"), default="on", help="megaspan's layer inputs in host memory")
    parser.add_argument("--peers", nargs="*", default=[], choices=(*PEERS, *PEERS_CP), help="TRL beside it, in the same run")
    parser.add_argument("--set", dest="options", nargs="*", type=option, default=[], help="megaspan's options, as NAME=VALUE")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds a case may take")
    parser.add_argument("--json", type=Path, help="file that results are appended to, a line each")
    parser.add_argument("--tiny", action="store_true", help="a toy shape on whatever is there, in seconds: tries the code only")
    made = parser.parse_args(given)
    if made.tiny:
        made.shape, made.tokens, made.layers, made.warm, made.limit, made.host, made.timeout = (
            "tiny",
            256,
            [1, 2],
            64,
            0,
            0,
            300,
        )
    if not made.warm and made.steps < 2:
        parser.error("--steps: without a first row to warm up, the second step is the one to quote, so at least 2")
    if len(set(made.layers)) < 2:
        parser.error("--layers: a line needs two points")
    (made.layout,) = layouts_of(parser, made)
    several = made.layout.ranks > 1
    if wrong := [name for name in made.peers if (name in PEERS_CP) != several]:
        parser.error(f"--peers {wrong[0]}: it runs on {'one GPU' if several else 'several GPUs'}")
    if made.masters is None:
        made.masters = several
    return made


def case_of(args: argparse.Namespace, layers: int, peer: str | None = None) -> dict[str, Any]:
    """The case of a number of layers (0: all of the shape's)."""
    case = {
        "system": "megaspan", "shape": args.shape, "tokens": args.tokens, "layers": layers, "steps": args.steps,
        "warm": args.warm, "limit": args.limit, "host": args.host, "clip": args.clip, "masters": args.masters,
        "offload": args.offload == "on", "selective": False, "options": dict(args.options), "layout": args.layout.name,
    }  # fmt: skip
    if peer is None:
        return case
    beside = {"system": "trl", "attention": "sdpa", "offload": False, "layout": Layout(cp=args.layout.ranks).name}
    return case | beside | (PEERS | PEERS_CP)[peer]


def plan_of(case: dict[str, Any], machine: Machine | None = None) -> Plan:
    """The plan of megaspan's case on this machine, or another; of one rank, where the case has several."""
    with tempfile.TemporaryDirectory() as folder:
        machine = machine or world.machine()
        return plan_command(settings(case, Path(folder), cuda=machine.device_bytes > 0), machine)


def line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Offset and slope of the line nearest to points (layers, value)."""
    slope, offset = np.polyfit(*np.array(points, dtype=float).T, 1)
    return float(offset), float(slope)


def summary(name: str, outcomes: list[Outcome], depth: int) -> dict[str, Any]:
    """a, b and the whole depth of one system, in seconds; peaks as they came."""
    measured = [outcome for outcome in outcomes if outcome.seconds is not None and not outcome.failed]
    found: dict[str, Any] = {
        "name": name,
        "seconds": {outcome.case["layers"]: outcome.seconds for outcome in measured},
        "peak_bytes": {outcome.case["layers"]: outcome.most("peak_bytes") for outcome in measured},
        "host_bytes": {outcome.case["layers"]: outcome.most("host_bytes") for outcome in measured},
        "failed": {outcome.case["layers"]: f"{outcome.failed}: {outcome.why}" for outcome in outcomes if outcome.failed},
    }
    if len(measured) > 1:
        a, b = line([(outcome.case["layers"], outcome.seconds or 0.0) for outcome in measured])
        found |= {"a": a, "b": b, "depth": depth, "whole_seconds": a + b * depth}
        low, slope = line([(outcome.case["layers"], outcome.most("peak_bytes")) for outcome in measured])
        found |= {"peak_bytes_a": low, "peak_bytes_b": slope}
    return found


def kinds_of(whole: Plan) -> dict[str, int]:
    """How many layers of each kind the whole model has; none where its plan is not made of streamed layers."""
    if not (whole.streamed and whole.offload and whole.device_limit):
        return {}
    return dict(Counter(kind_of(keep) for keep in whole.keep.layers))


def systems(args: argparse.Namespace, whole: Plan) -> list[tuple[str, str | None, dict[str, Any]]]:
    """What to draw a line for: names, TRL's settings (None: megaspan), dials."""
    found: list[tuple[str, str | None, dict[str, Any]]] = [(peer, peer, {}) for peer in args.peers]
    for kind in args.kinds or list(kinds_of(whole)) or ["plan"]:
        found.append((f"megaspan, {kind}", None, {} if kind == "plan" else {"dials": dials_of(whole, kind)}))
    return found


def whole_seconds(results: list[dict[str, Any]], counts: dict[str, int]) -> float | None:
    """Seconds of megaspan's whole depth from the lines of the kinds of its layers; None where one is missing."""
    lines = {found["name"].removeprefix("megaspan, "): found for found in results if "b" in found}
    if not counts:
        return lines["plan"]["whole_seconds"] if "plan" in lines else None
    if not counts.keys() <= lines.keys():
        return None
    return max(lines[kind]["a"] for kind in counts) + sum(count * lines[kind]["b"] for kind, count in counts.items())


def main(given: list[str] | None = None) -> int:
    """Run every case; 1 when megaspan has no line."""
    args = arguments(given)
    if wants_a_gpu("depth", args.tiny):
        return 2
    record = Record(args.json, command="depth", **vars(args))
    whole = plan_of(case_of(args, 0))
    depth, counts = whole.model.layers, kinds_of(whole)
    record.write(
        whole_plan={
            "layers": depth,
            "kinds": counts,
            "seconds": whole.seconds.total,
            "fits": whole.fits,
            "bytes": whole.device_bytes,
        }
    )
    results = []
    for name, peer, more in systems(args, whole):
        outcomes = [record.case(name, case_of(args, layers, peer) | more, args.timeout) for layers in args.layers]
        results.append(summary(name, outcomes, depth))
        record.write(summary=results[-1])
        print(sentence(results[-1], args.tokens), flush=True)
    ours = [found for found in results if found["name"].startswith("megaspan")]
    total = whole_seconds(ours, counts)
    record.write(megaspan_whole_seconds=total, planned_seconds=whole.seconds.total)
    if total is not None:
        parts = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or f"{depth} as planned"
        planned = f"; the plan says {format_seconds(whole.seconds.total)}" if whole.seconds.total else ""
        print(f"megaspan, {depth} layers ({parts}): {format_seconds(total)} a step{planned}")
    return int(any("b" not in found for found in ours))


def sentence(found: dict[str, Any], tokens: int) -> str:
    """A system's line in words."""
    if "b" not in found:
        return f"{found['name']}: no line: {found['failed'] or found['seconds']}"
    peaks = ", ".join(f"{format_bytes(size)} at {layers} layers" for layers, size in found["peak_bytes"].items() if size)
    text = (
        f"{found['a']:.2f} s + {found['b']:.2f} s x layers; {found['depth']} of them: {format_seconds(found['whole_seconds'])}"
    )
    return f"{found['name']}, {format_tokens(tokens)} tokens: {text}" + (f"; peak {peaks}" if peaks else "")


if __name__ == "__main__":
    sys.exit(main())
