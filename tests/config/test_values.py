"""Readers of single values, each checked through the option that uses it."""

from __future__ import annotations

import pytest
import yaml

from megaspan.config import SFTConfig
from megaspan.human import UserErrors

READ = [
    ("max_length", "1M", 1_048_576), ("max_length", 4096.0, 4096), ("memory_limit", "80GiB", 80 * 2**30),
    ("learning_rate", "2e-5", 2e-5), ("learning_rate", 0, 0.0), ("max_steps", "12", 12), ("max_steps", -1, -1),
    ("max_steps", 1e3, 1000), ("seed", 0, 0), ("warmup_steps", 0.1, 0.1), ("warmup_steps", 10, 10.0),
    ("pad_to_multiple_of", "auto", None), ("pad_to_multiple_of", "16", 16), ("report_to", "wandb", ("wandb",)),
    ("report_to", ["none"], "none"), ("report_to", False, "none"), ("report_to", "wandb,trackio", ("wandb", "trackio")),
    ("save_strategy", False, "no"), ("packing", "yes", True), ("packing", "off", False), ("run_name", 7, "7"),
    ("dtype", "torch.bfloat16", "bfloat16"), ("max_rows", "4k", None), ("resume_from_checkpoint", True, True),
    ("resume_from_checkpoint", "run/checkpoint-5", "run/checkpoint-5"), ("num_train_epochs", 0.5, 0.5),
    ("lora_target_modules", "all-linear", ("all-linear",)),
]  # fmt: skip

WRONG = [
    ("max_length", 0), ("max_length", -4), ("max_length", True), ("max_length", "12q"), ("max_length", 1.5),
    ("max_length", [4]), ("memory_limit", "80 elephants"), ("host_memory", 80),
    ("learning_rate", "fast"), ("learning_rate", -1),
    ("learning_rate", float("nan")), ("learning_rate", float("inf")), ("learning_rate", True), ("max_steps", 0),
    ("max_steps", 1.5), ("max_steps", "many"), ("seed", -1), ("seed", None), ("warmup_steps", 1.5), ("warmup_steps", -1),
    ("warmup_ratio", 1.0), ("pad_to_multiple_of", 0), ("pad_to_multiple_of", "x"), ("report_to", ["wandb", "foo"]),
    ("save_strategy", True), ("packing", 2), ("packing", "maybe"), ("run_name", ["a"]), ("run_name", " "),
    ("dtype", "float16"), ("dtype", "auto"), ("max_rows", 0), ("num_train_epochs", 0), ("lora_dropout", 1.0),
    ("adam_beta1", 1.0), ("save_steps", 0.5), ("model_init_kwargs", "yarn"), ("max_lost_tokens", -0.1),
    ("max_lost_tokens", "some"), ("use_peft", None), ("overlong", "cut"), ("packing_strategy", "bfd_split"),
    ("save_minutes", 0),
    ("cp_size", 0), ("cp_size", -2), ("lr_scheduler_kwargs", [1]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "value"), READ)
def test_a_value_is_read(name, text, value):
    if value is None and name == "max_rows":
        with pytest.raises(UserErrors, match="max_rows"):
            SFTConfig(max_length=4096, max_rows=text)  # rows are counted, not measured in tokens
        return
    extra = {"use_peft": True} if name.startswith("lora") else {"report_to": "wandb"} if name == "run_name" else {}
    assert getattr(SFTConfig(**{"max_length": 4096, **extra, name: text}), name) == value


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_is_one_sentence_with_the_name(name, value):
    with pytest.raises(UserErrors) as caught:
        SFTConfig(**{"max_length": 4096, name: value})
    (error,) = caught.value.errors
    assert error.option == name
    assert str(error).startswith(name)
    assert "\n" not in str(error)
    assert "pydantic" not in str(error).lower()


@pytest.mark.parametrize("name", sorted(set(SFTConfig.model_fields)))
def test_every_option_refuses_a_value_of_no_type(name):
    """No option swallows just anything; each says what is legal (rule of section 3 of the design)."""
    with pytest.raises(UserErrors) as caught:
        SFTConfig(**{"max_length": 4096, name: object()})
    assert any(error.option == name for error in caught.value.errors)


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("memory_limit", 80, "80GiB"), ("memory_limit", "80", "80GiB"), ("memory_limit", 80.5, "80.5GiB"),
        ("host_memory", "1_900", "1900GiB"), ("memory_limit", 81559, "81559MiB"), ("memory_limit", "80gi", "80GiB"),
        ("memory_limit", [80, "GB"], "80GB"), ("max_length", "1million", "1M"), ("max_length", "128kb", "128k"),
        ("max_length", ["128k", "tokens"], "128k"), ("max_length", "1.5 mil", "1.5M"), ("max_lost_tokens", "50%", "0.5"),
        ("lora_dropout", "10%", "0.1"),
        ("model_init_kwargs", "rope_parameters=auto", "{rope_parameters: auto}"), ("model_init_kwargs", "auto", None),
        ("memory_limit", 0, None), ("memory_limit", -80, None), ("memory_limit", "much", None), ("memory_limit", True, None),
        ("max_length", 1.5, None), ("max_length", 0, None), ("host_memory", "50%", None), ("seed", "3 GiB", None),
    ],
)  # fmt: skip
def test_what_a_wrong_size_was_meant_to_be(name, value, meant):
    """What is suggested is legal."""
    config = {"max_length": 4096, "use_peft": True, "packing": False, "overlong": "drop"}
    with pytest.raises(UserErrors) as caught:
        SFTConfig(**config | {name: value})
    (error,) = caught.value.errors
    assert error.do == (f"Write {name}: {meant}" if meant else None)
    if meant:
        SFTConfig(**config | {name: yaml.safe_load(meant)})


def test_a_glob_that_the_shell_wrote_out():
    """`--dataset_name books/*.txt` without quotes comes as many words."""
    with pytest.raises(UserErrors, match="Put a glob in quotes, name the folder, or list several in datasets"):
        SFTConfig(max_length=4096, dataset_name=["a.txt", "b.txt"])
    with pytest.raises(UserErrors, match="Put it in quotes"):
        SFTConfig(max_length=4096, run_name=["my", "run"])
