"""Ranks that hang, die, fail or get a signal, as threads of one process (real processes are in test_ranks.py)."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
import threading
import time

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megaspan.human import UserError, UserErrors
from megaspan.world import Heartbeat, heartbeat
from megaspan.world.agreement import node
from megaspan.world.deaths import find_death
from megaspan.world.failure import report_failure
from tests.world import meeting
from tests.world.meeting import FAST, environ, part, until


@pytest.fixture
def meet():
    made = []

    def make(size: int, **more):
        hearts, ended, started = meeting.meet(size, **more)
        made.extend(hearts)
        return hearts, ended, started

    yield make
    meeting.part(made)


def test_a_rank_that_hangs_is_named_and_then_ends_all(meet, capsys):
    hearts, ended, _ = meet(3)
    for heart in hearts:
        heart.beat("forward layer 5")
    for rank in (0, 2):
        hearts[rank].beat("forward layer 6")
    began = time.monotonic()
    until(lambda: None not in ended)
    assert FAST.end <= time.monotonic() - began < FAST.end + 3
    assert ended == [1, 1, 1]
    named, last = (line for line in capsys.readouterr().err.splitlines() if "rank" in line)
    assert named.startswith("megaspan: rank 1 has been in 'forward layer 5' for 0.")
    assert "; the others wait. The run ends after 1.20 s of this." in named
    assert last.startswith("megaspan: rank 1 has been in 'forward layer 5' for 1.")
    assert last.endswith("The run is ended.")


def test_a_rank_that_moves_again_goes_on(meet, capsys):
    hearts, ended, _ = meet(2)
    hearts[0].beat("save")
    hearts[0].beat("after")
    hearts[1].beat("save")
    until(lambda: bool(hearts[0]._now.named))
    hearts[1].beat("after")
    until(lambda: not hearts[0]._now.named)
    time.sleep(2 * FAST.period)
    part(hearts)
    assert ended == [None, None]
    assert "rank 1 moves again." in capsys.readouterr().err


@pytest.mark.parametrize("phase", ["forward layer 5", "start"])
def test_ranks_that_were_all_stopped_go_on(meet, capsys, monkeypatch, phase):
    """Ctrl-Z and fg, or a scheduler that suspends a job: nobody has moved for an hour, and nobody is to blame."""
    monkeypatch.setattr(heartbeat, "START_PATIENCE", 0.1)
    hearts, ended, _ = meet(3, late=int(phase == "start"))
    for heart in hearts:
        heart.beat(phase)
    time.sleep(2 * FAST.period)
    stopped, clock = 3600.0, time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + stopped)
    time.sleep(4 * FAST.period)
    assert ended[:2] == [None, None]
    assert capsys.readouterr().err == ""
    until(lambda: None not in ended[:2])  # from then on all is as ever
    part(hearts)


def test_what_ends_a_rank_is_said_while_an_error_of_it_is_on_its_way_out(capsys, monkeypatch):
    """torch's excepthook puts a buffer in the place of sys.stderr, and nobody reads it once the watch has ended the process."""
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    heartbeat._say("rank 1 died")
    assert capsys.readouterr().err == "megaspan: rank 1 died\n"


def test_patience_is_what_a_phase_is_expected_to_last(meet, capsys):
    """A layer of eight million tokens takes minutes and is no hang; and what has no limit is never named (case R82)."""
    hearts, ended, _ = meet(2)
    hearts[0].beat("forward layer 0")
    hearts[1].beat("tokenise", None)
    time.sleep(FAST.end + 0.3)
    hearts[0].beat("forward layer 1", 10.0)
    hearts[1].beat("forward layer 1", 10.0)
    time.sleep(FAST.end + 0.3)
    part(hearts)
    assert ended == [None, None]
    assert capsys.readouterr().err == ""


def test_ranks_that_start_late_are_waited_for_and_then_named(meet, capsys, monkeypatch):
    hearts, ended, _ = meet(3, late=1)
    for heart in hearts:
        heart.beat("connect")
    time.sleep(FAST.end + 0.3)
    assert capsys.readouterr().err == ""  # nobody is blamed for waiting
    monkeypatch.setattr(heartbeat, "START_PATIENCE", 0.1)
    until(lambda: None not in ended[:2])
    assert "rank 2 has been in 'start' for 1." in capsys.readouterr().err


@pytest.mark.parametrize(("code", "others"), [(2, 2), (3, 3)])
def test_a_rank_that_fails_ends_the_others_with_its_code_in_silence(meet, capsys, tmp_path, code, others):
    """And torch's elastic agent, whose report comes behind, finds the sentence where it looks for a traceback."""
    hearts, ended, started = meet(3)
    files = [{"TORCHELASTIC_ERROR_FILE": str(tmp_path / f"{rank}.json")} for rank in range(3)]
    failure = report_failure(code, ["a wrong thing"], environ=environ(started[1]) | files[1])
    assert failure is not None
    agent = ProcessFailure(1, 7, code, str(tmp_path / "1.json"))
    said = "megaspan: a wrong thing" if code == 2 else "megaspan: rank 1: a wrong thing"
    assert f"traceback : {said}\n" in str(ChildFailedError("script.py", {1: agent}))
    assert (failure.rank, failure.sentences) == (1, ["a wrong thing"])
    until(lambda: ended[0] is not None and ended[2] is not None)
    assert ended == [others, None, others]  # it ends itself
    assert report_failure(1, ["connection closed by peer"], environ=environ(started[0]) | files[0]) is None
    assert not (tmp_path / "0.json").exists()  # an echo is no cause
    part(hearts)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("goes_on", [False, True], ids=["its process ends", "it makes another trainer"])
def test_a_rank_that_leaves_a_step_ends_those_that_wait_for_it(meet, capsys, goes_on):
    """`sys.exit` in a callback, or an error that a script catches on one rank: nobody is dead, and nobody answers any more."""
    hearts, ended, _ = meet(3)
    for heart in hearts:
        heart.beat("forward layer 5")
    hearts[1].abandon(ValueError("a bad row"))
    leave = threading.Thread(target=hearts[1].renew if goes_on else hearts[1].close)
    leave.start()
    until(lambda: ended[0] == 1 and ended[2] == 1)
    told = capsys.readouterr().err
    assert told.startswith(
        "megaspan: rank 1 has left 'forward layer 5' by ValueError (a bad row), and its script went on; rank "
    )
    assert told.count("megaspan:") == 1
    part(hearts)
    leave.join(10)


def test_ranks_that_all_leave_a_step_are_left_alone(meet, capsys):
    """One after the other, and the last of them has work of its own first."""
    hearts, ended, _ = meet(2)
    for heart in hearts:
        heart.beat("forward layer 5")
        heart.abandon(ValueError())
    hearts[0].renew()
    time.sleep(2 * FAST.left)
    hearts[1].renew()
    part(hearts)
    assert ended == [None, None]
    assert capsys.readouterr().err == ""


def test_a_sentence_that_is_being_said_is_not_cut_off(meet, capsys):
    """The watch finds the same death as the main thread, a moment later: it must not end the process before that has spoken."""
    hearts, ended, started = meet(2)
    part(hearts[:1])
    hearts[0]._closed.clear()
    assert report_failure(1, ["rank 1 died"], environ=environ(started[0])) is not None
    watch = threading.Thread(target=hearts[0]._finish, args=(1, "rank 1 died"))
    watch.start()
    time.sleep(0.2)
    assert ended[0] is None
    hearts[0]._closed.set()  # said, and on the way out
    watch.join(5)
    assert ended[0] is None
    assert capsys.readouterr().err == ""


def test_a_rank_that_dies_without_a_word_is_named(meet, capsys):
    dead = dead_process()
    hearts, ended, _ = meet(3)
    hearts[2].beat("backward layer 7")
    until(lambda: hearts[0]._now.seen.get(2, ([0, 0],))[0][1] == 1)
    part([hearts[2]])
    hearts[2]._board.write("who/2", {"pid": dead, "node": node()})
    until(lambda: ended[0] is not None and ended[1] is not None)
    assert ended == [1, 1, None]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megaspan: rank 2 died in 'backward layer 7' without a word")
    # The echo that the dead rank leaves in another one is told as the death that it is.
    assert "rank 2 died" in find_death(hearts[0]._board, 3)


def walk(heart, rank: int, places: list[int], came: dict[int, int], speed: float) -> None:
    for place in range(1, 1000):
        time.sleep(speed)
        if (stop := heart.boundary(came.get(rank))) is not None:
            places[rank] = place
            assert stop == signal.SIGTERM
            return


def test_a_rank_that_stopped_by_agreement_leaves_the_slower_ones_to_get_there(meet):
    hearts, ended, started = meet(2)
    assert hearts[0].boundary(signal.SIGTERM) is None
    until(hearts[0]._now.agreed.is_set)
    assert hearts[0].boundary(None) == signal.SIGTERM
    report_failure(143, ["interrupted by SIGTERM"], environ=environ(started[0]))  # it has saved, and ends
    time.sleep(5 * FAST.period)
    assert ended == [None, None]
    assert [hearts[1].boundary(None) for _ in range(2)] == [None, signal.SIGTERM]


def test_a_rank_that_a_signal_ends_before_any_boundary_ends_the_others(meet, capsys):
    _, ended, started = meet(2)
    report_failure(143, ["interrupted by SIGTERM"], environ=environ(started[0]))
    until(lambda: ended[1] == 143)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("receivers", [[0], [2], [0, 1, 2]])
def test_a_signal_to_any_rank_stops_all_at_one_boundary(meet, receivers):
    """Each would stop at a layer of its own, and the first collective after that would never be answered."""
    hearts, ended, _ = meet(3)
    places, came = [0, 0, 0], {}
    threads = [
        threading.Thread(target=walk, args=(heart, rank, places, came, 0.002 * (1 + 3 * rank)), daemon=True)
        for rank, heart in enumerate(hearts)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    came.update(dict.fromkeys(receivers, signal.SIGTERM))
    for thread in threads:
        thread.join(10)
    assert len(set(places)) == 1
    assert places[0] > 0
    assert all(heart.stopped for heart in hearts)
    part(hearts)
    assert ended == [None] * 3


def test_nobody_leaves_before_all_are_done(meet):
    hearts, _, _ = meet(2)
    left = []
    thread = threading.Thread(target=lambda: (hearts[0].close(), left.append(0)))
    thread.start()
    time.sleep(0.3)
    assert left == []
    hearts[1].close()
    thread.join(5)
    assert left == [0]


def test_a_beat_is_cheap(meet):
    hearts, _, _ = meet(1)
    began = time.perf_counter()
    for number in range(10_000):
        hearts[0].beat("layer")
        assert hearts[0].boundary(None) is None or number < 0
    part(hearts)
    assert time.perf_counter() - began < 1.0  # 100 µs each would be seen nowhere; it is below 10


def test_this_process_is_alive_and_says_where_it_is():
    from megaspan.world.deaths import _alive
    from megaspan.world.heartbeat import location

    assert _alive(os.getpid())
    where, waits = location()
    assert "heartbeat.py" in where or "test_heartbeat.py" in where
    assert not waits


def test_a_second_trainer_of_the_same_processes_is_watched_anew(meet):
    """What the first has written, its end included, is no news of the second; an exit code ends both."""
    hearts, ended, started = meet(2)
    threads = [threading.Thread(target=heart.close) for heart in hearts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    again = [Heartbeat(launch, FAST, lambda code, rank=launch.rank: ended.__setitem__(rank, code)) for launch in started]
    try:
        for heart in again:
            heart.beat("forward layer 1")
        assert again[1].boundary(15) is None
        until(lambda: all(heart._now.frozen is not None for heart in again))
        stops = [threading.Thread(target=lambda heart=heart: [heart.boundary(None) for _ in range(2)]) for heart in again]
        for thread in stops:
            thread.start()
        for thread in stops:
            thread.join(10)
        assert [heart.stopped for heart in again] == [True, True]
        assert ended == [None, None]
        report_failure(1, ["a fault"], environ=environ(started[0]))
        until(lambda: ended[1] == 1)
    finally:
        part(again)


def test_a_rank_that_went_on_to_the_next_trainer_is_not_waited_for(meet, capsys):
    """Neither blamed for what it no longer writes, nor asked where to stop for a signal."""
    hearts, ended, _ = meet(2)
    for heart in hearts:
        heart.beat("after the last step", None)
    hearts[0].renew()
    assert hearts[1].boundary(signal.SIGTERM) is None
    until(hearts[1]._now.agreed.is_set)
    assert [hearts[1].boundary(None) for _ in range(3)] == [None] * 3
    hearts[1].renew()
    until(lambda: all(len(heart._now.seen) == 2 for heart in hearts))
    # The session before is forgotten: all stop for a signal of this one.
    hearts[0].boundary(signal.SIGINT)
    until(lambda: all(heart._now.agreed.is_set() for heart in hearts))
    assert hearts[0].boundary(None) == signal.SIGINT
    assert [hearts[1].boundary(None) for _ in range(2)] == [None, signal.SIGINT]
    part(hearts)
    assert ended == [None, None]
    assert capsys.readouterr().err == ""


def test_a_rank_that_does_not_answer_where_to_stop_is_named(meet):
    hearts, _, _ = meet(2)
    part(hearts[1:])  # its thread is gone, it is not
    hearts[0].boundary(signal.SIGTERM)
    until(lambda: hearts[0]._now.frozen is not None)
    with pytest.raises(RuntimeError, match=r"rank 1 did not say within 1\.20 s where to stop for SIGTERM"):
        hearts[0].boundary(None)


def dead_process() -> int:
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(0,))
    child.start()
    child.join()
    assert child.pid is not None
    return child.pid


def test_the_wait_at_the_end_is_over_when_a_rank_has_died(meet, capsys):
    dead = dead_process()
    hearts, ended, _ = meet(2)
    part(hearts[1:])
    hearts[1]._board.write("who/1", {"pid": dead, "node": node()})
    hearts[0].close()
    assert ended[0] == 1
    assert "rank 1 died in 'start' without a word" in capsys.readouterr().err


def test_a_rank_that_works_on_alone_is_left_alone(meet, capsys):
    hearts, ended, _ = meet(2)
    hearts[0].close(wait=0.3)
    assert ended == [None, None]
    assert capsys.readouterr().err == "megaspan: rank 0 ends: it has waited 0.30 s for rank 1 to end.\n"


def test_a_trainer_that_one_rank_alone_makes_is_told_from_a_death(meet, capsys):
    dead = dead_process()
    hearts, ended, _ = meet(2)
    hearts[0].renew()
    hearts[1].close()
    hearts[1]._own.write("who/1", {"pid": dead, "node": node()})
    until(lambda: ended[0] == 1)
    assert capsys.readouterr().err == "megaspan: rank 1 has ended, and this one waits for a trainer that it did not make.\n"


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (UserError("a wrong file", got=3, do="Right it"), UserError, r"^a wrong file; got 3\. Right it\.$"),
        (UserErrors([UserError("one"), UserError("two")]), UserErrors, r"^one\.\ntwo\.$"),
        (OSError("no room"), RuntimeError, "the first rank of this machine failed: OSError: no room"),
    ],
)
def test_what_fails_on_the_first_rank_fails_on_all(meet, error, kind, words):
    """A script may catch it: the others would wait for ever for rows that nobody makes."""
    hearts, _, _ = meet(2)

    def act():
        raise error

    with pytest.raises(type(error)):
        hearts[0].in_turn("rows", True, act)
    with pytest.raises(kind, match=words):
        hearts[1].in_turn("rows", False, act)


def test_the_first_of_a_machine_works_before_the_others(meet):
    hearts, _, _ = meet(3)
    order: list[int] = []

    def work(rank: int) -> None:
        if rank == 0:
            time.sleep(0.3)
        order.append(rank)

    threads = [
        threading.Thread(target=heart.in_turn, args=("rows", rank == 0, lambda rank=rank: work(rank)))
        for rank, heart in reversed(list(enumerate(hearts)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert order[0] == 0
    assert sorted(order) == [0, 1, 2]
