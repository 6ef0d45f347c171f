"""Runs that are made longer when they are done, or resumed with nothing left, and what a resume may not change."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megaspan import SFTTrainer, store
from megaspan.human import UserError
from megaspan.trainer import run, setup
from megaspan.trainer.resumed import Resumed
from megaspan.trainer.schedule import Schedule
from tests.trainer.support import assert_same_bits, documents, logged, model_folder, settings, trainer, weights  # noqa: F401

DATA = documents([40, 11, 23, 5, 40, 7, 19])  # four steps an epoch of two rows, the last of one


@pytest.mark.parametrize(
    ("short", "long"), [({"num_train_epochs": 1}, {"num_train_epochs": 2}), ({"max_steps": 3}, {"max_steps": 6})]
)
def test_a_run_made_longer_is_the_run_that_was_as_long_from_the_start(tmp_path, model_folder, capsys, short, long):  # noqa: F811
    """Bit-equal where the schedule does not depend on the length: weights, optimizer, random states, counters, metrics."""
    options = {
        "gradient_accumulation_steps": 2, "lr_scheduler_type": "constant", "save_strategy": "steps", "use_peft": True,
        "lora_r": 4, "lora_dropout": 0.3,
    }  # fmt: skip
    whole = trainer(model_folder, tmp_path / "whole", DATA, **options, **long)
    whole.train()
    trainer(model_folder, tmp_path / "run", DATA, **options, **short).train()
    capsys.readouterr()
    longer = trainer(model_folder, tmp_path / "run", DATA, **options, **long)
    longer.train(resume_from_checkpoint=True)
    before, now = (4, 8) if "num_train_epochs" in long else (3, 6)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "was to have" in line]
    assert re.match(rf"  resumed +{now} steps +the run was to have {before}; the learning rate .* is 0.01 either way$", line)
    assert longer.state.global_step == whole.state.global_step == now
    assert_same_bits(weights(longer.model), weights(whole.model))
    assert logged(tmp_path / "run") == logged(tmp_path / "whole")
    last = [tmp_path / name / f"checkpoint-{now}" for name in ("run", "whole")]
    for name in ("trainable.safetensors", "state.safetensors"):
        assert len({(folder / name).read_bytes() for folder in last}) == 1
    states = [json.loads((folder / "state.json").read_text()) for folder in last]
    for state in states:
        state["progress"].pop("log_history")  # has seconds
    assert states[0] == states[1]


def test_the_schedule_is_that_of_the_new_length_and_it_is_said(tmp_path, model_folder, capsys):  # noqa: F811
    """As in transformers; the old one ends at 0, so nothing would be learnt with it."""
    options = {"save_strategy": "steps", "warmup_steps": 2}
    trainer(model_folder, tmp_path, DATA, max_steps=4, **options).train()
    capsys.readouterr()
    longer = trainer(model_folder, tmp_path, DATA, max_steps=8, **options)
    longer.train(True)
    assert re.search(
        r"! resumed +8 steps +the run was to have 4; the learning rate of step 5 is 0\.006667, and was to be 0\n",
        capsys.readouterr().err,
    )
    rates = [entry["learning_rate"] for entry in longer.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([0, 0.005, 0.01, 0.005, *(0.01 * left / 6 for left in (4, 3, 2, 1))])
    start = json.loads((tmp_path / "run.json").read_text())["starts"][-1]
    assert start["identity"]["total_steps"] == 8
    trainer(model_folder, tmp_path, DATA, max_steps=6, **options).train(str(tmp_path / "checkpoint-4"))  # shorter than 8, too


def test_a_finished_run_says_that_nothing_is_left_and_what_to_type(tmp_path, model_folder, capsys):  # noqa: F811
    """Nothing of its folder is written anew: its options are those that its steps were made with."""
    options = {"num_train_epochs": 1, "save_strategy": "steps", "gradient_accumulation_steps": 2}
    done = trainer(model_folder, tmp_path, DATA, **options)
    done.train()
    facts = [(tmp_path / name).read_bytes() for name in ("config.yaml", "run.json", "metrics.jsonl")]
    capsys.readouterr()
    again = trainer(model_folder, tmp_path, DATA, **options, learning_rate=1.0)
    output = again.train(True)
    told = capsys.readouterr().err
    assert (
        f"megaspan: nothing is left to train: {tmp_path}/checkpoint-4 has done 4 steps, and num_train_epochs: 1 ends the run"
        in told
    )
    assert "such as --num_train_epochs 2 --resume_from_checkpoint true.\n" in told
    assert "planned memory" not in told
    assert output.global_step == 4
    assert_same_bits(weights(again.model), weights(done.model))  # to be saved, where a save was cut off
    assert facts == [(tmp_path / name).read_bytes() for name in ("config.yaml", "run.json", "metrics.jsonl")]


@pytest.mark.parametrize(
    ("options", "step", "said"),
    [
        ({"max_steps": 4}, 4, "max_steps: 4 ends the run there. To train on, resume with a larger one, such as --max_steps 8 "),
        ({"max_steps": 2}, 4, "max_steps: 2 ends it after 2. To train on, resume with a larger one, such as --max_steps 6 "),
        ({"num_train_epochs": 0.5}, 4, "num_train_epochs: 0.5 ends it after 2. .* such as --num_train_epochs 2 "),
        ({"num_train_epochs": 2}, 4, None),
    ],
)
def test_what_to_type_for_more_steps_is_more_steps(tmp_path, options, step, said):
    args = settings(tmp_path, **options)
    schedule = Schedule(rows=4, rows_per_step=1, epochs=args.num_train_epochs, max_steps=args.max_steps, seed=0)
    sentence = Resumed(Path("checkpoint-4"), step, 4, None, {}).nothing_left(args, schedule)
    assert (sentence is None) == (said is None)
    assert said is None or re.search(said, sentence)


def test_a_checkpoint_that_does_not_tell_its_rate_is_made_longer(tmp_path):
    """Those of earlier versions."""
    args = settings(tmp_path, max_steps=8)
    schedule = Schedule(rows=4, rows_per_step=1, epochs=1, max_steps=8, seed=0)
    lines = Resumed(Path("checkpoint-4"), 4, 4, None, {"learning_rate": 1e-2}).lines(
        args.replace(weight_decay=0.0), schedule, 0.1
    )
    assert [(line.value, line.reason) for line in lines if "steps" in str(line.value) and "warmup" not in str(line.value)] == [
        ("8 steps", "the run was to have 4")
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_length": 30}, r"made by another run: max_length was 40 and is 30\. Write max_length=40 as before"),
        ({"packing": True}, r"packing was false and is true.*Write packing=False"),
        ({"overlong": "drop"}, "overlong was split and is drop"),
        ({"max_rows": 3}, "max_rows was null and is 3"),
        ({"seed": 9}, "seed was 3 and is 9; order was 3 and is 9"),
        ({"data_seed": 9}, "data_seed was null and is 9; order was 3 and is 9"),
        ({"train_sampling_strategy": "sequential"}, "order was 3 and is 'sequential'"),
        (
            {"gradient_accumulation_steps": 2},
            "steps was 1 and is 2; rows_per_step was 1 and is 2. Write gradient_accumulation_steps=1, which",
        ),
        ({"use_peft": True, "lora_alpha": 8}, "adapter was None and is .*'lora_alpha': 8"),
        ({"resume_from_checkpoint": "latest"}, "got 'latest'. Write resume_from_checkpoint=True for the newest checkpoint of"),
        ({"resume_from_checkpoint": "nowhere"}, "there is no checkpoint nowhere"),
    ],
)
def test_what_is_another_run_is_refused_before_a_row_is_made(model_folder, finished, monkeypatch, change, said):  # noqa: F811
    """Rows of another length are made for minutes, and the refusal came behind them."""
    data, out = finished
    monkeypatch.setattr(setup, "open_all", lambda *_: pytest.fail("rows are made"))
    options = {"max_steps": 4, "resume_from_checkpoint": True, "dataset_name": str(data), **change}
    with pytest.raises(UserError, match=said):
        trainer(model_folder, out, None, **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, model_folder):  # noqa: F811
    """A run of two steps on a file."""
    place = tmp_path_factory.mktemp("finished")
    (place / "text.txt").write_text("In the beginning God created the heaven and the earth. " * 5)
    trainer(model_folder, place / "run", None, max_steps=2, save_strategy="steps", dataset_name=str(place / "text.txt")).train()
    return place / "text.txt", place / "run"


def test_what_may_change_is_not_refused(model_folder, finished):  # noqa: F811
    data, out = finished
    changes = {
        "learning_rate": 1.0, "logging_steps": 2, "save_strategy": "epoch", "max_grad_norm": 0.1, "run_name": "longer",
        "gradient_checkpointing": False,
    }  # fmt: skip
    trainer(model_folder, out, None, max_steps=3, dataset_name=str(data), resume_from_checkpoint=True, **changes)


def test_the_verb_resumes_a_finished_run_to_its_model(model_folder, finished, capsys, monkeypatch):  # noqa: F811
    """A run that was killed while its model was saved has no step left, and still gets its model."""
    data, out = finished
    monkeypatch.setattr(SFTTrainer, "_draw", lambda _: None)
    config = settings(out, max_steps=2, save_strategy="steps", dataset_name=str(data), model_name_or_path=str(model_folder))
    result = run(config.replace(resume_from_checkpoint=True))
    assert "nothing is left to train" in capsys.readouterr().err
    assert result["steps"] == 2
    assert (Path(result["model"]) / "model.safetensors").exists()
    with pytest.raises(UserError, match="already holds a run"):
        store.open_run(out)


def test_a_finished_run_without_a_checkpoint_says_what_is_left_of_it(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(
        UserError, match=rf"has kept no checkpoint.* model_name_or_path: {tmp_path}/model with another output_dir"
    ):
        store.checkpoint_of(tmp_path, True)
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="Start anew with another output_dir, and with save_strategy: steps"):
        store.checkpoint_of(tmp_path, True)


def test_an_epoch_that_the_end_cuts_off_is_evaluated_and_saved(tmp_path, model_folder):  # noqa: F811
    """As in transformers; `eval_strategy: epoch` with `max_steps` inside the first epoch did nothing at all."""
    options = {"max_steps": 2, "save_strategy": "epoch", "eval_strategy": "epoch", "eval_dataset": documents([20])}
    short = trainer(model_folder, tmp_path, DATA, **options)
    short.train()
    assert [entry["step"] for entry in short.state.log_history if "eval_loss" in entry] == [2]
    assert (tmp_path / "checkpoint-2").is_dir()
