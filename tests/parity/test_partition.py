"""P3, partition, and P2, perturbation, on one device, for every family.

The same rows cut differently into micro-batches give the same gradient; a changed token changes nothing that came before it.
"""

from __future__ import annotations

import pytest
import torch

from megaspan.model import prepare
from tests.model.support import plan, settings
from tests.models import FAMILIES, VOCAB, WINDOW, assert_same_gradients, batch, gradients, tiny
from tests.parity.test_parity import step

torch.set_num_threads(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_micro_batches_of_any_size_give_one_gradient(family: str) -> None:
    """R10: 8 rows with 0 to 22 trained tokens as 8x1, 4x2, 2x4 and 1x8, against the plain model with all eight at once.

    One row has no label at all (R08): it adds nothing to the sum and nothing to the count.
    """
    rows = [batch(23, seed=row, ignored=row / 7) for row in range(8)]
    whole = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    assert not (whole["labels"][7] != -100).any()
    want_loss, want = step(tiny(family), [whole])
    model = prepare(tiny(family), settings(), plan())
    for size in (8, 4, 2, 1):
        parts = [{name: tensor[first : first + size] for name, tensor in whole.items()} for first in range(0, 8, size)]
        loss, got = step(model, parts)
        assert loss == pytest.approx(want_loss, rel=1e-6)
        assert_same_gradients(got, want, 1e-4 if family in ("gpt_oss", "qwen3_moe") else 1e-5)


def test_a_window_without_any_label_leaves_zero() -> None:
    """R08: loss 0 and gradients of zero, not NaN, when nothing in the whole window trains."""
    model = prepare(tiny("gemma3"), settings(), plan())
    parts = [{name: tensor if name == "input_ids" else tensor * 0 - 100 for name, tensor in batch(19).items()}] * 2
    for part in parts:
        output = model(**part, num_items_in_batch=0)
        output.loss.backward()
        assert output.loss.item() == 0
    assert not any(gradient.any() for gradient in gradients(model).values())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_changed_token_changes_nothing_before_it(family: str) -> None:
    """P2 through the trained path: the gradient of one label's loss by the embeddings ends at its token, and it reaches as far
    back as the plain model's: to the first token, or in Mistral, all windows, no farther than its layers' windows together.
    """
    length, position = 40, 31
    reach = {}
    for kind in ("plain", "prepared"):
        model = tiny(family)
        if kind == "prepared":
            prepare(model, settings(), plan())
        generator = torch.Generator().manual_seed(0)
        embeds = torch.randn(1, length, 64, generator=generator, requires_grad=True)
        labels = torch.full((1, length), -100)
        labels[0, position + 1] = int(torch.randint(VOCAB, (1,), generator=generator))
        model(inputs_embeds=embeds, labels=labels).loss.backward()
        assert embeds.grad is not None
        reach[kind] = embeds.grad[0].abs().amax(1).nonzero().squeeze(1).tolist()
    assert reach["prepared"] == reach["plain"]
    assert reach["prepared"][-1] == position
    farthest = position - 2 * (WINDOW - 1) if family == "mistral" else 0
    assert reach["prepared"][0] == farthest
