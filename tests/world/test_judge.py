"""Which rank holds up the others, from made-up sightings."""

from __future__ import annotations

import pytest

from megaspan.world.judge import Seen, culprits, sentence

LEAST, FACTOR = 45.0, 2.0


def layer(count: int, silent: float, **more) -> Seen:
    return Seen(count, f"layer {count}", more.pop("patience", 0.0), silent, **more)


@pytest.mark.parametrize(
    ("seen", "blamed"),
    [
        ([], []),
        ([layer(5, 1), layer(5, 2)], []),
        ([layer(5, 50), layer(4, 51)], [1]),  # rank 0 has gone on and waits
        ([layer(5, 300), layer(4, 44)], []),  # it waits for one that is at work
        ([layer(5, 1), layer(4, 300)], []),  # rank 0 has just moved, and so may rank 1 have
        ([layer(4, 60), layer(4, 61)], [0, 1]),  # nobody moves
        ([layer(4, 60, waits=True), layer(4, 61)], [1]),  # at one place, but rank 0 is inside a collective
        ([layer(4, 60, waits=True), layer(4, 61, waits=True)], [0, 1]),
        ([layer(4, 60), layer(4, 3)], []),  # the second of the last ones may still move
        ([layer(5, 60), layer(4, 60, patience=31.0)], []),  # its plan says that this lasts 31 s
        ([layer(5, 90), layer(4, 63, patience=31.0)], [1]),
        ([layer(5, 999), layer(4, 999, patience=None)], []),  # it tokenises, or saves
        ([layer(4, 2), layer(5, 50, absent=46.0)], [1]),  # its process does not run at all, or its machine is gone
        ([layer(4, 2, patience=None, absent=46.0), layer(5, 50)], [0]),
    ],
)
def test_the_rank_that_the_others_wait_for_is_blamed(seen, blamed):
    assert culprits(dict(enumerate(seen)), LEAST, FACTOR) == blamed


def test_the_sentence_names_rank_phase_time_and_line():
    seen = {0: layer(5, 50.0), 1: layer(4, 51.0, where="step.py:12 in backward"), 2: layer(5, 50.0)}
    assert sentence([1], seen) == "rank 1 has been in 'layer 4' for 51.0 s at step.py:12 in backward; the others wait"
    assert sentence([1], {1: seen[1], 0: seen[0]}).endswith("; the other rank waits")
    stuck = {rank: layer(4, 60.0, waits=True) for rank in range(6)}
    assert sentence(list(stuck), stuck).startswith(
        "rank 0 has been in 'layer 4' for 1 min 00 s inside a collective; rank 1 has"
    )
    assert sentence(list(stuck), stuck).endswith("; …; nobody moves")
    gone = {0: layer(4, 50.0), 1: layer(3, 48.0, absent=47.0)}
    assert sentence([1], gone) == "rank 1 answers no more since 47.0 s, last in 'layer 3'; the other rank waits"
