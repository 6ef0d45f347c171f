"""What an error says to type is a command line that does what it should."""

from __future__ import annotations

import pytest

from megaspan.world import commands
from megaspan.world.commands import again
from megaspan.world.launched import Launch


@pytest.mark.parametrize(("by", "more"), [("megaspan train", "--nproc 3 "), ("torchrun", "")])
def test_a_rank_of_our_own_launcher_says_how_many_it_is_of(monkeypatch, by, more):
    """The launcher takes --nproc off the command lines of its ranks, and without it one process would start."""
    monkeypatch.setattr("sys.argv", ["/bin/megaspan", "train", "run.yaml", "--sp_size", "3", "--seed", "1"])
    wanted = f"type megaspan train run.yaml {more}--seed 1 --sp_size 1 --cp_size 3"
    assert again(Launch(by, 0, 3, 0))(None, {"sp_size": 1, "cp_size": 3}) == wanted


def test_accelerates_own_file_is_named(monkeypatch):
    monkeypatch.setattr("sys.argv", ["script.py"])
    started = Launch("accelerate launch", 0, 1, 0)
    assert again(started)(8, {}).startswith("type accelerate launch --config_file FSDP2.yaml --num_processes 8")
    monkeypatch.setattr(commands, "launch_file_name", lambda: "f8.yaml")
    assert again(started)(8, {}).startswith("type accelerate launch --config_file f8.yaml --num_processes 8")
