import json
import signal
import subprocess
import sys
import time

import pytest

from megaspan.human import UserError
from megaspan.report import Metrics, read_metrics


def steps(run):
    return [entry["step"] for entry in read_metrics(run)]


def test_one_json_object_a_line_with_step_and_time(tmp_path):
    with Metrics(tmp_path / "run") as metrics:
        metrics.log(1, {"loss": 4.311, "num_tokens": 1048576.0})
        metrics.log(1, {"eval_loss": 4.2})
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    first, second = map(json.loads, lines)
    assert first["loss"] == 4.311
    assert first["step"] == second["step"] == 1
    assert abs(first["time"] - time.time()) < 60


def test_a_resumed_run_continues_and_no_step_is_there_twice(tmp_path):
    with Metrics(tmp_path) as metrics:
        for step in range(1, 6):
            metrics.log(step, {"loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # killed while it wrote
    with Metrics(tmp_path, resumed_step=3) as metrics:
        for step in range(4, 8):
            metrics.log(step, {"loss": step * 10.0})
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    assert [entry["loss"] for entry in read_metrics(tmp_path)] == [1.0, 2.0, 3.0, 40.0, 50.0, 60.0, 70.0]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 7


def test_a_new_run_in_an_old_folder_keeps_the_old_file(tmp_path):
    for value in (1.0, 2.0, 3.0):
        with Metrics(tmp_path) as metrics:
            metrics.log(1, {"loss": value})
    assert [entry["loss"] for entry in read_metrics(tmp_path)] == [3.0]
    assert json.loads((tmp_path / "metrics.2.jsonl").read_text())["loss"] == 2.0


def test_numbers_that_json_lacks_are_null_and_named(tmp_path):
    with Metrics(tmp_path) as metrics:
        metrics.log(1, {"loss": float("nan"), "grad_norm": float("inf"), "epoch": 1.0})
    text = (tmp_path / "metrics.jsonl").read_text()
    entry = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert entry["loss"] is None
    assert entry["not_finite"] == {"loss": "nan", "grad_norm": "inf"}


KILLED = """
import os, signal, sys
from megaspan.report import Metrics
metrics = Metrics(sys.argv[1])
for step in range(1, 4):
    metrics.log(step, {"loss": 1.0})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_every_tracker_ends_its_record_where_the_disk_is_full(tmp_path, monkeypatch):
    """The line that found no room is tried again as the file is closed."""
    ended = []

    class Ending:
        def close(self, failed):
            ended.append(failed)

    monkeypatch.setattr("megaspan.report.metrics.start_trackers", lambda *_: [Ending(), Ending()])
    metrics = Metrics(tmp_path)
    metrics._file.close()
    metrics._file = open("/dev/full", "w")  # noqa: SIM115
    with pytest.raises(UserError, match="No space left"), metrics:
        metrics.log(1, {})
    assert ended == [True, True]


def test_a_killed_run_has_lost_nothing(tmp_path):
    process = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert steps(tmp_path) == [1, 2, 3]


def test_a_full_disk_is_a_sentence_with_the_step(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with (
        pytest.raises(UserError, match=r"cannot be written at step 3: No space left on device\. Make room there"),
        Metrics(tmp_path) as metrics,
    ):
        metrics.log(3, {"loss": 1.0})
