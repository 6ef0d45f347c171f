import json

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from megaspan.human import UserError
from megaspan.store import save_model
from megaspan.store.adapter import adapter_config
from tests.models import batch, save_model_folder, tiny_tokenizer

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 4096}


@torch.no_grad()
def logits(model):
    return model.eval()(batch(24)["input_ids"]).logits


def lora(folder, **options):
    """A peft model on a base folder, every adapter weight away from its start."""
    config = AutoConfig.from_pretrained(folder)
    if options.pop("extended", False):
        config.rope_parameters, config.max_position_embeddings = YARN, 16384
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, attn_implementation="eager")
    if tokens := options.pop("resize", None):
        model.resize_token_embeddings(tokens)
    peft_model = get_peft_model(
        model, LoraConfig(r=4, task_type="CAUSAL_LM", **{"target_modules": ["q_proj", "down_proj"], **options})
    )
    with torch.no_grad():
        for parameter in peft_model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return peft_model


@pytest.mark.parametrize(
    "options",
    [{}, {"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["lm_head"]}, {"use_rslora": True, "bias": "none"}],
    ids=["plain", "head", "saved-head", "rslora"],
)
def test_stock_peft_loads_it(tmp_path, options):
    folder = save_model_folder(tmp_path / "base", tie_word_embeddings=False)
    model = lora(folder, **options)
    save_model(model, tiny_tokenizer(), tmp_path / "out")
    base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert torch.equal(logits(PeftModel.from_pretrained(base, tmp_path / "out")), logits(model))
    auto = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert torch.equal(logits(auto), logits(model))


def test_the_folder_says_which_rope_its_base_needs_and_its_lines_work(tmp_path):
    """R51 for LoRA: on the base as published the adapter is silently wrong; the README's own lines are right."""
    folder = save_model_folder(tmp_path / "base")
    model = lora(folder, extended=True)
    out = save_model(model, None, tmp_path / "out")
    published = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert not torch.allclose(logits(PeftModel.from_pretrained(published, out)), logits(model), rtol=1e-3)

    readme = (out / "README.md").read_text()
    assert "needs its base model with the rope settings below" in readme
    lines = readme.split("```python\n")[1].split("```")[0].replace("THIS_FOLDER", str(out))
    names: dict = {}
    exec(lines.replace("config=config)", 'config=config, attn_implementation="eager")'), names)
    assert torch.equal(logits(names["model"]), logits(model))
    facts = json.loads((out / "megaspan.json").read_text())
    assert facts["rope_parameters"] == YARN
    assert facts["max_position_embeddings"] == 16384
    assert facts["base_model"] == str(folder)
    assert facts["needs_own_rope"] is True


def test_without_an_extension_there_is_no_alarm(tmp_path):
    folder = save_model_folder(tmp_path / "base")
    out = save_model(lora(folder), None, tmp_path / "out")
    assert "those it was published with" in (out / "README.md").read_text()


def test_a_resized_vocabulary_travels_with_the_adapter(tmp_path):
    """R91: three tokens added under LoRA."""
    folder = save_model_folder(tmp_path / "base")
    model = lora(folder, resize=323)
    out = save_model(model, None, tmp_path / "out")
    lines = (out / "README.md").read_text().split("```python\n")[1].split("```")[0].replace("THIS_FOLDER", str(out))
    assert "resize_token_embeddings(323)" in lines
    names: dict = {}
    exec(lines.replace("config=config)", 'config=config, attn_implementation="eager")'), names)
    assert torch.equal(logits(names["model"]), logits(model))


def test_a_start_that_changes_the_base_is_refused(tmp_path):
    model = lora(save_model_folder(tmp_path / "base"))
    adapter_config(model)
    model.peft_config["default"].init_lora_weights = "pissa"
    with pytest.raises(UserError, match="init_lora_weights=pissa"):
        adapter_config(model)
