"""A plan as tables for people and as plain values for programs."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from megaspan.human import format_bytes, format_seconds, format_tokens
from megaspan.plan.choose import ELSEWHERE, Plan
from megaspan.plan.levers import Lever
from megaspan.plan.reasons import RATED


def plan_dict(plan: Plan) -> dict[str, Any]:
    """Every field of a plan as JSON values; bytes and tokens are whole numbers."""
    lever = plan.next_lever
    return {
        "model": plan.model.name,
        "parameters": plan.model.parameters,
        "parameters_exact": plan.model.exact,
        "machine": asdict(plan.machine),
        "tokens": plan.tokens,
        "documents": plan.documents,
        "precision": plan.precision,
        "loss_tile_tokens": plan.loss_tile_tokens,
        "checkpoint": plan.checkpoint,
        "offload": plan.offload,
        "keep": [asdict(layer) for layer in plan.keep.layers],
        "keep_again": plan.keep.again,
        "segments": [len(segment) for segment in plan.keep.segments],
        "keep_on_device": plan.keep_on_device,
        "keep_outputs": plan.keep_outputs,
        "kept": [dict(zip(("layers", "what", "bytes", "why"), row, strict=True)) for row in plan.kept],
        "streamed": plan.streamed,
        "layer_tile_tokens": plan.layer_tile_tokens,
        "kv_heads_per_call": plan.kv_heads_per_call,
        "stream_back": plan.stream_back,
        "project_ahead": plan.project_ahead,
        "states": asdict(plan.states),
        "summary": plan.summary,
        "fits": plan.fits,
        "sizes": asdict(plan.sizes),
        "ranks": plan.sizes.total,
        "tokens_per_rank": plan.tokens_per_rank,
        "device_bytes": plan.device_bytes,
        "device_needed": plan.device_needed,
        "device_limit": plan.device_limit,
        "host_bytes": plan.host_bytes,
        "host_limit": plan.host_limit,
        "device_limit_from": plan.limits_from[0],
        "host_limit_from": plan.limits_from[1],
        "longest_row": plan.longest_row,
        "parts": [part._asdict() for part in plan.parts],
        "moments": dict(plan.moments),
        "peak": plan.peak,
        "largest_allocation": plan.largest._asdict(),
        "seconds": plan.seconds.total,
        "seconds_parts": [asdict(part) for part in plan.seconds.parts],
        "seconds_note": seconds_note(plan),
        "levers": [asdict(each) for each in plan.levers],
        "next_lever": asdict(lever) if lever else None,
        "next_lever_suffices": plan.suffices,
        "reasons": list(plan.reasons),
        "host_for_layers": plan.host_for_layers,
        "rehearsal": None,
    }


def lever_sentence(lever: Lever, tokens: int) -> str:
    """What one lever does at this length: saved bytes, or that it does nothing and from where on it would."""
    state = "on" if lever.on else "off"
    if lever.saves <= 0 or lever.from_tokens is not None:
        start = f"; saves from {format_tokens(lever.from_tokens)} tokens on" if lever.from_tokens else ""
        return f"{state}: does nothing at {format_tokens(tokens)} tokens, the peak is elsewhere{start}"
    verb = "saves" if lever.on else "would save"
    host = f" and {format_bytes(lever.host)} of host memory" if lever.host > 0 else ""
    return f"{state}: {verb} {format_bytes(lever.saves)}; costs {lever.cost}{host}"


def render_plan(plan: Plan, width: int = 128) -> str:
    """Tables of bytes, moments, seconds and levers, and the answer in the last lines."""
    from rich.console import Console
    from rich.table import Table

    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, markup=False)

    def table(title: str, *columns: str) -> Table:
        made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for column in columns:
            made.add_column(column, justify="right" if column in ("size", "seconds") else "left", overflow="fold")
        console.print(f"\n{title}", soft_wrap=True)
        return made

    model = plan.model
    console.print(
        f"{model.name}: {model.parameters:,} parameters, {model.layers} layers; a row of {format_tokens(plan.tokens)} tokens; "
        f"{plan.precision}; on {plan.machine.device_name}",
        soft_wrap=True,
    )
    if plan.sizes.total > 1:
        rows = f", {plan.sizes.data} rows at a time" if plan.sizes.data > 1 else ""
        console.print(f"{plan.sizes}; {format_tokens(plan.tokens_per_rank)} tokens of a row on each{rows}", soft_wrap=True)
    memory = table(f"At the peak ({plan.peak})", "place", "part", "size", "formula")
    for place, needed in (("device", plan.device_needed), ("host", plan.host_bytes), ("disk", 0)):
        parts = [part for part in plan.parts if part.place == place]
        for part in parts:
            memory.add_row(place, part.name, format_bytes(part.bytes), part.formula)
        if needed and len(parts) > 1:
            memory.add_row(place, "in all", format_bytes(needed), "", end_section=True)
    console.print(memory)
    console.print(legend(plan, [*(part.formula for part in plan.parts), plan.largest.formula]), soft_wrap=True)
    moments = table("Moments of a step (tensors alone)", "moment", "size")
    for name, size in plan.moments:
        moments.add_row(name, format_bytes(size))
    console.print(moments)
    if plan.checkpoint:
        kept = table("What is kept for the backward, the top layers first", "layers", "what", "size", "why")
        for name, what, size, why in reversed(plan.kept):
            kept.add_row(name, what, format_bytes(size), why)
        console.print(kept)
    largest = plan.largest
    console.print(f"\nLargest single tensor: {largest.name}, {format_bytes(largest.bytes)} = {largest.formula}", soft_wrap=True)
    if plan.seconds.parts:
        held = "one document" if plan.documents == 1 else f"{plan.documents:,} documents"
        seconds = table(f"Seconds of a step, its row {held} (predicted)", "part", "seconds", "formula")
        for each in plan.seconds.parts:
            seconds.add_row(each.name, f"{each.seconds:.2f}" if each.seconds >= 0.005 else "< 0.01", each.formula)
        console.print(seconds)
        console.print(f"{format_seconds(plan.seconds.total or 0)} a step {plan.seconds.note}", soft_wrap=True)
    else:
        console.print(f"\nSeconds of a step: {seconds_note(plan)}", soft_wrap=True)
    levers = table("Levers", "lever", "effect", "to turn on")
    for lever in plan.levers:
        levers.add_row(lever.name, lever_sentence(lever, plan.tokens), "" if lever.on else lever.do)
    console.print(levers)
    console.print()
    for reason in plan.reasons:
        console.print(f"· {reason}", soft_wrap=True)
    console.print()
    for line in answer_lines(plan):
        console.print(line, soft_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def seconds_note(plan: Plan) -> str:
    """Which kernel the seconds hold for, or why there are none, and what the seconds in the summary are then."""
    note = plan.seconds.note
    compared = plan.seconds.total is None and f"on {RATED}" in plan.summary
    return f"{note}; the time on {RATED} that is named in the answer is there to compare" if compared else note


def letters(plan: Plan) -> dict[str, tuple[int, str]]:
    """What the letters of the formulas stand for: a number, and what it is."""
    model, shared = plan.model, plan.sizes.total > 1
    return {
        "t": (plan.tokens_per_rank, "tokens of a row on a rank" if shared else "tokens of the row"),
        "E": (model.hidden, "hidden size"),
        "Q": (model.query_width, f"{model.heads} query heads x {model.head_dim}"),
        "K": (model.kv_width, f"{model.kv_heads} KV heads x {model.head_dim}"),
        "H": (model.heads, "query heads"),
        "F": (model.mlp_width, "MLP width"),
        "V": (model.vocab, "words of the tokenizer"),
    }


def legend(plan: Plan, formulas: Iterable[str]) -> str:
    """The letters that occur in `formulas` with their values, in one line; those that a formula explains are left out."""
    text = " ".join(formulas)
    used = {name: told for name, told in letters(plan).items() if re.search(rf"(?<![\w']){name}(?!\w| =)", text)}
    said = ", ".join(f"{name} = {value:,} ({what})" for name, (value, what) in used.items() if f"{name} = " not in text)
    pinned = "; pinned memory is locked, which makes copies fast" if any("pinned" in part.name for part in plan.parts) else ""
    return f"letters: {said}; x and · multiply, B are bytes{pinned}" if said else ""


def answer_lines(plan: Plan) -> list[str]:
    """The answer: what is needed of what there is, whether it fits, the longest row, the next lever."""
    lines = [plan.summary]
    if plan.sizes.total > 1:
        lines.append(f"{plan.sizes}; all numbers are of one rank, but for the files on disk and the seconds")
    device, _ = plan.limits_from
    if plan.device_limit:
        lines.append(
            f"device  {format_bytes(plan.device_needed)} of {format_bytes(plan.device_limit)} ({device}), "
            f"{format_bytes(plan.device_bytes)} of them tensors at the peak"
        )
    lines.append(f"host    {format_bytes(plan.host_bytes)} of {format_bytes(plan.host_limit)} ({_host_from(plan)})")
    longest = f"longest row that memory allows: {format_tokens(plan.longest_row)} tokens" if plan.longest_row else ""
    lines.append(("fits; " if plan.fits else "DOES NOT FIT; ") + (longest or "no row fits with these settings"))
    lever = plan.next_lever
    if lever is not None:
        gain = f"saves {format_bytes(lever.saves)}" if lever.saves > 0 else f"frees {format_bytes(-lever.host)} of host memory"
        what = "to go further" if plan.fits else "that makes it fit" if plan.suffices else "of several that it needs"
        lines.append(f"next lever {what}: {lever.do} ({lever.name}; {gain}; costs {lever.cost})")
    elif not plan.fits:
        lines.append("no lever of this version makes it fit: it needs more memory or a smaller model")
    return lines


def _host_from(plan: Plan) -> str:
    """Where the limit of host memory comes from: the whole of it, where ranks share it."""
    ranks, source = plan.machine.host_ranks, plan.limits_from[1]
    source = source.removesuffix(f", for each of {ranks} ranks")
    if plan.machine.device_name == ELSEWHERE and source != "host_memory":
        source = f"{source} of this machine; host_memory says what the other has"
    if ranks == 1:
        return source
    each = " of each machine" if plan.sizes.total > ranks else ""
    return f"{format_bytes(plan.host_limit * ranks)}{each} / {ranks} ranks; {source}"
