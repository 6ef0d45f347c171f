import os

import pytest

from megaspan.human import UserError
from megaspan.store import checkpoints, rehearsal, rehearse_save, save_checkpoint
from tests.models import tiny_tokenizer
from tests.store.training import start, train


def test_the_prediction_is_the_size_on_disk(tmp_path):
    """R88: what a save takes is known at step 0."""
    model, optimizer = start()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    planned = rehearse_save(tmp_path / "run", model=model, optimizer=optimizer, optimizer_bytes=12 * parameters, saves=3)
    assert list((tmp_path / "run").iterdir()) == []
    train(model, optimizer, 0, 1)
    path = save_checkpoint(tmp_path / "run", model=model, optimizer=optimizer, progress={"step": 1})
    on_disk = sum(file.stat().st_size for file in path.iterdir() if file.suffix == ".safetensors")
    assert planned.checkpoint_bytes == pytest.approx(on_disk, rel=0.05)
    assert planned.model_bytes == 2 * parameters
    assert planned.needed_bytes == 3 * planned.checkpoint_bytes + planned.model_bytes


def test_no_room_stops_the_run_before_it_starts(tmp_path, monkeypatch):
    model, optimizer = start()
    options = {"model": model, "optimizer": optimizer, "optimizer_bytes": 10 * 2**30}
    monkeypatch.setattr(rehearsal, "free_bytes", lambda folder: 25 * 2**30)
    with pytest.raises(UserError, match=r"3 checkpoints of 10\.0 GiB at a time .* 25\.0 GiB are free.*save_total_limit: 1"):
        rehearse_save(tmp_path, saves=9, keep=2, **options)
    assert rehearse_save(tmp_path, saves=9, keep=1, **options).needed_bytes < 25 * 2**30
    assert rehearse_save(tmp_path, saves=0, **options).needed_bytes < 2**20
    monkeypatch.setattr(rehearsal, "free_bytes", lambda folder: 1)
    with pytest.raises(UserError, match=r"save: a final model of"):
        rehearse_save(tmp_path, saves=0, **options)


def test_what_a_save_wants_to_spare_is_asked_for_at_the_start(tmp_path, monkeypatch):
    """A run that was let through with less would be refused at its first checkpoint."""
    model, optimizer = start()
    options = {"model": model, "optimizer": optimizer, "optimizer_bytes": 0, "saves": 1}
    needed = rehearse_save(tmp_path, **options).needed_bytes
    monkeypatch.setattr(rehearsal, "free_bytes", lambda folder: needed + 64 * 2**20 - 1)
    with pytest.raises(UserError, match=r"and 64\.0 MiB to spare"):
        rehearse_save(tmp_path, **options)
    monkeypatch.setattr(rehearsal, "free_bytes", lambda folder: needed + 64 * 2**20)
    rehearse_save(tmp_path, **options)


def test_settings_and_tokenizers_that_cannot_be_saved_are_found_before_the_first_step(tmp_path):
    class Gone(type(tiny_tokenizer())):
        def save_pretrained(self, *_, **__):
            raise OSError("the vocabulary's file is gone")

    model, optimizer = start()
    options = {"model": model, "optimizer": optimizer, "optimizer_bytes": 0, "saves": 1}
    tokenizer = tiny_tokenizer()
    rehearse_save(tmp_path, tokenizer=tokenizer, **options)
    tokenizer.__class__ = Gone
    with pytest.raises(UserError, match="Gone cannot be saved, so the run could not be saved: OSError: the vocabulary's file"):
        rehearse_save(tmp_path, tokenizer=tokenizer, **options)
    model.config.note = object()
    with pytest.raises(UserError, match=r"refuses to save this model's settings.*not JSON serializable"):
        rehearse_save(tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_that_rotation_will_delete_count_as_room(tmp_path, monkeypatch):
    model, optimizer = start()
    save_checkpoint(tmp_path, model=model, optimizer=optimizer, progress={"step": 1})
    size = sum(file.stat().st_size for file in checkpoints(tmp_path)[0].iterdir())
    monkeypatch.setattr(rehearsal, "free_bytes", lambda folder: 64 * 2**20)
    assert (
        rehearse_save(tmp_path, model=model, optimizer=optimizer, optimizer_bytes=0, saves=0, keep=1).free_bytes
        == 64 * 2**20 + size
    )


def test_a_folder_that_cannot_be_written_to_is_a_sentence(tmp_path):
    model, optimizer = start()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write to .*output_dir"):
        rehearse_save(tmp_path / "file" / "run", model=model, optimizer=optimizer, optimizer_bytes=0, saves=1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_read_only_folder_is_a_sentence(tmp_path):
    model, optimizer = start()
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot write"):
        rehearse_save(tmp_path / "run", model=model, optimizer=optimizer, optimizer_bytes=0, saves=1)


def test_a_state_that_cannot_be_saved_is_found_before_the_first_step(tmp_path):
    model, optimizer = start()
    optimizer.schedule.callback = object()
    with pytest.raises(TypeError, match=r"state\.optimizer\.schedule\.callback"):
        rehearse_save(tmp_path, model=model, optimizer=optimizer, optimizer_bytes=0, saves=1)
    model, optimizer = start()
    with pytest.raises(TypeError, match=r"state\.progress\.callbacks"):
        rehearse_save(tmp_path, model=model, optimizer=optimizer, optimizer_bytes=0, saves=1, progress={"callbacks": object()})
