"""accelerate's launch file: every key is honoured or refused by its name (issue 5, item 7)."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import os
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from megaspan import world
from megaspan.config import SFTConfig
from megaspan.human import UserError, UserErrors
from megaspan.world import launchfile
from megaspan.world.dropped import SECTIONS, UNUSED, launch_file, launch_flags
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


GUIDE = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "FSDP", "downcast_bf16": "no",
    "enable_cpu_affinity": False, "machine_rank": 0, "main_process_port": 0, "main_training_function": "main",
    "mixed_precision": "bf16", "num_machines": 1, "num_processes": 8, "rdzv_backend": "static", "same_network": True,
    "tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False, "use_cpu": False,
    "fsdp_config": {
        "fsdp_activation_checkpointing": False, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True, "fsdp_offload_params": False, "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "FULL_STATE_DICT", "fsdp_version": 2,
    },
    "parallelism_config": {
        "parallelism_config_dp_replicate_size": 1, "parallelism_config_dp_shard_size": 1, "parallelism_config_tp_size": 1,
        "parallelism_config_cp_size": 8, "parallelism_config_cp_comm_strategy": "allgather",
    },
}  # fmt: skip
# Every key of such a file with another value than the guide's, and what becomes of it.
FOLLOWED = [
    ("mixed_precision", "bf16", lambda environ: world.launch_precision(environ) == "bf16"),
    ("mixed_precision", "no", lambda environ: world.launch_precision(environ) == "no"),
    ("mixed_precision", None, lambda environ: world.launch_precision(environ) == "no"),  # the same: a "no" says nothing
    ("gpu_ids", "2,3", lambda environ: environ["CUDA_VISIBLE_DEVICES"] == "2,3"),
    ("fsdp_transformer_layer_cls_to_wrap", "Layer", lambda environ: environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "Layer"),
    ("fsdp_state_dict_type", "SHARDED_STATE_DICT", lambda environ: True),  # checkpoints are, the final model is whole
    ("fsdp_activation_checkpointing", True, lambda environ: environ["FSDP_ACTIVATION_CHECKPOINTING"] == "true"),
    ("parallelism_config_cp_size", 2, lambda environ: launchfile.sizes(environ)["cp_size"] == 2),
    ("parallelism_config_sp_size", 2, lambda environ: launchfile.sizes(environ)["sp_size"] == 2),
    ("parallelism_config_dp_shard_size", 2, lambda environ: launchfile.sizes(environ)["dp_shard_size"] == 2),
    ("parallelism_config_dp_replicate_size", 2, lambda environ: launchfile.sizes(environ)["dp_replicate_size"] == 2),
]
REFUSED = [
    ("mixed_precision", "fp16"), ("debug", True), ("dynamo_backend", "INDUCTOR"),
    ("dynamo_mode", "max-autotune"), ("dynamo_use_fullgraph", True), ("dynamo_use_dynamic", True),
    ("dynamo_use_regional_compilation", True), ("fsdp_version", 1), ("fsdp_reshard_after_forward", False),
    ("fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"), ("fsdp_min_num_params", 7), ("fsdp_offload_params", True),
    ("fsdp_sharding_strategy", "HYBRID_SHARD"), ("fsdp_backward_prefetch", "BACKWARD_POST"), ("fsdp_forward_prefetch", True),
    ("fsdp_state_dict_type", "LOCAL_STATE_DICT"), ("fsdp_use_orig_params", False), ("fsdp_cpu_ram_efficient_loading", False),
    ("fsdp_ignored_modules", "lm_head"), ("parallelism_config_tp_size", 2), ("parallelism_config_cp_backend", "other"),
    ("parallelism_config_cp_comm_strategy", "alltoall"), ("parallelism_config_sp_backend", "other"),
    ("parallelism_config_sp_seq_length", 512), ("parallelism_config_sp_seq_length_is_variable", False),
    ("parallelism_config_sp_attn_implementation", "eager"),
]  # fmt: skip


def section_of(key: str) -> str | None:
    sections = {"fsdp": "fsdp_config", "parallelism": "parallelism_config", "dynamo": "dynamo_config"}
    return sections.get(key.partition("_")[0])


def launched_with(folder: Path, key: str, value: object) -> dict[str, str]:
    """What the installed accelerate sets for the guide's file with one other value: its own code is run."""
    file = copy.deepcopy(GUIDE)
    section = section_of(key)
    place = file if section is None else file.setdefault(section, {})
    if value is None:
        del place[key]
    else:
        place[key] = value
    if key.startswith("parallelism_config_sp_"):  # read beside such a size alone
        place |= {"parallelism_config_cp_size": 1, "parallelism_config_sp_size": place.get("parallelism_config_sp_size", 8)}
    (folder / "file.yaml").write_text(yaml.safe_dump(file))
    given = launch_command_parser().parse_args(["--config_file", str(folder / "file.yaml"), "script.py"])
    environ = prepare_multi_gpu_env(_validate_launch_command(given)[0])
    return {name: value for name, value in environ.items() if value != os.environ.get(name)}


@pytest.mark.parametrize(("key", "value", "follows"), FOLLOWED, ids=[f"{key}={value}" for key, value, _ in FOLLOWED])
def test_a_key_of_the_file_is_followed(tmp_path, key, value, follows):
    environ = launched_with(tmp_path, key, value)
    world.refuse_launch(environ)
    assert follows(environ)


@pytest.mark.parametrize(("key", "value"), REFUSED, ids=[f"{key}={value}" for key, value in REFUSED])
def test_a_key_of_the_file_is_refused_by_its_name(tmp_path, key, value):
    with pytest.raises(UserErrors) as caught:
        world.refuse_launch(launched_with(tmp_path, key, value))
    (error,) = caught.value.errors
    assert (key if key != "fsdp_version" else "asks for FSDP1") in str(error)


def test_every_key_has_another_value_in_the_table():
    """Keys of the file that its launcher uses up, and those that are refused before a rank exists, are all that is left."""
    tried = {key for key, *_ in FOLLOWED} | {key for key, _ in REFUSED}
    by_the_launcher = {
        "compute_environment", "distributed_type", "enable_cpu_affinity", "use_parallelism_config",
        "use_cpu", "gradient_accumulation_steps",
        "gradient_clipping", "fsdp_sync_module_states", "fsdp_activation_checkpointing_offload",
    }  # fmt: skip
    assert set(launchfile.NAMES) - tried == by_the_launcher


def parent_with(proc: Path, said: object, *words: str) -> int:
    """A made-up /proc with the process that started this one."""
    place = proc / "7"
    place.mkdir(parents=True)
    (place / "cwd").symlink_to(proc)
    (place / "cmdline").write_text("\0".join([*words, ""]))
    (proc / "my.yaml").write_text(yaml.safe_dump(said))
    return 7


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        (["python", "-m", "accelerate.commands.launch", "--config_file", "my.yaml", "script.py"], True),
        (["python", "/bin/accelerate", "launch", "--config_file=my.yaml", "script.py"], True),
        (["python", "/bin/accelerate", "launch", "script.py", "--config_file", "my.yaml"], False),  # the script's own
        (["python", "/bin/accelerate", "launch", "-m", "module", "--config_file", "my.yaml"], False),
        (["python", "/bin/accelerate", "launch", "--no_python", "script.sh", "--config_file", "my.yaml"], False),
        (["python", "/bin/accelerate", "launch", "--num_processes", "2", "-m", "module", "--config_file=my.yaml"], False),
        (["python", "/bin/accelerate", "launch", "--config_file", "my.yaml", "-m", "module", "--config_file", "no"], True),
        (["python", "/bin/accelerate", "launch", "--config_file", "no", "--config_file", "my.yaml", "script.py"], True),
        (["python", "/bin/accelerate-launch", "--config-file", "my.yaml", "--num-processes=2", "script.py"], True),
        (["python", "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", "my.yaml", "script.py"], True),
        (["python", "/lib/accelerate/commands/launch.py", "--config_file", "my.yaml", "script.py"], True),
        (["python", "/lib/accelerate/commands/launch.py", "--config_file", "my.yaml", "--no_such_option"], False),
        (["/envs/accelerate", "torchrun", "--config_file", "my.yaml", "script.py"], False),
        (["torchrun", "--config_file", "my.yaml", "script.py"], False),
        (["python", "/bin/accelerate", "launch", "--config_file", "absent.yaml", "script.py"], False),
    ],
)
def test_the_file_of_the_launcher_is_found(tmp_path, words, seen):
    parent = parent_with(tmp_path, {"use_cpu": True}, *words)
    assert launch_file(parent, tmp_path) == ({"use_cpu": True} if seen else {})


@pytest.mark.parametrize(("flags", "seen"), [([], True), (["--cpu"], False), (["--config_file", "no.yaml"], False)])
def test_the_file_of_accelerate_config_is_read_where_accelerate_reads_it(tmp_path, monkeypatch, flags, seen):
    parent = parent_with(tmp_path, {"use_cpu": True}, "python", "/bin/accelerate", "launch", *flags, "script.py")
    monkeypatch.setattr("accelerate.commands.config.default_config_file", str(tmp_path / "my.yaml"))
    assert launch_file(parent, tmp_path) == ({"use_cpu": True} if seen else {})


def test_what_accelerate_drops_is_refused_by_its_name(monkeypatch):
    """accelerate says nothing of a misspelt key of a section: the weights stay where they were."""
    said = {
        "use_cpu": True, "downcast_bf16": "yes", "enable_cpu_affinity": True, "megatron_lm_config": {},
        "deepspeed_config": {"zero_stage": 3}, "main_training_function": "main",
        "fsdp_config": {"fsdp_ofload_params": True, "version": 2}, "parallelism_config": {"parallelism_config_cp_size": 8},
    }  # fmt: skip
    monkeypatch.setattr(launchfile, "launch_file", lambda: said)
    with pytest.raises(UserErrors) as caught:
        world.refuse_launch(FSDP2)
    first, second, third, fourth = map(str, caught.value.errors)
    assert "fsdp_config has the key fsdp_ofload_params, which accelerate drops" in first
    assert first.endswith("Did you mean fsdp_offload_params?")
    assert "deepspeed_config: megaspan does not use DeepSpeed" in second
    assert "enable_cpu_affinity: processes are not pinned" in third
    assert "downcast_bf16: there is nothing here for TPUs" in fourth
    assert launchfile.wants_cpu(FSDP2)
    assert not launchfile.wants_cpu({})
    monkeypatch.setattr(launchfile, "launch_file", lambda: GUIDE)
    world.refuse_launch(FSDP2)
    assert not launchfile.wants_cpu(FSDP2)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--gradient_clipping 0.5", "--gradient_clipping .* an option of the run; got '0.5'. Write max_grad_norm in"),
        ("--gradient_accumulation_steps=4", "--gradient_accumulation_steps .*got '4'"),
        ("--fsdp_offload_params true", "--fsdp_offload_params .*got 'true'. Write offload_optimizer: true"),
        ("--parallelism-config-cp-size 2", "--parallelism_config_cp_size without .*; got '2'. Write cp_size: 2"),
        ("--gradient_accumulation_steps 1 --num_processes 2 --mixed_precision bf16 --fsdp_offload_params false", None),
        ("script.py --gradient_clipping 0.5", None),
    ],
)  # fmt: skip
def test_a_flag_of_accelerate_that_reaches_no_rank_is_refused(tmp_path, monkeypatch, flags, sentence):
    """accelerate reads it for DeepSpeed alone and drops it elsewhere: gradients were clipped at 1.0 all the same."""
    parent = parent_with(tmp_path, {}, "python", "/bin/accelerate", "launch", *flags.split(), "script.py")
    typed = launch_flags(parent, tmp_path)
    monkeypatch.setattr(launchfile, "launch_flags", lambda: typed)
    alone = {"ACCELERATE_MIXED_PRECISION": "no"}
    if sentence is None:
        world.refuse_launch(alone)
        return
    with pytest.raises(UserErrors, match=sentence) as caught:
        world.refuse_launch(alone)
    assert len(caught.value.errors) == 1
    assert launch_flags(parent, tmp_path / "elsewhere") == {}


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"num_processes": 2}, "num_processes: accelerate starts one process where distributed_type is MULTI_CPU; got 2"),
        ({"num_processes": 1, "parallelism_config": {"parallelism_config_cp_size": 2}},
         "parallelism_config_cp_size: accelerate drops it where distributed_type is MULTI_CPU; got 2"),
        ({"distributed_type": "FSDP", "num_processes": 2, "parallelism_config": {"parallelism_config_cp_size": 2}},
         "parallelism_config_cp_size: accelerate drops it under its flag --cpu, which starts one process; got 2. Leave --cpu"),
    ],
)  # fmt: skip
def test_a_file_that_shares_nothing_says_so(monkeypatch, said, sentence):
    """accelerate starts one process and passes no size on: the run would go on unshared."""
    monkeypatch.setattr(launchfile, "launch_file", lambda: {"distributed_type": "MULTI_CPU"} | said)
    alone = {"ACCELERATE_MIXED_PRECISION": "no"}
    with pytest.raises(UserErrors, match=sentence):
        world.refuse_launch(alone)
    world.refuse_launch(alone | {"WORLD_SIZE": "2", "RANK": "0", "PARALLELISM_CONFIG_CP_SIZE": "2"})


def test_every_key_of_the_installed_accelerate_is_read_by_its_launcher_or_decided():
    used_up = {
        "gpu_ids", "num_processes", "machine_rank", "num_machines", "main_process_ip", "main_process_port", "rdzv_backend",
        "same_network",
    }  # fmt: skip
    keys = {field.name for field in dataclasses.fields(ClusterConfig)}
    assert keys <= used_up | set(launchfile.NAMES) | set(SECTIONS) | set(UNUSED)
