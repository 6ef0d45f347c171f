import importlib.util
import json
import sys
import types

import pytest

from megaspan.human import UserError
from megaspan.report import Metrics, check_run_name, check_trackers
from megaspan.report import trackers as module


@pytest.mark.parametrize("value", ["none", None, [], ["none"]])
def test_none_is_none(value):
    assert check_trackers(value) == ()


def test_a_missing_tracker_stops_the_run_with_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("tensorboard", "wandb", "trackio"):
        with pytest.raises(UserError, match=r"is not installed\. Install it with: pip install 'megaspan\[track\]'"):
            check_trackers(name)
    with pytest.raises(UserError, match="pip install"):
        Metrics(tmp_path, ["wandb"])


def test_all_and_unknown_names_are_refused():
    with pytest.raises(UserError, match="Name the trackers"):
        check_trackers("all")
    with pytest.raises(UserError, match="Did you mean tensorboard"):
        check_trackers("tensorbord")


def test_tensorboard_has_the_numbers_under_the_names_of_transformers(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c  # noqa: F401 - the package that is meant

    with Metrics(tmp_path, "tensorboard") as metrics:
        metrics.log(1, {"loss": 4.5})
        metrics.log(1, {"eval_loss": 4.25})
    with Metrics(tmp_path, "tensorboard", resumed_step=1) as metrics:
        metrics.log(2, {"loss": 4.0})
    found = {}
    for path in (tmp_path / "tensorboard").iterdir():
        data, place = path.read_bytes(), 0
        while place < len(data):
            size = int.from_bytes(data[place : place + 8], "little")
            event = Event.FromString(data[place + 12 : place + 12 + size])
            place += 16 + size
            for value in event.summary.value:
                found[value.tag, event.step] = value.simple_value
    assert found == {("train/loss", 1): 4.5, ("eval/loss", 1): 4.25, ("train/loss", 2): 4.0}


def fake_wandb(calls):
    class Run:
        def define_metric(self, name, **options):
            calls.append(("define", name))

        def log(self, values):
            calls.append(("log", values))

        def finish(self, exit_code):
            calls.append(("finish", exit_code))

    wandb = types.ModuleType("wandb")
    wandb.__spec__ = types.SimpleNamespace()
    wandb.init = lambda **options: calls.append(("init", options)) or Run()
    return wandb


def test_a_resumed_run_continues_its_own_record_in_wandb(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb(calls))
    with Metrics(tmp_path / "book", "wandb", config={"max_length": 5}) as metrics:
        metrics.log(1, {"loss": 1.0, "eval_loss": 2.0, "note": "text"})
    with pytest.raises(RuntimeError), Metrics(tmp_path / "book", ["wandb"], resumed_step=1):
        raise RuntimeError
    with Metrics(tmp_path / "book", ["wandb"], "mine"):
        pass
    inits = [options for kind, options in calls if kind == "init"]
    assert inits[0]["config"] == {"max_length": 5}
    assert inits[0]["name"].startswith("book-")
    assert inits[1]["id"] == inits[0]["id"]
    assert inits[1]["name"] == inits[0]["name"]
    assert inits[2]["id"] != inits[0]["id"]
    assert inits[2]["name"] == "mine"
    assert ("log", {"train/loss": 1.0, "eval/loss": 2.0, "train/global_step": 1}) in calls
    assert [value for kind, value in calls if kind == "finish"] == [0, 1, 0]


def test_a_resumed_run_takes_another_name_where_its_record_can(tmp_path, monkeypatch):
    """It was accepted and ignored: wandb knows a record by its id, trackio by its name."""
    calls = []
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb(calls))
    for name, step in (("first", 0), ("second", 1), (None, 1)):
        Metrics(tmp_path, "wandb", name, resumed_step=step).close()
    inits = [options for kind, options in calls if kind == "init"]
    assert [options["name"] for options in inits] == ["first", "second", "second"]
    assert len({options["id"] for options in inits}) == 1
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    check_run_name("trackio", tmp_path, "second")
    check_run_name("trackio", tmp_path, None)
    check_run_name("wandb", tmp_path, "third")
    check_run_name("trackio", tmp_path / "new", "third")
    with pytest.raises(UserError, match="got 'third'; allowed: second"):
        check_run_name("trackio", tmp_path, "third")
    with pytest.raises(UserError, match="Write run_name: second as before"):
        Metrics(tmp_path, "trackio", "third", resumed_step=1)


def test_trackio_gets_the_numbers_with_their_steps(tmp_path, monkeypatch):
    calls = []
    run = types.SimpleNamespace(log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("finish"))
    trackio = types.ModuleType("trackio")
    trackio.__spec__ = types.SimpleNamespace()
    trackio.init = lambda **options: calls.append(options) or run
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    with Metrics(tmp_path, ["trackio"], "mine") as metrics:
        metrics.log(3, {"loss": 1.0})
    assert calls[0]["project"] == "megaspan"
    assert calls[0]["name"] == "mine"
    assert calls[1:] == [(3, {"train/loss": 1.0}), "finish"]
    assert json.loads((tmp_path / module._STATE).read_text())["name"] == "mine"
