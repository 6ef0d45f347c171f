"""The page of faults is complete, and each test that it names exists."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "faults.md").read_text("utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines() if re.match(r"\| R\d", line)]
# Faults of rows that ranks share, and of what goes with them: each is exact or refused, and none may be left out.
REQUIRED = [*range(1, 46), 57, *range(62, 67), *range(82, 86), *range(92, 96)]


@functools.cache
def functions_of(path: str) -> set[str]:
    """Names of the test functions of a file, which is read and not imported."""
    body = ast.parse((ROOT / path).read_text("utf-8")).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_fault_is_there_once():
    numbers = [row[0] for row in ROWS]
    assert len(set(numbers)) == len(numbers)
    assert not {f"R{number:02d}" for number in REQUIRED} - set(numbers)
    for number in REQUIRED:
        _, fault, here, _ = next(row for row in ROWS if row[0] == f"R{number:02d}")
        assert fault.endswith(".")
        assert re.match(r"exact\b|refused\b", here), here


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_tests_of_a_fault_exist(row):
    named = re.findall(r"`([^`]+)`", row[3])
    assert named
    assert row[3] == ", ".join(f"`{each}`" for each in named)
    gpu = [each.startswith("tests/gpu/") for each in named]
    assert not all(gpu), "what a GPU alone shows fails nobody's test"
    files = set()
    for path, name in (each.split("::") for each in named):
        assert name in functions_of(path), f"{path} has no test {name}"
        files.add(path)
    for words in re.findall(r'"([^"]+)"', row[2]):
        assert any(words in (ROOT / path).read_text("utf-8") for path in files), f"no test of {row[0]} asks for {words!r}"
