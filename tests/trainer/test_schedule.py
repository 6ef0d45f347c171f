"""Which rows each step sees."""

from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import DefaultFlowCallback

from megaspan.config import SFTConfig
from megaspan.trainer.callbacks import training_arguments
from megaspan.trainer.schedule import Schedule


def test_the_guides_run_has_twelve_steps():
    schedule = Schedule(rows=4, rows_per_step=1, epochs=3, max_steps=-1, seed=42)
    assert schedule.total_steps == 12
    assert schedule.epoch_after(0) == 0.25
    assert schedule.epoch_after(11) == 3.0


@given(rows=st.integers(1, 50), per_step=st.integers(1, 9), epochs=st.integers(1, 3), seed=st.integers(0, 99))
def test_every_row_once_an_epoch(rows, per_step, epochs, seed):
    """R85: the last window may be short, and no row is lost or repeated."""
    schedule = Schedule(rows=rows, rows_per_step=per_step, epochs=epochs, max_steps=-1, seed=seed)
    seen = [schedule.window(step) for step in range(schedule.total_steps)]
    for epoch in range(epochs):
        first = epoch * schedule.steps_per_epoch
        assert sorted(row for window in seen[first : first + schedule.steps_per_epoch] for row in window) == list(range(rows))
    assert schedule.epoch_after(schedule.total_steps - 1) == epochs


def test_epochs_differ_in_order_and_a_seed_repeats():
    schedule = Schedule(rows=40, rows_per_step=40, epochs=2, max_steps=-1, seed=7)
    assert schedule.window(0) != schedule.window(1)
    assert schedule.window(1) == Schedule(rows=40, rows_per_step=40, epochs=2, max_steps=-1, seed=7).window(1)
    assert schedule.window(0) != Schedule(rows=40, rows_per_step=40, epochs=2, max_steps=-1, seed=8).window(0)


def test_sequential_order_is_the_order_of_the_data():
    schedule = Schedule(rows=5, rows_per_step=2, epochs=1, max_steps=-1, seed=0, shuffled=False)
    assert [schedule.window(step) for step in range(3)] == [(0, 1), (2, 3), (4,)]


def test_max_steps_wins_over_epochs():
    assert Schedule(rows=4, rows_per_step=1, epochs=3, max_steps=5, seed=0).total_steps == 5
    assert Schedule(rows=4, rows_per_step=1, epochs=0.5, max_steps=-1, seed=0).total_steps == 2


@given(
    rows=st.integers(1, 20), max_steps=st.integers(1, 60), save_steps=st.integers(1, 30), done=st.integers(0, 59),
    strategy=st.sampled_from(["no", "steps", "epoch"]),
)  # fmt: skip
def test_the_planned_saves_are_those_that_transformers_asks_for(rows, max_steps, save_steps, done, strategy):
    schedule = Schedule(rows=rows, rows_per_step=3, epochs=1, max_steps=max_steps, seed=0)
    flow, control = DefaultFlowCallback(), TrainerControl()
    every = {"save_steps": save_steps} if strategy == "steps" else {}
    arguments = training_arguments(SFTConfig(max_length=8, save_strategy=strategy, **every))
    state = TrainerState(max_steps=max_steps, save_steps=save_steps, logging_steps=1)
    asked = 0
    for state.global_step in range(done + 1, max_steps + 1):
        control.should_save = False
        flow.on_step_end(arguments, state, control)
        if state.global_step % schedule.steps_per_epoch == 0 or control.should_training_stop:
            flow.on_epoch_end(arguments, state, control)
        asked += control.should_save
    assert schedule.saves(strategy, save_steps, done) == (0 if strategy == "no" else max(1, asked))
