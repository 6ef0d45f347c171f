"""What 1, 2, 4 and 8 GPUs reach, in commands of ten minutes: `python -m benchmarks.reach --plan one --json build/one.jsonl`.

A plan is a list of works for one kind of machine, in the order of their worth. Each is written to the file as it comes; what
the file holds is not run again, so the same command is given until nothing is left. Before a work begins, its expected seconds
must fit into what is left of `--seconds`; a smaller one that fits may go before it. `--list` prints the works with the
planner's prediction, on any machine. Works at part of the depth run with the dials of the whole model's plan.

    one    32,768 tokens beside TRL; kernels; 4B at half a million, 8B at a million tokens inside 80 GiB; 0.6B; longest row
    two    131,072 tokens, packed rows, gradients; 0.6B at a million tokens; the same in 80 GiB with twice the host memory
    four   131,072 tokens of the 4B shape on 2 and 4 GPUs; 4B at a million tokens inside 80 GiB
    eight  the reference run beside TRL; 131,072 tokens on 8 GPUs; 4,194,304 tokens of the 8B shape
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.case import dials_of
from benchmarks.depth import kinds_of, line, plan_of
from benchmarks.layouts import Layout
from benchmarks.outcome import Outcome
from benchmarks.record import Record, wants_a_gpu
from benchmarks.works import GIB, MACHINES, PLANS, Work
from megaspan.human import format_bytes, format_tokens

PATIENCE = 3.0  # times its expected seconds may a work take: one that hangs leaves time for others


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reach", description=__doc__.splitlines()[0])
    parser.add_argument("--plan", choices=tuple(PLANS), required=True, help="the machine: GPUs that it has")
    parser.add_argument("--only", nargs="+", default=[], help="these works, or parts of the plan, of those that --list prints")
    parser.add_argument("--seconds", type=float, default=560, help="seconds after which this command has ended")
    parser.add_argument("--json", type=Path, help="file of results, a line each; what it holds is not run again")
    parser.add_argument("--retry", action="store_true", help="run works again that failed before")
    parser.add_argument("--list", action="store_true", help="print works and predictions, run nothing")
    parser.add_argument("--tiny", action="store_true", help="a toy shape on whatever is there, two ranks: tries the code only")
    made = parser.parse_args(given)
    names = {word for work in PLANS[made.plan] for word in (work.name, work.part)}
    if wrong := [name for name in made.only if name not in names]:
        parser.error(f"--only {wrong[0]}: the plan has {', '.join(sorted(names))}")
    return made


def chosen(args: argparse.Namespace) -> list[Work]:
    """The works that are asked for, at toy size if so wished."""
    works = [work for work in PLANS[args.plan] if not args.only or {work.name, work.part} & set(args.only)]
    return [work.tiny() for work in works] if args.tiny else works


def held(file: Path | None, retry: bool) -> dict[str, dict[str, Any]]:
    """Outcomes of works that a file holds, by name. One that ran out of time is none."""
    found: dict[str, dict[str, Any]] = {}
    if file is not None and file.exists():
        for text in file.read_text(encoding="utf-8").splitlines():
            outcome = json.loads(text).get("outcome")
            if outcome is not None and outcome["failed"] != "timeout" and not (retry and outcome["failed"]):
                found[outcome["name"]] = outcome
    return found


def best(work: Work, done: dict[str, dict[str, Any]]) -> Work | None:
    """The work with the layout of the fastest of those that it waits for; None while one is missing."""
    if not work.best_of:
        return work
    if not set(work.best_of) <= done.keys():
        return None
    measured = [done[name] for name in work.best_of if done[name]["seconds"] and not done[name]["failed"]]
    if not measured:
        return None
    fastest = min(measured, key=lambda outcome: outcome["seconds"])
    return work.on(Layout.read(fastest["layout"]))


def case_of(work: Work) -> dict[str, Any]:
    """What `benchmarks.case` wants to know: few layers run as most of the whole model's do."""
    case = work.case()
    if case["system"] != "megaspan" or not case["layers"]:
        return case
    whole = plan_of(case | {"layers": 0})
    kinds = [work.kind] if work.kind else [kind for kind, _ in Counter(kinds_of(whole)).most_common(1)]
    return case | ({"dials": dials_of(whole, kinds[0])} if kinds else {})


def run(args: argparse.Namespace, works: list[Work], record: Record, done: dict[str, dict[str, Any]]) -> list[Work]:
    """Runs what fits into the time, in order; returns what is left."""
    until = time.monotonic() + args.seconds
    open_works = [work for work in works if work.name not in done]
    while True:
        left = until - time.monotonic()
        ready = [(work, best(work, done)) for work in open_works]
        fitting = [(work, settled) for work, settled in ready if settled is not None and settled.seconds <= left]
        if not fitting:
            return open_works
        work, settled = fitting[0]
        print(f"{work.name}: up to {settled.seconds:.0f} s …", file=sys.stderr, flush=True)
        limit = min(left, PATIENCE * settled.seconds)
        outcome = (
            record.command(work.name, work.command, limit) if work.command else record.case(work.name, case_of(settled), limit)
        )
        done[work.name] = outcome.as_dict()
        print(sentence(settled, outcome), flush=True)
        open_works.remove(work)


def sentence(work: Work, outcome: Outcome) -> str:
    """A work's result in words."""
    if outcome.failed:
        return f"{work.name}: {outcome.failed}: {outcome.why}"
    if work.command:
        return f"{work.name}: {outcome.wall_seconds:.0f} s in all"
    if work.rehearsal:
        found = outcome.facts.get("rehearsal") or {}
        figures = ", ".join(
            f"{figure['name']} {format_bytes(figure['rehearsed']) if figure['unit'] == 'bytes' else figure['rehearsed']}"
            for figure in found.get("figures", [])
            if figure["rehearsed"] is not None
        )
        answer = "fits" if found.get("fits") else f"does not fit ({found.get('failed_at') or found.get('why')})"
        return f"{work.name}: {answer}; {figures}; longest row by the plan {outcome.facts.get('longest_row', 0):,}"
    parts = [f"{outcome.seconds:.2f} s a step" if outcome.seconds else "no step"]
    if planned := outcome.facts.get("planned_seconds"):
        parts.append(f"planned {planned:.2f}")
    if peak := outcome.most("peak_bytes"):
        parts.append(f"peak {peak / GIB:.1f} GiB, least {outcome.least_peak / GIB:.1f}")
    return (
        f"{work.name}: {'; '.join(parts)}; host {outcome.most('host_bytes') / GIB:.0f} GiB; {outcome.wall_seconds:.0f} s in all"
    )


def conclusions(works: list[Work], done: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What several works say together: the whole depth from two of its parts, ratios to TRL, speed-ups over fewer GPUs."""
    good = {work: done[work.name]["seconds"] for work in works if work.name in done and not done[work.name]["failed"]}
    good = {work: seconds for work, seconds in good.items() if seconds}
    for found in groups(good, lambda work: work.of_layers and (work.shape, work.tokens, work.system, work.layout)):
        points, depth = [(work.layers, good[work]) for work in found], found[0].of_layers
        if len({layers for layers, _ in points}) > 1:
            a, b = line(points)
            told = f"{a:.2f} s + {b:.2f} s x layers; {depth} of them: {a + b * depth:.1f} s"
            yield f"{found[0].shape}, {format_tokens(found[0].tokens)} tokens, {found[0].layout.name}: {told}"
    for found in groups(good, lambda work: (work.shape, work.tokens, work.layers, work.layout.ranks, work.documents)):
        ours, peers = ([work for work in found if work.system == system] for system in ("megaspan", "trl"))
        for work, peer in product(ours, peers):
            yield f"{work.name}: {good[work] / good[peer]:.2f} x the time of {peer.name}"
    for found in groups(good, lambda work: not work.layers and (work.system, work.shape, work.tokens, work.documents)):
        fewest = min(work.layout.ranks for work in found)
        base = min(good[work] for work in found if work.layout.ranks == fewest)
        for work in found:
            if work.layout.ranks > fewest:
                yield f"{work.name}: {base / good[work]:.2f} x as fast as {fewest} GPU{'s' * (fewest > 1)}"


def groups(works: Iterable[Work], key: Callable[[Work], Any]) -> list[list[Work]]:
    """Works by a key; those without one are left out."""
    found: dict[Any, list[Work]] = {}
    for work in works:
        if name := key(work):
            found.setdefault(name, []).append(work)
    return list(found.values())


def listed(args: argparse.Namespace, works: list[Work]) -> None:
    """Prints works with the planner's prediction for one rank of the plan's machine."""
    for work in works:
        text = f"{work.part:10} {work.name:34} {work.seconds:4.0f} s"
        if work.system == "megaspan" and not work.command:
            plan = plan_of(work.case(), MACHINES[args.plan])
            seconds = f"{plan.seconds.total:.1f} s a step" if plan.seconds.total else "no seconds"
            sizes = (
                f"{plan.device_bytes / GIB:.1f} GiB, host {plan.host_bytes / GIB:.1f} of {plan.host_limit / GIB:.0f} GiB a rank"
            )
            text += f"  {seconds}, {sizes}, {'fits' if plan.fits else 'DOES NOT FIT'}, longest row {plan.longest_row:,}"
        print(text, flush=True)
    print(f"{sum(work.seconds for work in works):.0f} s in all, by the expectations of each")


def main(given: list[str] | None = None) -> int:
    """Runs what fits; 1 while something is left or has failed."""
    args = arguments(given)
    works = chosen(args)
    if args.list:
        listed(args, works)
        return 0
    if wants_a_gpu("reach", args.tiny):
        return 2
    done = held(args.json, args.retry)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
    record = Record(args.json, command="reach", plan=args.plan, seconds=args.seconds)
    left = run(args, works, record, done)
    for text in conclusions(works, done):
        print(text)
    failed = [work.name for work in works if work.name in done and done[work.name]["failed"]]
    if failed:
        print(f"failed: {', '.join(failed)} (--retry runs them again)")
    if left:
        print(f"left: {', '.join(f'{work.name} ({work.seconds:.0f} s)' for work in left)}")
    return int(bool(left or failed))


if __name__ == "__main__":
    sys.exit(main())
