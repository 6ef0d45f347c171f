"""Which rows of a window are a rank's."""

import numpy as np
import pytest
import torch

from megaspan.data import Row
from megaspan.plan import model_facts
from megaspan.trainer.share import Share, trained_tokens, untrained
from megaspan.world import Mesh

LENGTHS = [7, 1_000_000, 300, 10, 900_000, 20_000, 1]


def share(rank: int = 0, **sizes: int) -> Share:
    return Share(torch.device("cpu"), Mesh(**sizes, rank=rank))


@pytest.mark.parametrize("together", [1, 2, 3])
@pytest.mark.parametrize(
    ("sizes", "ranks"), [({"dp_shard": 2}, 2), ({"dp_replicate": 2, "dp_shard": 2}, 4), ({"dp_shard": 8}, 8)]
)
def test_every_row_is_run_once_and_every_rank_runs_as_often(sizes, ranks, together):
    parts = [share(rank, **sizes).deal(LENGTHS, together) for rank in range(ranks)]
    assert sorted(place for part in parts for places in part for place in places) == list(range(len(LENGTHS)))
    assert len({len(part) for part in parts}) == 1
    assert all(len(places) <= together for part in parts for places in part)


def test_rows_of_like_length_run_at_the_same_time():
    first, second = (share(rank, dp_shard=2).deal(LENGTHS) for rank in range(2))
    assert (first, second) == ([(1,), (5,), (3,), (6,)], [(4,), (2,), (0,), ()])


def test_the_longest_and_the_shortest_of_four_run_together():
    first, second = (share(rank, dp_shard=2).deal([40, 30, 20, 10], 2) for rank in range(2))
    assert (first, second) == ([(0, 3)], [(1, 2)])


def test_ranks_that_share_rows_run_all_of_them_in_their_order():
    assert share(1, cp=2, sp=2).deal(LENGTHS) == [(place,) for place in range(len(LENGTHS))]
    assert share(3, cp=2, sp=2).deal(LENGTHS, 4) == [(0, 1, 2, 3), (4, 5, 6)]
    assert [share(rank, cp=2, sp=2).counts for rank in range(4)] == [True, False, False, False]
    assert [share(rank, dp_shard=2, cp=2).counts for rank in range(4)] == [True, False, True, False]


def test_a_row_on_one_device_is_given_as_ever_and_a_packed_one_with_its_documents():
    ids = np.arange(6)
    plain = share().inputs(Row(ids, ids, (4, 2)))
    assert set(plain) == {"input_ids", "labels", "position_ids"}
    assert plain["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5]]
    labels = np.array([-100, 1, 2, 3, -100, 5, -100, -100])
    packed = share().inputs(Row(np.arange(8), labels, (4, 2), padding=2, attention_lengths=(4, 2)))
    assert packed["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 0, 1]]
    assert packed["shift_labels"].tolist() == [[1, 2, 3, -100, 5, -100, -100, -100]]
    assert packed["megaspan_row"].layout.lengths.tolist() == [4, 2, 2]


def test_the_documents_of_the_longest_row_are_known_before_the_plan():
    class Found(list):
        def heaviest(self, together):
            return list(range(together))

    ids, facts = np.arange(60), model_facts("qwen3-0.6b")
    rows = Found([Row(ids, ids, (40, 20), attention_lengths=(40, 20)), Row(ids, ids, (60,))])
    found = share().packed(rows, facts)
    assert (found.documents, found.cut, dict(found.pairs)) == (2, 0, {None: 40 * 41 // 2 + 20 * 21 // 2})
    several = share(1, cp=2).packed(rows, facts)
    assert several.cut > 0
    assert dict(several.pairs)[None] < dict(found.pairs)[None] * 0.6
    assert Share(torch.device("cpu"), together=2).packed(rows, facts).documents == 3
    assert share().packed(Found(rows[1:]), facts) is None


def test_a_rank_without_a_row_runs_one_token_that_trains_nothing():
    row = untrained(Row(np.arange(3, 9), np.arange(3, 9), (6,)))
    assert (row.input_ids.tolist(), trained_tokens(row), row.attention_lengths) == ([3], 0, (1,))
