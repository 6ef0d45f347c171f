"""One record of a dataset → one document: text, or token ids with the tokens that are trained.

Long data comes as books in a `text` column, or already as `input_ids` (a million of them in one row). Each kind of record has
one renderer here, chosen once by the columns that exist, so that a missing or misnamed column is an error before the first
token and not a run on nothing. A chat renderer is one more entry in `render_records`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaspan.human import UserError, nearest

CHAT_COLUMNS = ("messages", "conversations", "conversation", "prompt", "completion", "chosen", "rejected")
MASK_COLUMNS = ("labels", "completion_mask", "assistant_masks")
PACKED_COLUMNS = ("position_ids", "seq_lengths")
"""Of rows that were packed elsewhere: positions that start again with each document, or TRL's lengths of the documents."""
LARGEST_ID = 2**31 - 1


@dataclass(frozen=True)
class Document:
    """An unbroken text, as read: either `text` or `ids` is set; both None is a null record.

    Attributes:
        place: file, or dataset and record number, for messages.
        text: the text to tokenise.
        ids: tokens that are already there, uint32 [T].
        trained: bool [T], False where a token of `ids` gives no loss; None trains all.
        source: number of the source it comes from, where there are several.
        lengths: int64, tokens of each document in `ids` where the record is a row that was packed elsewhere; None for one text.
    """

    place: str
    text: str | None = None
    ids: np.ndarray | None = None
    trained: np.ndarray | None = None
    source: int = 0
    lengths: np.ndarray | None = None


@dataclass(frozen=True)
class Renderer:
    """How the records of one dataset become documents.

    Attributes:
        columns: the columns that are read; the others need not be loaded.
        render: a record and its place → a document.
    """

    columns: tuple[str, ...]
    render: Callable[[Mapping[str, Any], str], Document]


def render_records(columns: Sequence[str], text_field: str, place: str, *, more: bool = False) -> Renderer:
    """Chooses the renderer for a dataset with these columns.

    Args:
        columns: of the dataset, or of its first record.
        text_field: the column that the user named.
        place: for messages.
        more: later records may have further columns: masks and positions are looked for in each.

    `input_ids` wins over the default `text` column, as in TRL; a text column that the user named wins over `input_ids`.

    Raises:
        UserError: no column holds text or ids (the columns that exist are named), or only chat columns do.
    """
    if text_field in columns and ("input_ids" not in columns or text_field != "text"):
        return Renderer((text_field,), lambda record, where: _text(record, text_field, where))
    if "input_ids" in columns:
        packed = tuple(column for column in PACKED_COLUMNS if more or column in columns)
        masks = tuple(column for column in (*MASK_COLUMNS, "attention_mask") if more or column in columns)
        return Renderer(("input_ids", *masks, *packed), lambda record, where: _ids(record, masks, packed, where))
    chat = [column for column in CHAT_COLUMNS if column in columns]
    if chat:
        pairs = {"prompt", "completion"} & set(chat)
        what, how = ("prompts and completions", "Join them") if pairs else ("chats", "Render the conversations")
        raise UserError(
            f"{place} holds {what} ({', '.join(chat)}), which are not built yet: only plain text and input_ids are",
            do=f"{how} to a column of text, and name it with dataset_text_field; or, to train a part alone, to columns "
            "input_ids and completion_mask (1 where a token is trained)",
        )
    close = nearest(text_field, columns)
    raise UserError(
        f"{place} has no column {text_field!r}, only {', '.join(columns) or 'none'}",
        do=f"Set dataset_text_field to {f'{close!r}, or to ' if close else ''}the column that holds the text",
    )


def _text(record: Mapping[str, Any], field: str, place: str) -> Document:
    if field not in record:
        columns = ", ".join(record) or "none"
        raise UserError(f"{place} has no column {field!r}, only {columns}", do="Every record needs it; null is skipped")
    value = record[field]
    if value is not None and not isinstance(value, str):
        raise UserError(
            f"{place}: column {field!r} holds {_kind(value)}",
            allowed="text, or null",
            do="Name the column that holds the text with dataset_text_field",
        )
    return Document(place, text=value)


def _ids(record: Mapping[str, Any], masks: Sequence[str], packed: Sequence[str], place: str) -> Document:
    if record.get("input_ids") is None:
        return Document(place)
    ids = token_ids(record["input_ids"], f"{place}: column 'input_ids'")
    trained: np.ndarray | None = None
    for column in masks:
        values = record.get(column)
        if values is None:
            continue
        mask = _integers(values, f"{place}: column {column!r}")
        if len(mask) != len(ids):
            raise UserError(f"{place}: {column} has {len(mask):,} entries", allowed=f"as many as input_ids, {len(ids):,}")
        if column == "labels":
            if ((mask != -100) & (mask != ids)).any():
                raise UserError(
                    f"{place}: labels differ from input_ids",
                    allowed="the token's own id (labels are shifted later), or -100 where it is not trained",
                )
            mask = mask != -100
        elif not np.isin(mask, (0, 1)).all():
            raise UserError(f"{place}: {column} must hold only 0 and 1")
        if column == "attention_mask":
            if not mask.all():
                raise UserError(f"{place}: attention_mask hides tokens", do="Remove the padding: rows need none here")
            continue
        trained = mask.astype(bool) if trained is None else trained & mask.astype(bool)
    return Document(place, ids=ids, trained=trained, lengths=_document_lengths(record, packed, len(ids), place))


def _document_lengths(record: Mapping[str, Any], packed: Sequence[str], tokens: int, place: str) -> np.ndarray | None:
    """Lengths of the documents in a packed row, int64; None for one document, whether or not the record says so."""
    found: np.ndarray | None = None
    for column in packed:
        if record.get(column) is None or not tokens:
            continue
        values = _integers(record[column], f"{place}: column {column!r}")
        if column == "position_ids":
            lengths = _from_positions(values, tokens, place)
        elif len(values) and values.min() > 0 and values.sum() == tokens:
            lengths = values
        else:
            raise UserError(
                f"{place}: seq_lengths are not the lengths of the documents in input_ids",
                found=f"a sum of {int(values.sum()):,} for {tokens:,} tokens",
                allowed="lengths of at least 1 that add up to them",
            )
        if found is not None and not np.array_equal(found, lengths):
            raise UserError(f"{place}: position_ids and seq_lengths say different documents", do="Remove one of the columns")
        found = lengths
    return None if found is None or len(found) == 1 else found


def _from_positions(positions: np.ndarray, tokens: int, place: str) -> np.ndarray:
    """Lengths of the documents that begin wherever positions start again at 0."""
    if len(positions) != tokens:
        raise UserError(f"{place}: position_ids has {len(positions):,} entries", allowed=f"as many as input_ids, {tokens:,}")
    begins = np.flatnonzero(np.diff(positions, prepend=positions[0]) != 1)
    strange = begins[positions[begins] != 0]
    if len(strange):
        raise UserError(
            f"{place}: position_ids jump to {int(positions[strange[0]]):,} at token {int(strange[0]):,}",
            allowed="positions that count up by one, and start again at 0 where a document begins",
        )
    return np.diff(np.append(begins, tokens))


def token_ids(values: Any, place: str) -> np.ndarray:
    """Ids from a list or array as uint32 [T].

    Raises:
        UserError: not a flat sequence of whole numbers from 0 to 2³¹ − 1.
    """
    ids = _integers(values, place)
    if len(ids) and (ids.min() < 0 or ids.max() > LARGEST_ID):
        bad = ids.min() if ids.min() < 0 else ids.max()
        raise UserError(f"{place} holds a number that is no token id", got=int(bad), allowed=f"0 to {LARGEST_ID}")
    return ids.astype(np.uint32)


def _integers(values: Any, place: str) -> np.ndarray:
    if isinstance(values, str):
        raise UserError(f"{place} holds text", allowed="a flat list of whole numbers")
    try:
        array = np.asarray(values)
    except ValueError:
        array = np.empty((0, 0))
    if array.ndim == 1 and array.size == 0:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise UserError(f"{place} holds {_kind(values)}", allowed="a flat list of whole numbers")
    return array.astype(np.int64)


def _kind(value: Any) -> str:
    names = {"list": "a list", "dict": "a mapping", "int": "a number", "float": "a number", "bool": "true or false"}
    name = type(value).__name__
    if isinstance(value, list) and value:
        if None in value:
            return "a list with null in it"
        if all(isinstance(item, int) for item in value):
            return "a list with a number beyond 64 bits"
        inner = type(value[0]).__name__
        return f"a list of {({'list': 'lists', 'dict': 'mappings', 'str': 'texts', 'float': 'fractions'}).get(inner, inner)}"
    return names.get(name, name)
