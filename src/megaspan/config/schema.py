"""`SFTConfig`: everything a user can wish for, one frozen schema for YAML, flags and Python.

The names are those of TRL's `SFTConfig`, transformers' `TrainingArguments` and accelerate's `ParallelismConfig` wherever the
idea is the same. A run of a million tokens lasts hours, so nothing here is accepted and then ignored: an unknown key, an option
without effect beside the others, a wrong type are all reported together, before a weight is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from megaspan.config import checks, foreign, nested
from megaspan.config.spelling import for_python
from megaspan.config.values import (
    Bytes,
    Count,
    Datasets,
    Dtype,
    Folder,
    Lost,
    Mapping,
    Names,
    NotNegative,
    Optim,
    Padding,
    Positive,
    Resume,
    Share,
    StepLimit,
    Steps,
    Strategy,
    Text,
    Tokens,
    Trackers,
    Warmup,
    Whole,
    allowed_text,
    value_meant,
)
from megaspan.human import UserError, UserErrors, nearest

Schedule = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup",
    "inverse_sqrt", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay",
]  # fmt: skip

# The sections of --help and of the documentation, each with its first option.
GROUPS = (
    ("Run", "output_dir"), ("Model", "model_name_or_path"), ("LoRA", "use_peft"), ("Data", "dataset_name"),
    ("Training", "per_device_train_batch_size"), ("Precision and device", "bf16"), ("Memory", "gradient_checkpointing"),
    ("Several devices", "dp_replicate_size"), ("Evaluation", "eval_strategy"), ("Logging", "logging_strategy"),
    ("Saving", "save_strategy"),
)  # fmt: skip


class SFTConfig(BaseModel):
    """The settings of one fine-tuning run. Only `max_length` has no default.

    Frozen: `config.replace(name=value)` gives a changed copy, checked again.

    Raises:
        UserErrors: every unknown key, wrong value, option without effect and illegal combination, one sentence each.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    output_dir: Text = Field("run", description="Folder of the run: metrics, checkpoints and the final model.")
    run_name: Text | None = Field(None, description="Name of the run: in its header, its run.json, plots and trackers.")
    resume_from_checkpoint: Resume | None = Field(
        None, description="Continue from this checkpoint folder, or from the newest one of output_dir (true)."
    )

    model_name_or_path: Text | None = Field(
        None,
        description="Hub name or folder of a model; qwen3-0.6b, qwen3-4b, qwen3-8b are shapes with random weights.",
    )
    model_revision: Text | None = Field(None, description="Branch, tag or commit of the model; null is main.")
    trust_remote_code: bool = Field(False, description="Run Python code that ships with the model.")
    model_init_kwargs: Mapping | None = Field(
        None,
        description="rope_parameters (a mapping as in transformers, or auto: the factor follows from max_length), dtype, "
        "revision, trust_remote_code; any other key overrides that entry of the model's config.json.",
    )
    dtype: Dtype | None = Field(
        None,
        description="null and float32 keep fp32 master weights; bfloat16 keeps weights and optimizer in bf16, updates rounded.",
    )
    allow_past_window: bool = Field(False, description="Train past the positions that the model knows, without extending them.")

    use_peft: bool = Field(False, description="Train a LoRA adapter in place of all weights (needs megaspan[lora]).")
    lora_r: Count = Field(16, description="Rank of the adapter.")
    lora_alpha: Count = Field(32, description="Scale of the adapter: its output is multiplied by lora_alpha / lora_r.")
    lora_dropout: Share = Field(0.05, description="Dropout on the adapter's input.")
    lora_target_modules: Names | None = Field(
        None, description="Modules that get an adapter; null is peft's choice, all-linear all."
    )
    lora_modules_to_save: Names | None = Field(None, description="Modules trained in full beside the adapter.")
    use_rslora: bool = Field(False, description="Scale by lora_alpha / sqrt(lora_r).")
    use_dora: bool = Field(False, description="Weight-decomposed LoRA; not proven exact here, so only false is legal.")

    dataset_name: Text | None = Field(None, description="Text to train on: hub name, folder, file or glob.")
    dataset_config: Text | None = Field(None, description="Configuration name of the dataset.")
    dataset_train_split: Text = Field("train", description="Split to train on.")
    dataset_test_split: Text = Field("test", description="Split to evaluate on.")
    dataset_streaming: bool = Field(False, description="Read the dataset as a stream, without a download of the whole.")
    datasets: Datasets | None = Field(
        None, description="Several datasets, in this order: a list of {path, name, data_dir, data_files, split, columns}."
    )
    dataset_text_field: Text = Field("text", description="Column that holds the text.")
    dataset_num_proc: Count | None = Field(None, description="Threads of the tokenizer; null is one per core.")
    max_length: Tokens = Field(..., description="Tokens in a row, over all GPUs: 131072, 128k, 1M.")
    packing: bool = Field(True, description="Join documents until a row is full; false gives every document its own row.")
    packing_strategy: Literal["wrapped", "bfd"] = Field(
        "wrapped",
        description="wrapped joins documents and continues the rest in the next row; every token sees all earlier ones. "
        "bfd puts whole documents together, as tightly as they fit; each sees only itself.",
    )
    max_rows: Count | None = Field(None, description="Stop after this many rows.")
    overlong: Literal["split", "truncate", "drop"] = Field(
        "split",
        description="Without packing or with bfd, a document longer than max_length is split into rows, truncated or dropped.",
    )
    max_lost_tokens: Lost = Field(
        0.01, description="Stop when more tokens than this would be lost: a share up to 1, a number of tokens above 1."
    )
    eos_token: Text | None = Field(None, description="Token that ends a document; null is the tokenizer's own.")
    pad_to_multiple_of: Padding | None = Field(
        None, description="Pad rows to a multiple of this (counted as padding); never needed."
    )
    shuffle_dataset: bool = Field(False, description="Shuffle the documents before they are joined into rows.")
    train_sampling_strategy: Literal["random", "sequential"] = Field(
        "random", description="Order of the rows in an epoch: drawn anew each time, or as prepared."
    )

    per_device_train_batch_size: Count = Field(1, description="Rows per GPU in one micro-batch.")
    gradient_accumulation_steps: Count = Field(1, description="Micro-batches per optimizer step, weighted by their tokens.")
    num_train_epochs: Positive = Field(3.0, description="Passes over the rows.")
    max_steps: StepLimit = Field(-1, description="Optimizer steps in place of num_train_epochs; -1 is none.")
    learning_rate: NotNegative = Field(2e-5, description="Peak learning rate.")
    lr_scheduler_type: Schedule = Field("linear", description="Schedule, by transformers' names.")
    lr_scheduler_kwargs: Mapping | None = Field(None, description="Arguments of the schedule, such as {min_lr_rate: 0.1}.")
    warmup_steps: Warmup = Field(0.0, description="Steps of linear warm-up; below 1 a share of all steps.")
    warmup_ratio: Share | None = Field(None, description="Warm-up as a share of all steps (older name).")
    optim: Optim = Field(
        "adamw_torch_fused",
        description="AdamW of torch, fused or not; adamw_8bit (or adamw_bnb_8bit) keeps moments of 8 bits by bitsandbytes "
        "(needs megaspan[optim8]).",
    )
    weight_decay: NotNegative = Field(0.0, description="Decay, not applied to biases and norms.")
    adam_beta1: Share = Field(0.9, description="Decay of the first moment.")
    adam_beta2: Share = Field(0.999, description="Decay of the second moment.")
    adam_epsilon: Positive = Field(1e-8, description="Term added to the denominator of AdamW.")
    max_grad_norm: NotNegative = Field(1.0, description="Clip the global gradient norm to this; 0 does not clip.")
    loss_type: Literal["chunked_nll", "nll"] = Field(
        "chunked_nll", description="chunked_nll never holds the logits of a row; nll is the plain loss with all logits."
    )

    bf16: bool | None = Field(None, description="Compute in bf16; null is yes on a GPU, no on a CPU.")
    use_cpu: bool = Field(False, description="Run on the CPU even where a GPU is.")
    seed: Whole = Field(42, description="Seed of weights, dropout and, without data_seed, of the data order.")
    data_seed: Whole | None = Field(None, description="Seed of the data order; null is seed.")
    full_determinism: bool = Field(False, description="Bit-equal repetition also on a GPU, at a cost that the header prints.")

    gradient_checkpointing: bool = Field(
        True, description="Keep only the input of every layer and recompute the rest (newer name: activation_checkpointing)."
    )
    gradient_checkpointing_kwargs: Mapping | None = Field(
        None, description="{offload: true} keeps the layers' inputs in host memory (the default), {offload: false} on the GPU."
    )
    offload_optimizer: bool | None = Field(
        None, description="Moments and fp32 masters in host memory, updated in pieces on the GPU; null lets the plan decide."
    )
    memory_limit: Bytes | None = Field(
        None, description="GPU memory to plan for, and the most that a run takes; null is what the GPU has."
    )
    host_memory: Bytes | None = Field(
        None, description="Host memory to plan for; null is 95% of what the machine or its cgroup has."
    )
    offload_folder: Folder | None = Field(
        None, description="Folder on a fast local disk for what layers keep and neither GPU nor host can hold; null is none."
    )
    allow_slow_disk: bool = Field(
        False, description="Use offload_folder even where its disk would hold up a step by more than 10 %."
    )

    dp_replicate_size: Count = Field(1, description="Copies of the model, each on GPUs of its own.")
    dp_shard_size: Count | None = Field(
        None,
        description="GPUs with rows of their own that share one copy of the weights; null is what the other sizes leave.",
    )
    cp_size: Count = Field(1, description="GPUs that share the tokens of a row.")
    sp_size: Count = Field(1, description="GPUs that share the heads of a row (Ulysses).")

    eval_strategy: Strategy = Field("no", description="Evaluate never, every eval_steps, or after every epoch.")
    eval_steps: Steps | None = Field(None, description="Steps between evaluations; null is logging_steps.")

    logging_strategy: Strategy = Field("steps", description="Log never, every logging_steps, or after every epoch.")
    logging_steps: Steps = Field(1, description="Steps between logged lines.")
    report_to: Trackers = Field("none", description="Trackers beside metrics.jsonl: tensorboard, wandb, trackio; or none.")
    disable_tqdm: bool | None = Field(None, description="No progress bar; null shows it on a terminal.")

    save_strategy: Strategy = Field("steps", description="Checkpoints never, every save_steps, or after every epoch.")
    save_steps: Steps = Field(500, description="Steps between checkpoints.")
    save_minutes: Positive | None = Field(30.0, description="Save also when this many minutes have passed; null does not.")
    save_total_limit: Count | None = Field(None, description="Newest checkpoints to keep; null keeps all.")

    if not TYPE_CHECKING:  # type checkers see the fields in place of this signature

        @for_python()
        def __init__(self, /, **options: Any) -> None:
            values, written, errors = foreign.translate(options, type(self).model_fields)
            values, more = nested.check(values)
            errors += more
            wrong = {error.option for error in errors}
            good = {name: value for name, value in values.items() if name not in wrong}
            try:
                super().__init__(**{"max_length": 1, **good})
            except ValidationError as found:
                bad = {str(detail["loc"][0]) for detail in found.errors()}
                errors += [_wrong_value(name, good[name]) for name in bad]
                super().__init__(**{"max_length": 1, **{name: value for name, value in good.items() if name not in bad}})
            if values.get("max_length") is None:
                errors = [error for error in errors if error.option != "max_length"]
                errors.append(_no_length())
            errors += checks.combinations(self, {error.option for error in errors})
            if errors:
                for error in errors:
                    error.option = written.get(error.option or "", error.option)
                order = {name: position for position, name in enumerate(options)}
                raise UserErrors(sorted(errors, key=lambda error: order.get(error.option or "", len(order))))

        def __setattr__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                super().__setattr__(name, value)
            else:
                raise UserError(
                    f"a configuration cannot be changed: {name}", do=f"Write config = config.replace({name}={value!r})"
                )

    def replace(self, /, **changes: Any) -> SFTConfig:
        """A copy with some options changed, checked as a whole."""
        return type(self)(**{**self.given(), **changes})

    def given(self) -> dict[str, Any]:
        """The options that were set, with their values."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}

    @model_serializer(mode="wrap")
    def _without_idle(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """`model_dump()` leaves out what has no effect here, so that the dump of a run is a legal file again."""
        idle = checks.idle_options(self)
        return {name: value for name, value in dump(self).items() if name not in idle}

    def resolved(self) -> dict[str, Any]:
        """Every option that has an effect, with the value that holds; `SFTConfig(**config.resolved())` is the same run."""
        return self.model_dump()

    @property
    def offload(self) -> bool:
        """Whether the layers' inputs go to host memory."""
        return self.gradient_checkpointing and bool((self.gradient_checkpointing_kwargs or {}).get("offload", True))

    @property
    def rope_parameters(self) -> dict[str, Any] | Literal["auto"] | None:
        """The wish for positions: a mapping as in transformers, "auto", or None for the model's own."""
        return (self.model_init_kwargs or {}).get("rope_parameters")

    @property
    def config_overrides(self) -> dict[str, Any]:
        """The entries of model_init_kwargs that replace entries of the model's own configuration."""
        return {name: value for name, value in (self.model_init_kwargs or {}).items() if name != "rope_parameters"}

    @property
    def weights_dtype(self) -> Literal["bfloat16", "float32"] | None:
        """The wish for the weights; None is fp32 masters with bf16 computation on a GPU."""
        return self.dtype


def _wrong_value(name: str, value: Any) -> UserError:
    """One field's error: the sentence kept for this very value where there is one, else the legal values."""
    own = foreign.table()["values"].get(name, {}).get(str(value).removeprefix("torch."))
    if own is not None:
        return UserError(f"{name}: {own['why'].rstrip('.')}", got=value, do=own.get("do"), option=name)
    allowed = allowed_of(name)
    if (meant := value_meant(allowed, value)) is not None:
        return UserError(f"{name} must be {allowed}", got=value, do=f"Write {name}: {meant}", option=name)
    close = nearest(value, allowed.replace(" or ", ", ").split(", ")) if isinstance(value, str) else None
    do = f"Did you mean {close}?" if close else "Put it in quotes" if isinstance(value, float) and "text" in allowed else None
    if isinstance(value, list) and allowed.startswith("a text"):  # the shell has written a glob out, or parted words
        do = "Put it in quotes"
        if name == "dataset_name":
            do = "Put a glob in quotes, name the folder, or list several in datasets"
    found = "null" if value is None else None
    return UserError(f"{name} must be {allowed}", got=value, found=found, do=do, option=name)


def allowed_of(name: str) -> str:
    """The legal values of one option, in words that follow "must be"."""
    field = SFTConfig.model_fields[name]
    return allowed_text(field.annotation, field.metadata)


def _no_length() -> UserError:
    do = "Write max_length: 128k; megaspan plan shows what fits"
    return UserError(
        "max_length is missing and has no default",
        allowed="a number of tokens such as 131072, 128k or 1M",
        do=do,
        option="max_length",
    )
