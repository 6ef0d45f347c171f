import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megaspan.human import UserError
from megaspan.store import checkpoint as module
from megaspan.store import checkpoints, latest_checkpoint, load_checkpoint, save_checkpoint
from megaspan.store import folder as folder_module
from tests.models import tiny_tokenizer
from tests.store.training import Masters, start, train


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_resumed_run_is_bit_equal_to_one_that_was_not_interrupted(tmp_path, lora):
    model, optimizer = start(lora=lora)
    whole = train(model, optimizer, 0, 6)
    want = {name: parameter.clone() for name, parameter in model.named_parameters()}

    model, optimizer = start(lora=lora)
    first = train(model, optimizer, 0, 3)
    history = [{"step": 1, "loss": first[0]}]
    path = save_checkpoint(tmp_path, model=model, optimizer=optimizer, progress={"step": 3, "row": 7, "log_history": history})

    model, optimizer = start(lora=lora)
    train(model, optimizer, 10, 11)  # whatever happens before must not show
    progress = load_checkpoint(path, model, optimizer)
    assert progress == {"step": 3, "row": 7, "log_history": history}
    assert first + train(model, optimizer, 3, 6) == whole
    assert all(torch.equal(parameter, want[name]) for name, parameter in model.named_parameters())
    assert optimizer.schedule.last_epoch == 6


def test_the_frozen_base_of_a_lora_run_is_not_saved_again(tmp_path):
    model, optimizer = start(lora=True)
    path = save_checkpoint(tmp_path, model=model, optimizer=optimizer, progress={"step": 1})
    saved = load_file(path / "trainable.safetensors")
    assert saved
    assert all("lora_" in name for name in saved)
    assert not (path / "model.safetensors").exists()


def test_a_checkpoint_of_a_whole_model_loads_in_plain_transformers(tmp_path):
    model, optimizer = start(tied=True)
    path = save_checkpoint(tmp_path, model=model, optimizer=optimizer, progress={"step": 1}, tokenizer=tiny_tokenizer())
    loaded, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, dtype="auto")
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.dtype == torch.bfloat16
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name))


def test_nothing_in_a_checkpoint_is_pickled(tmp_path):
    model, optimizer = start()
    train(model, optimizer, 0, 1)
    path = save_checkpoint(tmp_path, model=model, optimizer=optimizer, progress={"step": 1})
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}
    json.loads((path / "state.json").read_text())


def test_rotation_keeps_the_newest_and_only_after_the_new_one_is_complete(tmp_path, monkeypatch):
    model, optimizer = start()
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, model=model, optimizer=optimizer, progress={"step": step}, keep=2)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3"]

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_tensors", full)
    with pytest.raises(UserError, match="filled up"):
        save_checkpoint(tmp_path, model=model, optimizer=optimizer, progress={"step": 4}, keep=2)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3"]


def test_after_a_resume_from_an_earlier_checkpoint_the_newest_is_the_one_written_last(tmp_path):
    model, optimizer = start()
    for step in (5, 10, 15):
        save_checkpoint(tmp_path, model=model, optimizer=optimizer, progress={"step": step})
    path = save_checkpoint(tmp_path, model=model, optimizer=optimizer, progress={"step": 6}, keep=2)
    assert latest_checkpoint(tmp_path) == path
    assert [checkpoint.name for checkpoint in checkpoints(tmp_path)] == ["checkpoint-15", "checkpoint-6"]


def test_a_step_saved_again_replaces_its_checkpoint(tmp_path):
    model, optimizer = start()
    for row in (1, 2):
        path = save_checkpoint(tmp_path, model=model, optimizer=optimizer, progress={"step": 5, "row": row}, keep=1)
    assert names(tmp_path) == ["checkpoint-5"]
    assert load_checkpoint(path, *start())["row"] == 2


def test_no_room_is_said_before_a_byte_is_written(tmp_path, monkeypatch):
    model, optimizer = start()
    monkeypatch.setattr(folder_module, "free_bytes", lambda folder: 1000)
    with pytest.raises(UserError, match=r"no room for checkpoint-1 .* are free"):
        save_checkpoint(tmp_path, model=model, optimizer=optimizer, progress={"step": 1})
    assert names(tmp_path) == []


KILLED = """
import sys, time
from pathlib import Path
from megaspan.store import checkpoint, save_checkpoint
from tests.store.training import start
run = Path(sys.argv[1])
model, optimizer = start()
save_checkpoint(run, model=model, optimizer=optimizer, progress={"step": 1}, keep=1)
write = checkpoint.write_tensors
def slow(path, tensors, feed=None):
    if path.name == "state.safetensors":
        path.write_bytes(b"half")
        (run / "writing").touch()
        time.sleep(60)
    return write(path, tensors)
checkpoint.write_tensors = slow
save_checkpoint(run, model=model, optimizer=optimizer, progress={"step": 2}, keep=1)
"""


def test_a_run_killed_in_the_middle_of_a_save_leaves_the_last_complete_checkpoint(tmp_path):
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], cwd=root, env=os.environ | {"PYTHONPATH": str(root)}
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "writing").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (tmp_path / "writing").unlink()
    assert names(tmp_path) == [".partial-checkpoint-2", "checkpoint-1"]
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-1"
    model, optimizer = start()
    assert load_checkpoint(tmp_path / "checkpoint-1", model, optimizer)["step"] == 1
    save_checkpoint(tmp_path, model=model, optimizer=optimizer, progress={"step": 2}, keep=1)
    assert names(tmp_path) == ["checkpoint-2"]


def test_a_damaged_checkpoint_is_refused_and_another_is_named(tmp_path):
    model, optimizer = start()
    for step in (1, 2):
        path = save_checkpoint(tmp_path, model=model, optimizer=optimizer, progress={"step": step})
    weights = path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    model, optimizer = start()
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(UserError, match=r"checkpoint-2 is damaged: model\.safetensors changed .*Resume from .*checkpoint-1"):
        load_checkpoint(path, model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    weights.write_bytes(content[:-5])
    with pytest.raises(UserError, match="is not complete"):
        load_checkpoint(path, model, optimizer)
    assert latest_checkpoint(tmp_path).name == "checkpoint-1"


def test_another_model_or_run_is_refused_and_every_difference_is_named(tmp_path):
    model, optimizer = start()
    identity = {"max_length": 1_048_576, "data": "abc", "model": "Qwen/Qwen3-8B"}
    path = save_checkpoint(tmp_path, model=model, optimizer=optimizer, progress={"step": 1}, identity=identity)
    other, _ = start(layers=3, vocab_size=130)
    before = [parameter.clone() for parameter in other.parameters()]
    with pytest.raises(UserError) as error:
        load_checkpoint(path, other, Masters(other), identity=identity | {"max_length": 131_072})
    text = str(error.value)
    assert "max_length was 1048576 and is 131072" in text
    assert "data was" not in text
    assert "more weights differ" in text
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
    assert load_checkpoint(path, model, optimizer, identity=identity)["step"] == 1


@pytest.mark.parametrize("place", ["checkpoint-9", "."])
def test_a_missing_checkpoint_lists_those_that_are_there(tmp_path, place):
    model, optimizer = start()
    save_checkpoint(tmp_path, model=model, optimizer=optimizer, progress={"step": 1})
    with pytest.raises(UserError, match=r"checkpoint-1|not complete"):
        load_checkpoint(tmp_path / place, model, optimizer)


def test_the_folder_of_a_run_is_answered_with_its_newest_checkpoint(tmp_path):
    """It was called incomplete, and a user with days of work in it was told to start anew."""
    model, optimizer = start()
    for step in range(1, 8):
        save_checkpoint(tmp_path, model=model, optimizer=optimizer, progress={"step": step})
    with pytest.raises(UserError, match=rf"is a run, not a checkpoint. Write resume_from_checkpoint: {tmp_path}/checkpoint-7"):
        module.require_checkpoint(tmp_path)
    with pytest.raises(UserError, match=r": checkpoint-3, checkpoint-4, .*checkpoint-7 and 2 older ones"):
        module.require_checkpoint(tmp_path / "checkpoint-9")


def test_a_checkpoint_of_transformers_says_what_to_do(tmp_path):
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text("{}")
    with pytest.raises(UserError, match=r"written by transformers.*model_name_or_path"):
        load_checkpoint(tmp_path / "checkpoint-3", *start())


def test_resume_does_not_depend_on_how_much_was_seen(tmp_path):
    """R87: the place in the data is a number; nothing is replayed."""
    model, optimizer = start()
    path = save_checkpoint(tmp_path, model=model, optimizer=optimizer, progress={"step": 10_000, "row": 10_000_000})
    begun = time.monotonic()
    assert load_checkpoint(path, model, optimizer)["row"] == 10_000_000
    assert time.monotonic() - begun < 5
