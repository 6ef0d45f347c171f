"""The mappings inside: rope parameters, checkpointing, datasets. Every key is known or refused with the nearest legal one."""

from __future__ import annotations

import pytest

from megaspan.config import SFTConfig
from megaspan.human import UserErrors

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
PER_KIND = {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}


def errors_of(**options) -> list[str]:
    with pytest.raises(UserErrors) as caught:
        SFTConfig(max_length=8, **options)
    return [str(error) for error in caught.value.errors]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (YARN, YARN), ("auto", "auto"), (None, None),
        ({**YARN, "factor": "4.0", "original_max_position_embeddings": "32k"}, YARN),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, YARN),
        ({"rope_type": "yarn", "factor": 2, "rope_theta": "1e6"}, {"rope_type": "yarn", "factor": 2, "rope_theta": 1e6}),
        (PER_KIND, PER_KIND),
        ({**LONG, "short_factor": ["1", 2]}, LONG),
    ],
)  # fmt: skip
def test_rope_parameters_are_read(written, read):
    assert SFTConfig(max_length=8, model_init_kwargs={"rope_parameters": written}).rope_parameters == read


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ({**YARN, "factr": 2}, "Did you mean factor?"), ({"factor": 4.0}, "Add rope_type: yarn"),
        ("yarn", "is no such mapping"), ({}, "no such mapping"), ({**YARN, "factor": "four"}, "factor must be a number"),
        ({**YARN, "factor": True}, "factor must be a number"),
        ({**YARN, "original_max_position_embeddings": "long"}, "original_max_position_embeddings must be"),
        ({**YARN, "truncate": "maybe"}, "true or false"), ({"rope_type": 3}, "rope_type must be a text"),
        ({"full_attention": {"factor": 2}}, "full_attention does not say which rope_type"),
    ],
)  # fmt: skip
def test_a_wrong_rope_entry_is_one_sentence(written, sentence):
    (error,) = errors_of(model_init_kwargs={"rope_parameters": written})
    assert sentence in error


@pytest.mark.parametrize(
    ("written", "offload"),
    [(None, True), ({}, True), ({"offload": True}, True), ({"offload": "no"}, False), ({"use_reentrant": False}, True)],
)
def test_offload_is_on_unless_refused(written, offload):
    config = SFTConfig(max_length=8, gradient_checkpointing_kwargs=written)
    assert config.offload is offload
    assert SFTConfig(max_length=8, activation_checkpointing_kwargs=written) == config
    assert not SFTConfig(max_length=8, gradient_checkpointing=False).offload


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ({"offload": "perhaps"}, "offload must be true or false"), ({"ofload": True}, "Did you mean offload?"),
        ({"use_reentrant": True}, "use_reentrant"), ({"selective": True}, "309 GB"),
        ({"every_n_layers": 2}, "every_n_layers"),
    ],
)  # fmt: skip
def test_a_wrong_checkpointing_entry_is_one_sentence(written, sentence):
    (error,) = errors_of(gradient_checkpointing_kwargs=written)
    assert sentence in error


def test_datasets_are_completed():
    config = SFTConfig(max_length=8, datasets=["book.txt", {"path": "hub/name", "split": "train[:5]", "columns": ["text"]}])
    empty = {"name": None, "data_dir": None, "data_files": None, "columns": None}
    assert config.datasets == (
        {"path": "book.txt", "split": "train", **empty},
        {"path": "hub/name", "split": "train[:5]", **empty, "columns": ["text"]},
    )
    assert SFTConfig(max_length=8, datasets=[]).datasets is None


def test_the_entries_of_trl_itself_are_read():
    from trl.scripts.utils import DatasetConfig

    config = SFTConfig(max_length=8, datasets=[DatasetConfig(path="hub/name", split="test")])
    assert (config.datasets[0]["path"], config.datasets[0]["split"]) == ("hub/name", "test")


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("book.txt", "datasets must be"), ([{"name": "x"}], "entry 1 has no path"),
        ([{"path": "x", "slit": "a"}], "Did you mean split?"), ([{"path": "x", "fraction": 0.5}], "fraction"),
        (["a", {"path": "x", "columns": "text"}], "entry 2: columns"), ([3], "entry 1 has no path"),
    ],
)  # fmt: skip
def test_a_wrong_dataset_is_one_sentence(written, sentence):
    (error,) = errors_of(datasets=written)
    assert sentence in error


def test_loading_arguments_are_refused_and_neutral_ones_pass():
    neutral = {"attn_implementation": "sdpa", "use_cache": False, "device_map": None, "low_cpu_mem_usage": True}
    assert SFTConfig(max_length=8, model_init_kwargs=neutral).config_overrides == {}
    assert (
        len(errors_of(model_init_kwargs={"attn_implementation": "eager", "device_map": "auto", "quantization_config": {}})) == 3
    )
    assert "is no name" in errors_of(model_init_kwargs={"num hidden layers": 2})[0]


def test_a_torch_dtype_may_be_given_as_such():
    import torch

    assert SFTConfig(max_length=8, model_init_kwargs={"dtype": torch.bfloat16}).weights_dtype == "bfloat16"
    assert "half precision" in errors_of(dtype=torch.float16)[0]
