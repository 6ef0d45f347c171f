"""`transformers.TrainerCallback` objects, called with the real `TrainingArguments`, `TrainerState` and `TrainerControl`.

Callbacks written for `transformers` or TRL (early stopping, loggers, profilers) work unchanged. When to log, evaluate and
save is decided by transformers' own `DefaultFlowCallback`, so `logging_steps`, `eval_strategy` and the rest mean what they
mean there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, ExportableState

from megaspan.config import SFTConfig
from megaspan.human import UserError
from megaspan.world import Mesh

# What TrainingArguments would act upon by itself when constructed; the callbacks only read the values.
_SET_HERE = {
    "output_dir",
    "bf16",
    "report_to",
    "use_cpu",
    "full_determinism",
    "resume_from_checkpoint",
    "disable_tqdm",
    "warmup_ratio",
    "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
}


class Callbacks:
    """The callbacks of one run, with the state that they see."""

    def __init__(
        self,
        config: SFTConfig,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None,
        model: Any,
        tokenizer: Any,
        mesh: Mesh,
    ) -> None:
        for callback in callbacks or ():
            check_callback(callback)
        self.arguments = training_arguments(config)
        # What callbacks that write something ask: they are called on every rank.
        self.state = TrainerState(is_local_process_zero=mesh.local_rank == 0, is_world_process_zero=mesh.rank == 0)
        self.control = TrainerControl()
        self.handler = CallbackHandler([DefaultFlowCallback, *(callbacks or ())], model, tokenizer, None, None)

    def call(self, event: str, **details: Any) -> TrainerControl:
        """Calls `event` ("on_step_end", …) on every callback and returns the control object they leave."""
        self.control = self.handler.call_event(event, self.arguments, self.state, self.control, **details)
        return self.control

    def begin_step(self) -> None:
        """As `TrainerControl` documents: save, evaluate and log requests last for one step."""
        self.control.should_save = self.control.should_evaluate = self.control.should_log = False
        self.call("on_step_begin")

    def evaluated(self, metrics: dict[str, float]) -> None:
        """Tells callbacks of held-out metrics beside the best so far, which is updated afterwards, as in transformers."""
        self.call("on_evaluate", metrics=metrics)
        loss = metrics.get("eval_loss")
        if loss is not None and (self.state.best_metric is None or loss < self.state.best_metric):
            self.state.best_metric, self.state.best_global_step = loss, self.state.global_step

    def export_state(self) -> dict[str, Any]:
        """State of callbacks that have one (early stopping), for a checkpoint."""
        return {type(callback).__name__: callback.state() for callback in self._stateful()}

    def load_state(self, saved: dict[str, Any]) -> None:
        """Restores what `export_state` wrote."""
        for callback in self._stateful():
            state = saved.get(type(callback).__name__)
            if state is not None:
                for name, value in (state["args"] | state["attributes"]).items():
                    setattr(callback, name, value)

    def _stateful(self) -> list[Any]:
        return [callback for callback in self.handler.callbacks if isinstance(callback, ExportableState)]


def check_callback(callback: Any) -> None:
    """Refuses what has not the methods of a callback, before they are missed in the middle of a run.

    Raises:
        UserError: it is neither a `TrainerCallback` nor a class of them.
    """
    kind = callback if isinstance(callback, type) else type(callback)
    if not issubclass(kind, TrainerCallback):
        raise UserError("a callback is no transformers.TrainerCallback", found=kind.__name__)


def check_callbacks(callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None, config: SFTConfig) -> None:
    """Refuses callbacks that cannot work with these options, before anything is loaded.

    Raises:
        UserError: as `check_callback`, or early stopping without an evaluation to stop by.
    """
    if not isinstance(callbacks, Sequence | None):
        raise UserError("callbacks is a list", found=type(callbacks).__name__, do="Write callbacks=[…]")
    for callback in callbacks or ():
        check_callback(callback)
        kind = callback if isinstance(callback, type) else type(callback)
        if issubclass(kind, EarlyStoppingCallback) and config.eval_strategy == "no":
            raise UserError(
                f"{kind.__name__} stops by the held-out loss, and nothing is evaluated",
                found="eval_strategy: no",
                do="Write eval_strategy: steps, or leave the callback out",
            )


def training_arguments(config: SFTConfig) -> TrainingArguments:
    """transformers' `TrainingArguments` with the values of `config` wherever the option exists there."""
    values = config.model_dump()
    known = {field.name for field in fields(TrainingArguments) if field.init}
    shared = {name: values[name] for name in (known - _SET_HERE) & values.keys() if values[name] is not None}
    # transformers 5.24 renamed it and warns of the old name even where nobody has set it.
    checkpointing = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
    shared[checkpointing] = config.gradient_checkpointing
    # What "best" means to early stopping: megaspan has no other metric than the held-out loss.
    shared |= {"metric_for_best_model": "eval_loss", "greater_is_better": False}
    return TrainingArguments(output_dir=config.output_dir, report_to="none", use_cpu=True, bf16=False, **shared)
