"""YAML files and flags, the broken ones above all: every mistake is one sentence with its line."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megaspan.config import SFTConfig, load_config
from megaspan.human import UserErrors


@pytest.fixture
def write(tmp_path):
    def write(text: str | bytes):
        path = tmp_path / "run.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def errors_of(path, *flags) -> list[str]:
    with pytest.raises(UserErrors) as caught:
        load_config(path, flags)
    assert all("\n" not in str(error) for error in caught.value.errors)
    return [str(error) for error in caught.value.errors]


def test_a_file_and_flags_over_it(write):
    path = write("max_length: 128k\nseed: 1\nlearning-rate: 1e-4\nsave_strategy: no\n")
    config = load_config(path, ["--seed", "7", "--output-dir=out", "--gradient_checkpointing_kwargs", "{offload: false}"])
    assert (config.max_length, config.seed, config.learning_rate, config.output_dir) == (131072, 7, 1e-4, "out")
    assert config.save_strategy == "no"
    assert not config.offload


def test_what_a_flag_makes_idle_in_the_file_goes(write):
    path = write("max_length: 4k\nnum_train_epochs: 3\nsave_steps: 5\nsave_total_limit: 2\nuse_peft: true\nlora_r: 8\n")
    config = load_config(path, ["--max_steps", "5", "--save_strategy", "no", "--no-use_peft"])
    assert (config.max_steps, config.save_strategy, config.use_peft) == (5, "no", False)
    assert not {"num_train_epochs", "save_steps", "save_total_limit", "lora_r"} & set(config.given())
    found = errors_of(path, "--max_steps", "5", "--num_train_epochs", "2")
    assert [error for error in found if "num_train_epochs has no effect" in error]
    assert "line 2" in errors_of(write("max_length: 4k\nnum_train_epochs: 3\nmax_steps: 5\n"), "--save_strategy", "no")[0]


@pytest.mark.parametrize(
    ("line", "flag", "value"),
    [
        ("datasets: [{path: a.txt}]", "--dataset_name", "b.txt"), ("dataset_name: a.txt", "--datasets", "[{path: b.txt}]"),
        ("warmup_steps: 3", "--warmup_ratio", "0.1"), ("warmup_ratio: 0.1", "--warmup_steps", "3"),
    ],
)  # fmt: skip
def test_a_flag_replaces_what_excludes_it_in_the_file(write, line, flag, value):
    config = load_config(write(f"max_length: 4k\n{line}\n"), [flag, value])
    assert line.partition(":")[0] not in config.given()
    assert flag[2:] in config.given()
    assert errors_of(write(f"max_length: 4k\n{line}\n"), flag, value, "--" + line.partition(":")[0], line.partition(": ")[2])


def test_a_flag_without_a_value_is_said_once(write):
    assert len(errors_of(None, "--max_length")) == 1
    assert len(errors_of(write("max_length: 4k\n"), "--learning_rate", "--seed", "3")) == 1
    assert load_config(write("max_length: 4k\n"), ["--packing", "--bf16"]).packing


def test_flags_alone_are_enough():
    assert load_config(None, ["--max_length", "1M"]) == SFTConfig(max_length="1M")


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--packing"], "packing", True), (["--no-packing"], "packing", False), (["--no_packing"], "packing", False),
        (["--packing", "no"], "packing", False), (["--max_steps", "-1"], "max_steps", -1),
        (["--learning_rate=2e-5"], "learning_rate", 2e-5),
        (["--no-activation-checkpointing"], "gradient_checkpointing", False),
        (["--report_to", "wandb", "trackio"], "report_to", ("wandb", "trackio")), (["--max_rows", "null"], "max_rows", None),
        (["--eos_token", "[EOS]"], "eos_token", "[EOS]"), (["--eos_token", "<|im_end|>"], "eos_token", "<|im_end|>"),
        (["--dataset_name", "*.txt"], "dataset_name", "*.txt"),
        (["--dataset_name", "{a,b}/*.md"], "dataset_name", "{a,b}/*.md"), (["--dataset_name", "#1"], "dataset_name", "#1"),
        (["--dataset_name", "a: b"], "dataset_name", "a: b"), (["--model_revision", "0123"], "model_revision", "0123"),
        (["--output_dir", "12"], "output_dir", "12"), (["--resume_from_checkpoint"], "resume_from_checkpoint", True),
        (["--datasets", "[{path: x.txt}]"], "datasets", None),
    ],
)  # fmt: skip
def test_flags_are_read_as_a_person_means_them(flags, name, value):
    config = load_config(None, ["--max_length", "4k", *flags])
    found = getattr(config, name)
    assert found[0]["path"] == "x.txt" if name == "datasets" else found == value


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("model_revision: 12e4567", "model_revision", "12e4567"), ("model_revision: 0123456", "model_revision", "0123456"),
        ("output_dir: 2024-01-01", "output_dir", "2024-01-01"), ("learning_rate: 2e-5", "learning_rate", 2e-5),
        ("learning_rate: 1.0e-4", "learning_rate", 1e-4), ("save_strategy: no", "save_strategy", "no"),
        ("packing: no", "packing", False), ("max_steps: 1_000", "max_steps", 1000), ("max_rows:", "max_rows", None),
        ("max_rows: ~", "max_rows", None), ("memory_limit: 80GiB", "memory_limit", 80 * 2**30),
        ("dataset_name: 'a: b'", "dataset_name", "a: b"),
    ],
)  # fmt: skip
def test_yaml_means_what_it_says(write, text, name, value):
    assert getattr(load_config(write(f"max_length: 4k\n{text}\n")), name) == value


def test_an_anchor_may_be_merged_and_a_byte_order_mark_is_no_key(write):
    path = write("\ufeffmax_length: 4k\r\nmodel_init_kwargs: {<<: {num_hidden_layers: 2}, vocab_size: 8}\r\n")
    assert load_config(path).config_overrides == {"num_hidden_layers": 2, "vocab_size": 8}


def test_every_mistake_has_its_line(write):
    path = write("max_length: 12q\n\nlerning_rate: 1e-4\nfp16: true\nparallelism_config_cp_size: 0\nlora_r: 8\n")
    found = errors_of(path, "--sed", "3")
    assert [sentence.split(":")[0].removeprefix(f"{path} ") for sentence in found] == [
        "line 1",
        "line 3",
        "line 4",
        "line 5",
        "line 6",
        "command line",
    ]
    assert "Did you mean learning_rate?" in found[1]
    assert "Did you mean seed?" in found[5]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty"), ("# nothing\n", "is empty"), ("- a\n- b\n", "is not a mapping"),
        ("just words\n", "is not a mapping"), ("max_length: [1\nseed: }\n", "line 2, column 5: this is not YAML"),
        ("max_length: 4k\n\tseed: 1\n", "line 2, column 1: this is not YAML: there is a tab"),
        ("max_length: 4k\n---\nseed: 1\n", "Remove the line ---"),
        (b"\xff\xfe\x00\x01", "not UTF-8"), ("max_length: 4k\nmax_length: 8k\n", "line 2: max_length is already on line 1"),
        ("max_length: 4k\nmax-length: 8k\n", "already on line 1"),
        ("max_length: 4k\nmodel_init_kwargs:\n  a: 1\n  b: {c: 1, c: 2}\n", "line 4: c is already on line 4"),
        ("max_length: !!python/object/apply:os.getcwd []\n", "a tag that names a type"),
        ("seed: 1\n", "max_length is missing"), ("max_length: null\n", "max_length is missing"),
        ("max_length: 4k\n? [a]\n: 1\n", "line 2: this key is no name of an option"),
        ("max_length: 4k\n1: 2\n", "1 is not an option"),
        ("max_length: 4k\nmodel_revision: 1.5\n", "Put it in quotes"),
        ("max_length: 4k\nmodel_init_kwargs: &a {x: *a}\n", "an anchor in it holds itself"),
        ("max_length: " + "[" * 2000 + "]" * 2000, "nested too deeply"), ("<<: 5\nmax_length: 4k\n", "line 1, column 5"),
        ("max_length: .inf\n", "max_length must be"), ("max_length: " + "9" * 400 + "k\n", "max_length must be"),
        ("max_length: 4k\nlearning_rate: " + "9" * 400, "learning_rate must be"),
        ("max_length: 4k\nmax_lost_tokens: " + "9" * 400 + "k", "max_lost_tokens must be"),
        ("max_length: 4k\nseed: 4294967296\n", "seed must be"), ('max_length: 4k\noutput_dir: "a\\0b"\n', "output_dir must be"),
    ],
)  # fmt: skip
def test_a_broken_file_is_one_sentence(write, text, sentence):
    found = errors_of(write(text))
    assert len(found) == 1
    assert sentence in found[0]


def test_a_missing_file_and_a_folder(tmp_path):
    assert "there is no file" in errors_of(tmp_path / "nothing.yaml")[0]
    assert "is a folder" in errors_of(tmp_path)[0]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["seed", "1"], "'seed' is not a flag"), (["--seed", "1", "--seed", "2"], "--seed is given twice"),
        (["--seed", "1", "2"], "seed must be a whole number"), (["-seed", "1"], "'-seed' is not a flag"),
        (["--"], "'--' is not a flag"), (["--seed"], "--seed needs a value; allowed: a whole number of at least 0"),
        (["--no-seed"], "seed must be a whole number"), (["--no_cuda"], "use_cpu"),
        (["--config", "x.yaml"], "megaspan train FILE.yaml"), (["--seed", "{"], "seed must be"),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_one_sentence(flags, sentence):
    found = errors_of(None, *flags, "--max_length", "4k")
    assert any(sentence in error for error in found)


@given(
    st.dictionaries(
        st.text(max_size=8), st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=5), st.lists, max_leaves=4)
    )
)
@example({"self": None})
@settings(max_examples=60, deadline=None)
def test_nothing_but_our_errors_ever_comes_out(options):
    with contextlib.suppress(UserErrors):
        SFTConfig(**options)


@given(st.lists(st.text(max_size=12), max_size=5))
@settings(max_examples=60, deadline=None)
def test_any_command_line_is_read_or_refused(words):
    with contextlib.suppress(UserErrors):
        load_config(None, words)


@given(st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_any_file_is_read_or_refused(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("any") / "x.yaml"
    path.write_text(text, encoding="utf-8", errors="replace")
    with contextlib.suppress(UserErrors):
        load_config(path)
