"""Plans against rehearsals, and rehearsals against real steps: `python -m benchmarks.rehearse qwen3-4b,512k,80GiB,128GiB`.

A case is SHAPE,TOKENS[,MEMORY LIMIT[,HOST MEMORY]]. Each is a process of its own that runs `megaspan plan --rehearse`. With
`--real` the same step runs with attention too, and the peaks are compared. With `--longest` the longest row that fits is
searched, from the plan's prediction on; the case's tokens are not used then.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.depth import plan_of
from benchmarks.layouts import add_arguments, layouts_of
from benchmarks.record import Record, option, wants_a_gpu
from megaspan.human import UserError, format_bytes, format_tokens, parse_bytes, parse_tokens

GRAIN = 16_384


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rehearse", description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", type=case_of, help="SHAPE,TOKENS[,MEMORY LIMIT[,HOST MEMORY]]")
    parser.add_argument("--layers", type=int, default=0, help="this many layers instead of the shape's own")
    parser.add_argument("--clip", type=float, default=1.0, help="max_grad_norm; 0 does not clip")
    parser.add_argument(
        "--masters",
        action=argparse.BooleanOptionalAction,
        help="fp32 masters in place of pure bf16 weights; the default on several GPUs",
    )
    add_arguments(parser)
    parser.add_argument("--real", action="store_true", help="run the step itself as well, and compare")
    parser.add_argument("--longest", action="store_true", help="search the longest row that fits")
    parser.add_argument("--tries", type=int, default=5, help="rehearsals of such a search")
    parser.add_argument("--set", dest="options", nargs="*", type=option, default=[], help="megaspan's options, as NAME=VALUE")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds a run may take")
    parser.add_argument("--json", type=Path, help="file that results are appended to, a line each")
    parser.add_argument("--tiny", action="store_true", help="a toy shape on whatever is there, in seconds: tries the code only")
    made = parser.parse_args(given)
    if made.tiny:
        made.cases, made.timeout = [case_of("tiny,256")], 300
    if not made.cases:
        parser.error("no case: for example qwen3-8b,1M,80GiB,256GiB")
    (made.layout,) = layouts_of(parser, made)
    if made.masters is None:
        made.masters = made.layout.ranks > 1
    return made


def case_of(text: str) -> dict[str, Any]:
    """A case as it is written on the command line."""
    shape, tokens, limit, host, *more = [*text.split(","), "", "", ""][: max(4, text.count(",") + 1)]
    try:
        if more or not tokens:
            raise UserError("not a case", got=text, allowed="SHAPE,TOKENS[,MEMORY LIMIT[,HOST MEMORY]]")
        sizes = {"limit": parse_bytes(limit) if limit else 0, "host": parse_bytes(host) if host else 0}
        return {"shape": shape, "tokens": parse_tokens(tokens), **sizes}
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def full_case(args: argparse.Namespace, case: dict[str, Any], system: str) -> dict[str, Any]:
    """What `benchmarks.case` wants to know."""
    return case | {
        "system": system, "layers": args.layers, "steps": 1, "warm": min(4096, case["tokens"]), "clip": args.clip,
        "masters": args.masters, "offload": True, "options": dict(args.options), "layout": args.layout.name,
    }  # fmt: skip


def rehearsed(record: Record, args: argparse.Namespace, case: dict[str, Any]) -> dict[str, Any]:
    """One rehearsal in its own process: what it found, or why there is nothing."""
    outcome = record.case("rehearsal", full_case(args, case, "rehearsal"), args.timeout)
    found = dict(
        outcome.facts.get("rehearsal") or {"fits": False, "figures": [], "failed_at": outcome.failed, "why": outcome.why}
    )
    found |= {"longest_row": outcome.facts.get("longest_row", 0), "wall_seconds": outcome.wall_seconds}
    print(f"{name_of(case)}: {sentence(found)}", flush=True)
    return found


def name_of(case: dict[str, Any]) -> str:
    """A case in words."""
    sizes = [f"{format_bytes(case[name])} of {name}" for name in ("limit", "host") if case[name]]
    return ", ".join([case["shape"], f"{format_tokens(case['tokens'])} tokens", *sizes]).replace("of limit", "of device")


def sentence(found: dict[str, Any]) -> str:
    """The numbers of a rehearsal on one line."""
    parts = []
    for figure in found["figures"]:
        value = figure["rehearsed"]
        if value is None:
            continue
        text = (
            format_bytes(value)
            if figure["unit"] == "bytes"
            else f"{value:.2f} s"
            if figure["unit"] == "seconds"
            else f"{value}"
        )
        off = "" if figure["difference"] is None else f" ({figure['difference']:+.1f} % of the plan)"
        parts.append(f"{figure['name']} {text}{off}")
    answer = "fits" if found["fits"] else f"DOES NOT FIT ({found['failed_at'] or found['why']})"
    return "; ".join([answer, *parts])


def compared(found: dict[str, Any], real: dict[str, Any]) -> dict[str, float]:
    """Peaks of a rehearsal above those of the real step, in percent."""
    numbers = {figure["name"]: figure["rehearsed"] for figure in found["figures"]}
    pairs = {"device, tensors": "peak_bytes", "device, taken by the allocator": "reserved_bytes", "host, process": "host_bytes"}
    return {name: 100 * (numbers[name] / real[key] - 1) for name, key in pairs.items() if numbers.get(name) and real.get(key)}


def search(fits: Callable[[int], bool], start: int, tries: int, grain: int = GRAIN) -> tuple[int, int | None]:
    """The longest row that was seen to fit (0 for none) and the shortest that was seen not to (None for none).

    Begins at `start`, goes on in growing strides, a sixteenth first, until the border is between two rows, and halves.
    """
    low, high, tokens = 0, None, max(grain, start // grain * grain)
    stride = max(grain, tokens // 16 // grain * grain)
    for _ in range(tries):
        if fits(tokens):
            low = tokens
        else:
            high = tokens
        if high is None:
            tokens, stride = low + stride, 2 * stride
        elif low == 0:
            tokens, stride = max(grain, high - stride), 2 * stride
        else:
            tokens = (low + high) // 2 // grain * grain
        if tokens in (low, high):
            break
    return low, high


def longest(record: Record, args: argparse.Namespace, case: dict[str, Any]) -> None:
    """Searches the longest row of a case, and says what stops the next one."""
    grain = 64 if args.tiny else GRAIN
    seen: dict[int, dict[str, Any]] = {}

    def fits(tokens: int) -> bool:
        seen[tokens] = rehearsed(record, args, case | {"tokens": tokens})
        return bool(seen[tokens]["fits"])

    predicted = plan_of(full_case(args, case, "megaspan")).longest_row
    low, high = search(fits, min(predicted, 512) if args.tiny else predicted, args.tries, grain)
    stop = seen[high] if high else None
    record.write(
        longest=low,
        shortest_that_does_not_fit=high,
        predicted=predicted,
        case=case,
        stopped_by=stop and (stop["failed_at"] or stop["why"]),
    )
    print(f"{name_of(case | {'tokens': low})}: the longest row that fits; the plan says {format_tokens(predicted)}", flush=True)


def main(given: list[str] | None = None) -> int:
    """Run every case; 1 where one does not fit."""
    args = arguments(given)
    if wants_a_gpu("rehearse", args.tiny):
        return 2
    record = Record(args.json, command="rehearse", **vars(args))
    all_fit = True
    for case in args.cases:
        if args.longest:
            longest(record, args, case)
            continue
        found = rehearsed(record, args, case)
        all_fit &= bool(found["fits"])
        if args.real:
            outcome = record.case("megaspan", full_case(args, case, "megaspan"), args.timeout)
            real = (
                {key: outcome.quoted[0][key] for key in ("peak_bytes", "reserved_bytes")}
                # A rehearsal tells of the host memory of one rank.
                | {"host_bytes": outcome.quoted[0]["host_bytes"] / args.layout.ranks}
                if outcome.quoted
                else {}
            )
            difference = compared(found, real)
            record.write(compared=difference, real_seconds=outcome.seconds, case=case, failed=outcome.failed, why=outcome.why)
            words = ", ".join(f"{name} {percent:+.2f} %" for name, percent in difference.items())
            print(f"{name_of(case)}: rehearsed above real: {words or outcome.failed or 'nothing to compare'}", flush=True)
    return int(not all_fit)


if __name__ == "__main__":
    sys.exit(main())
