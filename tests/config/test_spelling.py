"""One remedy, three spellings: that of the file, of the command line and of Python."""

from __future__ import annotations

import ast
import shlex
import subprocess
import sys

import pytest

from megaspan.config import SFTConfig, load_config
from megaspan.config.spelling import as_flags, as_python, for_command, for_python
from megaspan.human import UserError, UserErrors


@pytest.mark.parametrize(
    ("words", "flags", "python"),
    [
        ("Set gradient_checkpointing_kwargs: {offload: true} or remove it",
         "Set --gradient_checkpointing_kwargs '{offload: true}' or remove it",
         'Set gradient_checkpointing_kwargs={"offload": True} or remove it'),
        ("Add packing: false or packing_strategy: bfd, or remove it",
         "Add --packing false or --packing_strategy bfd, or remove it",
         'Add packing=False or packing_strategy="bfd", or remove it'),
        ("Write save_strategy: no.", "Write --save_strategy no.", 'Write save_strategy="no".'),
        ("Write learning_rate: 2e-5, max_length: 131,072 (seed: 3)?",
         "Write --learning_rate 2e-5, --max_length 131,072 (--seed 3)?",
         'Write learning_rate=2e-05, max_length="131,072" (seed=3)?'),
        ("Paste:\n  model_init_kwargs: {rope_parameters: {rope_type: yarn, factor: 4.0}}\n  packing: false"
         "  # as in datasets: here",
         "Paste:\n  --model_init_kwargs '{rope_parameters: {rope_type: yarn, factor: 4.0}}'\n"
         "  --packing false  # as in datasets: here",
         'Paste:\n  model_init_kwargs={"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}\n'
         "  packing=False  # as in datasets: here"),
        ("Set eos_token: '<s>'", "Set --eos_token '<s>'", 'Set eos_token="<s>"'),
    ],
)  # fmt: skip
def test_options_are_spelt_as_flags_and_as_arguments(words, flags, python):
    assert as_flags(words) == flags
    assert as_python(words) == python


@pytest.mark.parametrize(
    "words",
    ["Raise max_length", "Write parallelism_config_cp_size: 2", "Write factor: 4.0", "distributed_type: FSDP",
     "Did you mean seed?", "Write it as in --datasets: once", "Look at https://example.org"],
)  # fmt: skip
def test_other_words_are_left_alone(words):
    assert as_flags(words) == as_python(words) == words


def test_what_is_said_to_type_is_what_it_says():
    """The flag and the argument are read as the same option as the line."""
    line = "gradient_checkpointing_kwargs: {offload: false}"
    flags = load_config(None, ["--max_length", "4k", *shlex.split(as_flags(line))])
    call = ast.parse(f"f({as_python(line)})", mode="eval").body
    python = SFTConfig(max_length="4k", **{word.arg: ast.literal_eval(word.value) for word in call.keywords})
    assert flags.gradient_checkpointing_kwargs == python.gradient_checkpointing_kwargs == {"offload": False}


WRONG = {"max_length": "4k", "gradient_checkpointing": False, "offload_folder": "x"}


def test_from_python_the_remedy_is_an_argument():
    with pytest.raises(UserErrors, match=r'Set gradient_checkpointing_kwargs=\{"offload": True\} or remove it'):
        SFTConfig(**WRONG)
    with pytest.raises(UserError, match="Write seed=3"), for_python():
        raise UserError("wrong", do="Write seed: 3")


def test_from_a_command_it_is_a_line_of_the_file_or_a_flag(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("max_length: 4k\ngradient_checkpointing: false\noffload_folder: x\n")
    with pytest.raises(UserErrors) as caught:
        load_config(path, ["--packing", "false", "--packing_strategy", "bfd", "--memory_limit", "80"])
    for_command(caught.value, file=True)
    told = [str(error) for error in caught.value.errors]
    assert [each.partition(": ")[0] for each in told] == [f"{path} line 3", "command line", "command line"]
    assert told[0].endswith("Set gradient_checkpointing_kwargs: {offload: true} or remove it.")
    assert told[2].endswith("Write --memory_limit 80GiB.")
    for_command(caught.value, file=False)
    assert "Set --gradient_checkpointing_kwargs '{offload: true}'" in str(caught.value.errors[0])


def test_a_script_that_ends_with_an_error_says_it_in_python():
    """Also where the error comes from the trainer or from prepare, which know nothing of who started them."""
    code = "import megaspan, megaspan.human; raise megaspan.human.UserError('wrong', do='Write packing: false')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr.rstrip().endswith("wrong. Write packing=False.")
