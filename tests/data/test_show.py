"""The verb `megaspan data`: the ledger, and a row with its trained tokens marked."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megaspan.data import Row, data_command, show_row
from megaspan.human import UserError
from tests.data.given import Digits, config
from tests.data.tokenizers_here import PAGE, fast


def row(*documents: str, masked: tuple[int, ...] = (), padding: int = 0) -> Row:
    ids = np.array(Digits()("".join(documents))["input_ids"] + [2] * padding)
    labels = ids.copy()
    lengths = tuple(map(len, documents))
    labels[[0, *np.cumsum(lengths)[:-1], *masked]] = -100
    labels[len(labels) - padding :] = -100
    return Row(ids, labels, lengths, padding)


def test_a_short_row_is_shown_whole() -> None:
    shown = show_row(row("abc$", "def$", masked=(5, 6), padding=3), Digits(), "row 7")
    assert shown.splitlines() == [
        "row 7: 11 tokens, 4 trained, 2 documents; ⟦…⟧ is not trained",
        "─ document 1 of 2, 4 tokens here",
        "⟦a⟧bc$",
        "─ document 2 of 2, 4 tokens here",
        "⟦def⟧$",
        "─ padding, 3 tokens",
        "⟦###⟧",
    ]


def test_a_long_row_shows_its_ends_and_borders() -> None:
    shown = show_row(row("a" * 500, "b" * 400, masked=(200,)), Digits())
    assert shown.splitlines()[2:] == [
        "⟦a⟧" + "a" * 47,
        "… 436 tokens, 435 trained …",
        "a" * 16,
        "─ document 2 of 2, 400 tokens here",
        "⟦b⟧" + "b" * 15,
        "… 336 tokens, 336 trained …",
        "b" * 48,
    ]


def test_hundreds_of_documents_stay_short() -> None:
    assert len(show_row(row(*["a" * 100] * 300), Digits()).splitlines()) < 25


def test_without_a_tokenizer_the_ids_are_shown() -> None:
    assert "⟦97 ⟧98" in show_row(row("ab"), None)


def test_a_letter_of_several_tokens_is_whole() -> None:
    tokenizer = fast()
    ids = np.array(tokenizer("🙂🙃")["input_ids"])
    assert "🙃" in show_row(Row(ids, ids.copy(), (len(ids),)), tokenizer)


def test_the_command_loads_the_tokenizer_and_gives_json(tmp_path: Path) -> None:
    fast().save_pretrained(tmp_path / "model")
    (tmp_path / "book.txt").write_text(PAGE * 30)
    settings = config(model_name_or_path=str(tmp_path / "model"), dataset_name=str(tmp_path / "book.txt"), max_length=100)
    said: list[str] = []
    result = data_command(settings, 1, cache_folder=str(tmp_path / "c"), report=said.append)
    assert json.loads(json.dumps(result)) == result
    assert result["rows"] == -(-(len(fast()(PAGE * 30)["input_ids"]) + 1) // 100)
    assert result["ledger"]["tokens_in"] == len(fast()(PAGE * 30)["input_ids"])
    assert (result["row"]["index"], result["row"]["tokens"], result["row"]["trained"]) == (1, 100, 99)
    assert result["row"]["document_lengths"] == [100]
    assert 0 < result["row"]["unigram_entropy"] < 7
    assert said[-1] == result["row"]["text"]
    assert any(line.startswith("token ledger, train") for line in said)
    with pytest.raises(UserError, match=r"--show: no such row; got 999; allowed: 0 to \d+"):
        data_command(settings, 999, cache_folder=str(tmp_path / "c"), report=said.append)


def test_the_command_names_a_model_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "book.txt").write_text(PAGE)
    with pytest.raises(UserError, match="the tokenizer of nobody/no-model cannot be loaded"):
        data_command(config(model_name_or_path="nobody/no-model", dataset_name=str(tmp_path / "book.txt")))


def test_the_command_does_not_ask_the_hub_for_a_mistyped_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: pytest.fail("the hub was asked"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match=r"got 'modle'; .* Did you mean model"):
        data_command(config(model_name_or_path="modle", dataset_name="book.txt"))


def test_a_bare_shape_has_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "ids.jsonl").write_text(json.dumps({"input_ids": [5, 6, 7]}))
    settings = config(model_name_or_path=str(tmp_path / "model"), dataset_name=str(tmp_path / "ids.jsonl"))
    said: list[str] = []
    result = data_command(settings, 0, cache_folder=str(tmp_path / "c"), report=said.append)
    assert result["rows"] == 1
    assert "⟦5 ⟧6 7" in said[-1]
