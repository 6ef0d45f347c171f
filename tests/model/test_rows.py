"""Batches cut into stretches, against brute-force masks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megaspan.human import UserError
from megaspan.model.rows import Piece, check_covered, cut, shift


def visible(pieces: tuple[Piece, ...], rows: int, length: int) -> torch.Tensor:
    """[rows, length, length]: which query sees which key when each piece is a causal row of its own."""
    sees = torch.zeros(rows, length, length, dtype=torch.bool)
    for piece in pieces:
        span = slice(piece.start, piece.stop)
        sees[piece.row, span, span] = torch.ones(piece.stop - piece.start, piece.stop - piece.start, dtype=torch.bool).tril()
    return sees


@st.composite
def packed(draw: st.DrawFn) -> torch.Tensor:
    rows, length = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    starts = draw(st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=rows, max_size=rows))
    first = draw(st.integers(0, 3))
    positions = torch.zeros(rows, length, dtype=torch.int64)
    for row, flags in enumerate(starts):
        positions[row, 0] = first
        for place in range(1, length):
            positions[row, place] = 0 if flags[place] else positions[row, place - 1] + 1
    return positions


@given(packed())
def test_documents_are_those_of_transformers(positions: torch.Tensor) -> None:
    from transformers.masking_utils import find_packed_sequence_indices

    rows, length = positions.shape
    numbers = find_packed_sequence_indices(positions)
    numbers = torch.zeros_like(positions) if numbers is None else numbers
    wanted = (numbers[:, :, None] == numbers[:, None, :]) & torch.ones(length, length, dtype=torch.bool).tril()
    assert torch.equal(visible(cut(rows, length, position_ids=positions), rows, length), wanted)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=4))
def test_padding_on_either_side_is_cut_away(spans: list[tuple[int, int, int]]) -> None:
    length = max(1, max(sum(span) for span in spans))
    mask = torch.zeros(len(spans), length, dtype=torch.int64)
    for row, (left, tokens, _) in enumerate(spans):
        mask[row, left : left + tokens] = 1
    pieces = cut(len(spans), length, attention_mask=mask)
    seen = visible(pieces, len(spans), length)
    assert torch.equal(seen.any(2), mask.bool())
    assert torch.equal(seen, mask.bool()[:, :, None] & mask.bool()[:, None, :] & torch.ones(length, length).tril().bool())
    assert [piece.row for piece in pieces] == [row for row, span in enumerate(spans) if span[1]]


def test_one_set_of_positions_serves_all_rows() -> None:
    assert cut(2, 4, position_ids=torch.tensor([[0, 1, 0, 1]])) == (
        Piece(0, 0, 2), Piece(0, 2, 4), Piece(1, 0, 2), Piece(1, 2, 4),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"attention_mask": torch.tensor([[1, 0, 1, 1]])}, "holes"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "shape"),
        ({"attention_mask": torch.ones(1, 5)}, "shape"),
        ({"position_ids": torch.tensor([[0, 1, 5, 6]])}, "jump to 5 at token 2"),
        ({"position_ids": torch.tensor([[0, 2, 4, 6]])}, "jump to 2"),
        ({"position_ids": torch.arange(5)[None]}, "shape"),
        ({"position_ids": torch.arange(4)}, "shape"),
        ({"attention_mask": torch.ones(1, 4), "position_ids": torch.tensor([[0, 1, 0, 1]])}, "attention_mask"),
    ],
)
def test_what_is_no_stretch_is_refused(settings: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(UserError, match=words):
        cut(1, 4, **settings)


def test_positions_of_padding_do_not_matter() -> None:
    mask, positions = torch.tensor([[0, 0, 1, 1, 1]]), torch.tensor([[1, 1, 0, 1, 2]])
    assert cut(1, 5, attention_mask=mask, position_ids=positions) == (Piece(0, 2, 5),)


def test_a_label_that_padding_would_predict_is_refused() -> None:
    labels = torch.tensor([[-100, -100, 7, 8, 9]])
    pieces = cut(1, 5, attention_mask=torch.tensor([[0, 0, 1, 1, 1]]))
    with pytest.raises(UserError, match="row 0 trains token 2"):
        check_covered(shift(labels), pieces)
    labels[0, 2] = -100
    check_covered(shift(labels), pieces)


def test_shift() -> None:
    assert shift(torch.tensor([[1, 2, -100], [4, 5, 6]])).tolist() == [[2, -100, -100], [5, 6, -100]]
