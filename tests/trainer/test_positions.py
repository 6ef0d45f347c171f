"""Models whose positions are not what `max_position_embeddings` says: none by rotation, a learned table, YaRN beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megaspan import SFTConfig, cli
from megaspan.human import UserError
from megaspan.model import prepare
from tests.models import assert_same_gradients, gradients, save_model_folder, tiny_tokenizer
from tests.trainer.support import documents, trainer

DATA = documents([40, 40])
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}


def without_rotation(kind: str, place: Path, positions: int = 64) -> Path:
    """A folder of a family without rotary positions."""
    sizes = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    own: dict[str, dict[str, Any]] = {
        "gpt_bigcode": {"n_positions": positions, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
        "granitemoehybrid": {
            "layer_types": ["full_attention"] * 2, "position_embedding_type": None, "num_key_value_heads": 2,
            "intermediate_size": 96, "shared_intermediate_size": 72, "num_local_experts": 0, "num_experts_per_tok": 0,
            "mamba_n_heads": 2, "max_position_embeddings": positions,
        },
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **own[kind])).save_pretrained(place)
    tiny_tokenizer(place)
    return place


@pytest.mark.parametrize("kind", ["gpt_bigcode", "granitemoehybrid"])
def test_a_model_without_rotary_positions_trains_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    place = without_rotation(kind, tmp_path / "model")
    run = trainer(place, tmp_path / "run", DATA[:1], max_steps=1)
    run.train()
    plain = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    ids = torch.tensor([DATA[0]["input_ids"]])
    assert run.state.log_history[0]["loss"] == pytest.approx(plain(input_ids=ids, labels=ids).loss.item(), rel=1e-6)
    assert "no rotary table" in capsys.readouterr().err


def test_a_learned_table_is_not_run_past_whatever_is_wished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = without_rotation("gpt_bigcode", tmp_path / "model", positions=32)
    (tmp_path / "text.txt").write_text("In the beginning. " * 9)
    said = "has learned a table of 32 positions, which nothing extends; got max_length 40"
    for wish in (["--allow_past_window", "true"], ["--model_init_kwargs", "{rope_parameters: auto}"]):
        for verb in ("plan", "train"):
            words = ["--model_name_or_path", str(place), "--dataset_name", str(tmp_path / "text.txt"), "--max_length", "40"]
            assert cli.main([verb, *words, "--output_dir", str(tmp_path / "run"), *wish]) == 2
            shown = capsys.readouterr().err
            assert said in shown
            assert "token ledger" not in shown
    model = AutoModelForCausalLM.from_pretrained(place)
    with pytest.raises(UserError, match="has learned a table of 32 positions"):
        trainer(model, tmp_path / "run", DATA, allow_past_window=True)
    with pytest.raises(UserError, match="has learned a table of 32 positions"):
        prepare(model, SFTConfig(max_length=40, allow_past_window=True))


def test_rope_parameters_without_rotation_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = without_rotation("granitemoehybrid", tmp_path / "model", positions=32)
    words = ["plan", "--model_name_or_path", str(place), "--max_length", "40", "--model_init_kwargs", "{rope_parameters: auto}"]
    assert cli.main(words) == 2
    assert "has no rotary positions, so rope_parameters would have no effect" in capsys.readouterr().err


@pytest.mark.parametrize("native", [YARN, DYNAMIC], ids=["yarn", "dynamic"])
def test_scaling_beside_an_unraised_maximum_covers_what_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], native: dict[str, Any]
) -> None:
    """As Qwen's model cards write YaRN: 16 positions, times 4. The plan, the training and the own loop take 40 tokens."""
    place = save_model_folder(tmp_path / "model", "llama", max_position_embeddings=16, rope_parameters=native)
    assert cli.main(["plan", "--model_name_or_path", str(place), "--max_length", "40"]) == 0
    assert "the model's own window of 64 tokens" in capsys.readouterr().out
    run = trainer(place, tmp_path / "run", DATA, max_steps=1)
    run.train()
    run.save_model()
    settings = json.loads((tmp_path / "run" / "model" / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == 64
    plain, long = (AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32) for _ in range(2))
    prepare(long, SFTConfig(max_length=64))
    ids = torch.tensor([DATA[0]["input_ids"]])
    losses = [model(input_ids=ids, labels=ids).loss for model in (plain, long)]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
    for loss in losses:
        loss.backward()
    assert_same_gradients(gradients(long), gradients(plain))
    with pytest.raises(UserError, match="a row of 65 tokens is longer than the 64 positions"):
        prepare(AutoModelForCausalLM.from_pretrained(place), SFTConfig(max_length=65))


def test_dynamic_scaling_that_is_asked_for_covers_what_it_says(tmp_path: Path) -> None:
    place = save_model_folder(tmp_path / "model", "llama", max_position_embeddings=16)
    wish = {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0}}
    trainer(place, tmp_path / "run", DATA, max_steps=1, model_init_kwargs=wish).train()
