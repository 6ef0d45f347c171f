"""Cutting a long document changes no id: every common build of tokenizer against the single shot (R80)."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from megaspan.data.safecuts import SafeCuts
from tests.data.tokenizers_here import BUILDS, CORPUS, PAGE, UNPROVEN, build

LETTERS = "aAbsßtſÄé漢仮が👍1２² \n\r\t_,.'’-(\u0301\u00a0\u3000한ᄀ▁Ġ"
WORDS = [
    "the",
    " times",
    "  ",
    "\n\n",
    " \n",
    "'s",
    "'ll",
    "123",
    " 1859",
    "漢字",
    "。",
    "ещё",
    " слова",
    "🙂",
    "e\u0301",
    "…",
    "'S",
    "ſ",
]
texts = st.lists(st.one_of(st.sampled_from(WORDS), st.text(LETTERS, max_size=6)), max_size=40).map("".join)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def joined(tokenizer: Tokenizer, pieces: list[str]) -> list[int]:
    return [token for piece in pieces for token in ids(tokenizer, piece)]


class Untried(SafeCuts):
    """The proof alone, without the trial on the text."""

    def _try(self, text: str, position: int) -> bool:
        return True


@pytest.mark.parametrize("name", [*BUILDS, *UNPROVEN])
@settings(max_examples=120, deadline=None)
@given(text=texts, size=st.integers(1, 12))
@example(text=PAGE, size=4)
def test_the_proof_alone_never_changes_an_id(name: str, text: str, size: int) -> None:
    tokenizer = build(name)
    assert joined(tokenizer, list(Untried(tokenizer).pieces(text, size))) == ids(tokenizer, text)


@pytest.mark.parametrize("name", BUILDS)
def test_ordinary_text_is_cut_often(name: str) -> None:
    """The proof is not vacuous: prose and code are cut about every `size` characters, in every build."""
    text = PAGE.replace("\r", "") * 20
    pieces = list(SafeCuts(build(name)).pieces(text, 200))
    assert len(pieces) > len(text) / 400
    assert joined(build(name), pieces) == ids(build(name), text)


@pytest.mark.parametrize("name", UNPROVEN)
def test_what_cannot_be_proven_stays_whole(name: str) -> None:
    assert list(SafeCuts(build(name)).pieces(PAGE * 20, 100)) == [PAGE * 20]


@pytest.mark.parametrize("name", ["qwen", "deepseek", "o200k"])
def test_chinese_without_spaces_is_cut(name: str) -> None:
    text = "漢字と仮名、そして漢字。数は多い。" * 100
    pieces = list(SafeCuts(build(name)).pieces(text, 50))
    assert len(pieces) > 20
    assert joined(build(name), pieces) == ids(build(name), text)


@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(st.sampled_from(["<a>", " <b> ", "abc", " d", "  ", "\n", "ef gh", "<s", "s>", "x, y"]), max_size=30),
    size=st.integers(1, 8),
    flags=st.fixed_dictionaries({key: st.booleans() for key in ("lstrip", "rstrip", "single_word", "normalized")}),
    name=st.sampled_from(["gpt2", "llama2", "gemma", "wordpiece"]),
)
def test_added_tokens_are_never_cut_nor_their_spaces(parts: list[str], size: int, flags: dict[str, Any], name: str) -> None:
    tokenizer = Tokenizer.from_str(build(name).to_str())
    tokenizer.add_tokens([AddedToken(content, **flags) for content in ("<a>", "<b>", "<s s>", "bc d", "  ")])
    text = "".join(parts)
    assert joined(tokenizer, list(Untried(tokenizer).pieces(text, size))) == ids(tokenizer, text)


def test_a_wrong_proof_would_be_caught_by_the_trial() -> None:
    """Every kind of cut is tried once on the running library; one that fails is never made."""

    class Careless(SafeCuts):
        def _prove(self, left: str, right: str) -> bool:
            return True

    text = "aaaa aaaaaaaa bbbb " * 50
    pieces = list(Careless(build("gpt2")).pieces(text, 7))
    assert joined(build("gpt2"), pieces) == ids(build("gpt2"), text)


@pytest.mark.parametrize("name", ["gpt2", "llama2"])
def test_a_million_times_one_letter_inside_a_book(name: str) -> None:
    """R80: same ids as in one shot, and no time lost in the stretch where nothing can be cut."""
    tokenizer = build(name)
    book = " ".join(CORPUS) * 40
    text = book + "a" * 1_000_000 + book
    started = time.thread_time()
    pieces = list(SafeCuts(tokenizer).pieces(text, 20_000))
    seconds = time.thread_time() - started
    assert "".join(pieces).replace(" ", "") == text.replace(" ", "")
    assert len(pieces) > 8
    assert joined(tokenizer, pieces) == ids(tokenizer, text)
    assert seconds < 5
