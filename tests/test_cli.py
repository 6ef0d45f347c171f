"""The verbs as a user types them: exit codes, one sentence an error, result on stdout and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import termios
import time
import types
from pathlib import Path

import pytest

from megaspan import cli, world
from megaspan.config import SFTConfig
from megaspan.human import UserError
from tests.models import save_model_folder


@pytest.fixture
def verb(monkeypatch):
    """Puts a made-up module in place of the one a verb calls: verb("megaspan.trainer", run=...)."""

    def put(name: str, **functions):
        module = types.ModuleType(name)
        for function, body in functions.items():
            setattr(module, function, body)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        monkeypatch.setattr(sys.modules[parent] if parent in sys.modules else __import__(parent), child, module, raising=False)

    return put


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("max_length: 4k\nmodel_name_or_path: qwen3-0.6b\ndataset_name: book.txt\n")
    return str(path)


def failing(error: BaseException):
    def run(*_):
        raise error

    return run


class Plan:
    model = types.SimpleNamespace(exact=True)

    def __init__(self, fits: bool) -> None:
        self.fits = fits

    def render(self) -> str:
        return "the plan"

    def as_dict(self) -> dict[str, bool]:
        return {"fits": self.fits}


def test_help_names_every_verb_and_is_fast():
    began = time.monotonic()
    shown = subprocess.run([sys.executable, "-m", "megaspan", "--help"], capture_output=True, text=True, check=True)
    seconds = time.monotonic() - began
    for name in cli.VERBS:
        assert f"megaspan {name}" in shown.stdout
    assert seconds < 5  # half a second on an idle machine; the next test says why
    code = "import sys; from megaspan import cli; cli.main(['train', '--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_the_help_of_train_prints_every_option_with_its_documentation(capsys):
    assert cli.main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    flat = " ".join(shown.split())
    for name, option in SFTConfig.model_fields.items():
        assert f"--{name}\n" in shown
        assert option.description in flat
    assert "default 2e-5" in flat
    assert "\nData\n" in shown


@pytest.mark.parametrize("name", list(cli.VERBS))
def test_every_verb_has_help(name, capsys):
    assert cli.main([name, "-h"]) == 0
    assert f"megaspan {name}" in capsys.readouterr().out


def test_train_gets_the_configuration_and_prints_the_result(verb, config, capsys):
    seen = []
    verb("megaspan.trainer", run=lambda given: seen.append(given) or {"loss": 4.3, "model": "run/model"})
    assert cli.main(["train", config, "--seed", "7", "--nproc", "1"]) == 0
    assert (seen[0].seed, seen[0].max_length) == (7, 4096)
    assert capsys.readouterr().out == "loss: 4.3\nmodel: run/model\n"


def test_json_leaves_stdout_to_the_result(verb, config, capsys):
    def run(_):
        print("a library talks")
        return {"path": Path("run/model"), "steps": 12}

    verb("megaspan.trainer", run=run)
    assert cli.main(["train", config, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"path": "run/model", "steps": 12}
    assert "a library talks" in captured.err
    assert cli.main(["train", config]) == 0
    assert capsys.readouterr().out == "path: run/model\nsteps: 12\n"


@pytest.mark.parametrize(("fits", "code"), [(True, 0), (False, 1)])
def test_plan_says_by_its_exit_code_whether_it_fits(verb, config, capsys, fits, code):
    plan = {"plan_command": lambda given, machine: Plan(fits and machine == world.machine()), "is_plain": lambda given: True}
    verb("megaspan.plan", has_plain_adapter=lambda given, model: True, **plan)
    assert cli.main(["plan", config]) == code
    assert capsys.readouterr().out == "the plan\n"
    assert cli.main(["plan", config, "--json"]) == code
    assert json.loads(capsys.readouterr().out) == {"fits": fits}


@pytest.mark.parametrize(("flags", "show"), [([], None), (["--show", "3"], 3), (["--show=0", "--seed", "1"], 0)])
def test_data_shows_a_row(verb, config, capsys, flags, show):
    verb("megaspan.data", data_command=lambda given, row: print(f"row {row}") or {"row": row})
    assert cli.main(["data", config, *flags]) == 0
    assert capsys.readouterr().out == f"row {show}\n"
    assert cli.main(["data", config, *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"row": show}


def test_eval_and_export_pass_on_what_was_typed(verb, capsys):
    verb("megaspan.evaluate", evaluate_command=lambda what, flags: {"what": what, "flags": flags})
    assert cli.main(["eval", "run", "--max_length", "1M", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"what": "run", "flags": ["--max_length", "1M"]}
    merged = []
    verb("megaspan.store", export=lambda run, out, merge: merged.append(merge) or Path(out))
    assert cli.main(["export", "run", "folder"]) == 0
    assert capsys.readouterr().out.startswith("folder ")
    assert cli.main(["export", "run", "folder", "--merge"]) == 0
    assert merged == [False, True]


def test_env_needs_nothing(capsys):
    assert cli.main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["versions"]["torch"]
    assert cli.main(["env"]) == 0
    assert "host_memory: " in capsys.readouterr().out


def test_numbers_that_json_has_no_word_for_become_null(verb, config, capsys):
    """A finished run that is resumed has no step left and no loss; a bucket without a trained token has none either."""
    verb("megaspan.trainer", run=lambda config: {"loss": float("nan"), "positions": [{"loss": float("inf")}], "steps": 0})
    assert cli.main(["train", config, "--json"]) == 0
    strict = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert strict == {"loss": None, "positions": [{"loss": None}], "steps": 0}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["trian", "x.yaml"], "Did you mean megaspan train?"),
        (["train"], "there is no configuration"),
        (["train", "no.yaml"], "there is no file"),
        (
            ["train", "a.yaml", "b.yaml"],
            "takes 0 or 1 word before its flags; got a.yaml b.yaml. Type megaspan train CONFIG.yaml",
        ),
        (["eval"], "takes 1 word before its flags; got none. Type megaspan eval"),
        (["export", "run"], "takes 2 words before its flags; got run. Type megaspan export RUN OUT"),
        (["env", "--seed", "1"], "--seed is not a flag of megaspan env; allowed: --json. Type megaspan env."),
        (["train", "--nproc", "0", "--max_length", "4k"], "--nproc must be at least 1"),
        (["plan", "--nproc", "0", "--max_length", "4k"], "--nproc must be at least 1"),
        (["train", "--nproc", "all", "--max_length", "4k"], "--nproc must be a whole number"),
        (["train", "--nproc", "--max_length", "4k"], "--nproc must be a whole number of at least 0; got nothing behind it"),
        (["train", "--max_length"], "--max_length needs a value"),
        (["data", "--show", "x", "--max_length", "4k"], "--show must be a whole number"),
        (["data", "--show", "²", "--max_length", "4k"], "--show must be a whole number"),
        (["--verbose"], "has no verb"),
        (["env", "--json=yes"], "--json takes no value"),
    ],
)
def test_a_wrong_command_is_one_sentence_and_exit_code_2(words, sentence, capsys):
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert sentence in captured.err
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err


def test_all_errors_of_a_file_come_at_once(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("max_length: 12q\nlerning_rate: 1\nfp16: true\n")
    assert cli.main(["train", str(path), "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 3
    assert json.loads(captured.out)["exit_code"] == 2
    assert len(json.loads(captured.out)["errors"]) == 3


class OutOfMemoryError(RuntimeError):
    """Stands for torch's class of this name."""


def with_note(error: BaseException, note: str) -> BaseException:
    error.add_note(note)
    return error


class Interrupted(Exception):
    signum = signal.SIGTERM


@pytest.mark.parametrize(
    ("error", "code", "sentences"),
    [
        (UserError("no", do="Do yes"), 2, ["no. Do yes."]),
        (with_note(OutOfMemoryError("CUDA out of memory. Tried 3 GiB\nmore"), "in the backward of layer 3"), 3,
         ["out of memory: CUDA out of memory. Tried 3 GiB", "in the backward of layer 3", "megaspan plan"]),
        (RuntimeError("CUDA error: out of memory"), 3, ["out of memory: CUDA error"]),
        (MemoryError(), 3, ["no memory left on the host"]),
        (KeyboardInterrupt(), 130, ["interrupted by SIGINT"]),
        (Interrupted("SIGTERM"), 143, ["interrupted by SIGTERM"]),
        (ModuleNotFoundError("No module named 'peft'", name="peft"), 2, ["pip install 'megaspan[lora]'"]),
        (ModuleNotFoundError("No module named 'foo'", name="foo"), 1, ["Traceback", "foo"]),
        (ValueError("a fault of ours"), 1, ["Traceback", "ValueError: a fault of ours"]),
    ],
)  # fmt: skip
def test_every_kind_of_failure_has_its_exit_code(verb, config, capsys, error, code, sentences):
    verb("megaspan.trainer", run=failing(error))
    assert cli.main(["train", config]) == code
    shown = capsys.readouterr().err
    for sentence in sentences:
        assert sentence in shown
    assert ("Traceback" in shown) == (code == 1)


def test_sigterm_outside_the_training_loop_is_a_sentence_too(verb, config, capsys):
    """While the text is read or the weights are loaded: a scheduler's log says why the job ended, and programs get JSON."""
    before = signal.getsignal(signal.SIGTERM)
    verb("megaspan.trainer", run=lambda config: os.kill(os.getpid(), signal.SIGTERM))
    assert cli.main(["train", config, "--json"]) == 143
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"exit_code": 143, "errors": ["interrupted by SIGTERM"]}
    assert captured.err == "megaspan: interrupted by SIGTERM\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_torch_s_own_out_of_memory_error_is_recognised(verb, config, capsys):
    import torch

    verb("megaspan.trainer", run=failing(torch.OutOfMemoryError("CUDA out of memory")))
    assert cli.main(["train", config]) == 3


def test_a_reader_that_stops_reading_is_no_error():
    command = f"{sys.executable} -m megaspan train --help | head -1; exit ${{PIPESTATUS[0]}}"
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert ran.returncode == 0
    assert ran.stderr == ""


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("megaspan 0.")


def test_no_words_at_all_show_the_help(capsys):
    assert cli.main([]) == 2
    assert "megaspan train" in capsys.readouterr().out


def test_evaluation_under_a_launcher_of_several_is_refused(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["eval", "run"]) == 2
    assert "evaluation runs on one device, and torchrun started 2 processes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "run.yaml", "--rehearse"], "is a flag of megaspan plan, not of megaspan train. Leave it out, or type "
         "megaspan plan CONFIG.yaml --rehearse."),
        (["train", "run.yaml", "--show", "3"], "type megaspan data CONFIG.yaml --show N."),
        (["data", "run.yaml", "--nproc=2"], "type megaspan train CONFIG.yaml --nproc N."),
        (["plan", "run.yaml", "--merge"], "type megaspan export RUN OUT --merge."),
        (["plan", "qwen3-8b"], "qwen3-8b is a model, and megaspan plan takes a YAML file of options here. Type megaspan plan "
         "--model_name_or_path qwen3-8b --max_length 128k."),
        (["train", "Qwen/Qwen3-8B"], "--model_name_or_path Qwen/Qwen3-8B --max_length 128k --dataset_name TEXT."),
        (["plan", "./model"], "Type megaspan plan --model_name_or_path ./model"),
        (["plan", "run"], "Did you mean run/config.yaml?"),
        (["plan", "run.yml"], "there is no file run.yml. Did you mean run.yaml?"),
        (["plan", "book.txt"], "Type megaspan plan CONFIG.yaml --dataset_name book.txt."),
        (["train", "--max_steps", "3", "run.yaml"], "the file comes before all flags of megaspan train. Type megaspan train "
         "run.yaml --max_steps 3."),
        (["train", "--max_steps", "3", "run.yaml", "--seed", "1"], "Type megaspan train run.yaml --max_steps 3 --seed 1."),
        (["train", "--packing", "run.yaml"], "Type megaspan train run.yaml --packing."),
        (["train", "--report_to", "wandb", "trackio", "run.yaml"], "Type megaspan train run.yaml --report_to wandb trackio."),
        (["train", "--max_length", "run.yaml"], "Type megaspan train run.yaml --max_length VALUE."),
        (["train", "--nproc", "run.yaml"], "Type megaspan train run.yaml --nproc N."),
        (["data", "--show", "3", "run.yaml"], "Type megaspan data run.yaml --show 3."),
        (["eval", "--max_length", "4k", "run"], "Type megaspan eval run --max_length 4k."),
        (["export", "--merge", "run", "a b"], "what it works on comes before all flags of megaspan export. Type megaspan "
         "export run 'a b' --merge."),
        (["export", "run", "--merge", "out"], "Type megaspan export run out --merge."),
        (["export", "--foo", "run", "out"], "--foo is not a flag of megaspan export; allowed: --merge, --json. Type megaspan "
         "export run out."),
        (["export", "run", "out", "--mrege"], "Type megaspan export run out --merge."),
        (["export", "-m", "run", "out"], "-m is not a flag of megaspan export"),
        (["env", "--json", "now"], "now stands behind the flags of megaspan env. Type megaspan env."),
        (["train", "-n", "2", "run.yaml"], "-n is not a flag of megaspan train. Did you mean --nproc?"),
        (["train", "run.yaml", "-nproc", "2"], "-nproc is not a flag of megaspan train. Did you mean --nproc?"),
        (["plan", "run.yaml", "--rehersal"], "Did you mean --rehearse?"),
        (["plan", "run.yaml", "--JSON"], "Did you mean --json?"),
        (["plan", "run.yaml", "--nproc", "2", "--nproc", "4"], "--nproc is given twice. Keep one of them."),
        (["plan", "run.yaml", "--nproc"], "got nothing behind it. Write --nproc 1."),
        (["plan", "run.yaml", "-x", "2"], "'-x' is not a flag. Write --name value"),
        (["plan", "run.yaml", "--=3"], "'--=3' is not a flag. Write --name value"),
        (["plan", "run.yaml", "--memory_limit", "80"], "got 80. Write --memory_limit 80GiB."),
        (["plan", "run.yaml", "--memory_limit", "80", "GiB"], "Write --memory_limit 80GiB."),
        (["plan", "small.yaml"], "small.yaml line 2: memory_limit must be a size from 1MiB, such as 80GiB, 64GB or 512MiB or "
         "null; got 80. Write memory_limit: 80GiB."),
        (["plan", "run.yaml", "--max_length", "1M"], "three lines:\n  max_length: 40960\n"),
        (["plan", "--model_name_or_path", "qwen3-0.6b", "--max_length", "1M"], "three lines:\n  --max_length 40960\n"
         "  --model_init_kwargs '{rope_parameters: auto}'\n"),
        (["plan", "run.yaml", "max_length=4k"], "Write --max_length=4k."),
        (["plan", "run.yaml", "\u2013max_length", "4k"], "Write --max_length."),
        (["plan", "run.yaml", "-max-length", "4k"], "'-max-length' is not a flag. Write --max-length."),
        (["plan", "run.yaml", "--model", "qwen3-8b"], "Did you mean model_name_or_path?"),
        (["plan", "run.yaml", "--batch_size", "3"], "Did you mean per_device_train_batch_size?"),
        (["plan", "run.yaml", "--max_lenght", "3"], "Did you mean max_length?"),
        (["run.yaml", "--seed", "3"], "The verb comes first, then the file: megaspan train run.yaml --seed 3."),
        (["--json", "plan", "run.yaml"], "The verb comes first, then the file: megaspan plan run.yaml --json."),
        (["plan", "dangling.yaml"], "there is no file dangling.yaml. Give the path"),
        (["plan", "~nobody-of-that-name/a.yaml"], "there is no file ~nobody-of-that-name/a.yaml"),
        (["plan", "x" * 5000], "cannot be read: File name too long."),
        (["plan", "run.yaml", "--model_name_or_path", "a b/c"], "no name that the hub could have; got 'a b/c'"),
        (["plan", "run.yaml", "--model_name_or_path", "~nobody-of-that-name/x"], "this machine has no such user"),
        (["plan", "run.yaml", "--model_name_or_path", "x" * 5000], "a name is longer than the file system knows: xxx"),
        (["report", "run"], "plots.png"),
        (["paln", "run.yaml"], "Did you mean megaspan plan?"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)  # fmt: skip
def test_a_slip_is_answered_with_what_to_type(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("max_length: 4k\nmodel_name_or_path: qwen3-0.6b\ndataset_name: book.txt\n")
    (tmp_path / "book.txt").write_text("a: book: of words")
    (tmp_path / "small.yaml").write_text("max_length: 4k\nmemory_limit: 80\n")
    (tmp_path / "dangling.yaml").symlink_to("nowhere")
    for folder, file in (("model", "config.json"), ("run", "config.yaml")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text("{}")
    assert cli.main(words) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("megaspan: ") == 1, "one sentence"


def test_what_is_said_is_as_wide_as_the_terminal_and_one_line_elsewhere(tmp_path, monkeypatch):
    """Words were broken at column 80. A command line to type stays in one piece."""
    import pty

    words = [sys.executable, "-m", "megaspan", "export", "--merge", "runs/of-a-long-name/checkpoint", "models/of-a-long-name"]
    typed = "Type megaspan export runs/of-a-long-name/checkpoint models/of-a-long-name --merge."
    piped = subprocess.run(words, capture_output=True, text=True, check=False)
    assert piped.stderr == f"megaspan: what it works on comes before all flags of megaspan export. {typed}\n"
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 60))
    ran = subprocess.run(words, stdout=theirs, stderr=theirs, check=False)
    os.close(theirs)
    shown = os.read(ours, 4096).decode().replace("\r", "")
    os.close(ours)
    assert ran.returncode == 2
    assert shown == f"megaspan: what it works on comes before all flags of\n    megaspan export.\n    {typed}\n"


def test_a_file_may_be_the_value_of_the_last_flag(tmp_path, monkeypatch, capsys):
    """It was taken for the configuration behind its flags."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("")
    assert cli.main(["plan", "--max_length", "4k", "--model_name_or_path", "qwen3-0.6b", "--output_dir", "a.yaml"]) == 0
    assert cli.main(["train", "--deepspeed", "a.yaml"]) == 2
    assert "DeepSpeed would take over" in capsys.readouterr().err


def test_a_result_is_printed_whatever_the_locale(tmp_path):
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    words = [sys.executable, "-m", "megaspan", "plan", "--model_name_or_path", "qwen3-0.6b", "--max_length", "4k"]
    ended = subprocess.run([*words, "--host_memory", "1TiB"], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "\\xb7 RoPE unchanged" in ended.stdout
    text, model = tmp_path / "t\xe9.txt", save_model_folder(tmp_path / "model")
    text.write_text("In the beginning. " * 9)
    words = [sys.executable, "-m", "megaspan", "data", "--model_name_or_path", str(model), "--dataset_name", str(text)]
    ended = subprocess.run([*words, "--max_length", "64", "--show", "0"], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "t\\xe9.txt" in ended.stdout
