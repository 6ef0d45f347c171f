import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaspan.report.pace import Pace


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def run_step(pace, clock, step, layer_seconds):
    pace.begin_step(step)
    for row in range(pace.rows_per_step):
        for index in range(pace.layers):
            pace.enter_layer("forward", index)
            clock.now += layer_seconds
            yield row, "forward", index
        for index in reversed(range(pace.layers)):
            pace.enter_layer("backward", index)
            clock.now += 3 * layer_seconds
            yield row, "backward", index
    pace.enter_phase("optimizer")
    pace.end_step()


@given(layers=st.integers(1, 12), rows=st.integers(1, 4), total=st.integers(1, 5))
def test_the_fractions_only_grow_and_reach_one(layers, rows, total):
    clock = Clock()
    pace = Pace(total, layers, rows, clock=clock)
    before = -1.0
    for step in range(1, total + 1):
        inside = -1.0
        for row, _, _ in run_step(pace, clock, step, 1.0):
            assert pace.row == row + 1
            assert inside < pace.in_step <= 1
            assert before < pace.in_run <= 1
            inside, before = pace.in_step, pace.in_run
    assert pace.in_run == 1.0
    assert pace.in_step == 0.0


def test_the_time_left_is_known_within_the_first_step_and_then_from_finished_ones():
    clock = Clock()
    pace = Pace(10, 4, clock=clock)
    assert pace.seconds_left is None
    for _, phase, index in run_step(pace, clock, 1, 5.0):
        if (phase, index) == ("backward", 1):  # entered: 4 layers forward, 2 backward done, and the clock moved by one more
            assert pace.seconds_left == pytest.approx(10 * (4 * 5 + 3 * 15) / (10 / 16) - (4 * 5 + 3 * 15))
    assert pace.seconds_left == pytest.approx(9 * 80)  # only the first, slow step is known
    for _ in run_step(pace, clock, 2, 1.0):
        pass
    assert pace.seconds_left == pytest.approx(8 * 16)


def test_a_resumed_run_starts_where_it_stands():
    pace = Pace(12, 4, step=6)
    assert pace.in_run == 0.5
