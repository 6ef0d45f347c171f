"""One measured case in processes of its own: `python -m benchmarks.case '{"system": "trl", …}' FOLDER`, one for each GPU.

A process per case and GPU, so that an out-of-memory error, an allocator setting or a patched library of one case cannot touch
the next. Random weights are made on the device, rows are random token ids: speed and memory do not depend on what the text
says. Results go to stdout, one JSON object a line after the word RESULT; everything else is the library's own talk. Every rank
says its steps and its failures, the rest is rank 0's to say; nothing is sent between ranks that the library does not send.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from benchmarks.communication import Profile
from benchmarks.layouts import layout_of
from benchmarks.start import end_with_parent
from megaspan import world

TINY: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
}


def say(**result: Any) -> None:
    """One result for the parent; of the ranks behind the first only steps and failures."""
    started = world.launch()
    if started.several:
        if started.rank and not result.keys() & {"step", "failed"}:
            return
        result["rank"] = started.rank
    sys.stdout.flush()
    # Ranks share the pipe, and the end of another one's line may come late.
    sys.stdout.write("\nRESULT " + json.dumps(result) + "\n")
    sys.stdout.flush()


def age() -> float:
    """Seconds that this process lives: how long a start takes, which no step shows."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # after the boot; proc(5), starttime
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class Clock(TrainerCallback):
    """Seconds and peak memory of every optimizer step, the same code for every system."""

    def __init__(self, profiled: int = 0) -> None:
        self.profiled = profiled
        self.begun = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        say(seconds_to_training=age())

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self.begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.synchronize()
        say(
            step=state.global_step,
            **({"profiled": True} if state.global_step == self.profiled else {}),
            seconds=time.perf_counter() - self.begun,
            peak_bytes=torch.cuda.max_memory_allocated() if cuda else 0,
            reserved_bytes=torch.cuda.max_memory_reserved() if cuda else 0,
            host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            say(loss=float(logs["loss"]), gradient_norm=float(logs.get("grad_norm", math.nan)))


def watchers(case: dict[str, Any]) -> list[TrainerCallback]:
    """The callbacks of a case: the clock, and the profiler of the last step where it is wanted and there is a GPU."""
    if not (case.get("profile") and torch.cuda.is_available()):
        return [Clock()]
    last = len(lengths(case))
    return [Clock(last), *[Profile(last, say)] * (world.launch().rank == 0)]


def shape_of(case: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the named shape, with the case's number of layers."""
    from megaspan.plan.facts import read_config

    config = dict(TINY) if case["shape"] == "tiny" else read_config(case["shape"])
    if case["layers"]:
        config["num_hidden_layers"] = case["layers"]
    return config


def lengths(case: dict[str, Any]) -> list[int]:
    """Tokens of each step's rows; a row of `warm` tokens first compiles what a whole step would pay for otherwise.

    A step under the profiler comes last and on top.
    """
    warm = min(case.get("warm", 0), case["tokens"])
    return [warm] * bool(warm) + [case["tokens"]] * (case["steps"] + bool(case.get("profile")))


def rows(case: dict[str, Any], vocab: int) -> Any:
    """Rows of random tokens for each step, one for each rank that has rows of its own; of `documents` documents if masked."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(1)
    whole = [length for length in lengths(case) for _ in range(layout_of(case).rows)]
    columns = {"input_ids": [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in whole]}
    if documents := case.get("documents", 0):
        columns["position_ids"] = [[p for size in cut(length, documents) for p in range(size)] for length in whole]
    return Dataset.from_dict(columns)


def cut(tokens: int, documents: int) -> list[int]:
    """Lengths of the documents of a packed row, all of at least a token; cuts at random, so that some are many times others."""
    documents = min(documents, tokens)
    places = torch.randperm(tokens - 1, generator=torch.Generator().manual_seed(documents))[: documents - 1] + 1
    borders = [0, *sorted(places.tolist()), tokens]
    return [after - before for before, after in pairwise(borders)]


def write_shape(folder: Path, config: dict[str, Any]) -> None:
    """A model folder without weights; ranks that share it never see half a file."""
    folder.mkdir(exist_ok=True)
    part = folder / f"config.json.{os.getpid()}"
    part.write_text(json.dumps(config))
    part.replace(folder / "config.json")


def settings(case: dict[str, Any], folder: Path, cuda: bool | None = None) -> Any:
    """megaspan's options of a case; the shape's configuration is written into the folder.

    Args:
        case: what runs.
        folder: for the shape and the run.
        cuda: whether it runs on a GPU; by default as this machine has one.
    """
    from megaspan import SFTConfig

    cuda = torch.cuda.is_available() if cuda is None else cuda
    write_shape(folder / "shape", shape_of(case))
    lora = case.get("lora", 0)
    own: dict[str, Any] = {"dtype": "bfloat16"} if cuda and not (case.get("masters") or lora) else {}
    if lora:
        own |= {"use_peft": True, "lora_r": lora, "lora_dropout": 0.0, "lora_target_modules": "all-linear"}
    if case["limit"] and cuda:
        own["memory_limit"] = case["limit"]
    if case.get("rope"):
        own["model_init_kwargs"] = {"rope_parameters": case["rope"]}
    if case.get("host"):
        own["host_memory"] = case["host"]
    own = {
        "output_dir": str(folder / "run"),
        "model_name_or_path": str(folder / "shape"),
        "max_length": case["tokens"],
        "max_steps": len(lengths(case)),
        "allow_past_window": True,
        "gradient_checkpointing_kwargs": {"offload": case["offload"]},
        "learning_rate": 1e-5,
        "max_grad_norm": case.get("clip", 1.0),
        "packing": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
    } | own
    return SFTConfig(**(own | layout_of(case).options | case.get("options", {})))


def run_megaspan(case: dict[str, Any], folder: Path) -> None:
    """megaspan through its public trainer, as a user would call it."""
    from megaspan import SFTTrainer
    from megaspan.model import levers

    args = settings(case, folder)
    vocab = shape_of(case)["vocab_size"]
    trainer = SFTTrainer(args=args, train_dataset=rows(case, vocab), callbacks=watchers(case))
    if case.get("dials"):
        turn_dials(trainer, args, case["dials"])
    placed = levers(trainer.model)
    assert placed is not None
    say(
        levers=[list(line) for line in placed.read_back()],
        prepared_in=trainer._job.seconds,
    )
    if not case.get("dials"):  # of others than its own the plan says nothing
        say(
            moments=dict(placed.plan.moments),
            planned_device_bytes=placed.plan.device_bytes,
            planned_host_bytes=placed.plan.host_bytes,
            planned_seconds=placed.plan.seconds.total,
        )
    trainer.train()


KINDS = {
    "kept": "input and attention's output wait on the host",
    "outputs": "the output waits on the host, the input is computed again",
    "again": "input and output are computed again",
}


def kind_of(keep: Any) -> str:
    """Which of `KINDS` a layer is, by what it keeps; wherever that waits."""
    return "again" if keep.output is None else "outputs" if keep.input is None else "kept"


def dials_of(plan: Any, kind: str) -> dict[str, Any]:
    """What makes few layers run as layers of one kind do in `plan`."""
    return {
        "kind": kind,
        "layer_tile_tokens": plan.layer_tile_tokens,
        "kv_heads_per_call": plan.kv_heads_per_call,
        "stream_back": plan.stream_back,
        "project_ahead": plan.project_ahead,
        "states": {"gradients": plan.states.gradients, "moments": plan.states.moments},
        "again": plan.keep.again,
        "attends": plan.keep.attends,
    }


def turn_dials(trainer: Any, args: Any, dials: dict[str, Any]) -> None:
    """Prepares the model anew with another plan's dials: the planner would give few layers more room than all of them have."""
    from dataclasses import replace

    from megaspan.model import levers, prepare, unprepare
    from megaspan.plan.keep import KeepPolicy, LayerKeep
    from megaspan.plan.states import StatePlan

    job = trainer._job  # the trainer has no argument for a plan, and a user needs none
    kind = dials["kind"]
    output = None if kind == "again" else "host"
    rest = LayerKeep("host" if kind == "kept" else None, output)
    policy = KeepPolicy((LayerKeep("host", output), *[rest] * (job.plan.model.layers - 1)), dials["again"], dials["attends"])
    own = {name: dials[name] for name in ("layer_tile_tokens", "kv_heads_per_call", "stream_back", "project_ahead")}
    job.plan = replace(job.plan, keep=policy, states=StatePlan(**dials["states"]), offload=True, **own)
    unprepare(trainer.model)
    prepare(trainer.model, args, job.plan)
    placed = levers(trainer.model)
    assert placed is not None
    placed.reserve(trainer.model, job.share.slots(job.rows[number] for number in range(len(job.rows))))


def run_rehearsal(case: dict[str, Any], folder: Path) -> None:
    """The step of `run_megaspan` without attention (`megaspan plan --rehearse`)."""
    from megaspan.rehearse import rehearse

    found = rehearse(settings(case, folder)).as_dict()
    plan = found.pop("plan")
    say(rehearsal=found, longest_row=plan["longest_row"], planned_seconds=plan["seconds"], plan_fits=plan["fits"])


def run_trl(case: dict[str, Any], folder: Path) -> None:
    """TRL's trainer with the case's attention and checkpointing options, everything else at its defaults."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    cuda, ranks = torch.cuda.is_available(), layout_of(case).ranks
    config = shape_of(case)
    config["max_position_embeddings"] = max(config["max_position_embeddings"], case["tokens"])
    if case.get("rope"):
        theta = (config.get("rope_parameters") or config)["rope_theta"]
        config["rope_parameters"] = {"rope_theta": theta, **case["rope"]}
    built = AutoConfig.for_model(**(config | {"use_cache": False}))
    torch.manual_seed(0)  # all ranks draw the same weights
    with torch.device("cuda" if cuda else "cpu"):
        model = AutoModelForCausalLM.from_config(
            # On one GPU fp32 weights under autocast are TRL's way to keep masters; FSDP2 always makes them of what it is given.
            built,
            dtype=torch.bfloat16 if cuda and (ranks > 1 or not case.get("masters")) else torch.float32,
            attn_implementation=case["attention"],
        )
    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "word": 2}, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    kept = {name: True for name in ("offload", "selective") if case[name]}
    adapter = None
    if lora := case.get("lora", 0):
        from peft import LoraConfig

        adapter = LoraConfig(task_type="CAUSAL_LM", r=lora, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear")
    args = SFTConfig(
        output_dir=str(folder / "run"),
        per_device_train_batch_size=1,
        max_length=None,
        max_steps=len(lengths(case)),
        max_grad_norm=case.get("clip", 1.0),
        train_sampling_strategy="sequential",
        bf16=cuda,
        use_cpu=not cuda,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs=kept or None,
        pad_to_multiple_of=2 * ranks if ranks > 1 else None,
        learning_rate=1e-5,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    SFTTrainer(
        model=model,
        args=args,
        train_dataset=rows(case, config["vocab_size"]),
        processing_class=words,
        peft_config=adapter,
        callbacks=watchers(case),
    ).train()


SYSTEMS = {"megaspan": run_megaspan, "trl": run_trl, "rehearsal": run_rehearsal}


def main(case: dict[str, Any], folder: Path) -> int:
    """Run one case; failures become results, and end the other ranks."""
    if case["system"] != "trl":
        world.set_allocator()
    end_with_parent()
    if torch.cuda.is_available():
        torch.cuda.set_device(world.launch().local_rank)
        if case["limit"]:
            total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, case["limit"] / total))
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    say(device=name, torch=torch.__version__)
    say(seconds_to_import=age())
    try:
        SYSTEMS[case["system"]](case, folder)
    except torch.OutOfMemoryError as error:
        say(failed="out of memory", why=str(error).splitlines()[0][:200])
        raise
    except ImportError as error:
        say(failed="not installed", why=str(error).splitlines()[0][:200])
        raise
    except Exception as error:
        say(failed=type(error).__name__, why=(str(error).strip().splitlines() or [""])[0][:300])
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), Path(sys.argv[2])))
