"""What is refused before a row is made."""

from __future__ import annotations

import os

import pytest
import torch
from transformers import AutoModelForCausalLM, EarlyStoppingCallback

from megaspan import SFTTrainer
from megaspan.data.prepare import OpenData
from megaspan.human import UserError
from megaspan.trainer import setup
from tests.models import save_model_folder
from tests.trainer.support import documents, model_folder, settings, trainer  # noqa: F401

DATA = documents([40, 11])


@pytest.fixture
def no_rows(monkeypatch):
    """Fails where a row would be made."""
    monkeypatch.setattr(OpenData, "rows", lambda *_, **__: pytest.fail("rows are made"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder of two splits, and one file."""
    place = tmp_path_factory.mktemp("texts")
    for split in ("train", "validation"):
        (place / "splits" / split).mkdir(parents=True)
        (place / "splits" / split / "a.txt").write_text("In the beginning.")
    (place / "file.txt").write_text("In the beginning.")
    return place


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": "a"}}, "does not take lr_scheduler_kwargs"),
        ({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6}, "learning_rate": 0},
         "has no rate with learning_rate: 0: .*division by zero.* write a learning_rate above 0"),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1}, "max_steps": 2}, "must be smaller"),
        ({"use_peft": True, "lora_target_modules": ["nosuch"]}, "peft cannot place the adapter: .*nosuch"),
        ({"eval_strategy": "epoch"}, "eval_strategy: epoch needs held-out data.*Pass eval_dataset=…"),
        ({"report_to": "nosuch"}, "report_to"),
    ],
)  # fmt: skip
def test_options_are_refused_before_rows(tmp_path, model_folder, no_rows, options, said):  # noqa: F811
    with pytest.raises(UserError, match=said):
        trainer(model_folder, tmp_path, DATA, **options)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("splits", r"eval_strategy: epoch, and .*splits has no split 'test'; allowed: train, validation. "
                   "Write dataset_test_split.*validation.* or eval_strategy.*no"),
        ("file.txt", "has no split 'test': files are one split"),
    ],
)  # fmt: skip
def test_held_out_data_is_looked_for_before_any_is_read(tmp_path, model_folder, no_rows, texts, name, said):  # noqa: F811
    with pytest.raises(UserError, match=said):
        trainer(model_folder, tmp_path, None, eval_strategy="epoch", dataset_name=str(texts / name))


def test_the_first_record_of_every_file_is_looked_at_before_rows(tmp_path, model_folder, no_rows, texts):  # noqa: F811
    """The second file's column was missed when the first one was tokenised."""
    (tmp_path / "b.jsonl").write_text('{"content": "a"}\n')
    both = [{"path": str(texts / "file.txt")}, {"path": str(tmp_path / "b.jsonl")}]
    with pytest.raises(UserError, match=r"b\.jsonl has no column 'text', only content"):
        trainer(model_folder, tmp_path, None, datasets=both)


def test_a_long_decay_is_not_refused_for_a_length_that_only_rows_tell(tmp_path):
    from megaspan.trainer.early import check_schedule

    kwargs = {"num_decay_steps": 5000}
    check_schedule(settings(tmp_path, lr_scheduler_type="warmup_stable_decay", lr_scheduler_kwargs=kwargs, warmup_steps=3000))


def test_a_model_from_python_is_looked_at_before_rows(tmp_path, model_folder, no_rows):  # noqa: F811
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with pytest.raises(UserError, match="the model has seen positions up to 4,096 only"):
        trainer(model, tmp_path, DATA, max_length=8192)
    with pytest.raises(UserError, match=r"model_init_kwargs \(tie_word_embeddings\) cannot change a model that exists"):
        trainer(model, tmp_path, DATA, model_init_kwargs={"tie_word_embeddings": True})
    with pytest.raises(UserError, match="half precision"):
        trainer(model.half(), tmp_path, DATA)


def test_callbacks_are_looked_at_before_rows(tmp_path, model_folder, no_rows):  # noqa: F811
    """transformers says the second by an AssertionError when the weights are there."""
    with pytest.raises(UserError, match="is no transformers"):
        trainer(model_folder, tmp_path, DATA, callbacks=[print])
    with pytest.raises(UserError, match="callbacks is a list; got EarlyStoppingCallback"):
        trainer(model_folder, tmp_path, DATA, callbacks=EarlyStoppingCallback(1))
    with pytest.raises(UserError, match=r"EarlyStoppingCallback stops by the held-out loss.*Write eval_strategy"):
        trainer(model_folder, tmp_path, DATA, callbacks=[EarlyStoppingCallback(1)])


def test_a_run_folder_that_cannot_be_written_to_is_found_before_rows(tmp_path, model_folder, no_rows, monkeypatch):  # noqa: F811
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=f"the run folder .* cannot be used: {tmp_path}/file is a file. Choose another output_dir"
    ):
        trainer(model_folder, tmp_path / "file" / "run", DATA)
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path)
    with pytest.raises(UserError, match=f"{tmp_path} may not be written to"):
        trainer(model_folder, tmp_path / "new" / "run", DATA)
    assert not (tmp_path / "new").exists()


def test_tokens_of_another_vocabulary_are_found_before_the_weights(tmp_path, model_folder, monkeypatch):  # noqa: F811
    monkeypatch.setattr(setup, "_loaded", lambda *_: pytest.fail("weights are loaded"))
    with pytest.raises(UserError, match="a row holds a token that the model does not know; got 999999"):
        trainer(str(model_folder), tmp_path, [{"input_ids": [1, 2, 999999]}])


def test_a_tokenizer_of_more_words_than_the_model_is_found_before_rows(tmp_path, no_rows):
    place = save_model_folder(tmp_path / "model", vocab_size=258)
    with pytest.raises(UserError, match="the tokenizer has token 258, but the model has embeddings for 258 tokens only"):
        trainer(place, tmp_path / "run", DATA)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tokenizer": 1}, "called processing_class now. Write processing_class=tokenizer"),
        ({"packing": True}, r"packing is an option, not a parameter of SFTTrainer. Write args=SFTConfig\(packing=…\)"),
        ({"max_seq_length": 64}, "max_seq_length is an option"),
        ({"nosuch": 1}, "SFTTrainer has no parameter nosuch"),
    ],
)
def test_parameters_of_older_scripts_are_named(tmp_path, model_folder, no_rows, given, said):  # noqa: F811
    with pytest.raises(UserError, match=said):
        SFTTrainer(str(model_folder), settings(tmp_path), train_dataset=DATA, **given)
