"""Families that the planner does not know: a plan and a training run hear the same, before a row is read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from megaspan import cli
from megaspan.config import SFTConfig
from megaspan.human import UserError
from megaspan.model import trial
from megaspan.model.taken import check_files

SIZES: dict[str, Any] = {
    "vocab_size": 104, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 256,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "deepseek_v32": LATENT | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "gptj": {"rotary_dim": 8},
    "opt": {"word_embed_proj_dim": 64, "attention_dropout": 0.0},
    "stablelm": {"pad_token_id": 500, "num_key_value_heads": 4},
}  # fmt: skip
REFUSED = {
    # Latent attention over the keys that an indexer chooses.
    "deepseek_v32": "has layers of type .*, which are not supported yet",
    "persimmon": "no attention layers that AttentionInterface reaches",
    "opt": "no attention layers that AttentionInterface reaches",
    # Its toy does not run: rotary_dim is no toy's. transformers 5.17 has its attention in its own code.
    "gptj": "no attention layers that AttentionInterface reaches|computes attention in its own code",
    # 5.17 takes its mask apart before anybody sees that it is another.
    "doge": "DogeForCausalLM (makes a mask of its own for its attention|trains in plain transformers, and not)",
    "stablelm": "cannot be loaded: Padding_idx must be within num_embeddings",
}


def wish(tmp_path: Path, family: str, **options: Any) -> SFTConfig:
    entries = AutoConfig.for_model(family, **(SIZES | MORE.get(family, {}))).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(entries))
    return SFTConfig(model_name_or_path=str(tmp_path), max_length=64, use_cpu=True, **options)


@pytest.mark.parametrize("family", REFUSED)
def test_a_plan_refuses_what_training_would_find_in_the_live_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    with pytest.raises(UserError) as refused:  # what training calls before it reads a row
        check_files(wish(tmp_path, family))
    assert re.search(REFUSED[family], str(refused.value))
    assert cli.main(["plan", f"--model_name_or_path={tmp_path}", "--max_length=64", "--use_cpu"]) == 2
    assert str(refused.value) in capsys.readouterr().err


def test_a_family_that_trains_is_taken_and_draws_nothing_of_the_run(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    check_files(wish(tmp_path, "gpt_neox", cp_size=2))
    assert torch.equal(torch.get_rng_state(), before)


def test_latent_attention_is_taken_on_one_rank_and_on_several(tmp_path: Path) -> None:
    for options in ({}, {"sp_size": 2}, {"cp_size": 2}, {"packing_strategy": "bfd"}):
        check_files(wish(tmp_path, "deepseek_v3", **options))
    assert cli.main(["plan", f"--model_name_or_path={tmp_path}", "--max_length=64", "--use_cpu"]) == 0


def test_rows_on_several_ranks_are_tried_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(trial, "refuse_shared_rows", asked.append)
    check_files(wish(tmp_path, "gpt_neox"))
    assert not asked
    for options in ({"cp_size": 2}, {"packing_strategy": "bfd"}):
        check_files(wish(tmp_path, "gpt_neox", **options))
    assert len(asked) == 2


def test_a_family_that_fails_under_the_levers_alone_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("sizes of tensors must match")

    monkeypatch.setattr(trial, "prepare", broken)
    with pytest.raises(UserError, match=r"GPTNeoXForCausalLM trains in plain transformers, and not .*: RuntimeError: sizes of"):
        check_files(wish(tmp_path, "gpt_neox"))
