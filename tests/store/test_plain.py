import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megaspan.human import UserError
from megaspan.store import plain as module
from megaspan.store import save_model
from megaspan.store.plain import saved_bytes
from tests.models import batch, tiny, tiny_tokenizer

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 4096}
CASES = [(family, tied) for family in ("llama", "gemma3", "gpt_oss") for tied in (False, True)]
CASES += [("qwen3", True), ("gemma2", False), ("qwen3_moe", False), ("granite", True)]


@torch.no_grad()
def logits(model):
    return model.eval()(batch(24)["input_ids"]).logits


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_round_trip_in_plain_transformers(tmp_path, family, tied):
    """P5, R89: same logits, tied weights tied and written once, rope settings equal."""
    model = tiny(family, tied=tied)
    save_model(model, None, tmp_path / "out")
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager", dtype="auto"
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) == tied
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.config.rope_parameters == model.config.rope_parameters


def test_the_extension_reaches_the_saved_folder(tmp_path):
    """R51: rope settings, the new length, the tokenizer's limit, the template."""
    model = tiny("llama", rope_parameters=YARN, max_position_embeddings=16384)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    save_model(model, tokenizer, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.config.rope_parameters == YARN
    assert loaded.config.max_position_embeddings == 16384
    assert torch.equal(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    read = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert read.model_max_length == 16384
    assert read.chat_template == tokenizer.chat_template
    assert read("hé!").input_ids == tokenizer("hé!").input_ids
    assert tokenizer.model_max_length > 1e9  # the caller's own is left alone


def test_a_megaspan_attention_name_does_not_reach_the_folder(tmp_path):
    from transformers import AttentionInterface

    AttentionInterface.register("megaspan-test", lambda *args, **kwargs: None)
    model = tiny("llama")
    model.set_attn_implementation("megaspan-test")
    save_model(model, None, tmp_path / "out")
    assert "megaspan" not in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.parametrize("tied", [False, True])
def test_weights_in_another_precision(tmp_path, tied):
    model = tiny("llama", tied=tied)
    save_model(model, None, tmp_path / "out", dtype=torch.bfloat16)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert model.dtype == torch.float32
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.to(torch.bfloat16), loaded.get_parameter(name))
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied


def test_large_models_are_written_in_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SHARD_SIZE", "50KB")
    model = tiny("llama")
    save_model(model, None, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")), logits(model)
    )
    monkeypatch.setattr(module, "SHARD_SIZE", "2GB")
    save_model(model, None, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").glob("model*")] == ["model.safetensors"]


def test_into_the_run_folder_itself_nothing_else_is_touched(tmp_path):
    """`trainer.save_model(args.output_dir)`, as TRL's examples end."""
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "model-00001-of-00002.safetensors").write_text("stale")
    save_model(tiny("llama"), tiny_tokenizer(), tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path)
    kept = {path.name for path in tmp_path.iterdir()}
    assert {"metrics.jsonl", "checkpoint-3", "config.json", "model.safetensors", "tokenizer.json"} <= kept
    assert not kept & {"saving", ".partial-saving", "model-00001-of-00002.safetensors"}


def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_write_tokenizer", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_model(tiny("llama"), tiny_tokenizer(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_settings_that_transformers_refuses_are_a_sentence(tmp_path):
    model = tiny("llama")
    model.generation_config.do_sample = False
    model.generation_config.temperature = 0.3
    with pytest.raises(UserError, match=r"refuses to save this model's settings.*generation_config"):
        module.write_settings(model, None, tmp_path)


def test_saved_bytes_are_the_bytes(tmp_path):
    model = tiny("llama", tied=True)
    save_model(model, None, tmp_path / "out")
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert 0 < size - saved_bytes(model) < 4096
    assert saved_bytes(model, torch.bfloat16) == saved_bytes(model) // 2


def test_more_vocabulary_than_the_tokenizer_has(tmp_path):
    """R91: rows that no token uses are saved and loaded as they are."""
    model = tiny("llama", vocab_size=320)
    save_model(model, tiny_tokenizer(), tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert torch.equal(logits(loaded), logits(model))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 320
