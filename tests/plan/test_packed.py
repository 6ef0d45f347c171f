"""Seconds of packed rows: steps that were measured, and rates of documents."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from benchmarks.case import cut

from megaspan.attention.layout import lay_out
from megaspan.attention.planned import packed_row
from megaspan.config import SFTConfig
from megaspan.plan import ModelFacts, RankSizes, choose, model_facts
from megaspan.plan.facts import Machine
from megaspan.plan.packed import LONG, PackedRow
from megaspan.plan.parts import Settings
from megaspan.plan.seconds import step_seconds

FOUR = model_facts("qwen3-4b")
H200 = Machine("NVIDIA H200", 139 * 2**30, 256 * 2**30, 32)
STEP = Settings(131_072, True, 2, True, True, True, True, 2048, streamed=True)


def packed(lengths: list[int], cp: int = 1, facts: ModelFacts = FOUR) -> PackedRow:
    return packed_row(lay_out(lengths, cp), facts)


def attention(s: Settings, kernel: str = "flash-attn-4") -> float:
    return sum(part.seconds for part in step_seconds(FOUR, s, "NVIDIA H200", kernel).parts[:2])


@pytest.mark.parametrize(("cp", "groups", "measured"), [(1, None, 8.85), (2, 4, 4.96)])
def test_packed_steps_take_what_was_measured(cp: int, groups: int | None, measured: float) -> None:
    """docs/log.md, commit f791c84: 64 documents, fp32 masters, FlashAttention 4; the benchmark's own lengths."""
    s = replace(STEP, ranks=RankSizes(cp=cp), kv_heads_per_call=groups, packed=packed(cut(131_072, 64), cp))
    assert step_seconds(FOUR, s, "NVIDIA H200", "flash-attn-4").total == pytest.approx(measured, rel=0.05)
    assert step_seconds(FOUR, replace(s, packed=None), "NVIDIA H200", "flash-attn-4").total > 3.5 * measured


@pytest.mark.parametrize(("kernel", "rates"), [("flash-attn-4", (214, 192)), ("FlashAttention 2", (144, 138))])
def test_rates_are_those_that_were_measured(kernel: str, rates: tuple[float, float]) -> None:
    s = replace(STEP, tokens=32_768, packed=packed([512] * 64))
    flops = 36 * 4 * FOUR.query_width * 64 * 512 * 513 / 2
    assert attention(s, kernel) == pytest.approx(flops / rates[0] / 1e12 + 2.5 * flops / rates[1] / 1e12, rel=5e-3)
    if kernel == "FlashAttention 2":
        assert attention(s, "cuDNN") == attention(s, kernel)  # which takes no documents
        assert "FlashAttention 2" in step_seconds(FOUR, s, "NVIDIA H200", "cuDNN").note


@pytest.mark.parametrize("length", [LONG, 131_072])
def test_one_long_document_takes_what_a_plain_row_does(length: int) -> None:
    s = replace(STEP, tokens=length)
    assert attention(replace(s, packed=packed([length]))) == pytest.approx(attention(s), rel=1e-3)


def test_shorter_documents_take_less_in_all_and_more_for_a_pair() -> None:
    found = [attention(replace(STEP, packed=packed([131_072 // count] * count))) for count in (1, 4, 64, 1024)]
    assert all(before > after for before, after in pairwise(found))
    assert found[3] > 2 * found[2] / 16


def test_the_fullest_rank_counts_in_each_kind_of_layer() -> None:
    sizes = {
        "model_type": "gemma3_text", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64,
        "head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    facts = ModelFacts.from_config(sizes)
    found = packed([1000, 400, 3], 1, facts)
    window = sum(sum(min(place + 1, 64) for place in range(n)) for n in (1000, 400, 3))
    full = sum(n * (n + 1) // 2 for n in (1000, 400, 3))
    assert dict(found.pairs) == {None: full, 64: window}
    assert [found.flops(facts, layer, 1) for layer in (0, 1)] == [4 * 256 * window, 4 * 256 * full]
    assert found.flops(facts, 0, 2) == 2 * 256 * window
    several = packed([1000, 400, 3], 2, facts)
    assert dict(several.pairs)[None] >= full / 2
    assert several.cut > 0
    assert found.cut == 0


def test_a_plan_says_how_many_documents_its_row_holds() -> None:
    args = SFTConfig(
        output_dir="run", model_name_or_path="qwen3-4b", max_length=131_072, allow_past_window=True,
        packing_strategy="bfd",
    )  # fmt: skip
    known = choose(args, FOUR, H200, packed=packed([2048] * 64))
    assert "its row 64 documents" in known.render()
    assert known.as_dict()["documents"] == 64
    assert known.seconds.total < 10
    assert any("holds 64 documents" in reason for reason in known.reasons)
    unknown = choose(args, FOUR, H200)
    assert "its row one document" in unknown.render()
    assert any("rows will hold several documents" in reason for reason in unknown.reasons)
    assert known.device_bytes == unknown.device_bytes
    plain = choose(args.replace(packing_strategy="wrapped"), FOUR, H200)
    assert not any("documents" in reason for reason in plain.reasons)
