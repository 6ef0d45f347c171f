import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from megaspan.plan.facts import ModelFacts, model_facts
from megaspan.report import flops_formula, model_flops
from megaspan.report.flops import attended_pairs, linear_weights
from tests.models import batch, tiny


@given(tokens=st.integers(0, 40), span=st.one_of(st.none(), st.integers(1, 50)))
def test_pairs_are_those_of_the_mask(tokens, span):
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if span is not None:
        mask &= ~torch.ones(tokens, tokens, dtype=torch.bool).tril(-span)
    assert attended_pairs(tokens, span) == int(mask.sum())


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_the_linear_part_is_what_torch_counts_and_attention_half_of_a_full_square(family):
    """The plain model runs full squares: torch's counter sees every pair, ours the visible ones."""
    tokens = 24
    model = tiny(family)
    facts = ModelFacts.from_config(model.config.to_dict())
    inputs = batch(tokens)
    with FlopCounterMode(display=False) as counter:
        model(**inputs).loss.backward()
    counts = {str(operation): count for operation, count in counter.get_flop_counts()["Global"].items()}
    linear = counts.get("aten.mm", 0) + counts.get("aten.addmm", 0)
    assert linear == 6 * linear_weights(facts) * tokens
    square = 12 * facts.layers * facts.heads * facts.head_dim * tokens**2
    rotary = facts.head_dim * tokens  # transformers 5.17 makes the phases by a product
    assert counts["aten.bmm"] in (square, square + rotary)
    pairs = sum(attended_pairs(tokens, facts.span(layer)) for layer in range(facts.layers))
    assert model_flops(facts, tokens) == linear + 12 * facts.heads * facts.head_dim * pairs


def test_a_hand_count_of_the_tiny_llama():
    """2 layers, hidden 64, 4 query and 2 KV heads of 16, MLP 96, vocabulary 128, 10 tokens: 55 pairs."""
    facts = ModelFacts.from_config(tiny("llama").config.to_dict())
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96
    linear = 2 * layer + 64 * 128
    attention = 12 * 2 * 4 * 16 * 55
    assert model_flops(facts, 10) == 6 * linear * 10 + attention
    assert model_flops(facts, 10, frozen=True) == 4 * linear * 10 + attention
    assert model_flops(facts, [10, 10]) == 2 * model_flops(facts, 10)


def test_the_reference_run():
    """1.0e18 model FLOP for a row of 1,048,576 tokens of Qwen3-8B, 95 % of them attention: 34 % of 8 H100 at 380 s."""
    facts = model_facts("qwen3-8b")
    total = model_flops(facts, 1_048_576)
    assert total == pytest.approx(1.02e18, rel=0.01)
    assert 1 - 6 * linear_weights(facts) * 1_048_576 / total == pytest.approx(0.95, abs=0.01)
    assert total / 380 / (8 * 989e12) == pytest.approx(0.34, abs=0.01)


def test_the_formula_has_the_numbers_of_the_model():
    text = flops_formula(model_facts("qwen3-8b"))
    assert "36 layers x 12 x 32 heads x 128 x T(T+1)/2" in text
    assert f"6 x {linear_weights(model_facts('qwen3-8b')):,} weights x T" in text
    windowed = flops_formula(ModelFacts.from_config(tiny("gemma3").config.to_dict()), frozen=True)
    assert windowed.startswith("4 x ")
    assert "1 layers x 12 x 4 heads x 16 x pairs within 8" in windowed
