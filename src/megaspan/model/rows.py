"""A batch cut into the stretches of tokens that really attend to each other, and those laid side by side again.

At a million tokens a mask is out of the question (a boolean one of 2^20 x 2^20 entries is a terabyte), so the long forward
knows only unbroken causal stretches: each row of a batch, a row without its padding, each document where `position_ids` start
again at zero. This is exact: nothing outside a stretch is visible from inside it under the masks that transformers would have
built, and whatever cannot be said in stretches is refused. Stretches run as one packed row, up to the length that memory was
planned for: a layer's weights are read, and its kernels launched, once for all of them, where ten thousand documents of a
million-token row one after the other would be ten thousand forwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megaspan.attention.context import RowContext, RowRanks
from megaspan.attention.layout import lay_out
from megaspan.human import UserError
from megaspan.layers.loss import IGNORED


@dataclass(frozen=True)
class Piece:
    """Tokens `start:stop` of one row; `restarts` says that its positions begin anew inside the row."""

    row: int
    start: int
    stop: int


def shift(labels_bT: torch.Tensor) -> torch.Tensor:
    """Labels moved one to the left, so that place `p` holds what the token at `p` has to predict; the last is ignored."""
    shifted = torch.full_like(labels_bT, IGNORED)
    shifted[:, :-1] = labels_bT[:, 1:]
    return shifted


def cut(
    rows: int, length: int, *, attention_mask: torch.Tensor | None = None, position_ids: torch.Tensor | None = None
) -> tuple[Piece, ...]:
    """The stretches of a batch of `rows` rows of `length` tokens, in order, none empty.

    Args:
        rows: rows of the batch.
        length: tokens a row.
        attention_mask: [rows, length], one where there is a token; padding may lie on either side.
        position_ids: [rows or 1, length]; a return to zero starts a new document, as in transformers.

    Raises:
        UserError: the mask has holes or more dimensions, or the positions jump, or mask and returning positions come together.
    """
    spans = [(0, length)] * rows if attention_mask is None else _unpadded(rows, length, attention_mask)
    if position_ids is None:
        return tuple(Piece(row, start, stop) for row, (start, stop) in enumerate(spans) if start < stop)
    if position_ids.ndim != 2 or position_ids.shape[0] not in (1, rows) or position_ids.shape[1] != length:
        raise UserError(
            "position_ids of this shape cannot be used", got=tuple(position_ids.shape), allowed=f"({rows} or 1, {length})"
        )
    breaks_by_row = _breaks(position_ids)
    pieces: list[Piece] = []
    for row, (start, stop) in enumerate(spans):
        inside = [(place, to) for place, to in breaks_by_row[row % position_ids.shape[0]] if start < place < stop]
        for place, to in inside:
            if to != 0:
                raise UserError(
                    f"position_ids jump to {to} at token {place} of row {row}",
                    allowed="positions that count up by one, and start again at 0 where a new document begins",
                )
        if inside and attention_mask is not None:
            raise UserError(
                "position_ids that start again come together with an attention_mask",
                do="Leave attention_mask out: with it, plain transformers lets the packed documents see each other",
            )
        edges = [start, *(place for place, _ in inside), stop]
        pieces += [Piece(row, here, there) for here, there in itertools.pairwise(edges) if here < there]
    return tuple(pieces)


@dataclass(frozen=True)
class Run:
    """One run of the backbone.

    Attributes:
        inputs: its arguments, of one row.
        row: how the row lies; None for one unbroken stretch.
    """

    inputs: dict[str, torch.Tensor]
    row: RowContext | None


def runs_of(arguments: Mapping[str, Any], pieces: Sequence[Piece], most: int) -> Iterator[Run]:
    """Runs of the backbone that do all pieces in their order.

    Args:
        arguments: of the model's forward: `input_ids` or `inputs_embeds`, and perhaps `position_ids`.
        pieces: from `cut`.
        most: tokens of a packed row that is made here; 0: every piece runs alone.
    """
    first = 0
    while first < len(pieces):
        last, tokens = first + 1, pieces[first].stop - pieces[first].start
        while last < len(pieces) and tokens + pieces[last].stop - pieces[last].start <= most:
            tokens, last = tokens + pieces[last].stop - pieces[last].start, last + 1
        yield _joined(arguments, pieces[first:last]) if last - first > 1 else Run(_inputs(arguments, pieces[first]), None)
        first = last


def run_of_row(arguments: Mapping[str, Any], row: RowContext) -> Run:
    """The run of a row whose layout is known.

    Raises:
        UserError: arguments that do not go with it.
    """
    name = "input_ids" if arguments.get("inputs_embeds") is None else "inputs_embeds"
    if tuple(arguments[name].shape[:2]) != (1, row.slots):
        shape = str(tuple(arguments[name].shape))
        raise UserError(f"{name} are not this rank's part of megaspan_row", found=shape, allowed=f"(1, {row.slots})")
    if arguments.get("attention_mask") is not None:
        raise UserError("megaspan_row says what is padding", found="an attention_mask with it", do="Leave attention_mask out")
    if row.ranks.sizes != (1, 1):
        for needed in ("shift_labels", "num_items_in_batch"):
            if arguments.get(needed) is None:
                raise UserError(f"a row on several ranks needs {needed}: a rank sees a part of its tokens only")
    positions = arguments.get("position_ids")
    return Run({name: arguments[name], "position_ids": row.positions[None] if positions is None else positions}, row)


def _inputs(arguments: Mapping[str, Any], piece: Piece) -> dict[str, torch.Tensor]:
    name = "input_ids" if arguments.get("inputs_embeds") is None else "inputs_embeds"
    inputs: dict[str, torch.Tensor] = {name: arguments[name][piece.row : piece.row + 1, piece.start : piece.stop]}
    positions = arguments.get("position_ids")
    if positions is not None:
        row = piece.row % positions.shape[0]
        inputs["position_ids"] = positions[row : row + 1, piece.start : piece.stop]
    elif piece.start > 0:
        # Rotary attention sees differences of positions only; these are the plain model's own, padding counted.
        inputs["position_ids"] = torch.arange(piece.start, piece.stop, device=inputs[name].device)[None]
    return inputs


def _joined(arguments: Mapping[str, Any], pieces: Sequence[Piece]) -> Run:
    """Pieces side by side in one row; neighbours of one row are not copied."""
    name = "input_ids" if arguments.get("inputs_embeds") is None else "inputs_embeds"
    tokens, positions = arguments[name], arguments.get("position_ids")
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    together = Piece(pieces[0].row, pieces[0].start, pieces[-1].stop)
    if all(here.row == there.row and here.stop == there.start for here, there in itertools.pairwise(pieces)):
        inputs = _inputs({name: tokens, "position_ids": positions}, together)
    else:
        parts = [_inputs({name: tokens, "position_ids": positions}, piece) for piece in pieces]
        inputs = {each: torch.cat([part[each] for part in parts], dim=1) for each in (name, "position_ids")}
    layout = lay_out([piece.stop - piece.start for piece in pieces], 1)
    return Run(inputs, RowContext(layout, RowRanks(), tokens.device))


def check_covered(shifted_bT: torch.Tensor, pieces: tuple[Piece, ...]) -> None:
    """Refuse labels that a padding token would have to predict: its output is undefined.

    Raises:
        UserError: there is such a label.
    """
    if sum(piece.stop - piece.start for piece in pieces) == shifted_bT.numel():
        return
    outside = shifted_bT != IGNORED
    for piece in pieces:
        outside[piece.row, piece.start : piece.stop] = False
    if bool(outside.any()):
        row, place = (int(index) for index in outside.nonzero()[0])
        raise UserError(
            f"row {row} trains token {place + 1}, which only a padding token could predict",
            do="Set the labels of padding, and of the first token after padding on the left, to -100",
        )


def _unpadded(rows: int, length: int, attention_mask: torch.Tensor) -> list[tuple[int, int]]:
    """Where the tokens of each row begin and end."""
    if attention_mask.ndim != 2 or tuple(attention_mask.shape) != (rows, length):
        raise UserError(
            "an attention_mask of this shape cannot be used with labels",
            got=tuple(attention_mask.shape),
            allowed=f"({rows}, {length}), or none: attention is causal",
        )
    kept_bT = attention_mask.to(torch.bool)
    if attention_mask.dtype != torch.bool and bool((attention_mask != kept_bT).any()):
        raise UserError(
            "an attention_mask holds other values than 0 and 1, which plain transformers all takes for 1: documents that they "
            "number would see each other",
            do="Leave attention_mask out, and give position_ids that start again with each document",
        )
    counts = kept_bT.sum(1)
    first = kept_bT.int().argmax(1)
    last = length - 1 - kept_bT.flip(1).int().argmax(1)
    if bool(((counts > 0) & (last - first + 1 != counts)).any()):
        raise UserError(
            "an attention_mask with holes cannot be used",
            allowed="padding at the start or the end of a row",
            do="Leave attention_mask out, or cut the rows where it is zero",
        )
    return [(start, start + count) for start, count in zip(first.tolist(), counts.tolist(), strict=True)]


def _breaks(position_ids: torch.Tensor) -> list[list[tuple[int, int]]]:
    """For each row, the places where positions do not go on by one, with the position found there."""
    broken = position_ids.diff(dim=1) != 1
    found: list[list[tuple[int, int]]] = [[] for _ in range(position_ids.shape[0])]
    if bool(broken.any()):
        places = broken.nonzero()
        to = position_ids[places[:, 0], places[:, 1] + 1]
        for (row, place), position in zip(places.tolist(), to.tolist(), strict=True):
            found[row].append((place + 1, position))
    return found
