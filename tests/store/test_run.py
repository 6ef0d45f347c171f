import json
from pathlib import Path

import pytest
import torch
import yaml

from megaspan.human import UserError
from megaspan.store import open_run, read_run_facts, save_checkpoint, save_model, write_run_facts
from tests.store.training import start


def test_the_config_is_one_that_can_be_run_again(tmp_path):
    config = {"max_length": 1048576, "betas": (0.9, 0.95), "output_dir": Path("run"), "dtype": torch.bfloat16, "name": None}
    write_run_facts(tmp_path / "run", config=config, facts={})
    text = (tmp_path / "run" / "config.yaml").read_text()
    assert yaml.safe_load(text) == {
        "max_length": 1048576,
        "betas": [0.9, 0.95],
        "output_dir": "run",
        "dtype": "bfloat16",
        "name": None,
    }
    assert text.startswith("# Every option as megaspan")


def test_every_start_is_kept_with_versions_and_code_commit(tmp_path):
    write_run_facts(tmp_path, config={}, facts={"seed": 42, "machine": {"device_bytes": 0}})
    write_run_facts(tmp_path, config={}, facts={"resumed_from": Path("checkpoint-5")})
    first, second = read_run_facts(tmp_path)["starts"]
    assert first["seed"] == 42
    assert second["resumed_from"] == "checkpoint-5"
    assert {"megaspan", "torch", "transformers"} <= first["packages"].keys()
    assert first["commit"] is None or len(first["commit"].removesuffix("+changes")) == 40
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "run.json"]
    json.loads((tmp_path / "run.json").read_text())


def test_a_new_run_gets_a_folder_and_a_resume_the_newest_checkpoint(tmp_path):
    run = tmp_path / "deep" / "run"
    assert open_run(run) is None
    assert run.is_dir()
    with pytest.raises(UserError, match="nothing to resume"):
        open_run(run, True)
    model, optimizer = start()
    path = save_checkpoint(run, model=model, optimizer=optimizer, progress={"step": 1})
    assert open_run(run, True) == path
    assert open_run(run, str(path)) == path


def test_a_new_run_does_not_write_over_an_old_one(tmp_path):
    model, optimizer = start()
    save_checkpoint(tmp_path / "a", model=model, optimizer=optimizer, progress={"step": 1})
    save_model(model, None, tmp_path / "b" / "model")
    for run in ("a", "b"):
        with pytest.raises(UserError, match=r"already holds a run \((checkpoint-1|model)\).*--resume_from_checkpoint true"):
            open_run(tmp_path / run, False)


def test_what_a_killed_save_left_is_cleared(tmp_path):
    (tmp_path / ".partial-checkpoint-3").mkdir()
    assert open_run(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
