"""Sizes and errors: what is typed, what is read, what is printed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaspan.human import (
    UserError,
    UserErrors,
    fitted,
    format_bytes,
    format_seconds,
    format_tokens,
    missing_extra,
    nearest,
    parse_bytes,
    parse_tokens,
)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("131072", 131072), ("131_072", 131072), ("131,072", 131072), ("128k", 131072), ("128K", 131072), ("1M", 1_048_576),
     ("1.5M", 1_572_864), (" 8k ", 8192), ("8 k", 8192), (7, 7)],
)  # fmt: skip
def test_tokens_are_read_as_people_type_them(text, tokens):
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "k", "1.3", "12q", "-5", "1e6", "1GiB", True, None, [1], "0x10", "9" * 400])
def test_what_is_no_number_of_tokens_is_refused(text):
    with pytest.raises(UserError, match=r"128k"):
        parse_tokens(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * 2**30),
        ("80GB", 80 * 10**9),
        ("512M", 512 * 2**20),
        ("1.5TiB", 3 * 2**39),
        ("64 kb", 64_000),
        ("119.6GiB", 128_419_522_150),
    ],
)
def test_bytes_know_binary_from_decimal(text, size):
    assert parse_bytes(text) == size


@given(st.integers(min_value=0, max_value=2**50))
def test_printed_tokens_are_read_back(tokens):
    assert parse_tokens(format_tokens(tokens)) == tokens


@given(st.integers(min_value=1, max_value=2**20), st.sampled_from([("k", 10), ("M", 20), ("G", 30)]))
def test_units_are_powers_of_two(count, unit):
    name, power = unit
    assert parse_tokens(f"{count}{name}") == parse_bytes(f"{count}{name}iB") == count << power


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (2**30 * 38, "38.0 GiB"),
        (2**41, "2.00 TiB"),
        (2**50, "1024.0 TiB"),
        (-(2**20), "-1.0 MiB"),
    ],
)
def test_bytes_are_printed_in_binary_units(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.351, "0.35 s"),
        (12.44, "12.4 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 05 min"),
        (59.99, "60.0 s"),
        (3599.7, "1 h 00 min"),
    ],
)
def test_seconds_are_printed_as_people_read_them(seconds, text):
    assert format_seconds(seconds) == text


def test_an_error_has_four_parts_in_one_line():
    error = UserError("cp_size cannot split this row.", got=3, allowed="1, 2, 4", do="Write cp_size: 4")
    assert str(error) == "cp_size cannot split this row; got 3; allowed: 1, 2, 4. Write cp_size: 4."
    assert str(error.at("run.yaml line 3")) == f"run.yaml line 3: {error}"
    assert str(UserError("x", do="Did you mean y?")) == "x. Did you mean y?"


def test_what_was_typed_is_quoted_and_what_was_found_is_not():
    assert str(UserError("x", got="max_length 8")) == "x; got 'max_length 8'."
    error = UserError("x", found="max_length 8", allowed="9")
    assert str(error) == "x; got max_length 8; allowed: 9."
    assert str(error.at("line 3")) == f"line 3: {error}"


def test_no_error_quotes_our_own_words():
    """`got 'max_length 2,048'` was in every message about the window: words that were put together belong in `found`."""
    quoted = []
    for path in sorted((Path(__file__).parents[1] / "src").rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "UserError":
                got = [end for keyword in call.keywords if keyword.arg == "got" for end in _ends(keyword.value)]
                made = any(isinstance(end, ast.JoinedStr) or isinstance(getattr(end, "value", None), str) for end in got)
                quoted += [f"{path.name}:{call.lineno}"] * (made or any("__name__" in ast.unparse(end) for end in got))
    assert not quoted


def _ends(value):
    """The expressions that a conditional value can turn out to be."""
    if isinstance(value, ast.IfExp):
        return [*_ends(value.body), *_ends(value.orelse)]
    return [end for part in value.values for end in _ends(part)] if isinstance(value, ast.BoolOp) else [value]


def test_several_errors_keep_their_sentences():
    errors = [UserError("one"), UserError("two", got="2")]
    together = UserErrors(errors)
    assert str(together) == "one.\ntwo; got '2'."
    assert together.errors == tuple(errors)


def test_the_nearest_name_is_found_whatever_the_dashes():
    names = ["learning_rate", "lora_r", "max_length"]
    assert nearest("learnig-rate", names) == "learning_rate"
    assert nearest("Max_Lenght", names) == "max_length"
    assert nearest("book-one.TXT", ["Book-One.txt", "zzz"]) == "Book-One.txt"
    assert nearest("zzz", names) is None


@pytest.mark.parametrize(
    ("module", "extra"), [("peft", "lora"), ("peft.tuners", "lora"), ("wandb", "track"), ("flash_attn.cute", "flash")]
)
def test_a_missing_extra_names_the_command(module, extra):
    assert f"pip install 'megaspan[{extra}]'" in str(missing_extra(module))


def test_every_extra_named_in_an_error_exists():
    import tomllib

    from megaspan.human import _EXTRAS

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert set(_EXTRAS.values()) <= set(project["project"]["optional-dependencies"])
    assert missing_extra("torch") is None


def test_lines_to_paste_get_no_full_stop():
    assert str(UserError("x", do="Paste one of these:\n  a: true")) == "x. Paste one of these:\n  a: true"


def test_long_lines_break_between_words_on_a_terminal_alone():
    text = "  one two three four\nwho types /a/path/that/is/longer/than/the/line, has it whole. "
    text += "Type megaspan export run out --merge."
    assert fitted(text, None) == text
    assert fitted(text, 400) == text
    assert fitted(text, 16).split("\n") == [
        "  one two three", "      four", "who types", "    /a/path/that/is/longer/than/the/line,", "    has it", "    whole.",
        "    Type megaspan export run out --merge.",
    ]  # fmt: skip


def test_an_error_says_what_to_do_in_the_words_of_whoever_shows_it():
    error = UserError("wrong", got=3, do="Write x: 1")
    error.spell(lambda words: words.replace(": ", "="))
    assert str(error) == "wrong; got 3. Write x=1."
    error.spell(lambda words: words)
    assert str(error) == "wrong; got 3. Write x: 1."
    assert str(UserErrors([error, error])).count("Write x: 1.") == 2
