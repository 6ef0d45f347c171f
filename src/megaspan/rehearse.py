"""`megaspan plan --rehearse`: a step at full depth and length, with attention left out, before the hours are spent.

A plan is arithmetic; what an allocator and a copy engine make of it is seen when a step runs. But a step at a million tokens
of an 8B model is half an hour on one GPU, of which all but a minute or two are attention. So two steps run as `megaspan train`
would run them, through `SFTTrainer` itself: the model of the configured shape with random weights, the levers, the arena, the
optimizer, clipping. Only the attention kernels are stand-ins, which allocate what the real ones do (`attention/rehearsal.py`).
The first step is short and makes the optimizer's state; the second has a row of `max_length` tokens and is measured.

Copies that nobody hides are seconds lost. In the second step a device-side pause stands where attention would run, as long as
attention but not longer than a layer's copies need; the device's own timeline then tells how long a copy was under way while
nothing was computed. That is what is reported as exposed. Where attention's rate is unknown there is no pause, and the number
is an upper bound.

Of a run on several GPUs every rank runs: collectives, gathered weights and exchanged keys are the real ones. The numbers shown
are the largest of any rank.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from megaspan import world
from megaspan.attention.rehearsal import Pause, StandIn, cycles_per_second, skip_attention, visible_pairs
from megaspan.config import SFTConfig
from megaspan.config.schema import GROUPS
from megaspan.human import UserError, format_bytes, format_seconds
from megaspan.model import Levers, levers, unprepare
from megaspan.model.counted import counts_of
from megaspan.model.taken import check_files
from megaspan.plan import Plan, RankSizes, plan_command
from megaspan.plan.cost import CONTEXT_BYTES
from megaspan.plan.facts import read_config
from megaspan.plan.ranks import share_of
from megaspan.plan.step import CPU_BASE_BYTES
from megaspan.report.overlap import Overlap, device_spans, overlap
from megaspan.report.rehearsal import Figure, Rehearsal
from megaspan.trainer import SFTTrainer

SHORT = 4096
_DOUBT = 1.05  # a plan that needs this much more of the device than there is is not tried: its formulas are within 1 %
DEVICE, HOST, EXPOSED = "device, tensors", "host, process", "copies that nothing hides"
_ATTENTION = ("attention forward", "attention backward")
# Sections of the options whose wishes shape the memory of a step, and the options among them that do not.
_SECTIONS = ("Model", "LoRA", "Training", "Precision and device", "Memory", "Several devices")
_SET_HERE = {
    "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "data_seed",
}  # fmt: skip


def rehearse(config: SFTConfig) -> Rehearsal:
    """Runs a short step and one of `max_length` tokens of a configuration, attention left out; its data is not read.

    With more than one row a step, the long row comes after a short one, when gradients exist. Of several ranks, started by any
    launcher, all call it; where one of them runs out of memory all end with that error.

    Raises:
        UserError: the configuration does not allow the run, or describes a GPU that is not here.
    """
    started, machine = world.launch(), world.machine()
    if config.memory_limit and not machine.device_bytes and not config.use_cpu:
        raise UserError(
            "a rehearsal runs on the GPU that memory_limit describes, and there is none here",
            do="Rehearse on that machine, or remove memory_limit to rehearse on the CPU",
        )
    sizes = RankSizes.of(config, started.world_size)
    place_of_rank = share_of(machine, started.local_size), sizes
    plan = plan_command(config, *place_of_rank)
    check_files(config)
    if not plan.model.exact:
        plan = plan_command(config, *place_of_rank, counts=counts_of(config))
    if (refusal := _refusal(plan)) is not None:
        return _result(config, plan, None, None, refusal)
    folder = _existing(Path(config.output_dir))
    with _place(folder, started) as place:
        watch = _Watch()
        try:
            with _out_of_memory(watch, alone=not started.several):
                _run(config, place, watch, plan)
                watch.compare()
        finally:
            plan = watch.let_go() or plan
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return _result(config, plan, watch, None, None)


def _refusal(plan: Plan) -> str | None:
    """Why no step is run: the plan needs more than its formulas are ever wrong by, so hours of loading would end the same."""
    needs = [(plan.host_bytes, plan.host_limit, 1.0, "host memory")]
    if plan.device_limit:
        needs.append((plan.device_needed, plan.device_limit, _DOUBT, "the device"))
    short = [
        f"{format_bytes(size)} of {format_bytes(limit)} of {what}" for size, limit, doubt, what in needs if size > doubt * limit
    ]
    return f"no step was run: the plan needs {' and '.join(short)}" if short else None


@contextmanager
def _place(folder: Path, started: world.Launch) -> Iterator[Path]:
    """A folder for the time of the rehearsal, the same for all ranks: options are compared over them, paths too."""
    if started.meeting is None:
        with tempfile.TemporaryDirectory(prefix="megaspan-rehearsal-", dir=folder) as place:
            yield Path(place)
        return
    shared = folder / f"megaspan-rehearsal-{started.meeting[1]}"  # a port that only these ranks have
    shared.mkdir(exist_ok=True)
    try:
        yield shared
    finally:
        if started.rank == 0:
            shutil.rmtree(shared, ignore_errors=True)


def _run(config: SFTConfig, place: Path, watch: _Watch, plan: Plan) -> None:
    """The two steps; `watch` holds what they showed, also where they end early."""
    rows, ranks, vocab = _rows(config), plan.sizes.data, plan.model.vocab
    args = _arguments(config, place, rows)
    short = min(SHORT, args.max_length)
    lengths = [*[short] * rows, *[short] * (rows - 1), args.max_length]
    if ranks > 1:
        # Ranks with rows of their own are dealt the longest first: all are long, so that a second one meets gradients.
        lengths = [*[short] * rows * ranks, *[args.max_length] * rows * ranks]
    draw = np.random.default_rng(0)
    data = [{"input_ids": draw.integers(3, vocab, length).tolist()} for length in lengths]
    trainer = _leaving_nothing(place)(args=args, train_dataset=data, callbacks=[watch])
    watch.begin(trainer.model)
    trainer.train()


def _leaving_nothing(place: Path) -> type[SFTTrainer]:
    """The trainer, with its rows in `place`: made-up ones among those of real runs would be kept, and found, for ever."""

    class InPlace(SFTTrainer):
        _rows_folder = place / "rows"
        _draws = False

    return InPlace


def _rows(config: SFTConfig) -> int:
    """Rows of a window that are rehearsed on each rank: one, or two where their gradients are summed."""
    return min(2, config.per_device_train_batch_size * config.gradient_accumulation_steps)


def _arguments(config: SFTConfig, place: Path, rows: int) -> SFTConfig:
    """The options of the rehearsal: what shapes memory as wished, two steps, nothing saved, the weights random."""
    starts = {first: title for title, first in GROUPS}
    kept, section = {}, ""
    given = config.given()
    for name in type(config).model_fields:
        section = starts.get(name, section)
        if name in given and section in _SECTIONS and name not in _SET_HERE:
            kept[name] = given[name]
    kept |= {name: given[name] for name in ("max_length", "pad_to_multiple_of", "disable_tqdm") if name in given}
    if not config.trust_remote_code:  # the code of such a model is found by its name
        raw = read_config(str(config.model_name_or_path), config.model_revision)
        (place / "shape").mkdir(exist_ok=True)
        mine = place / f"config-{os.getpid()}"  # other ranks write the same; whoever reads finds a whole one
        mine.write_text(json.dumps(raw), encoding="utf-8")
        mine.rename(place / "shape" / "config.json")
        kept |= {"model_name_or_path": str(place / "shape"), "model_revision": None}
    return SFTConfig(
        **kept,
        output_dir=str(place / "run"),
        packing=False,
        train_sampling_strategy="sequential",
        gradient_accumulation_steps=rows,
        max_steps=2,
        save_strategy="no",
    )


class _Watch(TrainerCallback):
    """Sees the two steps from inside: where they are, and what they hold."""

    def __init__(self) -> None:
        self.moment, self.peak_at = "setting up, before the first step", ""
        self.failure: str | None = None
        self.kernel, self.pauses = "", False
        self.stand_ins: tuple[StandIn, ...] = ()
        self.step = self.device_peak = self.reserved = self.host_peak = self.pinned = 0
        self.seconds = self.paused = self.seconds_pinning = 0.0
        self.moved: dict[str, int] = {}
        self.overlap: Overlap | None = None
        self._model: Any = None
        self._before: dict[str, int] = {}

    def begin(self, model: Any) -> None:
        """The model is prepared: attention goes."""
        self._model, self._device = model, next(model.parameters()).device
        placed = self._levers()
        self.kernel, self._layers = placed.kernel.name, placed.plan.model.layers
        pause = _pause(placed.plan, self._device)
        self.stand_ins, self.pauses = skip_attention(model, pause), pause is not None

    def let_go(self) -> Plan | None:
        """Takes everything off the model and forgets it, so that the memory is free again; the plan that was rehearsed."""
        if self._model is None:
            return None
        placed = self._levers()
        if placed.checkpointing is not None:
            placed.checkpointing.discard()
        unprepare(self._model)
        self._model = None
        return placed.plan

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A step begins; the second is measured."""
        if not self.step:
            self._listen()
        self.step, self.device_peak, self._before = state.global_step + 1, 0, self._counts()
        self.moment = "forward, before the layers"
        for each in self.stand_ins:
            each.paused = 0.0
        self._profile: Any = None
        if self._device.type == "cuda":
            if self.step == 2:
                self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                self._profile.start()
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        self._begun = time.perf_counter()

    def _listen(self) -> None:
        """Hears of every layer boundary, before whoever listens already."""
        placed = self._levers()
        inner = placed.on_layer

        def on_layer(phase: str, index: int) -> None:
            self._reach(f"{phase} of layer {index + 1} of {self._layers}")
            for each in self.stand_ins:
                each.reads = phase == "backward"
            if inner is not None:
                inner(phase, index)

        placed.on_layer = on_layer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The update begins."""
        self._reach("optimizer's update")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A step is over, and the device has finished it."""
        self.seconds = time.perf_counter() - self._begun
        self.measure()
        if self._profile is not None:
            self._profile.stop()
            copies, work = device_spans(self._profile.profiler.kineto_results.events())
            seen = (np.max(work[:, 1]) - np.min(work[:, 0])) / 1e9 if len(work) else 0.0
            if seen > 0.9 * self.seconds:  # else the profiler's buffers were too small, or it is not allowed here
                self.overlap = overlap(copies, work)
            self._profile = None

    def measure(self) -> None:
        """Reads what the step has held so far."""
        self._reach(self.moment)
        self.host_peak = world.peak_host_bytes()
        self.paused = sum(each.paused for each in self.stand_ins)
        self.moved = {name: count - self._before.get(name, 0) for name, count in self._counts().items()}

    def compare(self) -> None:
        """Takes the largest numbers of all ranks, which all call it; a rank on its own keeps its."""
        self.device_peak, self.reserved, self.host_peak, self.pinned = map(
            int, world.largest([self.device_peak, self.reserved, self.host_peak, self.pinned])
        )
        self.seconds, self.paused, self.seconds_pinning = world.largest([self.seconds, self.paused, self.seconds_pinning])

    def _reach(self, moment: str) -> None:
        """The step goes on to another moment: the peak may have come in the one that ends."""
        if self._model is not None and self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            if peak > self.device_peak:
                self.device_peak, self.peak_at = peak, self.moment
            self.reserved = torch.cuda.max_memory_reserved(self._device)
        self.moment = moment

    def _counts(self) -> dict[str, int]:
        placed = levers(self._model) if self._model is not None else None
        stats = placed.checkpointing.stats() if placed is not None and placed.checkpointing is not None else None
        if stats is None:
            return {}
        self.pinned, self.seconds_pinning = stats.host_bytes, stats.seconds_pinning
        return {name: getattr(stats, name) for name in ("bytes_to_host", "bytes_to_device", "late")}

    def _levers(self) -> Levers:
        placed = levers(self._model)
        assert placed is not None
        return placed


@contextmanager
def _out_of_memory(watch: _Watch, *, alone: bool = True) -> Iterator[None]:
    """Running out of memory is a result; of several ranks it is an error, since the others wait for this one."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "out of memory" not in str(error):
            raise
        if not alone:
            error.add_note(f"in the {_moment(watch)} of the rehearsal")
            raise
        text = (str(error).strip().splitlines() or ["no memory left on the host"])[0]
    except UserError as error:
        if not alone or not any(words in error.what for words in ("of host memory", "the host has no")):
            raise
        text = str(error)
    else:
        return
    watch.failure = text
    watch.measure()


def _moment(watch: _Watch) -> str:
    return f"{watch.moment} (step {watch.step} of 2)" if watch.step else watch.moment


def _pause(plan: Plan, device: torch.device) -> Pause | None:
    """Attention's length as the plan knows it; None where it does not."""
    planned = sum(part.seconds for part in plan.seconds.parts if part.name == "attention backward")
    if device.type != "cuda" or not planned:
        return None
    facts, tokens = plan.model, plan.tokens
    pairs = sum(visible_pairs(tokens, tokens, facts.span(layer)) for layer in range(facts.layers))
    rate = 2.5 * 4.0 * facts.query_width * pairs / plan.sizes.row / planned
    # Then a layer's whole input is read for the next head group.
    beside = facts.hidden * plan.tokens_per_rank * 2 if plan.project_ahead else 0
    return Pause(rate, rate, cycles_per_second(device), beside)


def _result(config: SFTConfig, plan: Plan, watch: _Watch | None, failed_at: str | None, why: str | None) -> Rehearsal:
    """Numbers beside the plan's, and the answer."""
    gpu, figures, notes = plan.device_limit > 0, [], []
    if watch is not None:
        figures = list(_figures(plan, watch, gpu))
        notes = list(_notes(plan, watch, gpu))
        if watch.failure is not None:
            failed_at, why = _moment(watch), watch.failure
        elif gpu and watch.reserved > plan.device_limit:
            why = f"{format_bytes(watch.reserved)} of {format_bytes(plan.device_limit)} of the device were taken"
        elif watch.host_peak > plan.host_limit:
            why = f"{format_bytes(watch.host_peak)} of {format_bytes(plan.host_limit)} of host memory were taken"
    fits = failed_at is None and why is None
    return Rehearsal(
        model=str(config.model_name_or_path),
        tokens=config.max_length,
        device=plan.machine.device_name,
        kernel=watch.kernel if watch is not None else "",
        fits=fits,
        failed_at=failed_at,
        why=why,
        peak_at=watch.peak_at if watch is not None else "",
        do=None if fits else _advice(plan),
        figures=tuple(figures),
        notes=tuple(notes),
        plan=plan,
    )


def _figures(plan: Plan, watch: _Watch, gpu: bool) -> Iterator[Figure]:
    if gpu:
        yield Figure(DEVICE, "bytes", plan.device_bytes, watch.device_peak)
        yield Figure("device, taken by the allocator", "bytes", plan.device_needed - CONTEXT_BYTES, watch.reserved)
    pinned = sum(part.bytes for part in plan.parts if ", pinned" in part.name and part.name.startswith(("layer", "attention")))
    yield Figure("host, for what layers keep", "bytes", pinned or None, watch.pinned)
    yield Figure(HOST, "bytes", plan.host_bytes, watch.host_peak, 0.0 if gpu else CPU_BASE_BYTES)
    yield Figure("copied to the host", "bytes", None, watch.moved.get("bytes_to_host", 0))
    yield Figure("copied to the device", "bytes", None, watch.moved.get("bytes_to_device", 0))
    yield Figure("fetched too late", "count", 0, watch.moved.get("late", 0))
    if gpu:
        waiting = sum(part.seconds for part in plan.seconds.parts if part.name == "waiting for the host link")
        attention = sum(part.seconds for part in plan.seconds.parts if part.name in _ATTENTION)
        known = plan.seconds.total
        seen = watch.overlap
        yield Figure("copies under way", "seconds", None, seen.copying if seen else None)
        yield Figure(EXPOSED, "seconds", waiting if known else None, seen.exposed if seen else None)
        yield Figure("neither copies nor work", "seconds", None, seen.idle if seen else None)
        whole = watch.failure is None
        yield Figure(
            "step without attention",
            "seconds",
            known - attention if known else None,
            watch.seconds - watch.paused if whole else None,
        )
    yield Figure("pinning", "seconds", None, watch.seconds_pinning)


def _notes(plan: Plan, watch: _Watch, gpu: bool) -> Iterator[str]:
    if not gpu:
        yield "there is no GPU here: everything lies in host memory, and only that is rehearsed"
        if watch.host_peak < plan.host_bytes:
            yield (
                f"{format_bytes(CPU_BASE_BYTES)} of the planned host memory is set aside for Python and torch, whatever they "
                "take: a process that stays within that is as planned"
            )
        return
    if watch.overlap is None:
        if watch.failure is None:
            yield "the device's timeline could not be read whole, so exposed copies are unknown"
    elif watch.pauses:
        yield f"pauses of {format_seconds(watch.paused)} in all stood for attention, no longer than copies could hide behind it"
    else:
        yield "attention's rate on this device is unknown, so copies had only the other work to hide behind: an upper bound"
    if plan.seconds.total:
        yield f"the plan adds attention to that: {format_seconds(plan.seconds.total)} a step"


def _advice(plan: Plan) -> str:
    """What to turn."""
    if not plan.fits and plan.next_lever is not None:
        return f"next lever: {plan.next_lever.do} ({plan.next_lever.name}; costs {plan.next_lever.cost})"
    if not plan.fits:
        return "no lever of this version makes it fit: it needs more memory, a shorter row or a smaller model"
    if plan.device_limit:
        less = format_bytes(int(0.95 * plan.device_limit)).replace(" ", "")
        return f"the plan had said that it fits: write memory_limit: {less}, so that it plans for less"
    return "the plan had said that it fits: lower max_length, or host_memory, so that it plans for less"


def _existing(folder: Path) -> Path:
    """The folder or the nearest one around it that is there: where the run would save, so that its room is looked at too."""
    return next(place for place in (folder, *folder.absolute().parents) if place.is_dir())
