import ast
import io
import os
import pty
import subprocess
import sys
import types

import pytest

from megaspan.report import Progress
from megaspan.report.entries import dict_line, reading_line

ENTRY = {
    "loss": 4.31149,
    "grad_norm": 29.2501,
    "learning_rate": 1.8333333e-05,
    "num_tokens": 1048577.0,
    "epoch": 0.25,
    "entropy": 3.9,
    "tokens_per_second": 2759.34,
    "step_seconds": 380.1,
    "peak_device_bytes": 41e9,
    "forward_seconds": 100.0,
}


def run(progress, steps=2, layers=3):
    with progress:
        for step in range(1, steps + 1):
            progress.begin_step(step)
            for index in range(layers):
                progress.layer("forward", index)
            for index in reversed(range(layers)):
                progress.layer("backward", index)
            progress.phase("optimizer")
            progress.log(step, ENTRY)


def test_the_line_has_the_form_that_people_parse():
    line = dict_line(ENTRY)
    assert line.startswith(
        "{'loss': 4.311, 'grad_norm': 29.25, 'learning_rate': 1.833e-05, 'num_tokens': 1048577.0, 'epoch': 0.25"
    )
    assert ast.literal_eval(line)["tokens_per_second"] == 2759.0
    assert "forward_seconds" not in line
    entry = {"eval_loss": 2.0, "eval_runtime": 3.0, "eval_num_tokens": 68_914.0}  # what is counted is not rounded
    assert ast.literal_eval(dict_line(entry)) == entry


def test_off_a_terminal_there_is_exactly_one_line_a_step(capsys):
    run(Progress(2, 3))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [dict_line(ENTRY)] * 2


def test_other_ranks_show_nothing(capsys):
    progress = Progress(2, 3, quiet=True)
    run(progress)
    progress.say("x")
    assert capsys.readouterr().err == ""


def test_what_must_not_be_missed_is_marked(capsys):
    progress = Progress(2, 3)
    progress.say("the first loss is above the unigram entropy")
    progress.say("saved checkpoint-5", loud=False)
    assert capsys.readouterr().err == "! the first loss is above the unigram entropy\nsaved checkpoint-5\n"


TERMINAL = """
import time, sys
from megaspan.report import Progress
enabled = sys.argv[1] == "bar"
with Progress(2, 3, enabled, memory=lambda: (2**30, 2**31)) as progress:
    for step in (1, 2):
        progress.begin_step(step)
        for index in range(3): progress.layer("forward", index)
        time.sleep(0.6)
        for index in (2, 1, 0): progress.layer("backward", index)
        time.sleep(0.6)
        progress.log(step, {"loss": 4.0, "grad_norm": 1.0})
print("the result")
"""


def on_a_terminal(mode):
    """stderr on a pseudo-terminal of 110 columns, stdout in a pipe."""
    master, slave = pty.openpty()
    environment = os.environ | {"COLUMNS": "110", "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, "-c", TERMINAL, mode], stdout=subprocess.PIPE, stderr=slave, env=environment, text=True
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            chunk = os.read(master, 4096)
        except OSError:
            break
        if not chunk:
            break
        shown += chunk
    out, _ = process.communicate(timeout=30)
    return out, shown.decode()


def test_on_a_terminal_bars_move_inside_the_step_and_leave_the_lines_behind():
    out, shown = on_a_terminal("bar")
    assert out == "the result\n"
    for text in ("step 1/2", "step 2/2", "forward 3/3", "backward 1/3", "1.0 GiB now, 2.0 GiB peak", "s left"):
        assert text in shown
    assert shown.count("loss 4.0000") == 2
    assert "\x1b[2K" in shown  # the bars are wiped


def test_disable_tqdm_leaves_the_lines(capsys):
    out, shown = on_a_terminal("lines")
    assert out == "the result\n"
    assert shown.splitlines() == ["{'loss': 4.0, 'grad_norm': 1.0}"] * 2


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_a_reading_line_fits_the_terminal(width):
    line = reading_line(12, ENTRY, width)
    assert len(line) <= width
    assert "loss 4.3115" in line


def test_in_a_notebook_one_output_is_rewritten(monkeypatch, capsys):
    shown = []

    class Handle:
        def update(self, data, raw):
            assert raw
            shown.append(data["text/plain"])

    def display(data, raw, display_id):
        assert raw
        assert display_id
        shown.append(data["text/plain"])
        return Handle()

    shell = type("ZMQInteractiveShell", (), {})()
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: shell
    ipython.display = types.ModuleType("IPython.display")
    ipython.display.display = display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    run(Progress(2, 3, stream=io.StringIO()))
    assert "step 0/2" in shown[0]
    assert "step 2/2" in shown[-2]
    assert shown[-1].count("loss 4.3115") == 2
    assert "step 2/2" not in shown[-1]
    assert capsys.readouterr().err == ""
