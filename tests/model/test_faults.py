"""Faults of other systems that a forward in somebody's own loop could have (`docs/faults.md`): masks that hide, positions."""

from __future__ import annotations

import copy

import pytest
import torch

from megaspan.human import UserError
from megaspan.model import prepare
from tests.model.support import plan, settings, step
from tests.models import assert_same_gradients, batch, gradients, tiny

ROWS = ((7, 13), (11, 1, 8))  # two rows that are packed differently


def packed_batch() -> dict[str, torch.Tensor]:
    inputs = batch(20, rows=2)
    positions = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in ROWS])
    inputs["labels"][positions == 0] = -100
    return inputs | {"position_ids": positions}


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_rows_of_a_batch_that_are_packed_differently_are_their_documents(streamed: bool) -> None:
    """R26: five documents in two rows of a batch are five documents alone."""
    plain, inputs = tiny("gemma3"), packed_batch()
    model = prepare(copy.deepcopy(plain), settings(), plan(streamed=streamed))
    loss, got = step(model, **inputs)
    items, total = int((inputs["labels"] >= 0).sum()), 0.0
    for ids, labels, lengths in zip(inputs["input_ids"], inputs["labels"], ROWS, strict=True):
        for document, wanted in zip(ids.split(lengths), labels.split(lengths), strict=True):
            logits = plain(input_ids=document[None], use_cache=False).logits[0, :-1]
            part = torch.nn.functional.cross_entropy(logits, wanted[1:], reduction="sum") / items
            part.backward()
            total += float(part.detach())
    assert loss == pytest.approx(total, rel=1e-6)
    assert_same_gradients(got, gradients(plain))


def test_a_mask_of_ones_does_not_hide_packed_rows() -> None:
    """R26: with it transformers' own detection is off, and documents see each other; whoever wants that has to say so."""
    model, inputs = prepare(tiny("qwen3"), settings(), plan()), packed_batch()
    with pytest.raises(UserError, match="position_ids that start again come together with an attention_mask"):
        model(**inputs, attention_mask=torch.ones(2, 20, dtype=torch.int64))


@pytest.mark.parametrize("axes", [3, 4])
def test_positions_of_several_axes_are_refused(axes: int) -> None:
    """R33: [axes, rows, tokens], as models that see pictures have them."""
    model, positions = prepare(tiny("qwen3"), settings(), plan()), torch.arange(20).expand(axes, 2, 20)
    with pytest.raises(UserError, match=rf"position_ids of this shape cannot be used; got \({axes}, 2, 20\)"):
        model(**batch(20, rows=2), position_ids=positions)
