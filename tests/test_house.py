"""The rules of the house that a program can check (CONTRIBUTING.md)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in SOURCES]


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_a_file_is_short_and_says_what_it_is(path):
    text = path.read_text("utf-8")
    assert text.count("\n") <= 450
    assert ast.get_docstring(ast.parse(text)), "a module begins with what it is and why"


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_only_world_reads_the_environment(path):
    if "world" in path.parts:
        return
    tree = ast.parse(path.read_text("utf-8"))
    reads = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")]
    assert not reads, f"lines {reads}: ask megaspan.world instead"


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_nothing_warns(path):
    """A warning is an error with an override, or a line in the run header."""
    tree = ast.parse(path.read_text("utf-8"))
    warned = [
        node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node) == "warnings.warn"
    ]
    assert not warned


@pytest.mark.parametrize("path", SOURCES, ids=NAMES)
def test_no_text_file_is_in_the_encoding_of_the_machine(path):
    """A name that is no ASCII, in a path or a tokenizer, could not be saved where the locale is another than UTF-8."""
    calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
    before = {"read_text": 0, "write_text": 1}  # arguments before the encoding
    named = [(call, before.get(call.func.attr)) for call in calls if isinstance(call.func, ast.Attribute)]
    texts = [(call, first) for call, first in named if first is not None and len(call.args) <= first]
    assert not [call.lineno for call, _ in texts if not any(word.arg == "encoding" for word in call.keywords)]


def test_no_module_is_a_drawer():
    assert not [name for name in NAMES if re.search(r"(utils?|helpers?|common|misc)(\.py|/)", name)]


def test_the_make_targets_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in ("demo", "demo-yarn", "test", "test-all", "lint", "test-gpu", "bench"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert "make lint" in (ROOT / ".ci" / "run").read_text("utf-8")


def test_the_license_is_the_one_of_the_package():
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
