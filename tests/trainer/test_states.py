"""Whole runs with the model's states elsewhere: the same bits, and no half-done update is ever saved."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megaspan.data import Row
from megaspan.optimizer import Optimizer
from megaspan.plan.states import StatePlan
from megaspan.store import latest_checkpoint
from megaspan.trainer import sft
from megaspan.trainer.interrupt import Interrupted
from megaspan.trainer.share import Share
from megaspan.trainer.step import Accumulator
from tests.gloo import forked
from tests.trainer.support import assert_same_bits, documents, logged, model_folder, trainer, weights  # noqa: F401

DATA = documents([40, 11, 23, 5, 40, 7, 19])
UPDATE = StatePlan("update", "device")
OPTIONS = {"max_steps": 4, "max_grad_norm": 0.0, "save_strategy": "steps", "save_steps": 100}


def put(monkeypatch, states):
    """Every trainer from here on has its states in these places."""
    monkeypatch.setattr(sft, "Optimizer", lambda model, config, steps, **_: Optimizer(model, config, steps, states=states))


def at_layer(run, number, act):
    """Calls `act` at layer boundary `number` of the run (4 a step: forward 0, 1, backward 1, 0), before the loop hears."""
    passed, watch = {"layers": 0}, run._job.watch_layers

    def watch_layers(on_layer):
        def layer(phase, index):
            passed["layers"] += 1
            if passed["layers"] == number:
                act()
            on_layer(phase, index)

        watch(layer if on_layer else None)

    run._job.watch_layers = watch_layers


def send_signal():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)  # the thread that listens sets the mark


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("states", [UPDATE, StatePlan("host", "host"), StatePlan("update", "host")])
def test_a_run_is_the_same_wherever_its_states_lie(tmp_path, model_folder, monkeypatch, states, rows):  # noqa: F811
    """Five rows of changing length and a masked one; weights, metrics with the gradient norm, a resume elsewhere."""
    data = [*DATA[:5], {"input_ids": [3, 4, 5, 6], "labels": [-100] * 4}]
    options = OPTIONS | {"gradient_accumulation_steps": rows, "max_steps": 6 // rows, "train_sampling_strategy": "sequential"}
    options["max_grad_norm"] = 0.0 if states.gradients == "update" else 0.5
    whole = trainer(model_folder, tmp_path / "whole", data, **options)
    whole.train()
    put(monkeypatch, states)
    other = trainer(model_folder, tmp_path / "other", data, **(options | {"save_steps": 2}))
    other.train()
    assert_same_bits(weights(other.model), weights(whole.model))
    assert logged(tmp_path / "other") == logged(tmp_path / "whole")
    assert logged(tmp_path / "other")[0]["grad_norm"] > 0
    put(monkeypatch, None)
    moved = trainer(model_folder, tmp_path / "moved", data, **options)
    moved.train(resume_from_checkpoint=str(tmp_path / "other" / "checkpoint-2"))
    assert_same_bits(weights(moved.model), weights(whole.model))


@pytest.mark.parametrize(("layer", "saved"), [(5, 1), (6, 1), (7, 2), (8, 2)])
def test_a_signal_waits_for_an_update_that_has_begun(tmp_path, model_folder, monkeypatch, capsys, layer, saved):  # noqa: F811
    """In the second step's forward it is abandoned; in its backward the head is updated already, so the step is finished."""
    whole = trainer(model_folder, tmp_path / "whole", DATA, **OPTIONS)
    whole.train()
    put(monkeypatch, UPDATE)
    run = trainer(model_folder, tmp_path / "run", DATA, **OPTIONS)
    at_layer(run, layer, send_signal)
    with pytest.raises(Interrupted) as caught:
        run.train()
    assert f"checkpoint-{saved} is complete" in caught.value.__notes__[0]
    assert ("this step is finished and saved first" in capsys.readouterr().err) == (saved == 2)
    again = trainer(model_folder, tmp_path / "run", DATA, **OPTIONS)
    again.train(resume_from_checkpoint=True)
    assert_same_bits(weights(again.model), weights(whole.model))
    assert logged(tmp_path / "run") == logged(tmp_path / "whole")


def test_a_signal_in_the_last_step_ends_the_run_with_its_checkpoint(tmp_path, model_folder, monkeypatch):  # noqa: F811
    put(monkeypatch, UPDATE)
    run = trainer(model_folder, tmp_path, DATA, **(OPTIONS | {"max_steps": 1}))
    at_layer(run, 3, send_signal)
    with pytest.raises(Interrupted):
        run.train()
    assert latest_checkpoint(tmp_path).name == "checkpoint-1"


def test_a_bad_gradient_after_the_first_update_saves_nothing(tmp_path, model_folder, monkeypatch):  # noqa: F811
    options = OPTIONS | {"save_steps": 1}
    whole = trainer(model_folder, tmp_path / "whole", DATA, **options)
    whole.train()
    put(monkeypatch, UPDATE)
    run = trainer(model_folder, tmp_path / "run", DATA, **options)

    def spoil():
        run.model.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: gradient * torch.nan)

    at_layer(run, 5, spoil)
    with pytest.raises(
        RuntimeError, match=r"step 2: .*had been updated.*nothing of this step is saved.*checkpoint is intact"
    ) as e:
        run.train()
    assert "not saved" in e.value.__notes__[0]
    assert latest_checkpoint(tmp_path / "run").name == "checkpoint-1"
    again = trainer(model_folder, tmp_path / "run", DATA, **options)
    again.train(resume_from_checkpoint=True)
    assert_same_bits(weights(again.model), weights(whole.model))


def test_an_error_in_the_middle_of_an_update_is_no_step(tmp_path, model_folder, monkeypatch):  # noqa: F811
    """Out of memory in the backward, a full disk for what layers keep: said, and nothing saved."""
    put(monkeypatch, UPDATE)
    run = trainer(model_folder, tmp_path, DATA, **OPTIONS)

    def fail():
        raise RuntimeError("out of memory")

    at_layer(run, 4, fail)
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        run.train()
    assert "between two steps" in caught.value.__notes__[0]
    assert latest_checkpoint(tmp_path) is None


def killed(folder: Path, out: Path) -> None:
    """A run that ends in the middle of an update."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        put(patch, UPDATE)
        run = trainer(folder, out, DATA, **(OPTIONS | {"save_steps": 1}))
        at_layer(run, 12, lambda: os.kill(os.getpid(), signal.SIGKILL))
        run.train()


def test_a_kill_in_the_middle_of_an_update_leaves_the_last_checkpoint(tmp_path, model_folder):  # noqa: F811
    """In the third step's backward, when all but the first layer and the embedding are updated."""
    options = OPTIONS | {"save_steps": 1}
    whole = trainer(model_folder, tmp_path / "whole", DATA, **options)
    whole.train()
    process = forked(killed, model_folder, tmp_path / "run")
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert latest_checkpoint(tmp_path / "run").name == "checkpoint-2"
    again = trainer(model_folder, tmp_path / "run", DATA, **options)
    again.train(resume_from_checkpoint=True)
    assert_same_bits(weights(again.model), weights(whole.model))


def test_a_second_run_of_one_trainer_is_not_taken_by_the_first_ones_hooks(tmp_path, model_folder, monkeypatch):  # noqa: F811
    put(monkeypatch, StatePlan("host", "host"))
    run = trainer(model_folder, tmp_path, DATA, **(OPTIONS | {"max_steps": 1, "save_steps": 1}))
    run.train()
    run.model(torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
    assert all(parameter.grad is not None for parameter in run.model.parameters())


def test_a_window_without_a_trained_token_is_never_the_last_row():
    """A loss of 0 with a graph would update by gradients of 0: decay the weights and move them by their moments."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def forward(self, input_ids, labels, position_ids, num_items_in_batch, use_cache, megaspan_seed):
            zero = torch.zeros(())
            return SimpleNamespace(loss=self.weight * 0, correct=zero, entropy=zero)

    def row(label):
        return Row(input_ids=np.arange(4), labels=np.full(4, label), document_lengths=(4,))

    called = []
    accumulator = Accumulator(Model(), Share(torch.device("cpu")), seed=0)
    accumulator.backward([row(-100), row(-100)], 0, lambda: called.append("masked"))
    assert called == []
    accumulator.backward([row(1), row(-100)], 1, lambda: called.append("trained"))
    assert called == ["trained"]
