"""Seconds of a layer from few layers: `python -m benchmarks.depth --tokens 1048576 --layers 2 4 --memory-limit 80GiB`.

A step at a million tokens of a whole 8B model lasts half an hour, one of two layers two minutes. Steps with several numbers of
layers give step = a + b x layers; the whole depth follows. So that few layers run as all of them would, each case gets the
room that a layer has in the whole model: the states of the layers left out are taken off the device's limit, and of the host's
limit its share of layers remains (`--room all` leaves the limits as they are). A short row comes first and compiles.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.case import settings
from benchmarks.compare import PEERS, Outcome
from benchmarks.record import Record, wants_a_gpu
from megaspan import world
from megaspan.human import format_bytes, format_seconds, format_tokens, parse_bytes, parse_tokens
from megaspan.plan import Plan, plan_command
from megaspan.plan.cost import HOST_BASE_BYTES


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
    parser.add_argument("--room", choices=("layer", "all"), default="layer", help="limits cut to the share of the layers")
    parser.add_argument("--clip", type=float, default=1.0, help="max_grad_norm; 0 does not clip")
    parser.add_argument("--masters", action="store_true", help="fp32 masters, in place of pure bf16 weights")
    parser.add_argument("--offload", choices=("on", "off"), default="on", help="megaspan's layer inputs in host memory")
    parser.add_argument("--peers", nargs="*", default=[], choices=tuple(PEERS), help="TRL beside it, in the same run")
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
    return made


def case_of(args: argparse.Namespace, layers: int, peer: str | None = None) -> dict[str, Any]:
    """The case of a number of layers (0: all of the shape's)."""
    case = {
        "system": "megaspan", "shape": args.shape, "tokens": args.tokens, "layers": layers, "steps": args.steps,
        "warm": args.warm, "limit": args.limit, "host": args.host, "clip": args.clip, "masters": args.masters,
        "offload": args.offload == "on", "selective": False,
    }  # fmt: skip
    return case if peer is None else case | {"system": "trl", "attention": "sdpa", "offload": False} | PEERS[peer]


def plan_of(case: dict[str, Any]) -> Plan:
    """The plan of megaspan's case on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        return plan_command(settings(case, Path(folder)), world.machine())


def with_room(case: dict[str, Any], whole: Plan, part: Plan) -> dict[str, Any]:
    """The case with the room that its layers have in the whole model: limits of device and host."""
    if not whole.device_limit:
        return case
    states = resident(whole) - resident(part)
    share = part.model.layers / whole.model.layers
    # The plan's allowance for the process itself does not shrink.
    host = int(HOST_BASE_BYTES + max(0, whole.host_limit - HOST_BASE_BYTES) * share)
    return case | {"limit": whole.device_limit - states, "host": host}


def resident(plan: Plan) -> int:
    """Bytes of weights, gradients and optimizer on the device: what the update needs, at which no layer runs."""
    return next((size for name, size in plan.moments if "optimizer" in name), 0)


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


def main(given: list[str] | None = None) -> int:
    """Run every case; 1 when megaspan has no line."""
    args = arguments(given)
    if wants_a_gpu("depth", args.tiny):
        return 2
    record = Record(args.json, command="depth", **vars(args))
    whole = plan_of(case_of(args, 0))
    depth = whole.model.layers
    record.write(whole_plan={"layers": depth, "seconds": whole.seconds.total, "fits": whole.fits, "bytes": whole.device_bytes})
    results = []
    for peer in (*args.peers, None):
        outcomes = []
        for layers in args.layers:
            case = case_of(args, layers, peer)
            if args.room == "layer" and peer is None:
                case = with_room(case, whole, plan_of(case))
            outcomes.append(record.case(peer or "megaspan", case, args.timeout))
        results.append(summary(peer or "megaspan", outcomes, depth))
        record.write(summary=results[-1])
    for found in results:
        peaks = ", ".join(f"{format_bytes(size)} at {layers}" for layers, size in found["peak_bytes"].items() if size)
        if "b" in found:
            text = f"{found['a']:.2f} s + {found['b']:.2f} s x layers; {depth} layers: {format_seconds(found['whole_seconds'])}"
            print(f"{found['name']}, {format_tokens(args.tokens)} tokens: {text}" + (f"; peak {peaks} layers" if peaks else ""))
        else:
            print(f"{found['name']}: no line: {found['failed'] or found['seconds']}")
    return int("b" not in results[-1])


if __name__ == "__main__":
    sys.exit(main())
