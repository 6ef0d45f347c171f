"""Every option of TRL, transformers and accelerate is decided: supported, or refused with its own sentence (issue item 2)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml
from accelerate.parallelism_config import ParallelismConfig
from transformers import TrainingArguments
from trl import ModelConfig, ScriptArguments
from trl import SFTConfig as TRLConfig
from trl.scripts.utils import DatasetConfig, DatasetMixtureConfig

from megaspan.config import SFTConfig, foreign, load_config
from megaspan.config.nested import DATASET_KEYS
from megaspan.human import UserErrors

# (name, default) of every field; transformers 5.17 has no field that 5.24 lacks, so each installed version is walked.
FIELDS = {
    field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    for source in (ParallelismConfig, DatasetMixtureConfig, ScriptArguments, ModelConfig, TrainingArguments, TRLConfig)
    for field in dataclasses.fields(source)
}
# Where our table departs from the field: TRL turns bf16 on itself when the field is null.
EFFECTIVE = {"bf16": True}
TABLE = foreign.table()
# A value that asks for something, where the default's own type does not tell.
WISHES = {
    "debug": "underflow_overflow", "optim_args": "a=1", "report_to": "wandb", "label_names": ["x"],
    "include_for_metrics": ["loss"], "include_num_input_tokens_seen": "all", "lora_task_type": "SEQ_CLS",
    "length_column_name": "n", "bnb_4bit_quant_type": "fp4", "prediction_loss_only": "some",
    "logging_nan_inf_filter": "some", "enable_jit_checkpoint": "some", "do_train": "some",
}  # fmt: skip


def wish(name: str) -> object:
    default = FIELDS[name]
    if name in WISHES:
        return WISHES[name]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 7
    return "something"


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_every_field_is_decided(name):
    assert (name in TABLE["supported"]) != (name in TABLE["refused"]) or name == "eval_packing", (
        f"{name} is new: write it into src/megaspan/config/trl.yaml, supported or refused with its sentence"
    )


@pytest.mark.parametrize("name", sorted(set(FIELDS) & set(TABLE["supported"])))
def test_the_default_of_a_supported_field_is_theirs(name):
    """What the documentation calls TRL's default is TRL's default."""
    theirs = EFFECTIVE.get(name, FIELDS[name])
    assert TABLE["supported"][name]["trl"] == getattr(theirs, "value", theirs)


def test_the_table_names_nothing_that_does_not_exist():
    names = set(SFTConfig.model_fields) | set(foreign.ALIASES) | {"parallelism_config", "eval_packing"}
    assert set(TABLE["supported"]) <= names
    assert set(TABLE["own"]) <= set(SFTConfig.model_fields) - set(TABLE["supported"])
    assert set(TABLE["values"]) <= set(SFTConfig.model_fields)
    assert not set(TABLE["refused"]) & (set(SFTConfig.model_fields) | set(foreign.ALIASES))
    for section in ("older", "launch"):
        assert not set(TABLE[section]) & (set(SFTConfig.model_fields) | set(TABLE["refused"]))


@pytest.mark.parametrize("name", sorted(TABLE["refused"]))
def test_a_refused_field_passes_at_rest_and_is_refused_with_its_own_sentence(name):
    for neutral in (None, FIELDS.get(name), *TABLE["refused"][name].get("neutral", ())):
        SFTConfig(max_length=8, **{name: neutral})
    with pytest.raises(UserErrors) as caught:
        SFTConfig(max_length=8, **{name: wish(name)})
    (error,) = caught.value.errors
    assert error.option == name
    assert TABLE["refused"][name]["why"].rstrip(".") in str(error)
    assert error.do


NULLS = sorted(name for name in FIELDS.keys() & SFTConfig.model_fields.keys() - {"max_length"} if FIELDS[name] is None)


@pytest.mark.parametrize("name", NULLS)
def test_a_supported_field_takes_null_where_that_is_their_default(name):
    """And it means what leaving the option out means."""
    assert getattr(SFTConfig(max_length=8, **{name: None}), name) == getattr(SFTConfig(max_length=8), name)


def entries(section: str):
    for name, entry in TABLE[section].items():
        yield from ((f"{name}={value}", inner) for value, inner in entry.items()) if section == "values" else ((name, entry),)


def test_every_sentence_is_there_and_no_two_options_share_one():
    sections = set(TABLE) - {"supported", "own"}
    for name, entry in (pair for section in sections for pair in entries(section)):
        assert set(entry) <= {"trl", "neutral", "why", "do"}, name  # a comma in an unquoted sentence makes a key of its rest
        assert entry["why"], name
        assert entry["do"], name
    refused = [entry["why"] for entry in TABLE["refused"].values()]
    assert len(set(refused)) == len(refused)


@pytest.mark.parametrize("section", ["model_init_kwargs", "gradient_checkpointing_kwargs"])
def test_entries_of_the_inner_mappings_pass_at_rest_and_are_refused_otherwise(section):
    for name, entry in TABLE[section].items():
        for neutral in (None, *entry.get("neutral", ())):
            SFTConfig(max_length=8, **{section: {name: neutral}})
        with pytest.raises(UserErrors, match=name):
            SFTConfig(max_length=8, **{section: {name: "something else"}})


@pytest.mark.parametrize("section", ["older", "launch"])
def test_older_names_and_launch_keys_say_what_to_write(section):
    for name, entry in TABLE[section].items():
        for neutral in (None, *entry.get("neutral", ())):
            SFTConfig(max_length=8, **{name: neutral})
        with pytest.raises(UserErrors) as caught:
            SFTConfig(max_length=8, **{name: "something else"})
        assert [error.do for error in caught.value.errors] == [entry["do"]]


def test_values_that_are_legal_elsewhere_have_their_sentence():
    for name, values in TABLE["values"].items():
        for value, entry in values.items():
            with pytest.raises(UserErrors) as caught:
                SFTConfig(max_length=8, **{name: value})
            assert entry["why"] in str(caught.value)


def test_every_entry_of_a_dataset_is_decided():
    for field in dataclasses.fields(DatasetConfig):
        assert (field.name in DATASET_KEYS) != (field.name in TABLE["datasets"])


def test_parallel_sizes_have_three_spellings():
    assert SFTConfig(max_length=8, parallelism_config=ParallelismConfig()) == SFTConfig(max_length=8)
    for options in (
        {"cp_size": 2},
        {"parallelism_config_cp_size": 2},
        {"parallelism_config": {"cp_size": 2}},
        {"parallelism_config": {"parallelism_config_cp_size": 2}},
        {"parallelism_config": ParallelismConfig(cp_size=2)},
    ):
        assert SFTConfig(max_length=8, **options).cp_size == 2
    with pytest.raises(UserErrors, match="alltoall"):
        SFTConfig(max_length=8, parallelism_config_cp_comm_strategy="alltoall")


def test_the_defaults_of_all_their_classes_together_pass(tmp_path):
    """A file that spells out every default of TRL runs here, but for bfd packing and options without effect."""
    options = {name: getattr(value, "value", value) for name, value in FIELDS.items()}
    ours = {"max_length": 1024, "packing": True, "packing_strategy": "wrapped"}
    without_effect = {"lora_r", "lora_alpha", "lora_dropout", "use_rslora", "max_steps"}
    path = tmp_path / "all.yaml"
    path.write_text(yaml.safe_dump({name: value for name, value in (options | ours).items() if name not in without_effect}))
    config = load_config(path)
    assert config.max_length == 1024
    assert config.report_to == "none"


def test_the_launch_file_of_accelerate_is_recognised():
    example = Path(__file__).parents[2] / "examples" / "sft_qwen3_8b_1m_context" / "context_parallel_8gpu.yaml"
    if not example.exists():
        pytest.skip("the example is not here")
    with pytest.raises(UserErrors, match="accelerate launch --config_file"):
        load_config(example)


def test_no_sentence_of_the_table_ends_at_a_comma():
    """A comma in an unquoted text of a YAML mapping begins another key: half a sentence was cut off without a word."""
    for section in (value for name, value in TABLE.items() if name != "values"):
        for name, entry in section.items():
            keys = set(entry) if isinstance(entry, dict) else set()
            assert keys <= {"trl", "differs", "why", "do", "neutral"}, name
    for name, values in TABLE["values"].items():
        assert all(set(entry) <= {"why", "do"} for entry in values.values()), name
