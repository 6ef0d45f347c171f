"""`SFTTrainer`: the main job, with the constructor and the methods that users of TRL know.

What makes a million tokens possible is in the levers that `prepare` puts on the model; what is here is what a step of minutes
asks for: everything that can fail is tried before the first step, a checkpoint is complete or absent, a signal is answered at
the next layer, a resume reads nothing twice. On several ranks every rank makes the same trainer with the same arguments and
calls the same methods; rank 0 writes and speaks.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerState
from transformers.trainer_utils import TrainOutput

from megaspan import store, world
from megaspan.config import SFTConfig
from megaspan.config.spelling import for_python
from megaspan.human import UserError
from megaspan.optimizer import Optimizer
from megaspan.report import Line, Metrics, Progress, plot_run, print_header
from megaspan.trainer.callbacks import Callbacks, check_callback, check_callbacks
from megaspan.trainer.early import refuse_others, refuse_parameters
from megaspan.trainer.interrupt import Interrupted, Interrupts
from megaspan.trainer.job import Job, say
from megaspan.trainer.loop import Loop
from megaspan.trainer.resumed import Resumed, but_length, run_options, update_options
from megaspan.trainer.schedule import Schedule
from megaspan.trainer.setup import set_up
from megaspan.trainer.step import Accumulator, Sums


class SFTTrainer:
    """Fine-tunes a causal language model on rows of up to millions of tokens.

    Args:
        model: a hub name, a model folder, a shape name, or a `transformers` model; None takes `args.model_name_or_path`.
        args: the options.
        train_dataset: a `datasets` object, a path, or a list of strings, dicts or token ids; None takes `args.dataset_name`.
        eval_dataset: held-out data, the same kinds.
        processing_class: the tokenizer; None loads the model's own.
        callbacks: `transformers.TrainerCallback` objects or classes.
        peft_config: a `peft.LoraConfig`; None takes `args.use_peft` and its `lora_*` options.
        data_collator, compute_loss_func, compute_metrics, optimizers, optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics, quantization_config, formatting_func: TRL's other parameters; refused unless None.

    Raises:
        UserError: a wrong option, data or model, before any weight is loaded where that can be seen.
    """

    _rows_folder: Path | None = None  # of prepared rows, where they are not to be found again
    _draws = True  # plots.png when the training is done; the verb draws it when the model is saved

    @for_python()
    def __init__(
        self,
        model: str | Path | PreTrainedModel | None = None,
        args: SFTConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Callable | None = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: Any = None,
        preprocess_logits_for_metrics: Callable | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Callable | None = None,
        **others: Any,
    ) -> None:
        refuse_others(others)
        refuse_parameters(
            data_collator=data_collator,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            optimizers=None if optimizers == (None, None) else optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            quantization_config=quantization_config,
            formatting_func=formatting_func,
        )
        if not isinstance(args, SFTConfig):
            got = None if args is None else type(args).__module__ + "." + type(args).__name__
            raise UserError(
                "SFTTrainer needs args of megaspan's own SFTConfig",
                found=got,
                do="Pass args=megaspan.SFTConfig(max_length='128k')",
            )
        check_callbacks(callbacks, args)
        self._job: Job = set_up(model, args, train_dataset, eval_dataset, processing_class, peft_config, self._rows_folder)
        self.args = self._job.args
        self.model, self.processing_class = self._job.model, self._job.tokenizer
        self.train_dataset, self.eval_dataset = self._job.rows, self._job.eval_rows
        self._callbacks = Callbacks(self.args, callbacks, self.model, self.processing_class, self._job.ranks.mesh)
        self._unlogged = Sums()
        self._callbacks.call("on_init_end")

    @property
    def state(self) -> TrainerState:
        """transformers' `TrainerState`: `global_step`, `epoch`, `log_history`, …"""
        return self._callbacks.state

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Adds a callback, as in `transformers.Trainer`."""
        check_callback(callback)
        self._callbacks.handler.add_callback(callback)

    @for_python()
    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Trains to the last step, saving checkpoints on the way.

        The run folder then holds `metrics.jsonl` and, where the extra `plots` is installed, `plots.png`.

        Args:
            resume_from_checkpoint: a checkpoint folder, or True for the newest complete one of the run; None takes the option.

        Raises:
            UserError: the checkpoint is not of this run, the folder holds another run or one is at work there, the disk has no
                room, or this trainer has trained before and is not told to resume.
            Interrupted: SIGINT or SIGTERM came; a complete checkpoint was left.
        """
        with ExitStack() as stack:
            store.together(lambda: stack.enter_context(store.lock_run(self.args.output_dir)))
            return self._train(resume_from_checkpoint, stack)

    def _train(self, resume_from_checkpoint: str | bool | None, stack: ExitStack) -> TrainOutput:
        args, job, state = self.args, self._job, self._callbacks.state
        wish = args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        checkpoint = store.together(lambda: store.open_run(args.output_dir, wish))
        if checkpoint is None and state.global_step > 0:
            raise UserError(
                f"this trainer has trained {state.global_step} steps already, and the state of its optimizer is gone",
                do="Make a new SFTTrainer, or continue from a checkpoint: train(resume_from_checkpoint=True)",
            )
        schedule = Schedule(
            rows=len(job.rows),
            rows_per_step=job.rows_per_step,
            epochs=args.num_train_epochs,
            max_steps=args.max_steps,
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffled=args.train_sampling_strategy == "random",
        )
        optimizer = Optimizer(self.model, args, schedule.total_steps, states=job.plan.states)
        stack.callback(optimizer.close)  # of a train() that is refused, its hooks would take the next one's gradients
        self._start_state(schedule, optimizer)
        resumed: list[Line] = []
        if checkpoint is not None:
            identity = but_length(job.identity(schedule), checkpoint)
            saved = store.load_checkpoint(checkpoint, self.model, optimizer, identity=identity, options=run_options(args))
            self._restore_state(saved)
            before = Resumed.of(checkpoint, saved)
            if (finished := before.nothing_left(args, schedule)) is not None:
                return self._finished(finished)
            resumed = before.lines(args, schedule, optimizer.learning_rate)
        rehearsal = store.rehearse_save(
            args.output_dir,
            model=self.model,
            optimizer=optimizer,
            optimizer_bytes=optimizer.state_bytes,
            saves=schedule.saves(args.save_strategy, args.save_steps, state.global_step),
            keep=args.save_total_limit,
            progress=self._progress(),
            identity=job.identity(schedule),
            tokenizer=self.processing_class,
        )
        job.write_run_facts(schedule, checkpoint)
        speaks = job.ranks.speaks
        metrics = Metrics(
            args.output_dir, args.report_to, args.run_name, args.resolved(), resumed_step=state.global_step, quiet=not speaks
        )
        progress = Progress(
            schedule.total_steps,
            job.facts.layers,
            enabled=not args.disable_tqdm,
            first_step=state.global_step,
            rows_per_step=job.share.rounds(schedule.rows_per_step),
            quiet=not speaks,
            memory=job.device_memory if job.device.type == "cuda" else None,
        )
        if speaks:
            precision = Line("precision", optimizer.precision, optimizer.reason)
            print_header(job.header(schedule, precision, rehearsal, resumed))
        begun, first = time.monotonic(), state.global_step

        def save() -> Path:
            return store.save_checkpoint(
                args.output_dir,
                model=self.model,
                optimizer=optimizer,
                progress=self._progress(),
                keep=args.save_total_limit,
                tokenizer=self.processing_class,
                identity=job.identity(schedule),
            )

        with Interrupts() as interrupts, progress, metrics:
            loop = Loop(
                args,
                job,
                optimizer,
                self._callbacks,
                schedule,
                metrics,
                progress,
                interrupts,
                evaluate=self._evaluate,
                save=save,
                unlogged=self._unlogged,
            )
            try:
                loop.run()
            finally:
                job.levers.give_back_disk()  # the final model may need the room
        job.ranks.beat("after the last step", None)
        seconds = time.monotonic() - begun
        if self._draws:
            self._draw()
        found = {"train_runtime": seconds, "train_loss": loop.mean_loss} | ({"resumed_at_step": float(first)} if first else {})
        return TrainOutput(state.global_step, loop.mean_loss, found)

    def _finished(self, sentence: str) -> TrainOutput:
        """A run that has done all its steps already: its weights are there to be saved, and nothing of it is written anew."""
        self._job.levers.give_back_disk()
        self._job.say(f"megaspan: {sentence}.")
        steps = self.state.global_step
        return TrainOutput(steps, math.nan, {"train_runtime": 0.0, "train_loss": math.nan, "resumed_at_step": float(steps)})

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Loss, token accuracy and entropy on held-out rows, by the code that trains.

        Args:
            eval_dataset: other held-out data than the trainer's own.
            metric_key_prefix: goes before each name.
        """
        rows = self._job.eval_rows if eval_dataset is None else self._job.prepare_eval(eval_dataset)
        metrics = self._evaluate(None, rows, metric_key_prefix)
        self._job.ranks.beat("after the evaluation", None)
        self.state.log_history.append(metrics | {"step": self.state.global_step})
        return metrics

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Writes a folder that plain `transformers` (or `peft`) loads: weights, tokenizer, rope settings, the new length.

        Of several ranks all call it, and one writes.
        """
        out = Path(output_dir or Path(self.args.output_dir) / store.FINAL)
        store.save_model(self.model, self.processing_class, out)

    def _draw(self) -> Path | None:
        """The run's plots, by the rank that writes; None where there are none. A picture never costs what was trained."""
        if not self._job.ranks.speaks or find_spec("matplotlib") is None:
            return None
        try:
            return plot_run(self.args.output_dir)
        except UserError:  # a run that had no step left has none to show
            return None
        except Exception as error:  # whatever matplotlib or the disk does
            say(self._job.ranks, f"! plots.png was not drawn: {type(error).__name__}: {error}")
            return None

    def _evaluate(
        self, begins: Callable[[int], None] | None = None, rows: Any = None, prefix: str = "eval"
    ) -> dict[str, float]:
        """Metrics of held-out rows; `begins` is called before each of this rank's, and may raise."""
        rows = self._job.eval_rows if rows is None else rows
        if rows is None:
            raise UserError(
                "there is no held-out data to evaluate on",
                do="Pass eval_dataset=…, or set eval_strategy and dataset_test_split",
            )
        begun = time.monotonic()
        accumulator = Accumulator(self.model, self._job.share, self.args.seed)
        training = self.model.training
        self.model.eval()
        try:
            accumulator.evaluate(rows, begins or self._evaluation_begins)
            total = accumulator.sums()
        finally:
            self.model.train(training)
        values = total.means() | {"runtime": time.monotonic() - begun, "num_tokens": float(total.tokens)}
        metrics = {f"{prefix}_{name}": value for name, value in values.items()}
        self._callbacks.evaluated(metrics)
        return metrics

    def _evaluation_begins(self, number: int) -> None:
        """Row `number` of an evaluation outside of the loop begins."""
        self._job.ranks.beat(f"evaluation row {number + 1}", self._job.patience.row)

    def _start_state(self, schedule: Schedule, optimizer: Optimizer) -> None:
        args, state = self.args, self.state
        state.max_steps, state.num_train_epochs = schedule.total_steps, -(-schedule.total_steps // schedule.steps_per_epoch)
        state.logging_steps, state.save_steps = args.logging_steps, args.save_steps
        state.eval_steps = args.eval_steps or args.logging_steps
        state.train_batch_size = args.per_device_train_batch_size
        self._callbacks.handler.optimizer = optimizer

    def _progress(self) -> dict[str, Any]:
        """What a checkpoint must give back besides weights, optimizer and random states."""
        state = self.state
        return {
            "step": state.global_step,
            "epoch": state.epoch,
            "num_tokens": state.num_input_tokens_seen,
            "log_history": state.log_history,
            "callbacks": self._callbacks.export_state(),
            "options": update_options(self.args),
            "learning_rate": self._callbacks.handler.optimizer.learning_rate,  # of the next step
            "best": [state.best_metric, state.best_global_step],
            "unlogged": dataclasses.asdict(self._unlogged),
        }

    def _restore_state(self, saved: dict[str, Any]) -> None:
        state = self.state
        state.global_step, state.epoch = saved["step"], saved["epoch"]
        state.num_input_tokens_seen, state.log_history = saved["num_tokens"], saved["log_history"]
        self._callbacks.load_state(saved["callbacks"])
        state.best_metric, state.best_global_step = saved["best"]
        self._unlogged = Sums(**saved["unlogged"])


def run(config: SFTConfig) -> dict[str, Any]:
    """The verb `megaspan train`: trains as `config` says and saves the final model; returns what a program wants to know."""
    if world.launch().rank == 0:  # before anything is loaded
        with store.lock_run(config.output_dir):
            store.open_run(config.output_dir, config.resume_from_checkpoint)
    trainer = SFTTrainer(args=config)
    trainer._draws = False
    output = trainer.train()
    with Interrupts() as interrupts:  # the training is done: a signal waits for the one thing that is left of it
        trainer.save_model()
    (signum,) = world.largest([interrupts.signum or 0])
    if signum:
        interrupted = Interrupted(int(signum))
        interrupted.add_note(f"the training was done, and {Path(config.output_dir) / store.FINAL} is complete")
        raise interrupted
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    result = {
        "steps": output.global_step,
        "last_loss": round(losses[-1], 4) if losses else None,
        "tokens": trainer.state.num_input_tokens_seen,
        "seconds": round(output.metrics["train_runtime"], 1),
        **({"resumed_at_step": int(output.metrics["resumed_at_step"])} if "resumed_at_step" in output.metrics else {}),
        "model": str(Path(config.output_dir) / store.FINAL),
        "metrics": str(Path(config.output_dir) / "metrics.jsonl"),
    }
    picture = trainer._draw()
    return result | ({"plot": str(picture)} if picture else {})
