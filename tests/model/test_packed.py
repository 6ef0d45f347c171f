"""Packed rows on one device: documents and padded rows side by side in one forward, exact as if each came alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from megaspan.attention.context import RowContext, RowRanks
from megaspan.attention.layout import lay_out
from megaspan.human import UserError
from megaspan.memory.aside import Aside
from megaspan.model import levers, prepare
from megaspan.model import prepared as prepared_module
from tests.model.support import plan, settings, step
from tests.models import FAMILIES, assert_same_gradients, batch, gradients, tiny

DOCUMENTS = (13, 1, 40, 9, 4)
LENGTH = sum(DOCUMENTS)


def packed(seed: int = 0) -> dict[str, Tensor]:
    """A row of documents, with positions that start again; no label at the first token of each."""
    inputs = batch(LENGTH, seed=seed)
    starts = torch.tensor([0, *DOCUMENTS[:-1]]).cumsum(0)
    inputs["labels"][0, starts] = -100
    return inputs | {"position_ids": torch.cat([torch.arange(length) for length in DOCUMENTS])[None]}


def alone(model: Any, inputs: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """The mean loss and its gradients, document by document, by transformers itself."""
    model.zero_grad()
    items, total = int((inputs["labels"][:, 1:] >= 0).sum()), 0.0
    for ids, labels in zip(*(inputs[name].split(DOCUMENTS, dim=1) for name in ("input_ids", "labels")), strict=True):
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits.float(), labels[0, 1:], reduction="sum") / items
        loss.backward()
        total += float(loss.detach())
    return total, gradients(model)


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "checkpointed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_is_its_documents_one_by_one(family: str, streamed: bool) -> None:
    plain, inputs = tiny(family), packed()
    model = prepare(copy.deepcopy(plain), settings(), plan(streamed=streamed, heads=1))
    loss, got = step(model, **inputs)
    want_loss, want = alone(plain, inputs)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert_same_gradients(got, want, 1e-4 if family in ("gpt_oss", "qwen3_moe") else 1e-5)
    placed = levers(model)
    assert placed is not None
    if streamed:
        stats = placed.checkpointing.stats()
        assert (stats.attention_forwards, stats.attention_backwards, stats.passed_on) == (2, 2, 0)


@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_documents_together_and_one_after_the_other_agree(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts against each other in fp64; a family that would not tell its layers runs its documents one after the other."""
    plain, inputs = tiny(family, dtype=torch.float64), packed()
    together = prepare(copy.deepcopy(plain), settings(), plan())
    monkeypatch.setattr(prepared_module, "passes_arguments_on", lambda model: False)
    apart = prepare(plain, settings(), plan())
    loss, got = step(together, **inputs)
    want_loss, want = step(apart, **inputs)
    assert loss == pytest.approx(want_loss, rel=1e-10)
    assert_same_gradients(got, want, 1e-10)
    assert [levers(each).checkpointing.stats().attention_forwards for each in (together, apart)] == [2, 2 * len(DOCUMENTS)]


def test_head_groups_of_several_documents_are_not_projected_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go the way of those that ranks share, whose exchange would read what is not there yet; the plan says so too."""
    plain, inputs, entered = tiny("qwen3", num_attention_heads=8, num_key_value_heads=4), packed(), list[int]()
    enter = Aside.__enter__
    monkeypatch.setattr(Aside, "__enter__", lambda self: (entered.append(1), enter(self))[1])
    dials = plan(heads=1, keep=0)
    dials.stream_back = dials.project_ahead = True
    model = prepare(copy.deepcopy(plain), settings(), dials)
    _, got = step(model, **inputs)
    assert not entered
    assert_same_gradients(got, alone(plain, inputs)[1])
    step(model, **batch(LENGTH))
    assert entered, "of one document they are"


def test_a_given_row_is_the_one_that_positions_say() -> None:
    """The loss of a window's row: a sum over all its labels, shifted before, divided by those of the window."""
    model, inputs = prepare(tiny("qwen3"), settings(), plan()), packed()
    loss, got = step(model, **inputs, num_items_in_batch=100)
    row = RowContext(lay_out(DOCUMENTS, 1), RowRanks(), "cpu")
    shifted = torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
    given = {"input_ids": inputs["input_ids"], "shift_labels": shifted, "megaspan_row": row}
    assert step(model, **given, num_items_in_batch=100)[0] == loss
    with torch.no_grad():
        assert float(model(**given, num_items_in_batch=100).loss) == pytest.approx(loss, rel=1e-6)
    no_label = given | {"shift_labels": torch.full_like(shifted, -100)}
    none, zeros = step(model, **no_label, num_items_in_batch=100)
    assert none == 0
    assert set(zeros) == set(got)
    assert not any(gradient.any() for gradient in zeros.values())


def runs(model: Any, **inputs: Any) -> int:
    """How often the backbone runs in one call."""
    count = 0

    def seen(*_: Any) -> None:
        nonlocal count
        count += 1

    hook = model.get_decoder().register_forward_hook(seen)
    model(**inputs)
    hook.remove()
    return count


def test_rows_of_a_batch_are_joined_up_to_the_length_that_memory_was_planned_for() -> None:
    inputs = batch(20, rows=5)
    mask = torch.ones(5, 20, dtype=torch.int64)
    mask[2, 12:] = mask[3, 2:] = 0
    inputs["labels"][mask == 0] = -100
    for longest, many in ((256, 1), (50, 2), (20, 4), (8, 5)):  # 20 + 20, 12 + 2 + 20; 20, 20, 12 + 2, 20; each alone
        model = prepare(tiny("gemma3"), settings(max_length=longest), plan())
        assert runs(model, **inputs, attention_mask=mask) == many
        got = step(model, **inputs, attention_mask=mask)
        want = step(tiny("gemma3"), **inputs, attention_mask=mask)
        assert got[0] == pytest.approx(want[0], rel=1e-6)
        assert_same_gradients(got[1], want[1])


def test_a_layer_that_is_not_told_of_the_documents_is_found() -> None:
    """Attention of such a layer would look across documents in silence (R03)."""
    model = prepare(tiny("qwen3"), settings(), plan(checkpoint=False))
    attention = model.model.layers[1].self_attn
    own = attention.forward
    attention.forward = lambda *args, megaspan_row=None, position_ids=None, **kwargs: own(*args, **kwargs)
    with pytest.raises(UserError, match="1 of 2 attention layers"):
        model(**packed())


def test_what_does_not_go_with_a_row_is_refused() -> None:
    model = prepare(tiny("qwen3"), settings(), plan())
    row = RowContext(lay_out(DOCUMENTS, 1), RowRanks(), "cpu")
    given = {"input_ids": batch(LENGTH)["input_ids"], "megaspan_row": row}
    labels = torch.full((1, LENGTH), 3)
    for more, words in (
        ({}, "labels only"),
        ({"shift_labels": labels, "attention_mask": torch.ones(1, LENGTH)}, "what is padding"),
        ({"shift_labels": labels[:, 1:], "input_ids": given["input_ids"][:, 1:]}, "this rank's part"),
    ):
        with pytest.raises(UserError, match=words):
            model(**(given | more))
    short = prepare(tiny("qwen3", max_position_embeddings=32), settings(max_length=32), plan())
    with pytest.raises(UserError, match="40 tokens is longer"):
        short(**given, shift_labels=labels)
