"""Keys of accelerate's launch file that accelerate reads and hands on to nobody.

What a rank can see of the file is the environment (`launchfile.py`), and accelerate drops some of it without a word: a
misspelt key of a section, a section of an engine that is not used, `use_cpu` and `enable_cpu_affinity` beside FSDP. So the file
itself is looked at too, where the parent process is `accelerate launch`, and for such keys alone: flags and
defaults of accelerate change what the others mean. Sections and behaviour are those of accelerate 1.15
(`accelerate/commands/launch.py`).
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from megaspan.human import UserError, nearest

# Sections whose keys have a name of their own here, with what accelerate lets a user leave out before each key.
SECTIONS = {"fsdp_config": "fsdp_", "parallelism_config": "", "dynamo_config": "dynamo_"}
_TPU = "there is nothing here for TPUs"
UNUSED = {
    "deepspeed_config": "megaspan does not use DeepSpeed", "megatron_lm_config": "megaspan does not use Megatron-LM",
    "mpirun_config": "ranks do not start by MPI here", "fp8_config": "floats of 8 bits are not proven exact",
    "enable_cpu_affinity": "processes are not pinned to cores", "main_training_function": "a script starts at its first line",
    "downcast_bf16": _TPU, "tpu_name": _TPU, "tpu_zone": _TPU, "tpu_use_cluster": _TPU, "tpu_use_sudo": _TPU, "tpu_vm": _TPU,
    "tpu_env": _TPU, "commands": _TPU, "command_file": _TPU,
}  # fmt: skip


def launch_file(parent: int | None = None, proc: Path = Path("/proc")) -> Mapping[str, Any]:
    """What the launch file of the parent process says; empty where there is none to be seen.

    Args:
        parent: its process number; None is that of this process's parent.
        proc: where Linux tells of processes.
    """
    place = proc / str(os.getppid() if parent is None else parent)
    try:
        name = launch_file_name(parent, proc)
        said = None if name is None else yaml.safe_load((Path(os.readlink(place / "cwd")) / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return said if isinstance(said, dict) else {}


def launch_file_name(parent: int | None = None, proc: Path = Path("/proc")) -> str | None:
    """The launch file of the parent process as it was typed there; None where there is none to be seen."""
    place = proc / str(os.getppid() if parent is None else parent)
    try:
        return _config_file((place / "cmdline").read_text(encoding="utf-8").removesuffix("\0").split("\0"))
    except (OSError, ValueError):
        return None


def _config_file(words: list[str]) -> str | None:
    """The file that accelerate reads for a command line of its own; None where there is none, or for any other command.

    A script may have a `--config_file` too, so accelerate's own parser is asked where its options end and the script begins.
    """
    if (found := _parsed(words)) is None:
        return None
    from accelerate.commands.config import default_config_file

    _, given = found
    if given.config_file is None and not given.cpu and os.path.isfile(default_config_file):
        return str(default_config_file)  # what `accelerate config` has written
    return None if given.config_file is None else str(given.config_file)


def _parsed(words: list[str]) -> tuple[ArgumentParser, Namespace] | None:
    """Accelerate's parser and what it reads in a command line of its own; None for any other command."""
    start = next((place for place, word in enumerate(words) if place and _is_accelerate(word)), None)
    if start is None:
        return None
    from accelerate.commands.launch import launch_command_parser

    own, parser = words[start + 1 :], launch_command_parser()
    try:
        return parser, parser.parse_args(own[1:] if own[:1] == ["launch"] else own)
    except SystemExit:  # nothing that accelerate would have started
        return None


def launch_flags(parent: int | None = None, proc: Path = Path("/proc")) -> dict[str, str]:
    """The flags that the parent process was given as accelerate, by name, but for those at accelerate's default.

    Of some, `--gradient_clipping` for one, nothing reaches the ranks: it is for DeepSpeed alone.
    """
    place = proc / str(os.getppid() if parent is None else parent)
    try:
        found = _parsed((place / "cmdline").read_text(encoding="utf-8").removesuffix("\0").split("\0"))
    except (OSError, ValueError):
        return {}
    if found is None:
        return {}
    parser, given = found
    return {name: str(value) for name, value in vars(given).items() if value is not None and value != parser.get_default(name)}


def _is_accelerate(word: str) -> bool:
    """Whether a word starts accelerate: its command, its module, or that module's file."""
    return Path(word).name.startswith("accelerate") or word.endswith("accelerate/commands/launch.py")


def dropped(said: Mapping[str, Any], known: Container[str], names: list[str]) -> Iterator[UserError]:
    """An error for each key that accelerate drops.

    Args:
        said: the file.
        known: names of keys that reach the ranks.
        names: the same, to find the one that was meant.
    """
    for section, prefix in SECTIONS.items():
        for key, value in _mapping(said.get(section)).items():
            name = str(key) if str(key).startswith(prefix) else f"{prefix}{key}"
            if name not in known:
                close = nearest(name, names)
                yield UserError(
                    f"the launch file's {section} has the key {key}, which accelerate drops without a word",
                    got=value,
                    do=f"Did you mean {close}?" if close else "Remove it",
                )
    for key, why in UNUSED.items():
        value = said.get(key)
        if value and str(value).lower() not in ("no", "false", "none", "main"):
            yield UserError(f"the launch file's {key}: {why}", got=value, do="Remove it")


def _mapping(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, dict) else {}
