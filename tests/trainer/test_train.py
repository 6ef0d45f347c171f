"""The loop against plain transformers, written out by hand."""

from __future__ import annotations

import math
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, TrainerCallback, get_scheduler

from megaspan import SFTTrainer
from megaspan.human import UserError
from megaspan.world import Ranks
from tests.models import assert_same_gradients, tiny
from tests.trainer.support import (  # noqa: F401
    assert_same_bits,
    documents,
    logged,
    model_folder,
    settings,
    trainer,
    weights,
)


def plain_run(folder, rows, steps, per_step, *, learning_rate=1e-2, max_grad_norm=1.0, betas=(0.9, 0.999), decay=0.0):
    """Plain transformers and torch: full logits, one sum over the window, AdamW, clipping, linear schedule."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=betas, weight_decay=decay)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=steps)
    losses, norms = [], []
    for step in range(steps):
        window = [torch.tensor(row)[None] for row in rows[step * per_step : (step + 1) * per_step]]
        count = sum(row.shape[1] - 1 for row in window)
        total = 0.0
        for row in window:
            logits = model(row).logits[0, :-1].float()
            loss = torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum") / count
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm).item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model, losses, norms


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_same_weights_as_plain_transformers(tmp_path, model_folder, accumulation):  # noqa: F811
    """Loss, norm and weights of a whole run; rows of different length in a window (R09, R10: means over tokens)."""
    data = documents([40, 11, 23, 5, 40, 7])
    run = trainer(
        model_folder, tmp_path, data, num_train_epochs=1, gradient_accumulation_steps=accumulation,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    run.processing_class.eos_token = None
    rows = [run.train_dataset[number].input_ids for number in range(len(run.train_dataset))]
    run.train()
    steps = 6 // accumulation
    model, losses, norms = plain_run(model_folder, rows, steps, accumulation)
    entries = logged(tmp_path)
    assert [entry["loss"] for entry in entries] == pytest.approx(losses, rel=1e-6)
    assert [entry["grad_norm"] for entry in entries] == pytest.approx(norms, rel=1e-5)
    # AdamW divides by the root of the second moment, which magnifies the rounding of tiny gradients: 1e-3 of the movement.
    got = weights(run.model)
    start = weights(AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32))
    for name, want in weights(model).items():
        assert (got[name] - want).norm() <= 1e-3 * (want - start[name]).norm(), name
    assert entries[-1]["epoch"] == 1.0
    assert entries[-1]["num_tokens"] == sum(len(row) for row in rows)


@pytest.mark.parametrize("cut", [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_one_step_does_not_depend_on_how_the_samples_are_cut(tmp_path, model_folder, cut):  # noqa: F811
    """P3, R10: batch size × accumulation of 8 × 1, 4 × 2, 2 × 4 and 1 × 8 give one gradient."""
    data = documents([40, 3, 17, 29, 8, 2, 33, 12])
    seen = {}

    class Gradients(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            seen.update({name: parameter.grad.clone() for name, parameter in model.named_parameters()})

    options = {"max_steps": 1, "train_sampling_strategy": "sequential", "callbacks": [Gradients]}
    size, accumulation = cut
    trainer(
        model_folder,
        tmp_path / "a",
        data,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation,
        **options,
    ).train()
    got = dict(seen)
    trainer(model_folder, tmp_path / "b", data, gradient_accumulation_steps=8, **options).train()
    assert_same_gradients(got, seen)


def test_a_last_window_that_is_not_full_is_weighted_by_its_tokens(tmp_path, model_folder):  # noqa: F811
    """R85: 7 rows in windows of 2."""
    run = trainer(model_folder, tmp_path, documents([9] * 7), num_train_epochs=1, gradient_accumulation_steps=2)
    run.train()
    assert run.state.global_step == 4
    assert logged(tmp_path)[-1]["num_tokens"] == sum(run.train_dataset.lengths)


def test_a_step_without_a_trained_token_changes_nothing_and_says_so(tmp_path, model_folder, capsys):  # noqa: F811
    """R08: never NaN weights, never a cheerful loss of 0."""
    rows = [{"input_ids": [1, 2, 3, 4], "labels": [-100] * 4}, {"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]}]
    run = trainer(model_folder, tmp_path, rows, num_train_epochs=1, train_sampling_strategy="sequential", eos_token=None)
    before = weights(run.model)
    saved = []

    class After(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            saved.append(weights(model))

    run.add_callback(After)
    run.train()
    masked = [number for number in range(2) if (run.train_dataset[number].labels[1:] == -100).all()]
    if masked:  # the end-of-text token appended to a row may be trained; here the labels came with the data
        assert_same_bits(saved[masked[0]], before)
        assert "no token of its rows is trained" in capsys.readouterr().err
        assert "loss" not in logged(tmp_path)[masked[0]]
    assert all(torch.isfinite(parameter).all() for parameter in run.model.parameters())


def test_a_gradient_that_is_not_finite_stops_the_run_before_the_update(tmp_path, model_folder, monkeypatch):  # noqa: F811
    run = trainer(model_folder, tmp_path, documents([20]), max_steps=1)
    with torch.no_grad():
        run.model.model.layers[0].mlp.up_proj.weight[0, 0] = math.inf
    before = weights(run.model)
    left: list[str] = []
    monkeypatch.setattr(Ranks, "abandon", lambda self, error: left.append(str(error)))
    with pytest.raises(RuntimeError, match="nothing was updated"):
        run.train()
    assert_same_bits(weights(run.model), before)
    assert "nothing was updated" in left[0]  # other ranks do not wait, whatever the script does with the error


def test_evaluation_is_training_without_the_update(tmp_path, model_folder):  # noqa: F811
    """R06: with a learning rate of 0, the held-out loss of the training rows is the training loss; odd row counts included."""
    data = documents([40, 13, 7])
    run = trainer(
        model_folder, tmp_path, data, eval_dataset=data, learning_rate=0.0, num_train_epochs=1, gradient_accumulation_steps=3
    )
    run.train()
    metrics = run.evaluate()
    entry = logged(tmp_path)[0]
    assert metrics["eval_loss"] == pytest.approx(entry["loss"], rel=1e-6)
    assert metrics["eval_mean_token_accuracy"] == entry["mean_token_accuracy"]
    assert metrics["eval_entropy"] == pytest.approx(entry["entropy"], rel=1e-6)
    assert run.model.training


def test_metrics_are_means_over_the_tokens_of_the_loss(tmp_path, model_folder):  # noqa: F811
    """R14: entropy and accuracy are taken at the trained positions, not one beside them."""
    row = {"input_ids": [10, 20, 30, 40, 50, 60], "labels": [-100, -100, -100, 40, 50, 60]}
    run = trainer(model_folder, tmp_path, [row], learning_rate=0.0, max_steps=1)
    ids = torch.from_numpy(run.train_dataset[0].input_ids)[None]
    labels = torch.from_numpy(run.train_dataset[0].labels)
    run.train()
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with torch.no_grad():
        log_p = model(ids).logits[0].log_softmax(-1)
    places = [place for place in range(ids.shape[1] - 1) if labels[place + 1] != -100]
    entropy = sum(-(log_p[place].exp() * log_p[place]).sum().item() for place in places) / len(places)
    right = sum(int(log_p[place].argmax() == labels[place + 1]) for place in places) / len(places)
    entry = logged(tmp_path)[0]
    assert entry["entropy"] == pytest.approx(entropy, rel=1e-5)
    assert entry["mean_token_accuracy"] == pytest.approx(right)


def test_seconds_are_those_of_one_step_whatever_is_done_between_steps(tmp_path, model_folder):  # noqa: F811
    """A log line of three steps, with a checkpoint (as slow as a disk) after each."""

    class Slow(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **more):
            time.sleep(0.2)

        def on_save(self, args, state, control, **more):
            time.sleep(1.0)

    made = trainer(
        model_folder, tmp_path / "run", documents([30] * 6), callbacks=[Slow()], max_steps=6, logging_steps=3,
        save_strategy="steps", save_steps=1,
    )  # fmt: skip
    made.train()
    for entry in (entry for entry in made.state.log_history if "loss" in entry):
        assert 0.2 <= entry["step_seconds"] < 1.0
        assert entry["tokens_per_second"] * entry["step_seconds"] == pytest.approx(30)


def test_early_stopping_of_transformers_stops(tmp_path, model_folder):  # noqa: F811
    """A callback written for transformers works: the held-out loss does not improve at a learning rate of 0."""
    data = documents([20] * 6)
    run = trainer(
        model_folder, tmp_path, data, eval_dataset=data[:2], learning_rate=0.0, num_train_epochs=2, eval_strategy="steps",
        eval_steps=1, callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )  # fmt: skip
    run.train()
    assert run.state.global_step == 3
    assert run.state.best_global_step == 1


def test_parameters_of_trls_trainer_are_refused_by_name(tmp_path, model_folder):  # noqa: F811
    from megaspan import SFTTrainer
    from tests.trainer.support import settings

    refused = [
        "data_collator", "compute_loss_func", "compute_metrics", "optimizer_cls_and_kwargs", "preprocess_logits_for_metrics",
        "quantization_config", "formatting_func",
    ]  # fmt: skip
    for name in refused:
        with pytest.raises(UserError, match=name):
            SFTTrainer(str(model_folder), settings(tmp_path), **{name: object()})
    with pytest.raises(UserError, match="optimizers"):
        SFTTrainer(str(model_folder), settings(tmp_path), optimizers=(object(), None))
    with pytest.raises(UserError, match="SFTConfig"):
        SFTTrainer(str(model_folder))


def test_every_parameter_of_trls_trainer_is_known():
    """A parameter that TRL adds tomorrow must be supported or refused here."""
    import inspect

    import trl

    from megaspan import SFTTrainer

    assert (
        inspect.signature(trl.SFTTrainer.__init__).parameters.keys() <= inspect.signature(SFTTrainer.__init__).parameters.keys()
    )


def test_a_row_with_a_token_that_the_model_lacks_is_refused_before_training(tmp_path, model_folder):  # noqa: F811
    with pytest.raises(UserError, match="does not know"):
        trainer(model_folder, tmp_path, [{"input_ids": [1, 2, 5000]}])


def test_random_weights_may_start_above_the_unigram_entropy_and_it_is_said(tmp_path, model_folder, capsys):  # noqa: F811
    """R52: the sign of wrong positions is one loud line."""
    trainer(model_folder, tmp_path, [{"input_ids": [7] * 30}], max_steps=1).train()
    assert "above the unigram entropy of its rows" in capsys.readouterr().err


def test_a_model_object_trains(tmp_path, model_folder):  # noqa: F811
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    run = trainer(model, tmp_path, documents([20, 20]), num_train_epochs=1)
    output = run.train()
    assert run.model is model
    assert output.global_step == 2
    assert output.training_loss == pytest.approx(sum(entry["loss"] for entry in run.state.log_history) / 2, rel=1e-6)


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), 5, ["a"]])
def test_a_model_of_another_kind_is_refused_and_not_replaced_by_the_options(tmp_path, model_folder, model):  # noqa: F811
    args = settings(tmp_path, model_name_or_path=str(model_folder))
    with pytest.raises(UserError, match="neither a name nor a transformers model"):
        SFTTrainer(model, args, train_dataset=documents([9]))


def test_the_picture_of_a_run(tmp_path, model_folder, monkeypatch, capsys):  # noqa: F811
    """`SFTTrainer` leaves what the verb leaves; a picture that cannot be drawn costs nothing that was trained."""
    run = SFTTrainer(str(model_folder), settings(tmp_path / "run", max_steps=2), train_dataset=documents([12, 9]))
    run.train()
    assert (tmp_path / "run" / "plots.png").read_bytes().startswith(b"\x89PNG")

    def fails(_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("megaspan.trainer.sft.plot_run", fails)
    again = SFTTrainer(str(model_folder), settings(tmp_path / "again", max_steps=2), train_dataset=documents([12, 9]))
    assert again.train().global_step == 2
    assert "! plots.png was not drawn: OSError: the disk is full" in capsys.readouterr().err
    assert not (tmp_path / "again" / "plots.png").exists()


def test_a_path_is_a_name(tmp_path, model_folder):  # noqa: F811
    run = SFTTrainer(model_folder, settings(tmp_path), train_dataset=documents([9]))
    assert run.args.model_name_or_path == str(model_folder)


def test_a_model_in_half_precision_is_refused(tmp_path):
    with pytest.raises(UserError, match="half precision"):
        trainer(tiny("llama", vocab_size=320, dtype=torch.float16), tmp_path, documents([9]))


@pytest.mark.parametrize("callback", ["tensorboard", object(), dict])
def test_what_is_no_callback_is_refused(tmp_path, model_folder, callback):  # noqa: F811
    with pytest.raises(UserError, match=r"no transformers\.TrainerCallback"):
        trainer(model_folder, tmp_path, documents([9]), callbacks=[callback])
