"""Runs that keep things on disk: signals, resumes, a full disk, what is left behind."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path

import pytest
import torch

from megaspan.human import UserError
from megaspan.model import disk
from megaspan.plan.keep import KeepPolicy, LayerKeep
from megaspan.trainer import setup
from megaspan.trainer.interrupt import Interrupted
from tests.memory.latedisk import empties
from tests.trainer.support import assert_same_bits, documents, model_folder, trainer, weights
from tests.trainer.test_resume import _interrupt_at_layer

__all__ = ["model_folder"]
DATA = documents([40, 37, 40, 21, 40, 33])
torch.set_num_threads(1)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An offload_folder, and a planner that keeps everything there: on a CPU the true one never does."""
    choose = setup.choose

    def on_disk(args, facts, machine, **options):
        plan = choose(args, facts, machine, **options)
        keep = KeepPolicy((LayerKeep("disk", "disk"),) * facts.layers)
        return dataclasses.replace(plan, keep=keep, stream_back=True) if args.offload_folder else plan

    monkeypatch.setattr(setup, "choose", on_disk)
    monkeypatch.setattr(disk, "_LEAST", 1)
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


OPTIONS = {"max_steps": 3, "gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 100}


@pytest.fixture
def whole(tmp_path, model_folder):
    run = trainer(model_folder, tmp_path / "whole", DATA, **OPTIONS)
    run.train()
    return weights(run.model)


@pytest.mark.parametrize("calls", [6, 11])
def test_a_signal_in_a_step_with_a_disk_and_the_resume(tmp_path, model_folder, folder, whole, capsys, calls):
    """In the forward of a step's second row, and in a later backward: nothing stays, and the resumed run is exact."""
    options = OPTIONS | {"offload_folder": str(folder)}
    run = trainer(model_folder, tmp_path / "run", DATA, **options)
    tier = run._job.levers.disk.tier
    _interrupt_at_layer(run, calls)
    with pytest.raises(Interrupted):
        run.train()
    assert tier.stats().peak > 0
    assert tier.stats().used == tier.stats().file_bytes == 0
    assert "on disk" in capsys.readouterr().err
    again = trainer(model_folder, tmp_path / "run", DATA, **options)
    again.train(resume_from_checkpoint=True)
    assert_same_bits(weights(again.model), whole)
    assert again._job.seconds["disk speed"] > 0
    assert again._job.seconds["levers"] > 0
    assert list(folder.iterdir()) == []


def test_a_full_disk_ends_the_run_with_a_sentence(tmp_path, model_folder, folder, whole, monkeypatch):
    options = OPTIONS | {"offload_folder": str(folder), "save_steps": 1}
    run = trainer(model_folder, tmp_path / "run", DATA, **options)
    real, left = os.pwritev, 9

    def full(*arguments):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(UserError, match="is full; the step was abandoned"):
            run.train()
    assert empties(run._job.levers.disk.tier)
    again = trainer(model_folder, tmp_path / "run", DATA, **options)
    resume = bool(list(Path(tmp_path / "run").glob("checkpoint-*")))
    again.train(resume_from_checkpoint=True if resume else None)
    assert_same_bits(weights(again.model), whole)
    assert empties(again._job.levers.disk.tier)
