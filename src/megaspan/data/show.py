"""`megaspan data`: the ledger, and one row as text with what is trained in it.

A row of a million tokens is four megabytes of text, so its beginning, its end and the borders of its documents are shown: the
places where labels, separators and cuts go wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megaspan.data.prepare import prepare_rows
from megaspan.data.rows import IGNORED, Row, Rows
from megaspan.human import UserError, format_tokens
from megaspan.plan.facts import read_config

if TYPE_CHECKING:
    from megaspan.config import SFTConfig

_EDGE = 48  # tokens shown at the beginning and the end of a row
_AROUND = 16  # tokens shown on each side of a document's border
_BORDERS = 4


def data_command(
    config: SFTConfig,
    show: int | None = None,
    *,
    split: str = "train",
    tokenizer: Any | None = None,
    cache_folder: str | None = None,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Prepares the rows of a configuration, reports the ledger, and with `show` one row.

    Args:
        config: the options.
        show: index of a row to show; None shows none.
        split: "train" or "test".
        tokenizer: by default the one of `model_name_or_path`.
        cache_folder: as in `prepare_rows`.
        report: takes the lines.

    Returns:
        rows, fingerprint, reused, ledger, and with `show` row: index, tokens, trained, document_lengths, unigram_entropy, text.

    Raises:
        UserError: as `prepare_rows`; no such row.
    """
    tokenizer = tokenizer if tokenizer is not None else _load_tokenizer(config)
    rows = prepare_rows(config, tokenizer, split, cache_folder=cache_folder, report=report)
    result: dict[str, Any] = {
        "rows": len(rows), "fingerprint": rows.fingerprint, "reused": rows.reused, "ledger": rows.ledger.to_dict(),
    }  # fmt: skip
    if show is not None:
        result["row"] = _describe(rows, show, tokenizer)
        report(result["row"]["text"])
    return result


def show_row(row: Row, tokenizer: Any | None, title: str = "row") -> str:
    """A row as text: ⟦…⟧ holds what is not trained, everything else is; ─ begins a document; the middle is left out."""
    trained = row.labels != IGNORED
    borders = [int(border) for border in np.cumsum(row.document_lengths)[:-1]]
    total = len(row.input_ids)
    lines = [
        f"{title}: {format_tokens(total)} tokens, {format_tokens(int(trained.sum()))} trained, "
        f"{len(row.document_lengths)} document{'' if len(row.document_lengths) == 1 else 's'}"
        f"{', each sees only itself' if len(row.attention_lengths) > 1 else ''}; ⟦…⟧ is not trained",
    ]
    starts = {0, *borders, *({total - row.padding} if row.padding else ())}
    last = 0
    for start, end in _windows(total, borders):
        if start > last:
            lines.append(f"… {format_tokens(start - last)} tokens, {format_tokens(int(trained[last:start].sum()))} trained …")
        for left, right in _between(start, end, starts):
            if left in starts:
                lines.append(_heading(row, left))
            lines.append(_marked(row, trained, left, right, tokenizer))
        last = end
    return "\n".join(lines)


def _windows(total: int, borders: list[int]) -> list[tuple[int, int]]:
    """The stretches that are shown: both ends and the first few borders, joined where they touch."""
    wanted = [(0, min(_EDGE, total)), *((b - _AROUND, b + _AROUND) for b in borders[:_BORDERS]), (total - _EDGE, total)]
    windows: list[tuple[int, int]] = []
    for start, end in sorted((max(0, start), min(total, end)) for start, end in wanted):
        if windows and start <= windows[-1][1]:
            windows[-1] = (windows[-1][0], max(end, windows[-1][1]))
        else:
            windows.append((start, end))
    return windows


def _between(start: int, end: int, starts: set[int]) -> list[tuple[int, int]]:
    cuts = [start, *sorted(cut for cut in starts if start < cut < end), end]
    return list(pairwise(cuts))


def _heading(row: Row, at: int) -> str:
    if row.padding and at == len(row.input_ids) - row.padding:
        return f"─ padding, {format_tokens(row.padding)} tokens"
    ends = np.cumsum(row.document_lengths)
    number = int(np.searchsorted(ends, at, side="right"))
    return f"─ document {number + 1} of {len(ends)}, {format_tokens(row.document_lengths[number])} tokens here"


def _marked(row: Row, trained: np.ndarray, start: int, end: int, tokenizer: Any | None) -> str:
    """Runs of tokens of one kind are decoded together, so that a letter of several tokens is whole."""
    edges = [start, *(np.flatnonzero(np.diff(trained[start:end])) + start + 1).tolist(), end]
    text = ""
    for left, right in pairwise(edges):
        ids = row.input_ids[left:right].tolist()
        part = tokenizer.decode(ids) if tokenizer is not None else " ".join(map(str, ids)) + " "
        text += part if trained[left] else f"⟦{part}⟧"
    return text


def _describe(rows: Rows, index: int, tokenizer: Any | None) -> dict[str, Any]:
    if not 0 <= index < len(rows):
        raise UserError("--show: no such row", got=index, allowed=f"0 to {len(rows) - 1}")
    row = rows[index]
    return {
        "index": index,
        "tokens": len(row.input_ids),
        "trained": int((row.labels != IGNORED).sum()),
        "document_lengths": list(row.document_lengths),
        "unigram_entropy": rows.unigram_entropy(index),
        "text": show_row(row, tokenizer, f"row {index}"),
    }


def _load_tokenizer(config: SFTConfig) -> Any | None:
    """The model's tokenizer; None for a bare shape, which has none.

    Raises:
        UserError: there is no such model.
    """
    name = config.model_name_or_path
    if name is None or (resources.files("megaspan.plan") / "shapes" / f"{name}.json").is_file():
        return None
    folder = Path(name)
    if folder.is_dir() and not [*folder.glob("tokenizer*"), *folder.glob("*.model"), *folder.glob("vocab*")]:
        return None
    if not folder.is_dir() and "/" not in name:
        read_config(name)  # says what is there instead; the hub would be asked for half a minute
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, revision=config.model_revision, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # tokenizers raises this very class, transformers whatever a broken file leads to
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        do = "Copy its tokenizer files again from the model it belongs to" if folder.is_dir() else "Check the name and HF_TOKEN"
        raise UserError(f"the tokenizer of {name} cannot be loaded: {reason}", do=do) from error
