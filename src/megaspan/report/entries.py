"""How a logged entry is shown: as a dict in the form people know from transformers, or as a line for reading."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megaspan.human import format_bytes, format_seconds

# What TRL logs, in its order, then speed. Bytes are in metrics.jsonl.
_SHOWN = (
    "loss",
    "grad_norm",
    "learning_rate",
    "num_tokens",
    "epoch",
    "mean_token_accuracy",
    "entropy",
    "step_seconds",
    "tokens_per_second",
)
_EXACT = ("num_tokens", "eval_num_tokens", "epoch")


def dict_line(entry: Mapping[str, float]) -> str:
    """`{'loss': 4.311, 'grad_norm': 29.25, 'learning_rate': 2e-05, 'num_tokens': 1048576.0, 'epoch': 0.25, …}`.

    Four digits, but all of those that count something. An entry without a loss (an evaluation) is shown whole.
    """
    names = [name for name in _SHOWN if name in entry] if "loss" in entry else list(entry)
    return str({name: entry[name] if name in _EXACT else _four_digits(entry[name]) for name in names})


def _four_digits(value: float) -> float:
    return float(f"{value:.4g}") if isinstance(value, float) and math.isfinite(value) else value


def reading_line(step: int, entry: Mapping[str, float], width: int | None = None) -> str:
    """The same for a terminal, in columns; what does not fit in `width` is left out, from the end.

    `step 3      loss 2.8710   grad norm 3.12     2,759 tokens/s   6 min 20 s   38.2 GiB   lr 1.83e-05   epoch 0.75`
    """
    parts = [f"step {step:<4}"]
    if "loss" in entry:
        shown = {
            "loss": lambda value: f"loss {value:<7.4f}",
            "grad_norm": lambda value: f"grad norm {value:<7.4g}",
            "tokens_per_second": lambda value: f"{value:>7,.0f} tokens/s",
            "step_seconds": lambda value: f"{format_seconds(value):>10}",
            "peak_device_bytes": lambda value: format_bytes(value),
            "learning_rate": lambda value: f"lr {value:<8.3g}",
            "epoch": lambda value: f"epoch {value:.2f}",
            "mean_token_accuracy": lambda value: f"accuracy {value:.1%}",
        }
        parts += [show(entry[name]) for name, show in shown.items() if entry.get(name) or name == "loss"]
    else:
        parts += [f"{name.replace('_', ' ')} {value:,.5g}" for name, value in entry.items()]
    line = parts[0]
    for part in parts[1:]:
        if width is not None and len(line) + 3 + len(part) > width:
            break
        line += "   " + part
    return line.rstrip()
