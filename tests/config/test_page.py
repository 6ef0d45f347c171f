"""The documentation page made from the tables, and the header's lines about defaults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megaspan.config import SFTConfig, differing_defaults, foreign
from megaspan.config.page import page

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-trl.md"


def test_the_page_is_current():
    assert PAGE.read_text("utf-8") == page(), "run: python -m megaspan.config.page > docs/coming-from-trl.md"


def test_the_page_names_every_option():
    for name in (*SFTConfig.model_fields, *foreign.table()["refused"], *foreign.table()["older"]):
        assert f"| `{name}` |" in page(), name


def test_every_differing_default_is_in_the_page():
    """A default that departs from TRL's without saying so would be a silent change of somebody's run."""
    same = {"gradient_checkpointing_kwargs"}  # null in both, with another meaning
    for name, entry in foreign.table()["supported"].items():
        if name not in SFTConfig.model_fields:
            continue
        ours, theirs = SFTConfig.model_fields[name].default, entry["trl"]
        equal = (
            ours == theirs
            or (theirs in (None, [], "auto", "main") and ours in (None, 1))
            or name in ("dtype", "bf16", "loss_type")
        )
        assert equal != ("differs" in entry) or name in same, name


def test_the_header_shows_the_defaults_in_use():
    lines = differing_defaults(SFTConfig(max_length=8))
    assert "packing: true (TRL: false); documents are joined until a row is full" in lines
    assert [re.match(r"\w+", line)[0] for line in lines] == [
        "output_dir", "packing", "packing_strategy", "per_device_train_batch_size",
        "gradient_checkpointing_kwargs", "logging_steps", "save_minutes",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        ({"packing": True}, "packing:"), ({"packing": False}, "packing_strategy"), ({"logging_steps": 1}, "logging_steps"),
        ({"gradient_checkpointing_kwargs": {"offload": True}}, "gradient_checkpointing_kwargs"),
        ({"gradient_checkpointing": False}, "offload"), ({"save_strategy": "no"}, "save_minutes"),
    ],
)  # fmt: skip
def test_a_default_that_was_written_or_is_idle_is_not_shown(options, gone):
    assert not any(gone in line for line in differing_defaults(SFTConfig(max_length=8, **options)))


def test_overlong_documents_and_the_plain_loss_are_said():
    assert any(
        line.startswith("overlong: split (TRL: truncate)")
        for line in differing_defaults(SFTConfig(max_length=8, packing=False))
    )
    assert any(
        "newer TRL means the chunked one" in line for line in differing_defaults(SFTConfig(max_length=8, loss_type="nll"))
    )
