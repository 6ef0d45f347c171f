import errno

import pytest

from megaspan.human import UserError
from megaspan.store import folder as module
from megaspan.store.folder import (
    clear_leftovers,
    damaged_files,
    new_folder,
    read_manifest,
    remove_folder,
    require_space,
    write_manifest,
)


def fill(folder, text="one"):
    (folder / "sub").mkdir()
    (folder / "a.txt").write_text(text)
    (folder / "sub" / "b.txt").write_text("two")
    write_manifest(folder, {"step": 1}, {})


def fail_in_the_middle(target, error):
    with new_folder(target) as folder:
        (folder / "a.txt").write_text("half")
        raise error


def test_a_folder_takes_its_place_whole_and_replaces_an_old_one(tmp_path):
    for text in ("one", "three"):
        with new_folder(tmp_path / "x") as folder:
            fill(folder, text)
            if text == "three":
                assert (tmp_path / "x" / "a.txt").read_text() == "one"
    assert (tmp_path / "x" / "a.txt").read_text() == "three"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert read_manifest(tmp_path / "x")["step"] == 1


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()])
def test_a_failed_write_leaves_what_was_there(tmp_path, error):
    with new_folder(tmp_path / "x") as folder:
        fill(folder)
    with pytest.raises(type(error)):
        fail_in_the_middle(tmp_path / "x", error)
    assert (tmp_path / "x" / "a.txt").read_text() == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "x"), Exception("I/O error: No space left on device (os error 28)")])
def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path, error):
    with pytest.raises(UserError, match="filled up after 4 B of x"):
        fail_in_the_middle(tmp_path / "x", error)
    assert list(tmp_path.iterdir()) == []


def test_what_a_kill_left_is_cleared_and_a_folder_set_aside_comes_back(tmp_path):
    with new_folder(tmp_path / "x") as folder:
        fill(folder)
    (tmp_path / "x").rename(tmp_path / ".old-x")  # killed between the two renames of a replacement
    (tmp_path / ".partial-x").mkdir()
    (tmp_path / ".old-y").mkdir()  # killed while it was deleted
    clear_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_damage_is_found(tmp_path):
    with new_folder(tmp_path / "x") as folder:
        fill(folder)
    manifest = read_manifest(tmp_path / "x")
    assert damaged_files(tmp_path / "x", manifest) == []
    (tmp_path / "x" / "sub" / "b.txt").write_text("twO")
    assert damaged_files(tmp_path / "x", manifest) == ["sub/b.txt"]
    (tmp_path / "x" / "a.txt").write_text("shorter or longer")
    assert read_manifest(tmp_path / "x") is None


def test_removal_leaves_nothing(tmp_path):
    with new_folder(tmp_path / "x") as folder:
        fill(folder)
    remove_folder(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_space_is_checked_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "free_bytes", lambda folder: 2**30)
    require_space(tmp_path, 2**29, "x")
    with pytest.raises(UserError, match=r"it takes 1\.0 GiB, and 1\.0 GiB are free"):
        require_space(tmp_path, 2**30, "x")


def test_a_place_that_cannot_be_written_to_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write to .*file: File exists"), new_folder(tmp_path / "file" / "x"):
        pass
