"""Which models a plan takes without asking transformers: never one that training refuses."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from megaspan import cli
from megaspan.config import SFTConfig
from megaspan.config.spelling import as_flags
from megaspan.human import UserError
from megaspan.model.taken import check_files
from megaspan.plan import has_plain_adapter, is_plain
from megaspan.plan.facts import ModelFacts, shape_names
from megaspan.plan.families import FAMILIES
from megaspan.plan.plain import is_usual
from megaspan.trainer.early import try_adapter

USUAL: dict[str, Any] = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2, "hidden_size": 32,
    "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300,
    "max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "quantised": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "is quantised (gptq)"),
    "linear attention": ({"layer_types": ["linear_attention", "full_attention"]}, "layers of type linear_attention"),
    "too many types": ({"layer_types": ["full_attention"] * 3}, "cannot be loaded"),
    "dropout": ({"attention_dropout": 0.1}, "has attention_dropout: 0.1"),
    "states": ({"output_hidden_states": True}, "has output_hidden_states: true"),
    "looks ahead": ({"is_causal": False}, "attends to later tokens"),
    "no decoder": ({"model_type": "bert", "architectures": ["BertLMHeadModel"]}, "attends to later tokens"),
    "encoder-decoder": ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
    "classifier": ({"architectures": ["Qwen3ForSequenceClassification"]}, "not a causal language model"),
    "another's class": ({"architectures": ["Qwen2ForCausalLM"]}, "not a causal language model"),
    "sees": ({"vision_config": {}}, "more than a language model"),
    "a state": ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "layers that carry a state"),
    "tuples": ({"return_dict": False}, "has return_dict: false"),
    "no tuples, but null": ({"return_dict": None}, "has return_dict: null"),
    "a type of no torch": ({"torch_dtype": "float7"}, "cannot be loaded"),
    "an odd width": (
        {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "hidden_size": 30}, "cannot be loaded"
    ),
    "a token's name": ({"bos_token_id": "<s>"}, "cannot be loaded"),
    "activation": ({"hidden_act": "nosuch"}, "has a hidden_act that transformers"),
    "rope": ({"rope_parameters": {"rope_type": "nosuch", "rope_theta": 10000.0}}, "has a rope_type that transformers"),
}  # fmt: skip


def folder(tmp_path: Path, **changes: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(USUAL | changes))
    return tmp_path


def wish(place: Path | str, **options: Any) -> SFTConfig:
    return SFTConfig(model_name_or_path=str(place), max_length=256, **options)


@pytest.mark.parametrize("case", REFUSED)
def test_a_plan_refuses_what_training_refuses_in_its_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    changes, words = REFUSED[case]
    place = folder(tmp_path, **changes)
    assert not is_plain(wish(place))
    with pytest.raises(UserError) as refused:
        check_files(wish(place))
    assert words in str(refused.value)
    assert cli.main(["plan", "--model_name_or_path", str(place), "--max_length", "256", "--use_cpu", "true"]) == 2
    assert as_flags(str(refused.value)) in capsys.readouterr().err


ODD: tuple[Any, ...] = ("yes", -1, 0, 0.5, float("nan"), [], {}, True, None)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_value_of_a_form_that_transformers_refuses_is_never_usual(family: str) -> None:
    """Every key that a configuration of a known family has, with values of every form."""
    own = type(AutoConfig.for_model(family))
    usual = AutoConfig.for_model(family, pad_token_id=None, bos_token_id=None, eos_token_id=None).to_dict()
    usual = {key: value for key, value in usual.items() if value is not None and key not in ("id2label", "label2id")}
    rope, entry = usual["rope_parameters"], {"rope_type": "default", "rope_theta": 10000.0}
    usual["rope_parameters"] = {kind: dict(entry) for kind, each in rope.items() if isinstance(each, dict)} or entry
    usual["hidden_size"] = 64 * usual["num_attention_heads"]
    assert is_usual(usual)
    for key in usual:
        for value in ODD:
            changed = usual | {key: value}
            if not is_usual(changed):
                continue
            try:
                ModelFacts.from_config(changed)
            except UserError:
                continue
            # It would raise; and it writes into the mapping that it is given.
            own.from_dict(copy.deepcopy({name: entry for name, entry in changed.items() if name != "model_type"}))


def test_training_asks_before_it_reads_a_row(tmp_path: Path) -> None:
    from megaspan.trainer import SFTTrainer

    args = wish(folder(tmp_path, attention_dropout=0.1), output_dir=str(tmp_path / "run"), datasets=[{"path": "nothing here"}])
    with pytest.raises(UserError, match=r"has attention_dropout: 0\.1"):
        SFTTrainer(args=args)


@pytest.mark.parametrize("changes", [{}, {"layer_types": ["full_attention"] * 2}, {"architectures": None}], ids=str)
def test_usual_models_need_nobody_to_be_asked(tmp_path: Path, changes: dict[str, Any]) -> None:
    place = folder(tmp_path, **changes)
    assert is_plain(wish(place))
    check_files(wish(place))
    save_file({"x": torch.zeros(3)}, place / "model.safetensors")
    assert is_plain(wish(place))
    assert all(is_plain(wish(name)) for name in shape_names())


def test_changes_of_the_configuration_are_looked_at_too(tmp_path: Path) -> None:
    place = folder(tmp_path, layer_types=["full_attention"] * 2)
    assert is_plain(wish(place, model_init_kwargs={"num_hidden_layers": 1}))
    for changes in ({"num_hiden_layers": 1}, {"attention_dropout": 0.5}, {"hidden_size": "many"}):
        given = wish(place, model_init_kwargs=changes)
        assert not is_plain(given)
        with pytest.raises(UserError, match=next(iter(changes))):
            check_files(given)
    off = wish(folder(tmp_path, attention_dropout=0.1), model_init_kwargs={"attention_dropout": 0.0})
    assert is_plain(off)
    check_files(off)


def test_files_that_were_cut_off_or_are_of_another_format(tmp_path: Path) -> None:
    place = folder(tmp_path)
    file = place / "model.safetensors"
    save_file({"x": torch.zeros(300), "y": torch.zeros(5)}, file)
    whole = file.read_bytes()
    for damaged in (whole[:-4], whole[:50], whole[:4], b"", whole + b"more"):
        file.write_bytes(damaged)
        assert not is_plain(wish(place))
        with pytest.raises(UserError, match="damaged or cut off"):
            check_files(wish(place))
    file.rename(place / "model.bin")
    assert not is_plain(wish(place))
    with pytest.raises(UserError, match=r"has weights as \.bin only"):
        check_files(wish(place))


@pytest.mark.parametrize("targets", [None, "all-linear", ["q_proj", "up_proj"], ["nosuch"], ["gate_proj"], "lm_head"], ids=str)
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "cohere2", "phi3", "qwen3_moe", "gpt_oss", "starcoder2"])
def test_a_plan_refuses_the_adapters_that_training_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, targets: Any
) -> None:
    more = {"pad_token_id": None}
    more |= {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2} if family in ("qwen3_moe", "gpt_oss") else {}
    entries = {name: value for name, value in USUAL.items() if name != "architectures"} | {"model_type": family} | more
    AutoConfig.for_model(**entries).save_pretrained(tmp_path)
    options = {"use_peft": True} | ({} if targets is None else {"lora_target_modules": targets})
    config = wish(tmp_path, **options)
    try:
        try_adapter(config, None)
        refused = None
    except UserError as error:
        refused = error
    plain = has_plain_adapter(config, ModelFacts.from_config(json.loads((tmp_path / "config.json").read_text())))
    assert refused is None or not plain
    flags = [word for name, value in options.items() for word in (f"--{name}", json.dumps(value))]
    code = cli.main(["plan", "--model_name_or_path", str(tmp_path), "--max_length", "256", *flags])
    said = capsys.readouterr().err
    assert code == (0 if refused is None else 2), said
    assert refused is None or refused.what in said


def test_adapters_of_common_layers_are_plain(tmp_path: Path) -> None:
    facts = ModelFacts.from_config(USUAL)
    for targets in ({}, {"lora_target_modules": "all-linear"}, {"lora_target_modules": ["q_proj", "down_proj"]}):
        assert has_plain_adapter(wish(folder(tmp_path), use_peft=True, **targets), facts)
    assert has_plain_adapter(wish(folder(tmp_path)), facts)
