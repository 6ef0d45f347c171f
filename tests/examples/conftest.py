"""What the examples' tests share: the toy model with its books, and the run of one process, each made once."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
from pathlib import Path
from typing import NamedTuple

import pytest

from megaspan import cli

EXAMPLES = Path(__file__).parents[2] / "examples"
GUIDE = EXAMPLES / "sft_qwen3_8b_1m_context"


class Toy(NamedTuple):
    """A working folder with the toy model, its books, and what `megaspan train toy.yaml --json` said and left there."""

    folder: Path
    said: str
    told: str
    entries: list[dict]


@pytest.fixture(scope="package")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """As a reader of the page does it, in this process: a process of its own imports for as long as it trains."""
    folder = tmp_path_factory.mktemp("toy")
    spec = importlib.util.spec_from_file_location("toy_model", GUIDE / "toy_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(folder / "build/toy")
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert cli.main(["train", str(GUIDE / "toy.yaml"), "--json", "--use_cpu", "true"]) == 0, err.getvalue()
    return Toy(folder, out.getvalue(), err.getvalue(), entries(folder / "build/toy/run/metrics.jsonl"))


def entries(metrics: Path) -> list[dict]:
    """What a run logged."""
    return [json.loads(line) for line in metrics.read_text().splitlines()]
