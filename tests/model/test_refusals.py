"""Who is refused is told what to do: a sentence that only says no sends a user to the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import megaspan
from megaspan.attention.seam import ANOTHER
from megaspan.human import UserError
from megaspan.model import prepare
from megaspan.model.source import find_source
from tests.model.support import plan, settings

PACKAGE = Path(megaspan.__file__).parent
FILES = [PACKAGE / f"model/{name}.py" for name in ("kinds", "load", "source", "taken", "trial", "limits")]
FILES += [path for path in (PACKAGE / "plan").glob("*.py") if path.name != "over_ranks.py"]
SAID = {"a row of one token has nothing to train: each token is predicted from those before it"}
"""Sentences whose legal values are all that can be said."""


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_every_refusal_of_a_model_or_a_plan_says_what_to_do(file: Path) -> None:
    text = file.read_text()
    silent = [
        f"line {node.lineno}"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "UserError"
        if "do" not in {keyword.arg for keyword in node.keywords}
        if not any(sentence in text.splitlines()[node.lineno - 2] for sentence in SAID)
    ]
    assert not silent


def test_attention_of_another_kind_names_families_that_are_taken() -> None:
    """Multi-head latent attention (DeepSeek V3) and OPT's have no seam for another kernel."""
    from transformers import AutoModelForCausalLM, OPTConfig

    sizes = {"vocab_size": 64, "hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(OPTConfig(**sizes, word_embed_proj_dim=32, max_position_embeddings=256))
    with pytest.raises(UserError) as refused:
        prepare(model, settings(), plan())
    assert str(refused.value).endswith(f"{ANOTHER}.")


def test_a_folder_that_is_not_there_names_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "qwen-tuned").mkdir()
    with pytest.raises(UserError, match=r"qwen-tuned\?$"):
        find_source(settings(model_name_or_path=str(tmp_path / "qwen-tunned")))
