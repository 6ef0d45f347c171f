import warnings

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from megaspan.human import UserError
from megaspan.store import export, save_checkpoint, save_model
from tests.models import batch, save_model_folder, tiny, tiny_tokenizer
from tests.store.test_adapter import lora
from tests.store.training import Masters, start


@torch.no_grad()
def logits(model):
    return model.eval()(batch(24)["input_ids"]).logits


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype="auto")


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("gemma3", False), ("gpt_oss", True), ("qwen3_moe", False)])
def test_a_run_without_a_final_save_is_exported_from_its_newest_checkpoint(tmp_path, family, tied):
    """R90: one command, with tokenizer and settings."""
    model, optimizer = start(family, tied=tied, max_position_embeddings=8192)
    for step in (1, 2):
        with torch.no_grad():
            model.get_input_embeddings().weight.add_(0.1)
        save_checkpoint(tmp_path / "run", model=model, optimizer=optimizer, progress={"step": step}, tokenizer=tiny_tokenizer())
    out = export(tmp_path / "run", tmp_path / "out")
    assert torch.equal(logits(load(out)), logits(model))
    assert AutoTokenizer.from_pretrained(out).model_max_length == 8192
    assert not {"manifest.json", "state.json", "state.safetensors"} & {path.name for path in out.iterdir()}


def test_the_final_model_is_preferred_and_copied(tmp_path):
    model, optimizer = start()
    save_checkpoint(tmp_path / "run", model=model, optimizer=optimizer, progress={"step": 1})
    final = tiny("llama", seed=5)
    save_model(final, tiny_tokenizer(), tmp_path / "run" / "model")
    assert torch.equal(logits(load(export(tmp_path / "run", tmp_path / "out"))), logits(final))
    assert torch.equal(logits(load(export(tmp_path / "run" / "checkpoint-1", tmp_path / "out1"))), logits(model))


def test_a_model_saved_into_the_run_folder_is_exported_without_the_run(tmp_path):
    model, optimizer = start()
    run = tmp_path / "run"
    save_checkpoint(run, model=model, optimizer=optimizer, progress={"step": 1})
    save_model(model, None, run)
    (run / "plots.png").write_bytes(b"")
    out = export(run, tmp_path / "out")
    assert torch.equal(logits(load(out)), logits(model))
    assert not (out / "checkpoint-1").exists()
    assert not (out / "plots.png").exists()


def test_a_folder_that_is_not_empty_is_not_touched(tmp_path):
    save_model(tiny("llama"), None, tmp_path / "run" / "model")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    with pytest.raises(UserError, match="not empty"):
        export(tmp_path / "run", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]


def test_nothing_to_export_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match="no folder"):
        export(tmp_path / "run", tmp_path / "out")
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match="neither a final model nor a complete checkpoint"):
        export(tmp_path / "run", tmp_path / "out")
    save_model(tiny("llama"), None, tmp_path / "run" / "model")
    with pytest.raises(UserError, match="no adapter to merge"):
        export(tmp_path / "run", tmp_path / "out", merge=True)


@pytest.mark.parametrize("resize", [None, 323])
@pytest.mark.parametrize("final", [False, True], ids=["checkpoint", "final"])
def test_a_lora_run_exports_its_adapter_or_merged_into_its_base(tmp_path, capfd, final, resize):
    base = save_model_folder(tmp_path / "base")
    model = lora(base, extended=True, modules_to_save=None if resize else ["lm_head"], resize=resize)
    if final:
        save_model(model, tiny_tokenizer(), tmp_path / "run" / "model")
    else:
        optimizer = Masters(model)
        save_checkpoint(tmp_path / "run", model=model, optimizer=optimizer, progress={"step": 1}, tokenizer=tiny_tokenizer())
    out = export(tmp_path / "run", tmp_path / "out")
    assert (out / "tokenizer.json").exists()
    assert str(base) in (out / "README.md").read_text()
    plain = AutoModelForCausalLM.from_pretrained(base, config=load_config(out / "base"), attn_implementation="eager")
    if resize:
        plain.resize_token_embeddings(resize)
    assert torch.equal(logits(PeftModel.from_pretrained(plain, out)), logits(model))
    capfd.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # of transformers, for what peft asks it
        made = export(tmp_path / "run", tmp_path / "merged", merge=True)
    assert "Loading weights" not in capfd.readouterr().err
    merged = load(made)
    assert torch.allclose(logits(merged), logits(model), rtol=1e-4, atol=1e-4)
    assert merged.config.max_position_embeddings == 16384
    assert (tmp_path / "merged" / "tokenizer.json").exists()
    assert not (tmp_path / "merged" / "adapter_config.json").exists()


def load_config(folder):
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder)


def test_a_run_that_trained_a_part_of_its_model_takes_the_rest_from_the_base(tmp_path):
    base = save_model_folder(tmp_path / "base")
    model = load(base)
    model.model.embed_tokens.requires_grad_(False)
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    save_checkpoint(tmp_path / "run", model=model, optimizer=Masters(model), progress={"step": 1})
    assert torch.equal(logits(load(export(tmp_path / "run", tmp_path / "out"))), logits(model))


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    model, optimizer = start()
    path = save_checkpoint(tmp_path / "run", model=model, optimizer=optimizer, progress={"step": 1})
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"damaged: model\.safetensors"):
        export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_another_program_is_refused_with_a_sentence(tmp_path):
    lora(save_model_folder(tmp_path / "base")).save_pretrained(tmp_path / "stock")
    with pytest.raises(UserError, match="an adapter that megaspan did not save"):
        export(tmp_path / "stock", tmp_path / "out", merge=True)
