"""A rank that hangs is named within a minute: a layer may last as long as layers do, not as on the slowest device."""

from __future__ import annotations

import pytest

from megaspan.plan import ModelFacts
from megaspan.plan.facts import read_config
from megaspan.report import heaviest_layer, model_flops
from megaspan.trainer.patience import FIRST_FORWARD, Patience
from megaspan.world.heartbeat import NAME_FACTOR, Limits
from tests.trainer.support import documents, model_folder, trainer

__all__ = ["model_folder"]

MILLION = 1_048_576


def eight_b(ranks: int, planned: float = 0.0) -> Patience:
    facts = ModelFacts.from_config(read_config("qwen3-8b"))
    return Patience(model_flops(facts, MILLION) / ranks, heaviest_layer(facts, MILLION), "cuda", planned)


def test_before_anything_is_known_the_slowest_device_counts():
    patience = eight_b(8)
    assert 60 < patience.layer < 80
    assert patience.row == pytest.approx(patience.layer * 36 + FIRST_FORWARD, rel=0.01)


@pytest.mark.parametrize(("ranks", "step", "least", "most"), [(8, 241.0, 0, 45), (2, 964.0, 60, 90)])
def test_a_plan_or_a_step_shortens_it(ranks, step, least, most):
    planned, learnt = eight_b(ranks, step), eight_b(ranks)
    learnt.learn(learnt._flops, 2 * step)  # the first one compiles
    slow = learnt.layer
    learnt.learn(learnt._flops, step)
    learnt.learn(learnt._flops, 3 * step)
    assert learnt.layer == pytest.approx(planned.layer) == pytest.approx(slow / 2) == pytest.approx(1.5 * step / 36, rel=0.01)
    named = max(Limits().name, NAME_FACTOR * learnt.layer)
    assert max(least, Limits().name) <= named <= most


def test_a_layer_that_sees_the_whole_row_among_windows_has_the_time_that_it_takes():
    """As in Gemma 3: at a million tokens one of the full layers, one in six, takes 4.8 times the mean."""
    types = ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(36)]
    window = {"model_type": "gemma3_text", "sliding_window": 1024, "use_sliding_window": True, "layer_types": types}
    facts = ModelFacts.from_config(read_config("qwen3-8b") | window)
    assert facts.span(0) == 1024
    assert facts.span(5) is None
    assert heaviest_layer(facts, MILLION) == pytest.approx(4.81 / 36, rel=0.001), "not a thirty-sixth"
    assert heaviest_layer(facts, 512) < 1 / 36, "within a window all are alike"


def test_short_rows_say_little_of_long_ones_and_slow_ones_nothing():
    patience = eight_b(8)
    unknown = patience.layer
    patience.learn(patience._flops / 1000, 3600.0)
    assert patience.layer == unknown
    patience.learn(patience._flops, 0.0)
    assert patience.layer == unknown


def test_a_run_learns_from_its_steps(tmp_path, model_folder, monkeypatch):
    learnt = []
    monkeypatch.setattr(Patience, "learn", lambda self, flops, seconds: learnt.append((flops, seconds)))
    run = trainer(model_folder, tmp_path, documents([40, 30]), max_steps=2)
    run.train()
    lengths = sorted(run._job.rows.lengths.tolist())
    assert sorted(flops for flops, _ in learnt) == [model_flops(run._job.facts, length) for length in lengths]
    assert all(seconds > 0 for _, seconds in learnt)
