"""The schema as a whole: defaults, all errors at once, frozen, round trips."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.config import SFTConfig, load_config
from megaspan.config.schema import GROUPS, allowed_of
from megaspan.human import UserError, UserErrors

YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 32768}


def test_the_settings_of_the_guide_are_read():
    config = SFTConfig(
        output_dir="run",
        max_length=1_048_576,
        gradient_checkpointing_kwargs={"offload": True},
        model_init_kwargs={"dtype": "bfloat16", "rope_parameters": YARN},
        pad_to_multiple_of=16,
        logging_steps=1,
        save_strategy="no",
    )
    assert config.rope_parameters == YARN
    assert config.weights_dtype == "bfloat16"
    assert config.offload
    assert config.pad_to_multiple_of == 16


def test_only_max_length_is_required():
    with pytest.raises(UserErrors) as caught:
        SFTConfig()
    assert [error.option for error in caught.value.errors] == ["max_length"]
    config = SFTConfig(max_length="1M")
    assert config.offload
    assert config.weights_dtype is None
    assert (config.packing, config.packing_strategy, config.loss_type) == (True, "wrapped", "chunked_nll")


def test_all_errors_come_at_once_in_the_order_of_the_file():
    with pytest.raises(UserErrors) as caught:
        SFTConfig(seed=1.5, lerning_rate=1, lora_r=8, fp16=True, model_init_kwargs={"device_map": "auto"}, max_length="x")
    assert [error.option for error in caught.value.errors] == [
        "seed",
        "lerning_rate",
        "lora_r",
        "fp16",
        "model_init_kwargs",
        "max_length",
    ]


def test_an_error_of_one_option_raises_no_false_error_of_another():
    with pytest.raises(UserErrors) as caught:
        SFTConfig(max_length=8, use_peft="perhaps", lora_r=8, save_strategy="best", save_steps=5)
    assert {error.option for error in caught.value.errors} == {"use_peft", "save_strategy"}


def test_dtype_revision_and_code_may_be_written_inside_or_outside():
    inside = SFTConfig(max_length=8, model_init_kwargs={"dtype": "bfloat16", "revision": "v1", "trust_remote_code": True})
    outside = SFTConfig(max_length=8, dtype="bfloat16", model_revision="v1", trust_remote_code=True)
    assert inside == outside
    assert inside.config_overrides == {}
    with pytest.raises(UserErrors, match="revision is v1, but model_revision is v2"):
        SFTConfig(max_length=8, model_revision="v2", model_init_kwargs={"revision": "v1"})


def test_other_entries_of_model_init_kwargs_override_the_model():
    config = SFTConfig(max_length=8, model_init_kwargs={"num_hidden_layers": 4, "rope_parameters": "auto"})
    assert config.config_overrides == {"num_hidden_layers": 4}
    assert config.rope_parameters == "auto"


def test_it_is_frozen_and_replaced():
    config = SFTConfig(max_length=8, lr_scheduler_type="cosine")
    with pytest.raises(UserError, match=r"config\.replace\(seed=3\)"):
        config.seed = 3
    changed = config.replace(seed=3)
    assert (changed.seed, changed.lr_scheduler_type, config.seed) == (3, "cosine", 42)
    with pytest.raises(UserErrors, match="seed"):
        config.replace(seed=-1)


def test_copies_and_pickles_are_equal():
    config = SFTConfig(max_length=8, model_init_kwargs={"rope_parameters": YARN}, datasets=["a.txt"])
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config


def test_pydantic_entry_points_raise_our_errors_too():
    with pytest.raises(UserErrors):
        SFTConfig.model_validate({"max_length": "x"})


OPTIONS = {
    "max_length": st.integers(1, 2**22), "learning_rate": st.floats(0, 1), "packing": st.booleans(), "use_peft": st.booleans(),
    "max_steps": st.sampled_from([-1, 1, 12]), "save_strategy": st.sampled_from(["no", "steps", "epoch"]),
    "gradient_checkpointing": st.booleans(), "report_to": st.sampled_from(["none", "wandb", ["tensorboard", "trackio"]]),
    "lr_scheduler_type": st.sampled_from(["linear", "cosine", "constant"]), "data_seed": st.none() | st.integers(0, 2**31),
    "dataset_name": st.none() | st.text("abc0[]#:'", min_size=1), "memory_limit": st.none() | st.integers(2**20, 2**40),
    "datasets": st.none() | st.just([{"path": "x", "columns": ["text"]}]), "warmup_steps": st.sampled_from([0, 0.1, 5]),
}  # fmt: skip


@given(
    st.fixed_dictionaries(
        {"max_length": OPTIONS["max_length"]}, optional={k: v for k, v in OPTIONS.items() if k != "max_length"}
    )
)
@settings(max_examples=60, deadline=None)
def test_the_dump_of_a_run_is_a_legal_file_with_the_same_meaning(tmp_path_factory, options):
    try:
        config = SFTConfig(**options)
    except UserErrors:
        return
    path = tmp_path_factory.mktemp("run") / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load_config(path) == config == SFTConfig(**config.resolved())


def test_every_option_is_documented_and_in_a_group():
    for name, option in SFTConfig.model_fields.items():
        assert option.description
        assert option.description.endswith("."), name
        assert allowed_of(name)
    firsts = [first for _, first in GROUPS]
    assert next(iter(SFTConfig.model_fields)) == firsts[0]
    assert [name for name in SFTConfig.model_fields if name in firsts] == firsts


def test_the_import_is_light():
    code = "import sys, megaspan.config; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
