"""A batch cut into the stretches of tokens that really attend to each other.

At a million tokens a mask is out of the question (a boolean one of 2^20 x 2^20 entries is a terabyte), so the long forward
knows only unbroken causal stretches and runs them one after the other: each row of a batch, a row without its padding, each
document where `position_ids` start again at zero. This is exact: nothing outside a stretch is visible from inside it under
the masks that transformers would have built, and whatever cannot be said in stretches is refused.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from megaspan.human import UserError

IGNORED = -100


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
