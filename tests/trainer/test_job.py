"""What the header says about a run's parts."""

import dataclasses

import pytest

from megaspan import world
from megaspan.config import SFTConfig
from megaspan.human import UserError
from megaspan.plan.keep import KeepPolicy
from megaspan.trainer import job, setup
from tests.trainer.support import documents, model_folder, trainer

__all__ = ["model_folder"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "every checkpoint is kept (save_total_limit: null); those of save_minutes: 30 are not in what is needed"),
        ({"save_minutes": None}, "every checkpoint is kept (save_total_limit: null)"),
        ({"save_total_limit": 1}, "save_total_limit: 1 keeps the newest"),
        ({"save_total_limit": 2}, "save_total_limit: 2 keeps the newest"),
        ({"save_strategy": "no"}, "no checkpoint but at a signal"),
    ],
)
def test_what_will_lie_on_the_disk_is_said(options, said):
    """R88: at a million tokens save_minutes alone fills a disk, and only the header can say so before."""
    assert job._kept(SFTConfig(max_length=8, **options)) == said


def test_ranks_plan_for_what_all_of_them_have_and_compare_their_plans(tmp_path, model_folder, monkeypatch):
    """One that keeps something else would wait for the others for ever: the least is planned for, and a digest compared."""
    compared = []

    def agree(machine):
        return dataclasses.replace(machine, host_bytes=5 * 2**30, host_source="the least of 2 ranks")

    def same(name, digest):
        compared.append((name, digest))
        if len(compared) > 3:
            raise UserError("the plan differs between ranks", do="Start every rank with the same options")

    monkeypatch.setattr(world, "agree", agree)
    monkeypatch.setattr(world, "same_everywhere", same)
    run = trainer(model_folder, tmp_path, documents([40, 30]), max_steps=1)
    assert run._job.plan.host_limit == 5 * 2**30
    assert [name for name, _ in compared] == ["the configuration", "the data", "the plan"]
    digest = compared[-1][1]
    assert digest == setup._digest(run._job.plan)
    with pytest.raises(UserError, match="differs between ranks"):
        trainer(model_folder, tmp_path, documents([40, 30]), max_steps=1)


def test_the_digest_is_of_what_decides_the_order_of_calls(tmp_path, model_folder):
    plan = trainer(model_folder, tmp_path, documents([40, 30]), max_steps=1)._job.plan
    changes = [
        {"keep": KeepPolicy.everything(2, "disk")},
        {"keep": dataclasses.replace(plan.keep, again="disk")},
        {"kv_heads_per_call": 1},
        {"layer_tile_tokens": 4096},
        {"stream_back": True},
        {"loss_tile_tokens": 7},
        {"states": dataclasses.replace(plan.states, gradients="host")},
    ]
    digests = [setup._digest(dataclasses.replace(plan, **change)) for change in ({}, {"host_bytes": 1}, *changes)]
    assert digests[0] == digests[1]
    assert len(set(digests[1:])) == 1 + len(changes)
