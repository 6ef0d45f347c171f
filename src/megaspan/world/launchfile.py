"""What `accelerate launch --config_file FILE` asks for, read from the environment that it hands on.

Every key of such a file is honoured or refused by its name in the file. accelerate writes a value for each key that it knows,
also for the ones that the file leaves out, so a value passes where it is accelerate's default or what megaspan does anyway, and
anything else is refused: a sharding strategy that is silently another one costs a day. Names are those of accelerate 1.15
(`accelerate/utils/launch.py`); a test runs that code and finds a decision here for each variable it sets.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megaspan.config.parallel import AXES
from megaspan.human import UserError, UserErrors
from megaspan.world.dropped import dropped, launch_file, launch_flags
from megaspan.world.launched import launch

if TYPE_CHECKING:
    from megaspan.config import SFTConfig

PREFIX = "PARALLELISM_CONFIG_"
FAMILIES = ("FSDP_", PREFIX, "ACCELERATE_USE_", "ACCELERATE_DYNAMO_")  # an unknown variable of these is refused


@dataclass(frozen=True)
class Key:
    """One key of the file: its variable, the values that pass (besides none), and the sentence for any other."""

    variable: str
    name: str
    passes: tuple[str, ...]
    why: str
    do: str = "Remove it"


NOT_COMPILED = "no model is compiled here, only the element-wise passes of layers"
FSDP_AS_ALWAYS = "sharding works as FSDP2 does by default here, a layer at a time"

KEYS: tuple[Key, ...] = (
    Key("ACCELERATE_MIXED_PRECISION", "mixed_precision", ("no", "bf16"), "half precision and floats of 8 bits are not proven "
        "exact over this many tokens", "Write mixed_precision: bf16"),
    Key("ACCELERATE_DEBUG_MODE", "debug", ("false",), "it checks collectives of accelerate, which are not used here"),
    Key("ACCELERATE_CPU_AFFINITY", "enable_cpu_affinity", ("0",), "processes are not pinned to cores"),
    Key("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "gradient_accumulation_steps", ("1",), "it is an option of the run",
        "Write gradient_accumulation_steps in the options of the run"),
    Key("ACCELERATE_GRADIENT_CLIPPING", "gradient_clipping", (), "it is an option of the run",
        "Write max_grad_norm in the options of the run"),
    Key("ACCELERATE_DYNAMO_BACKEND", "dynamo_backend", ("no",), NOT_COMPILED, "Remove dynamo_config"),
    Key("ACCELERATE_DYNAMO_MODE", "dynamo_mode", ("default",), NOT_COMPILED, "Remove dynamo_config"),
    Key("ACCELERATE_DYNAMO_USE_FULLGRAPH", "dynamo_use_fullgraph", ("false",), NOT_COMPILED),
    Key("ACCELERATE_DYNAMO_USE_DYNAMIC", "dynamo_use_dynamic", ("false",), NOT_COMPILED),
    Key("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "dynamo_use_regional_compilation", ("false",),
        NOT_COMPILED),
    Key("ACCELERATE_USE_SAGEMAKER", "compute_environment", ("false",), "only machines that you start processes on are known",
        "Write compute_environment: LOCAL_MACHINE"),
    # Read elsewhere in this file, or the same as what megaspan does.
    Key("ACCELERATE_USE_CPU", "use_cpu", ("true", "false"), "it is true or false"),
    Key("ACCELERATE_USE_FSDP", "distributed_type", ("true", "false"), "it is true or false"),
    Key("ACCELERATE_USE_DEEPSPEED", "distributed_type", ("true", "false"), "it is true or false"),
    Key("ACCELERATE_USE_MEGATRON_LM", "distributed_type", ("true", "false"), "it is true or false"),
    Key("ACCELERATE_USE_PARALLELISM_CONFIG", "use_parallelism_config", ("true", "false"), "it is true or false"),
    Key("FSDP_VERSION", "fsdp_version", ("1", "2"), "there are two versions of FSDP", "Write fsdp_version: 2"),
    Key("FSDP_RESHARD_AFTER_FORWARD", "fsdp_reshard_after_forward", ("true", "full_shard"), "a layer's weights never stay "
        "gathered: with all of them there would be nothing left for the tokens"),
    Key("FSDP_SHARDING_STRATEGY", "fsdp_sharding_strategy", ("full_shard", "1"), "it is a key of FSDP1; copies of the model "
        "are a size here", "Write parallelism_config_dp_replicate_size for copies, or remove it"),
    Key("FSDP_AUTO_WRAP_POLICY", "fsdp_auto_wrap_policy", ("transformer_based_wrap",), FSDP_AS_ALWAYS,
        "Write fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"),
    Key("FSDP_MIN_NUM_PARAMS", "fsdp_min_num_params", ("0", "100000000"), FSDP_AS_ALWAYS),
    Key("FSDP_BACKWARD_PREFETCH", "fsdp_backward_prefetch", ("backward_pre",), "the next layer's weights are always fetched "
        "ahead"),
    Key("FSDP_FORWARD_PREFETCH", "fsdp_forward_prefetch", ("false",), "when weights are fetched follows from the plan"),
    Key("FSDP_USE_ORIG_PARAMS", "fsdp_use_orig_params", ("true",), "FSDP2 has no flat parameters"),
    Key("FSDP_SYNC_MODULE_STATES", "fsdp_sync_module_states", ("true",), "every rank reads its own shard of one checkpoint"),
    Key("FSDP_CPU_RAM_EFFICIENT_LOADING", "fsdp_cpu_ram_efficient_loading", ("true",), "weights are always read straight into "
        "the shards"),
    Key("FSDP_OFFLOAD_PARAMS", "fsdp_offload_params", ("false",), "weights stay on the GPU; optimizer states may leave it",
        "Write offload_optimizer: true in the options of the run"),
    # Checkpoints are in shards and the final model is whole, so both kinds of file are there.
    Key("FSDP_STATE_DICT_TYPE", "fsdp_state_dict_type", ("full_state_dict", "sharded_state_dict"), "a checkpoint is in shards, "
        "the final model is whole"),
    Key("FSDP_IGNORED_MODULES", "fsdp_ignored_modules", (), "all weights are sharded"),
    Key("FSDP_ACTIVATION_CHECKPOINTING", "fsdp_activation_checkpointing", ("true", "false"), "it is true or false"),
    Key("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "fsdp_activation_checkpointing_offload", ("true", "false"),
        "it is true or false"),
    Key(PREFIX + "TP_SIZE", "parallelism_config_tp_size", ("1",), "tensor parallelism splits single products; long rows are "
        "split by tokens or heads", "Write parallelism_config_cp_size"),
    Key(PREFIX + "CP_BACKEND", "parallelism_config_cp_backend", ("torch",), "attention over several GPUs is megaspan's own"),
    Key(PREFIX + "SP_BACKEND", "parallelism_config_sp_backend", ("deepspeed",), "the exchange of heads is megaspan's own"),
    Key(PREFIX + "CP_COMM_STRATEGY", "parallelism_config_cp_comm_strategy", ("allgather",), "keys and values are gathered a "
        "head group at a time"),
    Key(PREFIX + "SP_SEQ_LENGTH", "parallelism_config_sp_seq_length", (), "rows may have any length"),
    Key(PREFIX + "SP_SEQ_LENGTH_IS_VARIABLE", "parallelism_config_sp_seq_length_is_variable", ("true",), "rows may have any "
        "length"),
    Key(PREFIX + "SP_ATTN_IMPLEMENTATION", "parallelism_config_sp_attn_implementation", ("sdpa",), "megaspan chooses the "
        "fastest exact kernel"),
)  # fmt: skip
NAMES = (
    *(key.name for key in KEYS),
    *(f"parallelism_config_{axis}_size" for axis in AXES),
    "fsdp_transformer_layer_cls_to_wrap",
)
READ_AS_NUMBERS_OR_NAMES = (*(f"{PREFIX}{axis.upper()}_SIZE" for axis in AXES), "FSDP_TRANSFORMER_CLS_TO_WRAP")


def refuse_launch(environ: Mapping[str, str] = os.environ) -> None:
    """Refuses what a launcher asks for and megaspan does not do.

    Raises:
        UserErrors: every such key of accelerate's file by its name.
    """
    if errors := list(_refused(environ)):
        raise UserErrors(errors)


def _refused(environ: Mapping[str, str]) -> Iterator[UserError]:
    if engine := _other_engine(environ):
        yield UserError(f"the launch file asks for {engine}, which megaspan does not use", do=fsdp2_lines(environ))
    for key in KEYS:
        value = environ.get(key.variable) or "None"
        if value not in ("None", "none") and value.lower() not in key.passes:
            yield UserError(f"the launch file's {key.name}: {key.why}", got=value, do=key.do)
    for axis, text in _size_texts(environ):
        if not text.isdecimal() or int(text) < 1:
            yield UserError(f"the launch file's parallelism_config_{axis}_size must be a whole number of at least 1", got=text)
    started = launch(environ)
    if started.by == "accelerate launch":
        yield from dropped(launch_file(), set(NAMES), list(NAMES))
        yield from _alone(launch_file(), started.world_size, environ)
        yield from _typed_in_vain(launch_flags(), environ)
    known = {key.variable for key in KEYS} | set(READ_AS_NUMBERS_OR_NAMES)
    for variable in environ:
        if variable.startswith(FAMILIES) and variable not in known:
            yield UserError(f"{variable} is set, and this version of megaspan does not know it", got=environ[variable])


def _alone(said: Mapping[str, Any], ranks: int, environ: Mapping[str, str]) -> Iterator[UserError]:
    """What a launch file of a kind that shares nothing asks for all the same, and accelerate does not do, without a word."""
    kind, wish = said.get("distributed_type"), said.get("num_processes")
    if kind == "MULTI_CPU" and isinstance(wish, int) and wish > ranks:
        yield UserError(
            "the launch file's num_processes: accelerate starts one process where distributed_type is MULTI_CPU",
            got=wish,
            do=fsdp2_lines(environ),
        )
        return
    if _true(environ, "ACCELERATE_USE_FSDP") or any(variable.startswith(PREFIX) for variable in environ):
        return
    section = said.get("parallelism_config")
    for name, size in section.items() if isinstance(section, dict) else ():
        if isinstance(size, int) and size > 1 and kind == "FSDP":
            yield UserError(
                f"the launch file's {name}: accelerate drops it under its flag --cpu, which starts one process",
                got=size,
                do="Leave --cpu out; without a GPU, or with use_cpu: true in the file, ranks run on the CPU",
            )
        elif isinstance(size, int) and size > 1:
            yield UserError(
                f"the launch file's {name}: accelerate drops it where distributed_type is {kind}",
                got=size,
                do=fsdp2_lines(environ),
            )


def _typed_in_vain(typed: Mapping[str, str], environ: Mapping[str, str]) -> Iterator[UserError]:
    """Flags of `accelerate launch` that ask for something and reach no rank (`--gradient_clipping`: under DeepSpeed alone)."""
    for key in KEYS:
        value = typed.get(key.name)
        if value is not None and key.variable not in environ and value.lower() not in (*key.passes, "none"):
            yield UserError(f"accelerate drops its flag --{key.name} without a word: {key.why}", got=value, do=key.do)
    for axis in AXES:
        size = typed.get(name := f"parallelism_config_{axis}_size", "1")
        if size != "1" and f"{PREFIX}{axis.upper()}_SIZE" not in environ:
            do = f"Write {axis}_size: {size} in the options of the run"
            yield UserError(f"accelerate drops its flag --{name} without --use_parallelism_config", got=size, do=do)


def _other_engine(environ: Mapping[str, str]) -> str | None:
    if _true(environ, "ACCELERATE_USE_DEEPSPEED"):
        return "DeepSpeed"
    if _true(environ, "ACCELERATE_USE_MEGATRON_LM"):
        return "Megatron-LM"
    return "FSDP1" if _true(environ, "ACCELERATE_USE_FSDP") and environ.get("FSDP_VERSION", "1") != "2" else None


def fsdp2_lines(environ: Mapping[str, str]) -> str:
    """The lines of a launch file that start the same ranks under FSDP2."""
    sizes = {f"{axis}_size": int(text) for axis, text in _size_texts(environ) if text.isdecimal() and int(text) > 1}
    sizes = sizes or {"cp_size": max(2, launch(environ).world_size)}
    lines = [
        "distributed_type: FSDP",
        "fsdp_config:",
        "  fsdp_version: 2",
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        "parallelism_config:",
        *(f"  parallelism_config_{name}: {size}" for name, size in sizes.items()),
    ]
    return "Write in its place:\n" + "\n".join(lines) + "\n(cp_size is how many GPUs share the tokens of a row)"


def sizes(environ: Mapping[str, str] = os.environ) -> dict[str, int]:
    """The sizes in accelerate's file by option name; all four, or none where the file has no such section.

    accelerate writes 1 for a size that the file leaves out, so a 1 says nothing.
    """
    return {f"{axis}_size": int(text) for axis, text in _size_texts(environ)}


def _size_texts(environ: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    for axis in AXES:
        text = environ.get(f"{PREFIX}{axis.upper()}_SIZE")
        if text not in (None, "", "None"):
            yield axis, text


def refuse_contradictions(config: SFTConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Refuses what accelerate's file and the options of the run both say, differently.

    Raises:
        UserErrors: each of them by both names.
    """
    said = [
        (option, size, getattr(config, option))
        for option, size in sizes(environ).items()
        if size > 1 and option in config.model_fields_set and getattr(config, option) not in (None, size)
    ]
    if _true(environ, "FSDP_ACTIVATION_CHECKPOINTING") and not config.gradient_checkpointing:
        said.append(("gradient_checkpointing", True, False))
    if _true(environ, "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD") and not config.offload:
        said.append(("gradient_checkpointing_kwargs: offload", True, False))
    if environ.get("ACCELERATE_MIXED_PRECISION") == "bf16" and config.bf16 is False:
        said.append(("bf16", True, False))
    if wants_cpu(environ) and "use_cpu" in config.model_fields_set and not config.use_cpu:
        said.append(("use_cpu", True, False))
    if said:
        raise UserErrors(
            [
                UserError(f"{name} is {_word(theirs)} in accelerate's launch file and {_word(ours)} in the options of the run",
                          do="Keep one of them", option=name.partition(":")[0])
                for name, theirs, ours in said
            ]
        )  # fmt: skip


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def launch_precision(environ: Mapping[str, str] = os.environ) -> str | None:
    """The file's mixed_precision, or that of accelerate's flags: bf16 or no; None under other launchers.

    accelerate passes "no" where nobody has written anything, so a "no" leaves the choice to the options of the run.
    """
    return environ.get("ACCELERATE_MIXED_PRECISION") if launch(environ).by == "accelerate launch" else None


def wants_cpu(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether accelerate's file or flags say to run on the CPU. Beside FSDP accelerate reads it and hands it on to nobody."""
    return _true(environ, "ACCELERATE_USE_CPU") or (
        launch(environ).by == "accelerate launch" and launch_file().get("use_cpu") is True
    )


def refuse_wrapped(layers: Sequence[str], environ: Mapping[str, str] = os.environ) -> None:
    """Refuses a fsdp_transformer_layer_cls_to_wrap that is not the class of the model's layers, the unit that is sharded.

    Args:
        layers: names of the classes of the decoder layers.

    Raises:
        UserError: another class is named.
    """
    named = {name.strip() for name in (environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP") or "").split(",")} - {"", "None"}
    if named and named != set(layers):
        raise UserError(
            "the launch file's fsdp_transformer_layer_cls_to_wrap is not the class of this model's layers",
            found=", ".join(sorted(named)),
            allowed=", ".join(sorted(layers)),
            do="Remove it: the layers are found",
        )


def _true(environ: Mapping[str, str], variable: str) -> bool:
    return environ.get(variable, "").lower() in ("true", "1")
