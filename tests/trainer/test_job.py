"""What the header says about a run's parts."""

import dataclasses
import json
import re

import pytest
import torch

from megaspan import world
from megaspan.attention.choose import KernelChoice, choose_kernel
from megaspan.attention.tiled import TiledMath
from megaspan.config import SFTConfig
from megaspan.human import UserError
from megaspan.plan.keep import KeepPolicy
from megaspan.trainer import job, setup
from tests.trainer.support import documents, model_folder, trainer

__all__ = ["model_folder"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "every checkpoint is kept (save_total_limit: null); those of save_minutes: 30 are not in what is needed"),
        ({"save_minutes": None}, "every checkpoint is kept (save_total_limit: null)"),
        ({"save_total_limit": 1}, "save_total_limit: 1 keeps the newest"),
        ({"save_total_limit": 2}, "save_total_limit: 2 keeps the newest"),
        ({"save_strategy": "no"}, "a checkpoint only when a signal stops the run"),
    ],
)
def test_what_will_lie_on_the_disk_is_said(options, said):
    """R88: at a million tokens save_minutes alone fills a disk, and only the header can say so before."""
    assert job._kept(SFTConfig(max_length=8, **options)) == said


def test_ranks_plan_for_what_all_of_them_have_and_compare_their_plans(tmp_path, model_folder, monkeypatch):
    """One that keeps something else would wait for the others for ever: the least is planned for, and a digest compared."""
    compared = []

    def agree(machine):
        return dataclasses.replace(machine, host_bytes=5 * 2**30, host_source="the least of 2 ranks")

    def same(name, digest):
        compared.append((name, digest))
        if len(compared) > 4:
            raise UserError("the plan differs between ranks", do="Start every rank with the same options")

    monkeypatch.setattr(world, "agree", agree)
    monkeypatch.setattr(world, "same_everywhere", same)
    run = trainer(model_folder, tmp_path, documents([40, 30]), max_steps=1)
    assert run._job.plan.host_limit == 5 * 2**30
    assert [name for name, _ in compared] == ["the configuration", "the data", "the plan", "which layers stream"]
    digest = compared[2][1]
    assert digest == setup._digest(run._job.plan)
    with pytest.raises(UserError, match="differs between ranks"):
        trainer(model_folder, tmp_path, documents([40, 30]), max_steps=1)


def test_heads_are_refused_with_what_was_typed_before_anything_is_planned(tmp_path, model_folder, monkeypatch):
    """A plan knows nothing of --nproc: the line that it said to type started one process."""

    def refuse(mesh, heads, kv_heads):
        raise UserError(f"{heads} and {kv_heads} heads")

    monkeypatch.setattr(world.Mesh, "check_heads", refuse)
    monkeypatch.setattr(setup, "plan_command", None)
    with pytest.raises(UserError, match="4 and 2 heads"):
        trainer(str(model_folder), tmp_path, documents([40]), max_steps=1)


def test_a_limit_of_gpu_memory_needs_a_gpu(tmp_path, model_folder):
    """It was taken and had no effect; a plan may have it for a machine elsewhere."""
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(UserError, match="memory_limit is for a GPU, and there is none here"):
        trainer(model_folder, tmp_path, documents([40]), max_steps=1, memory_limit="80GiB")


def test_the_digest_is_of_what_decides_the_order_of_calls(tmp_path, model_folder):
    plan = trainer(model_folder, tmp_path, documents([40, 30]), max_steps=1)._job.plan
    changes = [
        {"keep": KeepPolicy.everything(2, "disk")},
        {"keep": dataclasses.replace(plan.keep, again="disk")},
        {"kv_heads_per_call": 1},
        {"layer_tile_tokens": 4096},
        {"stream_back": True},
        {"loss_tile_tokens": 7},
        {"states": dataclasses.replace(plan.states, gradients="host")},
    ]
    digests = [setup._digest(dataclasses.replace(plan, **change)) for change in ({}, {"host_bytes": 1}, *changes)]
    assert digests[0] == digests[1]
    assert len(set(digests[1:])) == 1 + len(changes)


def test_the_plan_knows_the_documents_of_packed_rows(tmp_path, model_folder) -> None:
    packed = {"packing": True, "packing_strategy": "bfd", "max_length": 64, "eos_token": None}
    run = trainer(model_folder, tmp_path, documents([64, 40, 20, 4, 30, 30]), max_steps=1, **packed)
    assert run._job.plan.documents == 1  # the row of one document has most attention
    run = trainer(model_folder, tmp_path / "short", documents([40, 20, 4, 30, 30]), max_steps=1, **packed)
    assert run._job.plan.documents == 3


@pytest.mark.parametrize(
    ("sizes", "device", "batch", "windows", "said"),
    [
        ({}, "cpu", 1, 1, ""),
        ({"cp": 8}, "cuda", 1, 1, ""),
        ({"dp_shard": 2}, "cuda", 1, 1, " = 2 GPUs × 1 (per_device_train_batch_size) × 1 (gradient_accumulation_steps)"),
        ({"dp_shard": 2}, "cpu", 3, 4, " = 2 processes × 3 (per_device_train_batch_size) × 4 (gradient_accumulation_steps)"),
        ({}, "cuda", 1, 4, " = 1 GPU × 1 (per_device_train_batch_size) × 4 (gradient_accumulation_steps)"),
        ({"dp_replicate": 2, "cp": 2, "sp": 2}, "cuda", 1, 1, " = 2 groups of 4 GPUs × 1 (per_device_train_batch_size) × 1 "
         "(gradient_accumulation_steps)"),
    ],
)  # fmt: skip
def test_rows_a_step_are_told_with_their_product(tmp_path, model_folder, sizes, device, batch, windows, said):
    """`megaspan train --nproc 2` alone makes a step of twice the rows, so half the steps."""
    run = trainer(model_folder, tmp_path, documents([40, 30]), max_steps=1)._job
    options = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": windows}
    mesh = world.Mesh(**sizes)
    there = dataclasses.replace(run, args=run.args.replace(**options), ranks=world.Ranks(mesh, torch.device(device)))
    assert there._product() == said
    assert there.rows_per_step == mesh.size("data") * batch * windows


def test_the_header_is_understood_by_who_has_never_seen_one(tmp_path, model_folder, capsys):
    """Nothing about tiles that no row fills, two kernels of one name, seconds of something without a name."""
    trainer(model_folder, tmp_path, documents([40, 30]), max_steps=1, gradient_accumulation_steps=2).train()
    told = capsys.readouterr().err
    product = (
        "rows a step: 2 = 1 process × 1 (per_device_train_batch_size) × 2 (gradient_accumulation_steps); steps an epoch: 1"
    )
    assert product in told
    assert "attention runs forward once; a row is one tile\n" in told
    (attention,) = (line for line in told.splitlines() if line.startswith("  attention  "))
    assert attention.endswith("fastest proven for head size 16, float32 on cpu")
    (seconds,) = (line for line in told.splitlines() if line.startswith("  prepared in"))
    assert re.sub(r"[\d.]+ m?s", "1 s", seconds).split(maxsplit=2)[2] == (
        "rows 1 s, weights 1 s, plan and trials of the layers 1 s, host memory 1 s"
    )


def test_the_name_of_a_run_is_in_its_header_and_its_record(tmp_path, model_folder, capsys):
    """It was refused without a tracker; scripts that move here have one, and it says which of many headers this is."""
    run = trainer(model_folder, tmp_path, documents([40]), max_steps=1, run_name="whales at 40")
    run.train()
    assert re.search(rf"^  run +whales at 40 +.*{tmp_path.name}$", capsys.readouterr().err, re.M)
    assert json.loads((tmp_path / "run.json").read_text())["starts"][-1]["run_name"] == "whales at 40"
    assert "run_name: whales at 40\n" in (tmp_path / "config.yaml").read_text()


def test_an_adapter_is_told(tmp_path, model_folder):
    targets = {"use_peft": True, "lora_r": 2, "lora_dropout": 0.1, "lora_target_modules": ["v_proj", "q_proj"]}
    made = trainer(model_folder, tmp_path, documents([40]), max_steps=1, **targets)
    (line,) = made._job._adapter_lines()
    trained = sum(parameter.numel() for parameter in made.model.parameters() if parameter.requires_grad)
    assert line.value == "LoRA, r 2, alpha 32, dropout 0.1"
    assert line.reason == f"{trained:,} parameters train; on q_proj, v_proj"


def test_the_names_of_all_linear_are_told_by_kind(tmp_path, model_folder):
    """peft writes them out: 252 names for Qwen3-8B, in one line of the header."""
    made = trainer(model_folder, tmp_path, documents([40]), max_steps=1, use_peft=True, lora_target_modules="all-linear")
    layers = made.model.config.num_hidden_layers
    told = ", ".join(
        f"{kind} × {layers}" for kind in ("down_proj", "gate_proj", "up_proj", "k_proj", "o_proj", "q_proj", "v_proj")
    )
    assert made._job._adapter_lines()[0].reason.endswith(f" parameters train; on {told}")


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"cp": 8}, "weights and AdamW's states cut over 8 ranks, a row's tokens cut over 8 ranks"),
        ({"dp_shard": 2}, "weights and AdamW's states cut over 2 ranks, 2 ranks with a row each"),
        ({"dp_replicate": 2, "cp": 2, "sp": 2}, "2 copies of the model, weights and AdamW's states cut over 4 ranks, 2 groups "
         "of ranks with a row each, a row's tokens cut over 2 ranks, a row's heads shared by 2 ranks"),
    ],
)  # fmt: skip
def test_what_ranks_share_is_told(tmp_path, model_folder, sizes, told):
    made = trainer(model_folder, tmp_path, documents([40, 30]), max_steps=1)._job
    (line,) = dataclasses.replace(made, ranks=world.Ranks(world.Mesh(**sizes), made.device))._rank_lines()
    assert line.reason == told


def test_which_kernel_runs_when_is_told():
    """Calls of several documents, or of a rank's parts of a row, may take another kernel: `cp_size` alone makes such calls."""
    plain, window = (choose_kernel("cpu", torch.float32, 16, window) for window in (None, 8))
    both = [choose_kernel("cpu", torch.float32, 16, window, segments=2) for window in (None, 8)]
    assert [each.several for each in (plain, window, *both)] == [False, False, True, True]
    alike = "; also for several documents, or a rank's parts of a row, in one call"
    lines = [line for line in job.attention_lines([plain, window]) if not line.loud]
    assert [line.reason for line in lines] == [plain.reason, window.reason]
    lines = [line for line in job.attention_lines([plain, window, *both]) if not line.loud]
    assert [line.reason for line in lines] == [plain.reason + alike, window.reason + alike]
    slower = KernelChoice(TiledMath(), "it is proven", "SLOWER", several=True)
    lines = job.attention_lines([plain, slower])
    assert [(line.value, line.loud) for line in lines] == [(plain.name, False), (slower.name, False), ("SLOWER", True)]
    assert lines[0].reason == f"for one document in a call: {plain.reason}"
    assert lines[1].reason == "for several documents, or a rank's parts of a row, in one call: it is proven"


@pytest.mark.parametrize(
    ("asked", "dtype", "line"),
    [
        (None, torch.float32, None),
        ("no", torch.bfloat16, ("mixed_precision: no, and products are in bfloat16", "options decide", False)),
        ("bf16", torch.bfloat16, ("mixed_precision: bf16, and products are in bfloat16", "as the file says", False)),
        ("bf16", torch.float32, ("mixed_precision: bf16, and products are in float32", "not on a CPU; bf16: true", True)),
    ],
)
def test_what_becomes_of_the_precision_of_a_launch_file_is_said(monkeypatch, asked, dtype, line):
    monkeypatch.setattr(world, "launch_precision", lambda: asked)
    found = job.launch_lines(dtype)
    assert [(each.value, each.loud) for each in found] == ([] if line is None else [(line[0], line[2])])
    assert line is None or line[1] in found[0].reason
