"""Pictures: a run at a glance, and loss by position.

A mean loss hides what long context is about: a model read past its window is right up to there and worse than word counts
beyond (perplexity 335 against 12 at 16k tokens for a small model with an 8k window). So loss by position has a picture of its
own. matplotlib comes with the `plots` extra; figures are made without its global state, so that a notebook's own plots are
left alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from megaspan.human import UserError, format_tokens, missing_extra
from megaspan.report.metrics import read_metrics

# Okabe and Ito's colours, told apart by colour-blind readers; ink and grey for everything that is not data.
BLUE, VERMILION, GREEN, PURPLE, ORANGE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE)
INK, GREY, PALE = "#222222", "#767676", "#E4E4E4"
_GIB = 2**30
_LEFT = 0.075  # of a picture's width: where titles stand, and panels whose numbers are short
_TITLE_LETTERS = 60


def plot_run(run: Path | str) -> Path:
    """Draws loss, gradient norm, speed and memory over the steps of a run into `run/plots.png` and returns its path.

    Raises:
        UserError: matplotlib is not installed, or the run has no logged step yet.
    """
    run = Path(run)
    entries = read_metrics(run)
    steps = [entry for entry in entries if "loss" in entry]
    if not steps:
        raise UserError(f"there is nothing to plot: {run} holds no metrics.jsonl with a training step", do="Name a run folder")
    figure = _figure(9.6, 6.8)
    panels = figure.subplots(2, 2, gridspec_kw={"hspace": 0.42})
    figure.subplots_adjust(top=0.82, bottom=0.08)
    tokens = steps[-1].get("num_tokens")
    last = steps[-1]["step"]
    told = f"{last:,} step{'s' * (last != 1)}" + (f", {format_tokens(int(tokens))} tokens" if tokens else "")
    figure.text(_LEFT, 0.962, f"Run {run_title(run)}", fontsize=15, fontweight="bold", color=INK, va="center")
    figure.text(_LEFT, 0.924, told, fontsize=10, color=GREY, va="center")

    (loss, norm), (speed, memory) = panels
    _panel(loss, "Loss", "nats per token")
    _series(loss, steps, "loss", BLUE, "train")
    _series(loss, [entry for entry in entries if "eval_loss" in entry], "eval_loss", VERMILION, "eval", dots=True)
    _panel(norm, "Gradient norm", "before clipping")
    _series(norm, steps, "grad_norm", BLUE, "")
    _log_if_wide(norm, [entry.get("grad_norm") for entry in steps])
    _panel(speed, "Speed", "tokens per second")
    _series(speed, steps, "tokens_per_second", BLUE, "")
    _panel(memory, "Peak memory", "GiB")
    has_device = any(entry.get("peak_device_bytes") for entry in steps)
    if has_device:
        _series(memory, steps, "peak_device_bytes", BLUE, "GPU", scale=_GIB)
    _series(memory, steps, "peak_host_bytes", VERMILION if has_device else BLUE, "host", scale=_GIB)
    for axes in (speed, memory):
        axes.set_ylim(bottom=0, top=max(axes.get_ylim()[1], 1e-9) * 1.05)
    for axes in panels.flat:
        _whole_steps(axes, steps[0]["step"], last)
        _separate(axes)
    for axes in (speed, memory):
        axes.set_xlabel("step", color=GREY, fontsize=9)
    _make_room(figure, panels.T)
    return _save(figure, run / "plots.png")


def run_title(run: Path) -> str:
    """What a run is called: its `run_name`, or its folder with those above it, for many folders are called "run"."""
    try:
        name = (yaml.safe_load((run / "config.yaml").read_text("utf-8")) or {}).get("run_name")
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError):
        name = None
    folder = run.resolve()
    near = folder.relative_to(Path.cwd()).parts if folder.is_relative_to(Path.cwd()) else ()
    parts = near[-3:] if len(near) > 1 else folder.parts[1:][-2:]
    title = str(name or "/".join(parts) or folder)
    return title if len(title) <= _TITLE_LETTERS else f"…{title[1 - _TITLE_LETTERS :]}"


def plot_positions(
    curves: Mapping[str, Sequence[tuple[int, float]]],
    out: Path | str,
    *,
    native_window: int | None = None,
    unigram: float | None = None,
    title: str = "Perplexity by position in the text",
) -> Path:
    """Draws loss by position, one curve a model, and returns `out`.

    Args:
        curves: for each name, (first token of a span, mean loss of the span in nats), in order of position.
        out: the PNG to write.
        native_window: the length that the model was trained for, drawn as a line.
        unigram: the text's unigram entropy in nats, drawn as a line: above it, word counts alone predict better.
        title: above the picture.

    Raises:
        UserError: matplotlib is not installed, or there is no curve.
    """
    drawn = {name: [(start, loss) for start, loss in curve if math.isfinite(loss)] for name, curve in curves.items()}
    drawn = {name: curve for name, curve in drawn.items() if curve}
    if not drawn:
        raise UserError("there is no curve to plot", do="Evaluate at least one span of tokens")
    figure = _figure(9.6, 5.2)
    axes = figure.subplots()
    figure.subplots_adjust(top=0.80, bottom=0.12)
    figure.text(_LEFT, 0.94, title, fontsize=15, fontweight="bold", color=INK, va="center")
    figure.text(_LEFT, 0.88, "lower is better; logarithmic scale", fontsize=10, color=GREY, va="center")
    _panel(axes, "", "")
    axes.set_yscale("log")
    end = 0.0
    for colour, (name, curve) in zip(COLOURS * (1 + len(drawn) // len(COLOURS)), drawn.items(), strict=False):
        width = curve[-1][0] - curve[-2][0] if len(curve) > 1 else max(1, curve[0][0])
        edges = [start for start, _ in curve] + [curve[-1][0] + width]
        middles = [(first + second) / 2 for first, second in pairwise(edges)]
        values = [math.exp(min(loss, 700.0)) for _, loss in curve]
        axes.plot(middles, values, color=colour, linewidth=2.2, marker="o", markersize=3.5 if len(curve) <= 40 else 0)
        _label(axes, middles[-1], values[-1], f"{name}\n{_short(values[-1])}", colour)
        end = max(end, edges[-1])
    axes.set_xlim(0, end)
    low, high = _span_of(axes, unigram)
    axes.set_ylim(low, high)
    if native_window is not None and native_window < end:
        axes.axvline(native_window, color=GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        text = f" trained window, {format_tokens(native_window)} tokens"
        axes.text(native_window, high, text, color=GREY, fontsize=9, ha="left", va="bottom")
    if unigram is not None:
        axes.axhline(math.exp(unigram), color=GREY, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
        axes.text(end * 0.005, math.exp(unigram) * 1.03, "word counts alone", color=GREY, fontsize=9, ha="left", va="bottom")
    _log_ticks(axes, low, high)
    _token_ticks(axes, int(end))
    axes.set_xlabel("position in the text, tokens", color=GREY, fontsize=9)
    axes.set_ylabel("perplexity", color=GREY, fontsize=9)
    _separate(axes)
    _make_room(figure, [[axes]])
    return _save(figure, Path(out))


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise missing_extra("matplotlib") or error from error
    return Figure(figsize=(width, height), dpi=160, facecolor="white")


def _panel(axes: Any, title: str, unit: str) -> None:
    if title:
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=18)
        axes.text(0, 1.035, unit, transform=axes.transAxes, fontsize=8.5, color=GREY, va="bottom")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.grid(axis="y", color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(axis="both", which="both", colors=GREY, labelsize=8.5, length=0)
    axes.tick_params(axis="x", which="major", length=3)


def _series(
    axes: Any,
    entries: Sequence[Mapping[str, Any]],
    name: str,
    colour: str,
    label: str,
    *,
    dots: bool = False,
    scale: float = 1.0,
) -> None:
    points = [(entry["step"], entry[name] / scale) for entry in entries if entry.get(name) is not None]
    if not points:
        return
    steps, values = [step for step, _ in points], [value for _, value in points]
    reach = len(values) // 100
    if reach and not dots:  # many steps: the raw line behind, its running mean in front
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
        around = [values[max(0, place - reach) : place + reach + 1] for place in range(len(values))]
        values = [sum(part) / len(part) for part in around]
    few = len(values) <= 30
    axes.plot(steps, values, color=colour, linewidth=1.8, marker="o" if few or dots else None, markersize=3.5)
    _label(axes, steps[-1], values[-1], f"{label} {_short(values[-1])}".strip(), colour)


def _label(axes: Any, x: float, y: float, text: str, colour: str) -> None:
    axes.annotate(
        text, (x, y), xytext=(6, 0), textcoords="offset points", color=colour, fontsize=9, fontweight="bold", va="center",
        annotation_clip=False,
    )  # fmt: skip


def _separate(axes: Any) -> None:
    """Moves the labels at the right apart where curves end close to each other."""
    labels = _labels(axes)
    labels.sort(key=lambda label: axes.transData.transform((0, label.xy[1]))[1])
    points = 72 / axes.figure.dpi
    floor = -math.inf
    for label in labels:
        height = 12.0 * (1 + label.get_text().count("\n"))
        place = axes.transData.transform((0, label.xy[1]))[1] * points
        wanted = max(place, floor + height / 2)
        label.set_position((6, wanted - place))
        floor = wanted + height / 2


def _labels(axes: Any) -> list[Any]:
    return [child for child in axes.texts if hasattr(child, "xyann")]


def _make_room(figure: Any, columns: Sequence[Sequence[Any]]) -> None:
    """Places columns of panels so that the labels at their right and the numbers at their left lie in the picture, apart."""
    width = figure.bbox.width
    points = figure.dpi / 72 / width
    labels = [_widest([text for axes in column for text in _labels(axes)]) / width + 14 * points for column in columns]
    numbers = [
        _widest([text for axes in column for text in axes.get_yticklabels()]) / width
        + (24 if any(axes.get_ylabel() for axes in column) else 10) * points
        for column in columns
    ]
    left, right = max(_LEFT, numbers[0]), max(0.5, 1 - labels[-1])
    gap = sum(labels[:-1]) + sum(numbers[1:])
    each = (right - left - gap) / len(columns)
    figure.subplots_adjust(left=left, right=right, wspace=gap / max(1, len(columns) - 1) / each)


def _widest(texts: Sequence[Any]) -> float:
    return max((text.get_window_extent().width for text in texts), default=0.0)


def _log_if_wide(axes: Any, values: Sequence[float | None]) -> None:
    positive = [value for value in values if value]
    if positive and max(positive) > 20 * min(positive):
        axes.set_yscale("log")
        low, high = min(positive) / 1.3, max(positive) * 1.3
        axes.set_ylim(low, high)
        _log_ticks(axes, low, high)


def _log_ticks(axes: Any, low: float, high: float) -> None:
    """Ticks at round numbers, written out: as few kinds of them as give four ticks."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in ((1,), (1, 3), (1, 2, 5)):
        ticks = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(ticks) >= 4:
            break
    else:  # less than a decade: every so many units
        ticks = [float(tick) for tick in MaxNLocator(5).tick_values(low, high) if low <= tick <= high]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))


def _span_of(axes: Any, unigram: float | None) -> tuple[float, float]:
    values = [value for line in axes.lines for value in line.get_ydata()] + ([math.exp(unigram)] if unigram is not None else [])
    low, high = min(values), max(values)
    # A range that is nearly flat is shown as nearly flat, not blown up to fill the picture.
    room = max(1.15, (high / low) ** 0.06, (2.0 / (high / low)) ** 0.5)
    return low / room, high * room


def _whole_steps(axes: Any, first: int, last: int) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    margin = max(0.5, 0.02 * (last - first))
    axes.set_xlim(first - margin, last + margin)
    if axes.get_yscale() == "linear":
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))


def _token_ticks(axes: Any, end: int) -> None:
    """Ticks at binary sizes, as context lengths are named: 4k, 8k, 12k, …, 1M."""
    from matplotlib.ticker import FixedLocator, FuncFormatter

    step = 2 ** max(0, math.ceil(math.log2(max(end, 2) / 9)))
    axes.xaxis.set_major_locator(FixedLocator(list(range(0, end + 1, step))))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _size(int(value))))


def _size(tokens: int) -> str:
    for unit, name in ((2**20, "M"), (2**10, "k")):
        if tokens and tokens % (unit // 4) == 0 and tokens >= unit:
            return f"{tokens / unit:g}{name}"
    return str(tokens)


def _short(value: float) -> str:
    """Three digits or so: 4.31, 29.3, 335, 12,345."""
    if value == 0 or not math.isfinite(value):
        return str(value)
    if abs(value) >= 100:
        return f"{value:,.0f}" if abs(value) < 1e7 else f"{value:.1e}"
    return f"{value:.3g}"


def _tick(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:g}"


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
