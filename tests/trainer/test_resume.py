"""Checkpoints: resumed runs, killed runs, signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from megaspan import cli
from megaspan.human import UserError
from megaspan.trainer.interrupt import Interrupted
from tests.trainer.support import assert_same_bits, documents, logged, model_folder, trainer, weights  # noqa: F401

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
DATA = documents([40, 11, 23, 5, 40, 7, 19])


def test_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path, model_folder):  # noqa: F811
    """Bit-equal on the CPU: weights, metrics, learning rates, row order, over an epoch boundary."""
    options = {"num_train_epochs": 2, "gradient_accumulation_steps": 2, "save_strategy": "steps", "warmup_steps": 2}
    whole = trainer(model_folder, tmp_path / "whole", DATA, **(options | {"save_steps": 100}))
    whole.train()

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 5

    first = trainer(model_folder, tmp_path / "run", DATA, callbacks=[Stop], **(options | {"save_steps": 5}))
    first.train()
    assert first.state.global_step == 5
    second = trainer(model_folder, tmp_path / "run", DATA, **(options | {"save_steps": 5}))
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == whole.state.global_step == 8
    assert_same_bits(weights(second.model), weights(whole.model))
    assert logged(tmp_path / "run") == logged(tmp_path / "whole")
    assert [e["loss"] for e in second.state.log_history] == [e["loss"] for e in whole.state.log_history]


def test_a_mean_over_several_steps_survives_a_resume(tmp_path, model_folder):  # noqa: F811
    """With logging_steps 3 and a checkpoint at step 4, the line of step 6 is over steps 4 to 6, resumed or not."""
    options = {"max_steps": 6, "logging_steps": 3, "save_strategy": "steps", "save_steps": 4}
    whole = trainer(model_folder, tmp_path / "whole", DATA, **options)
    whole.train()
    resumed = trainer(model_folder, tmp_path / "other", DATA, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert logged(tmp_path / "other")[-1] == logged(tmp_path / "whole")[-1]
    assert logged(tmp_path / "whole")[-1]["step"] == 6


def test_lora_dropout_resumes_exactly(tmp_path, model_folder):  # noqa: F811
    """The random state is part of a checkpoint."""
    options = {"max_steps": 4, "use_peft": True, "lora_r": 4, "lora_dropout": 0.3, "save_strategy": "steps"}
    whole = trainer(model_folder, tmp_path / "whole", DATA, **(options | {"save_steps": 2}))
    whole.train()
    half = trainer(model_folder, tmp_path / "whole2", DATA, **(options | {"save_steps": 2}))
    half.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_same_bits(weights(half.model), weights(whole.model))


def test_resuming_with_other_settings_names_the_difference(tmp_path, model_folder):  # noqa: F811
    trainer(model_folder, tmp_path, DATA, max_steps=2, save_strategy="steps", save_steps=1).train()
    with pytest.raises(UserError, match=r"made by another run: the data is not the same\. Resume with the settings"):
        trainer(model_folder, tmp_path, DATA[:3], max_steps=2, save_strategy="steps", save_steps=1).train(True)
    sentence = (
        r"another run: max_length was 40 and is 30; the data is not the same\. Write max_length=40 as before, or start anew"
    )
    with pytest.raises(UserError, match=sentence):
        trainer(model_folder, tmp_path, DATA, max_length=30, max_steps=2, save_strategy="steps", save_steps=1).train(True)


def test_a_new_run_does_not_overwrite_another(tmp_path, model_folder):  # noqa: F811
    trainer(model_folder, tmp_path, DATA, max_steps=1, save_strategy="steps", save_steps=1).train()
    with pytest.raises(UserError, match="already holds a run"):
        trainer(model_folder, tmp_path, DATA, max_steps=1, save_strategy="steps", save_steps=1).train()


def test_save_total_limit_and_minutes(tmp_path, model_folder):  # noqa: F811
    run = trainer(model_folder, tmp_path / "a", DATA, max_steps=5, save_strategy="steps", save_steps=1, save_total_limit=2)
    run.train()
    assert sorted(path.name for path in (tmp_path / "a").glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-5"]
    run = trainer(model_folder, tmp_path / "b", DATA, max_steps=3, save_strategy="steps", save_steps=100, save_minutes=1e-9)
    run.train()
    assert len(list((tmp_path / "b").glob("checkpoint-*"))) == 3


class _Signal(TrainerCallback):
    """Sends this process a signal when the second step begins."""

    def __init__(self, signum):
        self.signum = signum

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            os.kill(os.getpid(), self.signum)
            time.sleep(0.3)  # the thread that listens sets the mark; the next layer sees it


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_abandons_the_step_and_leaves_a_complete_checkpoint(tmp_path, model_folder, signum):  # noqa: F811
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 100}
    whole = trainer(model_folder, tmp_path / "whole", DATA, **options)
    whole.train()
    run = trainer(model_folder, tmp_path / "run", DATA, callbacks=[_Signal(signum)], **options)
    with pytest.raises(Interrupted) as caught:
        run.train()
    assert caught.value.signum == signum
    assert (tmp_path / "run" / "checkpoint-1").is_dir()
    assert all(parameter.grad is None for parameter in run.model.parameters())
    again = trainer(model_folder, tmp_path / "run", DATA, **options)
    again.train(resume_from_checkpoint=True)
    assert_same_bits(weights(again.model), weights(whole.model))


def test_the_command_line_exits_143_and_resumes(tmp_path, model_folder, capsys):  # noqa: F811
    (tmp_path / "text.txt").write_text("In the beginning God created the heaven and the earth. " * 400)
    file = tmp_path / "run.yaml"
    file.write_text(
        textwrap.dedent(f"""
        model_name_or_path: {model_folder}
        dataset_name: {tmp_path / "text.txt"}
        output_dir: {tmp_path / "run"}
        max_length: 40
        max_steps: 80
        allow_past_window: true
        """)
    )
    command = [sys.executable, "-m", "megaspan", "train", str(file), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 143, error
    assert "Traceback" not in error
    checkpoints = list((tmp_path / "run").glob("checkpoint-*"))
    assert len(checkpoints) == 1
    step = int(checkpoints[0].name.split("-")[1])
    assert step >= 2
    capsys.readouterr()
    assert cli.main([*command[3:], "--resume_from_checkpoint", "true", "--save_strategy", "no"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["steps"] == 80
    assert result["resumed_at_step"] == step, "seconds of this start beside tokens of the whole run"
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, 81))
    AutoModelForCausalLM.from_pretrained(result["model"])


def test_the_final_model_loads_in_plain_transformers(tmp_path, model_folder):  # noqa: F811
    """P5, R51: YaRN and the new length are in the saved folder; the logits are those of the trained model."""
    rope = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}
    run = trainer(model_folder, tmp_path, DATA, max_steps=1, max_length=256, model_init_kwargs=rope)
    run.train()
    run.save_model()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    assert plain.config.rope_parameters["factor"] == 4.0
    assert plain.config.max_position_embeddings == 256
    ids = torch.arange(200)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, run.model.eval()(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer_calls", [1, 2, 3, 7])
def test_an_abandoned_step_draws_the_same_dropout_again(tmp_path, model_folder, layer_calls):  # noqa: F811
    """The forward of the abandoned step has used the generators; its checkpoint must not know (LoRA's own dropout is 0.05)."""
    options = {"max_steps": 3, "use_peft": True, "lora_r": 4, "lora_dropout": 0.5, "gradient_checkpointing": True}
    whole = trainer(model_folder, tmp_path / "whole", DATA, **options)
    whole.train()
    first = trainer(model_folder, tmp_path / "run", DATA, **options)
    passed = _interrupt_at_layer(first, layer_calls)
    with pytest.raises(Interrupted) as caught:
        first.train()
    assert passed["layers"] == layer_calls
    assert "checkpoint-" in caught.value.__notes__[0]
    second = trainer(model_folder, tmp_path / "run", DATA, **options)
    second.train(resume_from_checkpoint=True)
    assert_same_bits(weights(second.model), weights(whole.model))


def test_a_signal_in_an_evaluation_is_answered_before_the_next_row(tmp_path, model_folder):  # noqa: F811
    """Held-out rows of a million tokens are minutes each. The complete checkpoint is that of the step before."""
    options = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "eval_dataset": documents([20, 9, 30])}
    first = trainer(model_folder, tmp_path / "run", DATA, **options)
    seen = []

    def forward(*_):
        seen.append(1)
        if len(seen) == 2:  # the first held-out row
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)

    first.model.register_forward_pre_hook(forward)
    with pytest.raises(Interrupted) as caught:
        first.train()
    assert len(seen) == 2
    assert "checkpoint-1 is complete" in caught.value.__notes__[0]
    whole = trainer(model_folder, tmp_path / "whole", DATA, **options)
    whole.train()
    second = trainer(model_folder, tmp_path / "run", DATA, **options)
    second.train(resume_from_checkpoint=True)
    assert_same_bits(weights(second.model), weights(whole.model))


def _interrupt_at_layer(run, calls):
    """Makes the signal come at the layer boundary number `calls`, as the loop hears it."""
    passed, watch = {"layers": 0}, run._job.watch_layers

    def watch_layers(on_layer):
        def layer(phase, index):
            passed["layers"] += 1
            if passed["layers"] == calls:
                raise Interrupted(signal.SIGTERM)
            on_layer(phase, index)

        watch(layer if on_layer else None)

    run._job.watch_layers = watch_layers
    return passed


def test_a_signal_during_a_save_does_not_save_twice(tmp_path, model_folder, monkeypatch):  # noqa: F811
    """115 GB at 8B: the 30 seconds before the machine is gone are too short for a second one."""
    from megaspan import store

    written, save = [], store.save_checkpoint

    def save_and_signal(*args, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)  # the thread that listens hears it
        written.append(save(*args, **options))
        return written[-1]

    monkeypatch.setattr(store, "save_checkpoint", save_and_signal)
    with pytest.raises(Interrupted):
        trainer(model_folder, tmp_path, DATA, max_steps=3, save_strategy="steps", save_steps=1).train()
    assert [path.name for path in written] == ["checkpoint-1"]


def test_options_of_the_update_may_change_at_a_resume_and_it_is_said(tmp_path, model_folder, capsys):  # noqa: F811
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer(model_folder, tmp_path, DATA, **options).train()
    assert "so far" not in capsys.readouterr().err
    changed = trainer(model_folder, tmp_path, DATA, learning_rate=3e-2, max_grad_norm=0.5, **options)
    changed.train(str(tmp_path / "checkpoint-1"))
    header = capsys.readouterr().err
    assert "learning_rate: 0.03" in header
    assert "the run had 0.01 so far" in header
    assert header.count("so far") == 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_init_kwargs": {"rope_parameters": YARN}}, "positions was"),
        ({"dtype": "bfloat16"}, "weights was 'float32' and is 'bfloat16'"),
        ({"use_peft": True, "lora_alpha": 64}, "adapter was None"),
    ],
)
def test_a_resume_of_another_model_is_refused(tmp_path, model_folder, change, named):  # noqa: F811
    """Same files, same shapes, another model: positions, precision, the scale of an adapter."""
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer(model_folder, tmp_path, DATA, **options).train()
    with pytest.raises(UserError, match=named):
        trainer(model_folder, tmp_path, DATA, **(options | change)).train(str(tmp_path / "checkpoint-1"))


def test_the_scale_of_an_adapter_is_part_of_its_run(tmp_path, model_folder):  # noqa: F811
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "use_peft": True, "lora_r": 4}
    trainer(model_folder, tmp_path, DATA, lora_alpha=8, **options).train()
    with pytest.raises(UserError, match=r"adapter was .*'lora_alpha': 8.* and is .*'lora_alpha': 16"):
        trainer(model_folder, tmp_path, DATA, lora_alpha=16, **options).train(str(tmp_path / "checkpoint-1"))


def test_a_resume_that_is_refused_leaves_the_model_as_it_was(tmp_path, model_folder):  # noqa: F811
    """Weights, and no hook of an optimizer that is gone: who trains anew then begins where the model was loaded."""
    options = {"max_steps": 2, "bf16": True, "max_grad_norm": 0.0, "save_strategy": "steps", "save_steps": 1}
    trainer(model_folder, tmp_path / "old", DATA, **options).train()
    asked = {**options, "dtype": "bfloat16"}
    refused, fresh = (trainer(model_folder, tmp_path / name, DATA, **asked) for name in ("one", "other"))
    before = weights(refused.model)
    with pytest.raises(UserError, match="the checkpoint was made with fp32 masters, and this run is without"):
        refused.train(str(tmp_path / "old" / "checkpoint-1"))
    assert_same_bits(weights(refused.model), before)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in refused.model.parameters())
    refused.train()
    fresh.train()
    assert_same_bits(weights(refused.model), weights(fresh.model))


def test_a_trainer_that_has_trained_does_not_go_on_without_its_optimizer(tmp_path, model_folder):  # noqa: F811
    """A second `train()` in a notebook, after the end or after an error: neither nothing nor half a state."""
    done = trainer(model_folder, tmp_path, DATA, max_steps=1)
    done.train()
    with pytest.raises(UserError, match="has trained 1 steps already"):
        done.train()


def test_two_runs_do_not_share_a_folder(tmp_path, model_folder):  # noqa: F811
    """A job that is requeued while its first copy still runs; the second would clear away the first's open save."""
    refused = []

    class Second(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            with pytest.raises(UserError, match="another run is at work") as error:
                trainer(model_folder, tmp_path, DATA, max_steps=1).train()
            refused.append(error)

    trainer(model_folder, tmp_path, DATA, max_steps=1, callbacks=[Second]).train()
    assert len(refused) == 1


def test_a_missing_checkpoint_is_found_before_anything_is_loaded(tmp_path, model_folder, monkeypatch):  # noqa: F811
    from megaspan.trainer import run, sft
    from tests.trainer.support import settings

    monkeypatch.setattr(sft, "set_up", lambda *args: pytest.fail("the model was loaded"))
    with pytest.raises(UserError, match="there is no checkpoint"):
        run(settings(tmp_path, model_name_or_path=str(model_folder), resume_from_checkpoint=str(tmp_path / "checkpoint-7")))
