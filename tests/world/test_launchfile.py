"""accelerate's launch file: every key is honoured or refused by its name (issue 5, item 7)."""

from __future__ import annotations

import argparse
import os

import pytest
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from megaspan import world
from megaspan.config import SFTConfig
from megaspan.human import UserError, UserErrors
from megaspan.world import launchfile
from megaspan.world.launchfile import KEYS, READ_AS_NUMBERS_OR_NAMES

# What accelerate 1.15 sets for the FSDP2 file of TRL, with cp_size 8.
FSDP2 = {
    "ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_IGNORED_MODULES": "None",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "1",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "1", "PARALLELISM_CONFIG_TP_SIZE": "1", "PARALLELISM_CONFIG_CP_SIZE": "8",
    "PARALLELISM_CONFIG_CP_BACKEND": "torch", "PARALLELISM_CONFIG_SP_SIZE": "1", "PARALLELISM_CONFIG_SP_BACKEND": "deepspeed",
    "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "allgather", "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3",
}  # fmt: skip


def test_the_file_of_the_guide_passes():
    world.refuse_launch({})
    world.refuse_launch(FSDP2)
    assert launchfile.sizes(FSDP2) == {"dp_replicate_size": 1, "dp_shard_size": 1, "cp_size": 8, "sp_size": 1}


@pytest.mark.parametrize("key", KEYS, ids=[key.variable for key in KEYS])
def test_every_key_passes_at_rest_and_is_refused_by_name_otherwise(key):
    passing = ("", "None", *key.passes, *(value.upper() for value in key.passes))
    for value in passing:
        if value.lower() != "true" or not key.variable.endswith(("_DEEPSPEED", "_MEGATRON_LM")):  # these ask for an engine
            world.refuse_launch({"FSDP_VERSION": "2", key.variable: value})
    with pytest.raises(UserErrors) as caught:
        world.refuse_launch({key.variable: "something"})
    (error,) = caught.value.errors
    assert f"the launch file's {key.name}: {key.why}; got 'something'" in str(error)
    assert error.do


@pytest.mark.parametrize(
    ("environ", "sentences"),
    [
        ({"FSDP_VERSION": "1"}, ["asks for FSDP1", "  fsdp_version: 2\n", "  parallelism_config_cp_size: 8\n"]),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "PARALLELISM_CONFIG_CP_SIZE": "1", "PARALLELISM_CONFIG_SP_SIZE": "2"},
         ["asks for DeepSpeed", "distributed_type: FSDP\n", "  parallelism_config_sp_size: 2\n"]),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, ["asks for Megatron-LM"]),
        ({"PARALLELISM_CONFIG_TP_SIZE": "2"}, ["parallelism_config_tp_size"]),
        ({"PARALLELISM_CONFIG_CP_SIZE": "0"}, ["parallelism_config_cp_size must be a whole number of at least 1; got '0'"]),
        ({"PARALLELISM_CONFIG_EP_SIZE": "2"}, ["PARALLELISM_CONFIG_EP_SIZE is set, and this version"]),
        ({"FSDP_NEW": "x"}, ["FSDP_NEW is set"]),
        ({"ACCELERATE_MIXED_PRECISION": "fp16", "FSDP_OFFLOAD_PARAMS": "true"}, ["mixed_precision: bf16", "fsdp_offload_"]),
    ],
)  # fmt: skip
def test_what_is_not_followed_is_refused_with_what_to_write(environ, sentences):
    with pytest.raises(UserErrors) as caught:
        world.refuse_launch(FSDP2 | environ)
    for sentence in sentences:
        assert sentence in str(caught.value)


def test_the_lines_to_paste_are_a_file_that_accelerate_reads(tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file

    lines = launchfile.fsdp2_lines({"WORLD_SIZE": "4", "RANK": "0"}).splitlines()[1:-1]
    (tmp_path / "file.yaml").write_text("\n".join(lines))
    read = load_config_from_file(str(tmp_path / "file.yaml"))
    assert read.distributed_type == "FSDP"
    assert read.fsdp_config["fsdp_version"] == 2
    assert read.parallelism_config == {"parallelism_config_cp_size": 4}


@pytest.mark.parametrize(
    ("environ", "options", "sentence"),
    [
        ({}, {"cp_size": 4}, "cp_size is 8 in accelerate's launch file and 4 in the options of the run"),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, {"gradient_checkpointing": False}, "gradient_checkpointing is true in"),
        (
            {"FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true"},
            {"gradient_checkpointing_kwargs": {"offload": False}},
            "gradient_checkpointing_kwargs: offload is true in",
        ),
        ({}, {"bf16": False}, "bf16 is true in accelerate's launch file and false in the options"),
        ({"ACCELERATE_USE_CPU": "True"}, {"use_cpu": False}, "use_cpu is true in"),
    ],
)
def test_what_is_said_twice_must_be_the_same(environ, options, sentence):
    with pytest.raises(UserErrors, match=sentence):
        launchfile.refuse_contradictions(SFTConfig(max_length=8, **options), FSDP2 | environ)
    launchfile.refuse_contradictions(SFTConfig(max_length=8, cp_size=8), FSDP2 | environ)


def test_the_class_that_the_file_wraps_is_the_class_of_the_layers():
    world.refuse_wrapped(["Qwen3DecoderLayer"], {})
    world.refuse_wrapped(["Qwen3DecoderLayer"], {"FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen3DecoderLayer"})
    with pytest.raises(UserError, match=r"LlamaDecoderLayer.*allowed: Qwen3DecoderLayer"):
        world.refuse_wrapped(["Qwen3DecoderLayer"], {"FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer"})


def arguments(*words: str) -> argparse.Namespace:
    found = launch_command_parser().parse_args([*words, "--num_processes", "8", "--main_process_port", "0", "script.py"])
    found.num_machines, found.use_cpu, found.gpu_ids, found.num_cpu_threads_per_process = 1, False, "all", 1
    return found


def test_every_variable_that_the_installed_accelerate_sets_is_decided():
    """Its own code is run with every feature on, so that a variable added there is a decision here and never an accident."""
    given = arguments(
        "--use_fsdp", "--fsdp_version", "2", "--use_parallelism_config", "--parallelism_config_cp_size", "4",
        "--parallelism_config_sp_size", "2", "--mixed_precision", "bf16", "--enable_cpu_affinity", "--dynamo_backend", "no",
        "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "--fsdp_transformer_layer_cls_to_wrap", "Layer",
        "--fsdp_backward_prefetch", "BACKWARD_PRE", "--fsdp_state_dict_type", "FULL_STATE_DICT", "--debug",
    )  # fmt: skip
    given.fsdp_ignored_modules = "x"
    environ = prepare_multi_gpu_env(given)
    new = {name for name in environ if environ[name] != os.environ.get(name)} - {"OMP_NUM_THREADS"}
    known = {key.variable for key in KEYS} | set(READ_AS_NUMBERS_OR_NAMES)
    assert len(new) > 30
    assert new <= known


def test_the_defaults_of_the_installed_accelerate_pass():
    given = arguments("--use_fsdp", "--fsdp_version", "2", "--mixed_precision", "no", "--dynamo_backend", "no")
    environ = prepare_multi_gpu_env(given)
    world.refuse_launch({name: value for name, value in environ.items() if value != os.environ.get(name)})
