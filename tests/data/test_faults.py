"""Faults of other systems that rows could have (`docs/faults.md`): padding sides, caches of a layout, answers that move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.data.given import Digits, prepare, texts_of, trained_of


class LeftPadding(Digits):
    padding_side = "left"


@pytest.mark.parametrize("strategy", ["wrapped", "bfd"])
def test_the_padding_side_of_a_tokenizer_changes_no_token(tmp_path: Path, strategy: str) -> None:
    """R21: padding that was asked for is behind the row, untrained, and in no document."""
    options: dict[str, Any] = {"pad_to_multiple_of": 4, "packing_strategy": strategy}
    left = prepare(tmp_path / "left", ["abcdefg", "hijkl", "mn"], LeftPadding(), **options)
    right = prepare(tmp_path / "right", ["abcdefg", "hijkl", "mn"], **options)
    for one, other in zip(left, right, strict=True):
        assert one.input_ids.tolist() == other.input_ids.tolist()
        assert one.labels.tolist() == other.labels.tolist()
        assert (one.padding, one.attention_lengths) == (other.padding, other.attention_lengths)
        kept = len(one.input_ids) - one.padding
        assert (one.input_ids[kept:] == Digits.pad_token_id).all()
        assert (one.labels[kept:] == -100).all()
        assert sum(one.attention_lengths) == kept
    assert sum(row.padding for row in left) > 0


LAYOUTS: list[dict[str, int]] = [{}, {"cp_size": 4}, {"sp_size": 2, "cp_size": 2}, {"dp_shard_size": 8}]


@pytest.mark.parametrize("packing", [{"packing_strategy": "bfd"}, {"packing": False}, {}], ids=str)
def test_rows_do_not_know_how_they_will_be_shared(tmp_path: Path, packing: dict[str, Any]) -> None:
    """R23: rows prepared for one layout are those of every other, and are found again; R95: limits are of the whole row."""
    said: list[str] = []
    data = ["abcdefghijk", "lm", "nop", "q"]
    found = [prepare(tmp_path, data, said=said, max_length=8, **packing, **sizes) for sizes in LAYOUTS]
    assert [rows.reused for rows in found] == [False, True, True, True]
    assert len({rows.fingerprint for rows in found}) == 1
    alone = [prepare(tmp_path / str(number), data, max_length=8, **packing, **sizes) for number, sizes in enumerate(LAYOUTS)]
    assert [texts_of(rows) for rows in (*found, *alone)] == [texts_of(found[0])] * 2 * len(LAYOUTS)
    assert max(len(row.input_ids) for row in found[0]) == 8
    assert sum("train rows prepared" in line for line in said) == 1
    assert sum("train rows reused" in line for line in said) == 3


@pytest.mark.parametrize("packing", [{"packing_strategy": "bfd"}, {"packing": False}, {}], ids=str)
def test_answers_of_several_samples_stay_the_answers(tmp_path: Path, packing: dict[str, Any]) -> None:
    """R29: three samples with prompts and answers of unequal lengths; what is trained is the answers, letter for letter."""
    samples = [("question", "ab"), ("q", "cdefg"), ("ques", "h")]
    data = [
        {"input_ids": [ord(letter) for letter in prompt + answer], "completion_mask": [0] * len(prompt) + [1] * len(answer)}
        for prompt, answer in samples
    ]
    rows = prepare(tmp_path, data, max_length=32, **packing)
    trained = "".join(trained_of(rows))
    assert trained.replace(".", " ").split() == [answer for _, answer in samples]
    assert len(trained) == sum(len(prompt + answer) for prompt, answer in samples)
