"""What the header says about a run's parts."""

import pytest

from megaspan.config import SFTConfig
from megaspan.trainer import job


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
