"""Compiled kernels are kept where locks work, and nowhere else."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

import pytest

from megaspan.world.kernelcache import PLACE, SWITCH, keep_kernels


def test_they_are_kept_in_the_cache_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    environ: dict[str, str] = {}
    told = keep_kernels(environ)
    folder = tmp_path / ".cache" / "megaspan" / "kernels"
    assert told == f"kept in {folder}"
    assert folder.is_dir()
    assert environ == {SWITCH: "1", PLACE: str(folder)}


@pytest.mark.parametrize(("given", "told"), [("0", "not kept"), ("1", "kept")])
def test_a_users_own_word_counts(given, told, tmp_path):
    environ = {SWITCH: given}
    assert keep_kernels(environ, tmp_path).startswith(f"{told} (your own")
    assert environ == {SWITCH: given}


def test_a_folder_of_the_users_own_is_used(tmp_path):
    environ = {PLACE: str(tmp_path / "elsewhere")}
    told = f"kept in {tmp_path / 'elsewhere'}"
    assert keep_kernels(environ) == told
    assert keep_kernels(environ) == told, "the second time too"
    assert (tmp_path / "elsewhere" / "lock").is_file()


def test_a_file_system_without_locks_keeps_nothing(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    environ: dict[str, str] = {}
    assert "No locks available" in keep_kernels(environ, tmp_path)
    assert environ == {}


def test_a_folder_that_cannot_be_made_keeps_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    environ: dict[str, str] = {}
    assert keep_kernels(environ, tmp_path / "file" / "kernels").startswith("not kept: ")
    assert environ == {}


def test_ranks_may_look_at_the_same_time(tmp_path):
    with (tmp_path / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert keep_kernels({}, tmp_path).startswith("kept in")
