"""The ledger checks itself and says it in a few lines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megaspan.data.ledger import SourceTally, TokenLedger

LEDGER = TokenLedger(
    max_length=1000, rows=4, documents=3, empty_documents=1, tokens_in=5000, added=3, added_in_front=0, trained=3990, masked=10,
    dropped=600, dropped_empty=1, truncated=300, unused=103, padding=0, split_documents=1, truncated_documents=1,
    dropped_documents=1, masked_rows=(2,), masked_row_count=1, stopped=True,
    sources=(SourceTally("books", 3, 5003, 4000, "moby.txt", 1, 3000),),
)  # fmt: skip


@pytest.mark.parametrize("name", ["tokens_in", "added", "trained", "masked", "dropped", "truncated", "unused"])
def test_one_token_too_many_is_found(name: str) -> None:
    with pytest.raises(AssertionError, match="the token ledger does not balance"):
        replace(LEDGER, **{name: getattr(LEDGER, name) + 1})
    with pytest.raises(AssertionError):
        replace(LEDGER, trained=LEDGER.trained + LEDGER.masked + 1, masked=-1)


def test_padding_is_apart() -> None:
    assert replace(LEDGER, padding=12345).row_tokens == 4000


def test_it_survives_json() -> None:
    assert TokenLedger.from_dict(LEDGER.to_dict()) == LEDGER
    assert (LEDGER.lost, LEDGER.longest_document) == (899, 4000)


@pytest.mark.parametrize(
    ("in_front", "said"),
    [(0, "3  end-of-text tokens"), (1, "3  beginning-of-text and end-of-text tokens"), (3, "3  beginning-of-text tokens")],
)
def test_what_was_added_is_named(in_front: int, said: str) -> None:
    assert said in replace(LEDGER, added_in_front=in_front).table().splitlines()[2]


def test_the_table_names_every_fate() -> None:
    table = LEDGER.table("test")
    for part in (
        "token ledger, test", "5,000  of 3 documents; 1 empty document skipped", "3  end-of-text tokens", "3,990  79.75 %",
        "600  1 overlong document left out", "300  ends of 1 document", "103  read ahead; reading stopped at max_rows",
        "4 rows of up to 1,000 tokens", "nothing to train in 1 row (index 2)", "longest document 4,000 tokens (moby.txt)",
        "1 document longer than max_length: 3,000 tokens (59.96 %) past it are dropped or truncated",
    ):  # fmt: skip
        assert part in table
    assert len(table.splitlines()) <= 13
