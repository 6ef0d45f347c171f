"""A rehearsal on the CPU: the trainer's own steps without attention, what they held, and memory that runs out."""

from __future__ import annotations

import json
import os
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megaspan import SFTConfig, SFTTrainer, cli, launch, rehearse
from megaspan.attention.cpu import CPUFlash
from megaspan.attention.rehearsal import StandIn
from megaspan.attention.tiled import TiledMath
from megaspan.human import UserError
from megaspan.model import levers
from megaspan.plan import Machine, ModelFacts, choose, plan_command
from megaspan.report.overlap import Overlap
from megaspan.world import Failure
from tests.gloo import run_ranks
from tests.models import tiny_config

SHORT, LONG = 37, 101
H200 = Machine("NVIDIA H200", 140 * 2**30, 128 * 2**30, 16)


@pytest.fixture(autouse=True)
def short_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearse, "SHORT", SHORT)


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shape")
    tiny_config("qwen3", layers=3).save_pretrained(folder)
    return folder


def settings(shape: Path, out: Path, **changes: object) -> SFTConfig:
    own = {"model_name_or_path": str(shape), "output_dir": str(out / "run"), "max_length": LONG, "use_cpu": True}
    return SFTConfig(**(own | changes))


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Tokens of every call, of real kernels and of stand-ins."""
    seen: dict[str, list[int]] = {"real": [], "stand-in": []}
    for kind, name in ((CPUFlash, "real"), (TiledMath, "real"), (StandIn, "stand-in")):
        inner = kind.forward

        def forward(self, q, *others, inner=inner, name=name):
            seen[name].append(q.shape[0])
            return inner(self, q, *others)

        monkeypatch.setattr(kind, "forward", forward)
    return seen


def test_two_steps_run_and_no_row_of_theirs_meets_a_real_kernel(shape, tmp_path, lengths):
    found = rehearse.rehearse(settings(shape, tmp_path))
    assert found.fits
    assert (found.model, found.tokens, found.kernel, found.failed_at) == (str(shape), LONG, "CPU flash", None)
    assert lengths["stand-in"][:3] == [SHORT] * 3
    assert set(lengths["stand-in"][3:]) == {LONG}
    assert not {SHORT, LONG} & set(lengths["real"])
    assert not list(tmp_path.iterdir()), "nothing is left behind, and no folder of a run was made"
    text = found.render()
    assert text.splitlines()[-1] == "fits"
    assert "only that is rehearsed" in text
    assert json.loads(json.dumps(found.as_dict()))["figures"][0]["rehearsed"] > 0


def test_it_moves_what_a_real_step_moves(shape, tmp_path):
    """The same rows through the same trainer with attention: bytes both ways, bytes held, late fetches are equal."""
    found = rehearse.rehearse(settings(shape, tmp_path))
    draw = np.random.default_rng(0)
    rows = [{"input_ids": draw.integers(3, 100, length).tolist()} for length in (SHORT, LONG)]
    args = settings(shape, tmp_path, packing=False, max_steps=2, save_strategy="no", train_sampling_strategy="sequential")
    trainer = SFTTrainer(args=args, train_dataset=rows)
    checkpointing = levers(trainer.model).checkpointing
    before = []
    trainer.add_callback(type("Between", (rehearse.TrainerCallback,), {
        "on_step_begin": lambda self, *_, **__: before.append(checkpointing.stats()),
    }))  # fmt: skip
    trainer.train()
    after, between = checkpointing.stats(), before[1]
    for name, field in (
        ("copied to the host", "bytes_to_host"),
        ("copied to the device", "bytes_to_device"),
        ("fetched too late", "late"),
    ):
        assert found.figure(name).rehearsed == getattr(after, field) - getattr(between, field), name
    assert found.figure("host, for what layers keep").rehearsed == after.host_bytes
    assert after.bytes_to_host > 0


def test_with_several_rows_a_step_the_long_one_comes_when_gradients_exist(shape, tmp_path, lengths):
    rehearse.rehearse(settings(shape, tmp_path, gradient_accumulation_steps=5, per_device_train_batch_size=2))
    assert lengths["stand-in"][:9] == [SHORT] * 9
    assert set(lengths["stand-in"][9:]) == {LONG}


def test_only_what_shapes_memory_is_taken_from_the_file(shape, tmp_path):
    """No data is read, nothing is evaluated, logged elsewhere or saved; the levers are as wished."""
    config = settings(
        shape, tmp_path, dataset_name=str(tmp_path / "nothing here"), eval_strategy="steps", eval_steps=1, save_total_limit=2,
        max_rows=7, overlong="drop", packing=False, num_train_epochs=9, report_to="tensorboard", data_seed=3,
        gradient_checkpointing_kwargs={"offload": False}, max_grad_norm=0.0, lr_scheduler_type="cosine", warmup_steps=0.5,
        loss_type="nll", dtype="bfloat16", model_init_kwargs={"num_hidden_layers": 2},
    )  # fmt: skip
    args = rehearse._arguments(config, tmp_path, 1)
    assert (args.loss_type, args.offload, args.max_grad_norm, args.dtype, args.lr_scheduler_type) == (
        "nll", False, 0.0, "bfloat16", "cosine",
    )  # fmt: skip
    assert (args.dataset_name, args.eval_strategy, args.save_strategy, args.report_to) == (None, "no", "no", "none")
    (tmp_path / "shape" / "config.json").unlink()
    (tmp_path / "shape").rmdir()
    found = rehearse.rehearse(config)
    assert found.fits
    assert found.plan.model.layers == 2
    assert found.figure("copied to the host").rehearsed == 0


def test_the_round_number_for_python_and_torch_is_no_finding(shape, tmp_path):
    """On a CPU a small model stays half below it: that is said in words, and no percentage is shown; more than planned is."""
    config = settings(shape, tmp_path)
    plan = plan_command(config, Machine("CPU", 0, 2**35, 2))
    watch = rehearse._Watch()
    for peak, difference in ((plan.host_bytes - 600 * 2**20, None), (int(1.25 * plan.host_bytes), 25.0)):
        watch.host_peak = peak
        found = rehearse._result(config, plan, watch, None, None)
        assert found.figure(rehearse.HOST).difference == (difference and pytest.approx(difference, rel=1e-6))
        assert ("is set aside for Python and torch" in found.render()) == (difference is None)


def test_nothing_is_left(shape, tmp_path, monkeypatch):
    """Neither beside the run folder nor among the prepared rows of real runs."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert rehearse.rehearse(settings(shape, tmp_path)).fits
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []
    assert not (tmp_path / "home" / ".cache" / "megaspan").exists()


def test_a_model_with_weights_is_rehearsed_by_its_shape(shape, tmp_path):
    """Its weights are not read: they may be 16 GB on a hub."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text((shape / "config.json").read_text())
    save_file({"not one of its weights": torch.zeros(1)}, folder / "model.safetensors")
    assert rehearse.rehearse(settings(folder, tmp_path)).fits


def test_adapters_are_rehearsed(shape, tmp_path):
    pytest.importorskip("peft")
    found = rehearse.rehearse(settings(shape, tmp_path, use_peft=True, lora_r=2))
    assert found.fits


def failing(monkeypatch: pytest.MonkeyPatch, way: str, calls: int, error: BaseException) -> None:
    """The stand-in runs out of memory at its call number `calls` (from 1)."""
    inner, seen = getattr(StandIn, way), []

    def run(self, *given):
        seen.append(given)
        if len(seen) == calls:
            raise error
        return inner(self, *given)

    monkeypatch.setattr(StandIn, way, run)


@pytest.mark.parametrize(
    ("way", "calls", "moment"),
    [
        ("forward", 1, "forward of layer 1 of 3 (step 1 of 2)"),
        ("forward", 5, "forward of layer 2 of 3 (step 2 of 2)"),
        ("backward", 4, "backward of layer 3 of 3 (step 2 of 2)"),
        ("backward", 6, "backward of layer 1 of 3 (step 2 of 2)"),
    ],
)
def test_running_out_of_memory_is_a_result_with_its_moment(monkeypatch, shape, tmp_path, way, calls, moment):
    failing(monkeypatch, way, calls, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 26 GiB.\nmore"))
    found = rehearse.rehearse(settings(shape, tmp_path))
    assert not found.fits
    assert found.failed_at == moment
    assert found.why == "CUDA out of memory. Tried to allocate 26 GiB."
    text = found.render()
    assert f"DOES NOT FIT: memory ran out in the {moment}" in text
    assert "max_length" in text, "what to turn"
    assert not list(tmp_path.iterdir())


def test_another_error_is_no_result(monkeypatch, shape, tmp_path):
    failing(monkeypatch, "forward", 2, RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        rehearse.rehearse(settings(shape, tmp_path))


def test_host_memory_that_the_plan_misses_is_not_asked_for(shape, tmp_path, lengths):
    found = rehearse.rehearse(settings(shape, tmp_path, host_memory="64MiB"))
    assert not found.fits
    assert found.failed_at is None, "nothing ran out: nothing was run"
    assert "no step was run: the plan needs 1.0 GiB of 64.0 MiB of host memory" in found.render()
    assert not lengths["stand-in"]


def test_what_the_plan_refuses_by_far_is_not_loaded(tmp_path, shape):
    """At once, and not as if memory had run out; a plan that is a little too large is tried."""
    facts = ModelFacts.from_config(json.loads((Path(rehearse.__file__).parent / "plan/shapes/qwen3-8b.json").read_text()))
    config = SFTConfig(model_name_or_path="qwen3-8b", max_length="128k", memory_limit="16GiB", offload_optimizer=False)
    plan = choose(config, facts, H200)
    refusal = rehearse._refusal(plan)
    assert refusal is not None
    assert "of 16.0 GiB of the device" in refusal
    text = rehearse._result(config, plan, None, None, refusal).render()
    assert "memory ran out" not in text
    assert "next lever" in text
    assert rehearse._refusal(replace(plan, device_needed=int(1.04 * plan.device_limit))) is None


def _verb_on_two_ranks(rank: int, world: int, shape: Path, out: Path) -> None:
    """As started by torchrun: the real collectives around stand-ins; the result comes from the rank that shows it alone."""
    names = ("RANK", "LOCAL_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ |= dict.fromkeys(names[0], str(rank)) | dict.fromkeys(names[1], str(world))
    rehearse.SHORT = SHORT
    flags = ["--model_name_or_path", str(shape), "--max_length", str(LONG), "--use_cpu", "true", "--cp_size", "2"]
    with redirect_stdout(StringIO()) as shown:
        assert cli.main(["plan", *flags, "--output_dir", str(out / "run"), "--rehearse", "--json"]) == 0
    if rank:
        assert not shown.getvalue()
        return
    written = json.loads(shown.getvalue())
    assert (written["ranks"], written["tokens_per_rank"], written["rehearsal"]["fits"]) == (2, 51, True)
    figures = {each["name"]: each["rehearsed"] for each in written["rehearsal"]["figures"]}
    assert figures["copied to the host"] > 0


def test_a_rehearsal_of_two_ranks_exchanges_and_gathers(shape, tmp_path):
    run_ranks(2, [(_verb_on_two_ranks, (shape, tmp_path))])
    assert not list(tmp_path.iterdir()), "the folder that the ranks shared is gone"


@pytest.mark.parametrize(("failure", "code"), [(None, 0), ("rank 0 ended with exit code 1", 1), ("no such option", 2)])
def test_the_verb_starts_ranks_of_its_own(monkeypatch, shape, capsys, failure, code):
    """Each is the same verb; that of rank 0 shows what does not fit, so nothing is said twice."""
    started = []

    def run(words, count):
        started.append((words, count))
        return None if failure is None else Failure(0, min(code, 2), [failure], "")

    monkeypatch.setattr(launch, "run", run)
    flags = ["--model_name_or_path", str(shape), "--max_length", str(LONG), "--use_cpu", "true", "--cp_size", "2"]
    assert cli.main(["plan", *flags, "--rehearse", "--nproc", "2", "--json"]) == code
    assert started == [(["plan", *flags, "--rehearse", "--json"], 2)]
    assert capsys.readouterr().err == ("megaspan: no such option\n" if code == 2 else "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU is the point")
def test_a_gpu_elsewhere_cannot_be_rehearsed_on(shape, tmp_path):
    with pytest.raises(UserError, match="there is none here"):
        rehearse.rehearse(settings(shape, tmp_path, use_cpu=False, memory_limit="80GiB"))


@pytest.mark.parametrize(("room", "code"), [("64GiB", 0), ("64MiB", 1)])
def test_the_verb_prints_it_and_says_by_its_exit_code_whether_it_fits(shape, tmp_path, capsys, monkeypatch, room, code):
    monkeypatch.chdir(tmp_path)
    flags = ["--model_name_or_path", str(shape), "--max_length", str(LONG), "--use_cpu", "true", "--host_memory", room]
    assert cli.main(["plan", *flags, "--rehearse"]) == code
    assert capsys.readouterr().out.startswith("rehearsal: ")
    assert cli.main(["plan", *flags, "--rehearse", "--json"]) == code
    written = json.loads(capsys.readouterr().out)
    assert written["fits"] == written["rehearsal"]["fits"] == (code == 0)
    assert written["tokens"] == written["rehearsal"]["tokens"] == LONG
    assert "plan" not in written["rehearsal"]
    assert cli.main(["plan", *flags, "--json"]) == code
    plain = json.loads(capsys.readouterr().out)
    assert plain["rehearsal"] is None
    assert set(plain) == set(written), "one form for programs"


def test_numbers_of_a_gpu_stand_beside_the_plans(tmp_path, shape):
    """The planner's allowances are not tensors; seconds are compared without attention and without the pauses for it."""
    facts = ModelFacts.from_config(json.loads((Path(rehearse.__file__).parent / "plan/shapes/qwen3-8b.json").read_text()))
    config = SFTConfig(model_name_or_path="qwen3-8b", max_length="256k", memory_limit="80GiB", dtype="bfloat16")
    plan = choose(config, facts, H200)
    watch = rehearse._Watch()
    watch.device_peak, watch.reserved, watch.pinned = plan.device_bytes, 79 * 2**30, 5
    watch.seconds, watch.paused, watch.overlap, watch.pauses = 50.0, 20.0, Overlap(3.0, 0.25, 0.5), True
    watch.host_peak, watch.peak_at, watch.kernel, watch.step = 2**30, "backward of layer 3 of 36", "FlashAttention 4", 2
    found = rehearse._result(config, plan, watch, None, None)
    assert found.fits
    assert found.figure(rehearse.DEVICE).difference == pytest.approx(0)
    assert found.figure(rehearse.EXPOSED).rehearsed == 0.25
    attention = sum(part.seconds for part in plan.seconds.parts if part.name in ("attention forward", "attention backward"))
    step = found.figure("step without attention")
    assert (step.planned, step.rehearsed) == (pytest.approx(plan.seconds.total - attention), 30.0)
    assert "peak came in the backward of layer 3" in found.render()
    watch.reserved = 81 * 2**30
    too_much = rehearse._result(config, plan, watch, None, None)
    assert not too_much.fits
    assert "memory_limit: 76.0GiB" in too_much.render()
    watch.pauses, watch.overlap = False, None
    assert "could not be read whole" in rehearse._result(config, plan, watch, None, None).render()


def test_a_pause_is_made_of_the_plans_own_rate(monkeypatch, shape):
    facts = ModelFacts.from_config(json.loads((Path(rehearse.__file__).parent / "plan/shapes/qwen3-8b.json").read_text()))
    plan = choose(SFTConfig(model_name_or_path="qwen3-8b", max_length="128k", dtype="bfloat16"), facts, H200)
    monkeypatch.setattr(rehearse, "cycles_per_second", lambda device: 1.7e9)
    pause = rehearse._pause(plan, torch.device("cuda"))
    assert pause is not None
    assert 4e14 < pause.backward < 7e14, "what kernels reach on an H200"
    unknown = replace(plan, seconds=replace(plan.seconds, parts=()))
    assert rehearse._pause(unknown, torch.device("cuda")) is None
    assert rehearse._pause(plan, torch.device("cpu")) is None


def test_on_a_gpu_the_second_step_is_watched_from_inside(monkeypatch):
    """With a device played by numbers: the moment of the peak, and the timeline of the second step alone."""
    peaks = iter([0, 10, 30, 30, 20])
    last = [0]

    def peak(device: torch.device) -> int:
        last[0] = next(peaks, last[0])
        return last[0]

    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peak)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 40)
    profiles = []

    class Profile:
        def __init__(self, activities: list) -> None:
            profiles.append(self)
            self.profiler = SimpleNamespace(kineto_results=SimpleNamespace(events=self.events))

        start = stop = lambda self: None

        def events(self) -> list:
            spans = [
                ("gemm", 0, 6 * 10**9),
                ("Memcpy HtoD (Pinned -> Device)", 5 * 10**9, 2 * 10**9),
                ("gemm", 8 * 10**9, 10**9),
            ]
            return [
                SimpleNamespace(
                    name=lambda name=name: name,
                    start_ns=lambda begun=begun: begun,
                    duration_ns=lambda took=took: took,
                    device_type=lambda: SimpleNamespace(name="CUDA"),
                )
                for name, begun, took in spans
            ]

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(rehearse.time, "perf_counter", iter([0.0, 1.0, 10.0, 19.0]).__next__)
    heard: list[tuple[str, int]] = []
    placed = SimpleNamespace(on_layer=lambda phase, index: heard.append((phase, index)), checkpointing=None)
    monkeypatch.setattr(rehearse, "levers", lambda model: placed)
    watch = rehearse._Watch()
    watch._model, watch._device, watch._layers = object(), torch.device("cuda", 0), 2
    for step in (0, 1):
        watch.on_step_begin(None, SimpleNamespace(global_step=step), None)
        if step:
            for phase, index in (("forward", 0), ("forward", 1), ("backward", 1)):
                placed.on_layer(phase, index)
            watch.on_pre_optimizer_step(None, None, None)
        watch.on_step_end(None, None, None)
    assert len(profiles) == 1
    assert heard == [("forward", 0), ("forward", 1), ("backward", 1)], "whoever listened before still hears, once"
    assert (watch.device_peak, watch.peak_at, watch.reserved, watch.seconds) == (30, "forward of layer 1 of 2", 40, 9.0)
    assert watch.overlap == Overlap(copying=2.0, exposed=1.0, idle=1.0)
