"""The proof about regular expressions against brute force: random patterns, random texts, every cut."""

from __future__ import annotations

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.data.regexpaths import read_pattern, settled
from tests.data.tokenizers_here import CL100K, DEEPSEEK, LLAMA3, O200K

ATOMS = ["a", "b", r"\s", r"\S", "[ab]", "[^a]", r"\w", " ", r"\p{L}", r"\n", ".", "(?i:A)", "(?i:ab)"]
LOOKS = [r"(?!\S)", "(?!a)", "(?=b)", r"(?=\s)"]


def _combine(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    quantified = st.tuples(inner, st.sampled_from(["+", "*", "?", "{1,2}", "{2}", "+?", "?+", "++"])).map(
        lambda t: f"(?:{t[0]}){t[1]}"
    )
    sequence = st.lists(inner, min_size=2, max_size=3).map("".join)
    either = st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})")
    return st.one_of(quantified, sequence, either)


patterns = st.recursive(st.sampled_from(ATOMS + LOOKS), _combine, max_leaves=8)


def pieces(pattern: regex.Pattern, text: str) -> list[str]:
    """Matches and the stretches between them, as a splitter gives them."""
    found, last = [], 0
    for match in pattern.finditer(text):
        found += [text[last : match.start()], match[0]]
        last = match.end()
    return [piece for piece in [*found, text[last:]] if piece]


@settings(max_examples=600, deadline=None)
@given(
    source=st.lists(patterns, min_size=1, max_size=3).map("|".join),
    left=st.text("abc \n", min_size=1),
    right=st.text("abc \n", min_size=1),
)
def test_separated_characters_are_split_alike(source: str, left: str, right: str) -> None:
    pattern = read_pattern(source)
    if pattern is None or not pattern.separates(left[-1], right[0]):
        return
    compiled = regex.compile(source)
    whole, parts = pieces(compiled, left + right), pieces(compiled, left) + pieces(compiled, right)
    if pattern.always_takes(left[-1]) or pattern.always_takes(right[0]):
        assert whole == parts
    else:  # the two may lie in one stretch without a match
        before, after = len(pieces(compiled, left)), pieces(compiled, right)
        assert whole in (parts, [*parts[: before - 1], parts[before - 1] + after[0], *parts[before + 1 :]])


@pytest.mark.parametrize("source", [LLAMA3, O200K, CL100K, DEEPSEEK])
def test_the_patterns_of_common_models_are_read(source: str) -> None:
    pattern = read_pattern(source)
    assert pattern is not None
    assert pattern.separates("t", " ")
    assert pattern.separates("字", "。")
    assert pattern.always_takes(" ")
    assert not pattern.separates(" ", "t")
    assert not pattern.separates("t", "h")
    assert not pattern.separates(",", "\n")


@pytest.mark.parametrize(
    "source",
    [
        "(?<=a)b|.",
        r"\bword|.",
        "^a|.",
        "a$|.",
        r"(a)\1|.",
        "(?=ab)a|.",
        "(?!a|b).",
        "[a[b]]",
        "[a&&b]",
        "a*",
        "(?i)a",
        "(?i:ß)",
        "(",
        "[a",
        "a)",
        r"\X",
    ],
)
def test_what_could_look_further_is_not_read(source: str) -> None:
    assert read_pattern(source) is None


def test_characters_that_change_with_their_neighbours_are_not_settled() -> None:
    assert all(map(settled, "aZ0 \n\t,.é漢한Жя。_=$"))
    assert not any(map(settled, "\u0301\u1100\u1161ßſ\u00a0\u0085\x1c\u200d🙂²"))


def test_what_only_seems_to_match_alone() -> None:
    """A possessive part gives nothing back, and a counted one needs its count."""
    for source, character in (("a?+a|b", "a"), ("(?>a?)a|b", "a"), ("a{2}|b", "a"), ("a(?!b)|b", "a"), ("ab|b", "a")):
        pattern = read_pattern(source)
        assert pattern is not None
        assert not pattern.always_takes(character)
        assert pattern.always_takes("b")


def test_paths_through_parts_that_may_be_empty() -> None:
    for source in ("ab?c", "a(?:b|d?)c", "(?:ab?)+c", "ab{0,2}c", "(?:b?a)*c"):
        pattern = read_pattern(source)
        assert pattern is not None
        assert not pattern.separates("a", "c")
        assert pattern.separates("c", "a")
