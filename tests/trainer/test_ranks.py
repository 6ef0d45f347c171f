"""The same run on one process and on several gloo ranks, in every layout: losses, norms, counts, held-out metrics, weights."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, TrainerCallback

from megaspan import SFTTrainer
from megaspan.config.parallel import AXES
from megaspan.human import UserError
from megaspan.trainer.interrupt import Interrupted
from tests.gloo import run_ranks
from tests.trainer.support import assert_same_bits, documents, logged, model_folder, trainer

__all__ = ["model_folder"]

# Rows of unequal length, shorter than the ranks are many too; seven rows in windows of four: the second one is not full.
DATA = documents([40, 11, 23, 1, 37, 7, 19])
HELD_OUT = documents([29, 3, 40], seed=1)
OPTIONS: dict[str, Any] = {
    "use_cpu": True,
    "num_train_epochs": 2, "eval_strategy": "steps", "eval_steps": 3, "learning_rate": 1e-3, "max_grad_norm": 0.5,
}  # fmt: skip
ROWS_A_STEP = 4


def launched(rank: int, world: int) -> None:
    """What a launcher would have set."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}


def options_of(sizes: dict[str, int], ranks: int, **changes: Any) -> dict[str, Any]:
    """Options with as many rows a step in every layout."""
    data = ranks // (sizes.get("cp_size", 1) * sizes.get("sp_size", 1))
    together = changes.get("per_device_train_batch_size", 1)
    return OPTIONS | {"gradient_accumulation_steps": ROWS_A_STEP // data // together} | sizes | changes


# That the family's layers may stream is not what these tests are about: `tests/layers/test_selfcheck.py` is.
taken_as_proven = patch("megaspan.layers.streamed.prove_family", lambda *_: None)


@taken_as_proven
def train(rank: int, world: int, folder: Any, out: Path, sizes: dict[str, int], changes: dict[str, Any]) -> None:
    """One run of one rank."""
    launched(rank, world)
    changes = dict(changes)
    data = changes.pop("data", DATA)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) if changes.pop("as_object", False) else folder
    run = trainer(model, out, data, eval_dataset=HELD_OUT, **options_of(sizes, world, **changes))
    mesh = run._job.ranks.mesh
    assert {f"{axis}_size": size for axis, size in zip(AXES, mesh.sizes, strict=True) if size > 1} == sizes
    assert all(isinstance(parameter, DTensor) for parameter in run.model.parameters())
    assert run.state.is_world_process_zero == (rank == 0)
    run.train()
    run.save_model()
    run._job.ranks.heart.close()


@taken_as_proven
def interrupted(rank: int, world: int, folder: Path, out: Path, sizes: dict[str, int]) -> None:
    """A signal comes to the last rank alone, in the second step; all stop, and the run goes on from what they left."""
    launched(rank, world)
    options = options_of(sizes, world, save_strategy="steps", save_steps=100)
    run = trainer(folder, out, DATA, eval_dataset=HELD_OUT, callbacks=[Signal(rank == world - 1)], **options)
    slow_from_second_step(run)
    with pytest.raises(Interrupted) as caught:
        run.train()
    assert caught.value.signum == signal.SIGTERM
    assert caught.value.__notes__[0].startswith(f"{out / 'checkpoint-1'} is complete")
    assert all(parameter.grad is None for parameter in run.model.parameters())
    run._job.ranks.heart.close()
    if rank == 0:
        shutil.copytree(out, out.with_name(f"{out.name}_stopped"))
    again = trainer(folder, out, DATA, eval_dataset=HELD_OUT, resume_from_checkpoint=True, **options)
    again.train()
    again.save_model()
    again._job.ranks.heart.close()


@taken_as_proven
def twice(rank: int, world: int, folder: Path, out: Path, first: dict[str, int], second: dict[str, int]) -> None:
    """A second trainer, in another layout, on the model object that a first one has trained."""
    launched(rank, world)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    runs = []
    for sizes, options in ((first, {}), (second, {"learning_rate": 5e-4})):
        runs.append(trainer(model, out, DATA, eval_dataset=HELD_OUT, **options_of(sizes, world, **options)))
        shutil.rmtree(out, ignore_errors=True)
        torch.distributed.barrier()
        runs[-1].train()
    runs[-1].save_model()
    assert runs[0].model is runs[1].model
    for wrong, words in (
        ({"dp_replicate_size": 2}, "over 2 ranks, and this run is on 1 rank in each of 2 copies"),
        (second | {"dtype": "bfloat16"}, "with fp32 masters, and this run asks for it in pure bf16"),
    ):
        with pytest.raises(UserError, match=words):
            trainer(model, out, DATA, eval_dataset=HELD_OUT, **options_of(wrong, world))
    other = model if rank == 0 else AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with pytest.raises(UserError, match="the model differs between ranks"):
        trainer(other, out, DATA, eval_dataset=HELD_OUT, **options_of(second, world))
    runs[-1]._job.ranks.heart.close()


def slow_from_second_step(run: SFTTrainer) -> None:
    """Makes a step last longer than ranks need to hear of each other's signals."""
    watch = run._job.watch_layers

    def watch_layers(on_layer: Any) -> None:
        def layer(phase: str, index: int) -> None:
            if run.state.global_step == 1:
                time.sleep(0.15)
            on_layer(phase, index)

        watch(layer if on_layer else None)

    run._job.watch_layers = watch_layers  # type: ignore[method-assign]


class Signal(TrainerCallback):
    """Sends this process a signal when the second step begins."""

    def __init__(self, sends: bool) -> None:
        self.sends = sends

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.sends and state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)


@taken_as_proven
def one(folder: Path, out: Path, **changes: Any) -> Path:
    """The same run on one process."""
    run = trainer(folder, out, changes.pop("data", DATA), eval_dataset=HELD_OUT, **options_of({}, 1, **changes))
    run.train()
    run.save_model()
    return out


@taken_as_proven
def one_twice(folder: Path, out: Path) -> Path:
    """What `twice` does, on one process."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for options in ({}, {"learning_rate": 5e-4}):
        run = trainer(model, out, DATA, eval_dataset=HELD_OUT, **options_of({}, 1, **options))
        shutil.rmtree(out, ignore_errors=True)
        run.train()
    run.save_model()
    return out


def saved(out: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in (out / "model").glob("*.safetensors"):
        found |= load_file(file)
    return found


def assert_same_run(out: Path, want: Path) -> None:
    """Every logged number, and the final weights."""
    got, wanted = logged(out), logged(want)
    assert [entry.keys() for entry in got] == [entry.keys() for entry in wanted]
    for entry, other in zip(got, wanted, strict=True):
        for name, value in other.items():
            tolerance = 1e-3 if name == "grad_norm" or "accuracy" in name else 2e-5
            exact = name in ("step", "num_tokens", "epoch", "learning_rate", "eval_num_tokens")
            if name == "eval_runtime":
                continue
            assert entry[name] == (value if exact else pytest.approx(value, rel=tolerance)), (out.name, name, entry["step"])
    weights, others = saved(out), saved(want)
    assert weights.keys() == others.keys()
    for name, tensor in others.items():
        # AdamW divides by the root of the second moment, which magnifies the rounding of tiny gradients.
        assert (weights[name] - tensor).norm() <= 1e-3 * tensor.norm(), (out.name, name)


LORA: dict[str, Any] = {"use_peft": True, "lora_r": 4, "lora_dropout": 0.2, "lora_target_modules": "all-linear"}
# A first window without a trained token, and a last one with two masked rows.
MASKED = [{"input_ids": each["input_ids"], "labels": [-100] * len(each["input_ids"])} for each in DATA[:6]]
MASKED += [{"input_ids": DATA[6]["input_ids"], "labels": DATA[6]["input_ids"]}]
SEQUENTIAL: dict[str, Any] = {"data": MASKED, "train_sampling_strategy": "sequential", "eos_token": None, "num_train_epochs": 1}
PACKED: dict[str, Any] = {"packing": True, "packing_strategy": "bfd", "data": documents([40, 11, 23, 1, 37, 7, 19, 3, 5, 2])}
TOGETHER: dict[str, Any] = {"per_device_train_batch_size": 2}
SHARD, CP, SP = {"dp_shard_size": 2}, {"cp_size": 2}, {"sp_size": 2}


def test_two_ranks(tmp_path, model_folder):
    """All in one group of two: starting one takes seconds."""
    runs: list[tuple[str, dict[str, int], dict[str, Any]]] = [
        ("whole", SHARD, {}), ("whole", CP, {"as_object": True}), ("whole", SP, {}), ("together", SHARD, TOGETHER),
        ("lora_masked", SHARD, LORA | SEQUENTIAL), ("masked", SP, SEQUENTIAL), ("lora_packed", CP, LORA | PACKED),
        ("packed_together", SP, PACKED | TOGETHER),
    ]  # fmt: skip
    cases = [(train, (model_folder, tmp_path / f"{name}_{next(iter(sizes))}", sizes, changes)) for name, sizes, changes in runs]
    stopped = (interrupted, (model_folder, tmp_path / "stopped", CP))
    run_ranks(2, [*cases, stopped, (twice, (model_folder, tmp_path / "twice", CP, SP))])
    wanted = {
        name: one(model_folder, tmp_path / name, **changes)
        for name, changes in (
            ("whole", {}), ("lora_masked", LORA | SEQUENTIAL), ("masked", SEQUENTIAL), ("lora_packed", LORA | PACKED),
            ("packed_together", PACKED),
        )
    }  # fmt: skip
    wanted["together"] = wanted["whole"]
    for name, sizes, _ in runs:
        assert_same_run(tmp_path / f"{name}_{next(iter(sizes))}", wanted[name])
    assert_same_bits(saved(tmp_path / "stopped"), saved(tmp_path / "whole_cp_size"))
    # What two ranks have left is taken on by one.
    on_one = tmp_path / "stopped_stopped"
    assert_same_run(
        one(model_folder, on_one, save_strategy="steps", save_steps=100, resume_from_checkpoint=True), wanted["whole"]
    )
    assert_same_run(tmp_path / "twice", one_twice(model_folder, tmp_path / "one_twice"))
    assert "loss" not in logged(tmp_path / "masked_sp_size")[0]
    assert "loss" not in logged(tmp_path / "lora_masked_dp_shard_size")[0]
    assert (tmp_path / "lora_packed_cp_size" / "model" / "adapter_config.json").exists()


@pytest.mark.full
def test_four_ranks(tmp_path, model_folder):
    layouts = [{"cp_size": 2, "sp_size": 2}, {"dp_replicate_size": 2, "cp_size": 2}]
    run_ranks(4, [(train, (model_folder, tmp_path / "_".join(sizes), sizes, {})) for sizes in layouts])
    wanted = one(model_folder, tmp_path / "one")
    for sizes in layouts:
        assert_same_run(tmp_path / "_".join(sizes), wanted)
