"""megaspan beside TRL on the same GPU in one go: `python -m benchmarks.compare --shape qwen3-4b --tokens 65536 131072`.

Each case is a process of its own (see `case.py`). Quoted is the median of the second and later steps (the first warms kernels
up and has no optimizer state yet), peak memory by `torch.cuda.max_memory_allocated`, and the ratio to TRL's default at the same
length. TRL runs at its default and at its fastest settings (FlashAttention 4 where it is installed, kept attention outputs),
with expandable segments as its guide recommends, so that none is a straw man. Running out of memory is a result.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megaspan.human import format_bytes, format_tokens, parse_bytes, parse_tokens
from megaspan.plan.seconds import has_flash4

ROOT = Path(__file__).resolve().parents[1]
PEERS: dict[str, dict[str, Any]] = {
    "trl-default": {"attention": "sdpa"},
    "trl-offload": {"attention": "sdpa", "offload": True},
    "trl-selective": {"attention": "sdpa", "selective": True},
    "trl-flash4": {"attention": "flash_attention_4"},
    "trl-flash4-offload": {"attention": "flash_attention_4", "offload": True},
}
FASTEST = ("trl-flash4", "trl-selective")


@dataclass
class Outcome:
    """What one case gave."""

    name: str
    case: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    failed: str | None = None
    why: str = ""
    device: str = ""
    wall_seconds: float = 0.0

    @property
    def quoted(self) -> list[dict[str, Any]]:
        """The second and later steps: the first is short, or warms kernels up and has no optimizer state yet."""
        return [step for step in self.steps if step["step"] > 1]

    @property
    def seconds(self) -> float | None:
        """Median seconds of a quoted step."""
        return statistics.median(step["seconds"] for step in self.quoted) if self.quoted else None

    def most(self, key: str) -> int:
        """Largest value over all steps."""
        return max((step[key] for step in self.steps), default=0)

    def as_dict(self) -> dict[str, Any]:
        """For the JSON file."""
        return {
            "name": self.name,
            **self.case,
            "seconds": self.seconds,
            "peak_bytes": self.most("peak_bytes"),
            "reserved_bytes": self.most("reserved_bytes"),
            "host_bytes": self.most("host_bytes"),
            "steps_measured": self.steps,
            "losses": self.losses,
            **self.facts,
            "failed": self.failed,
            "why": self.why,
            "wall_seconds": self.wall_seconds,
        }


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-4b", help="a shape that ships with megaspan, or a folder with a config.json")
    parser.add_argument("--tokens", nargs="+", type=parse_tokens, default=[65_536, 131_072], help="row lengths: 65536, 128k")
    parser.add_argument("--layers", type=int, default=0, help="this many layers instead of the shape's own")
    parser.add_argument("--steps", type=int, default=3, help="steps a case, at least 2")
    parser.add_argument("--offload", choices=("on", "off", "both"), default="on", help="megaspan's layer inputs in host memory")
    parser.add_argument(
        "--peers",
        nargs="*",
        default=["trl-default", "trl-fastest"],
        choices=(*PEERS, "trl-fastest"),
        help="what to run beside megaspan; trl-fastest is FlashAttention 4 (where installed) and selective checkpointing",
    )
    parser.add_argument(
        "--memory-limit", "--limit", dest="limit", type=parse_bytes, default=0, help="GPU memory of every case, such as 80GiB"
    )
    parser.add_argument("--masters", action="store_true", help="fp32 masters on both sides, in place of pure bf16 weights")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds a case may take")
    parser.add_argument("--json", type=Path, help="file for all measurements")
    parser.add_argument("--tiny", action="store_true", help="a toy shape on whatever is there, in seconds: tries the code only")
    made = parser.parse_args(given)
    if made.tiny:
        made.shape, made.tokens, made.layers, made.steps, made.timeout = "tiny", [256], 0, 2, 300
    if made.steps < 2:
        parser.error("--steps: the second step is the one to quote, so at least 2")
    return made


def cases(args: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """Every case by name, peers first, so that the ratio's denominator exists when megaspan's line is printed."""
    peers = [name for wish in args.peers for name in (FASTEST if wish == "trl-fastest" else (wish,))]
    peers = [name for name in dict.fromkeys(peers) if "flash4" not in name or has_flash4()]
    common = {
        "shape": args.shape,
        "layers": args.layers,
        "steps": args.steps,
        "limit": args.limit,
        "masters": args.masters,
    }
    made = []
    for tokens in args.tokens:
        for name in peers:
            options = {"attention": "sdpa", "offload": False, "selective": False} | PEERS[name]
            made.append((name, {"system": "trl", "tokens": tokens, **options, **common}))
        for offload in {"on": (True,), "off": (False,), "both": (False, True)}[args.offload]:
            name = "megaspan" if offload else "megaspan, inputs on the device"
            made.append((name, {"system": "megaspan", "tokens": tokens, "offload": offload, **common}))
    return made


def run_case(name: str, case: dict[str, Any], timeout: float, heard: Callable[[dict[str, Any]], None] | None = None) -> Outcome:
    """Run one case in its own process and collect what it says, passing each result on as it comes."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src"), environment.get("PYTHONPATH", "")]).rstrip(
        os.pathsep
    )
    if case["system"] == "trl" and "PYTORCH_ALLOC_CONF" not in environment:
        environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    outcome = Outcome(name, case)
    begun = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.case", json.dumps(case)]
    with tempfile.TemporaryFile("w+") as talk:
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=talk, text=True) as child:
            late = threading.Event()
            timer = threading.Timer(timeout, lambda: (late.set(), child.kill()))
            timer.start()
            try:
                assert child.stdout is not None
                for line in child.stdout:
                    if line.startswith("RESULT "):
                        result = json.loads(line.removeprefix("RESULT "))
                        collect(outcome, result)
                        if heard is not None:
                            heard(result)
                code = child.wait()
            finally:
                timer.cancel()
                child.kill()  # nothing is left behind where this process is interrupted
        outcome.wall_seconds = time.monotonic() - begun
        if late.is_set():
            outcome.failed, outcome.why = "timeout", f"more than {timeout:.0f} s"
        elif code and outcome.failed is None:
            talk.seek(0)
            outcome.failed = "killed" if code < 0 else "failed"
            outcome.why = f"signal {-code}" if code < 0 else (talk.read().strip().splitlines() or ["no message"])[-1][:300]
    return outcome


def collect(outcome: Outcome, result: dict[str, Any]) -> None:
    """File one result of a case."""
    if "failed" in result:
        outcome.failed, outcome.why = result["failed"], result["why"]
    elif "step" in result:
        outcome.steps.append(result)
    elif "loss" in result:
        outcome.losses.append(result["loss"])
    elif "device" in result:
        outcome.device = result["device"]
    else:
        outcome.facts |= result


def line_of(outcome: Outcome, base: Outcome | None) -> tuple[str, ...]:
    """One row of the table."""
    tokens = format_tokens(outcome.case["tokens"])
    if outcome.seconds is None or outcome.failed:
        return (outcome.name, tokens, outcome.failed or "no step", "", "", "", outcome.why[:60])
    peak, reserved = outcome.most("peak_bytes"), outcome.most("reserved_bytes")
    ratio = ""
    if base is not None and base.seconds and not base.failed:
        ratio = f"{outcome.seconds / base.seconds:.2f} x time"
        if base.most("peak_bytes"):
            ratio += f", {peak / base.most('peak_bytes'):.2f} x memory"
    gib = [f"{size / 2**30:.1f}" if size else "–" for size in (peak, reserved, outcome.most("host_bytes"))]
    return (outcome.name, tokens, f"{outcome.seconds:.2f}", *gib, ratio)


def show(outcomes: list[Outcome], args: argparse.Namespace) -> str:
    """The table, as plain text of fixed columns."""
    device = next((outcome.device for outcome in outcomes if outcome.device), "no device")
    precision = "fp32" if device == "CPU" else "bf16 with fp32 masters" if args.masters else "bf16 weights and optimizer"
    layers = f", {args.layers} layers" if args.layers else ""
    limit = f", limit {format_bytes(args.limit)}" if args.limit else ""
    lines = [("case", "tokens", "s/step", "peak GiB", "reserved", "host GiB", "to TRL's default")]
    for outcome in outcomes:
        same = (each for each in outcomes if each.name == "trl-default" and each.case["tokens"] == outcome.case["tokens"])
        lines.append(line_of(outcome, next(same, None)))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    table = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([f"{args.shape}{layers} on {device}, {precision}{limit}", *table])


def environment() -> dict[str, str]:
    """Versions of what was measured."""
    found = {}
    for name in ("megaspan", "torch", "transformers", "accelerate", "trl", "flash-attn-4"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def main(given: list[str] | None = None) -> int:
    """Run every case and print the table; 1 when megaspan itself failed."""
    args = arguments(given)
    if not args.tiny and not torch.cuda.is_available():
        print("benchmarks.compare: there is no GPU here; --tiny tries the code on the CPU", file=sys.stderr)
        return 2
    outcomes = []
    for name, case in cases(args):
        print(f"{name}, {format_tokens(case['tokens'])} tokens …", file=sys.stderr, flush=True)
        outcomes.append(run_case(name, case, args.timeout))
        print("  " + "  ".join(line_of(outcomes[-1], None)[2:]), file=sys.stderr, flush=True)
        if args.json:
            args.json.write_text(
                json.dumps({"versions": environment(), "cases": [outcome.as_dict() for outcome in outcomes]}, indent=1) + "\n"
            )
    print(show(outcomes, args))
    return int(any(outcome.failed for outcome in outcomes if outcome.case["system"] == "megaspan"))


if __name__ == "__main__":
    sys.exit(main())
