"""`load_model`: from `model_name_or_path` to an unmodified transformers model on its device, with its positions settled.

The rotary settings go into the configuration before the model is built: the frequencies are computed in the constructor, and
a model whose configuration says YaRN while its buffer does not starts at a loss of 10 instead of 4.3. They are read back from
the live module and compared with a fresh computation before anything else happens. A shape alone gets its random weights on
the device itself and in their final type (an 8B model is 16 GB on the GPU within a second, and nothing on the host).
"""

from __future__ import annotations

import copy
import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from megaspan.human import UserError
from megaspan.model.counted import facts_of
from megaspan.model.kinds import check_trainable, unwrap
from megaspan.model.limits import check_positions
from megaspan.model.source import (
    Source,
    apply_overrides,
    commit_of,
    fill_the_cache,
    find_source,
    first_line,
    read_config,
    unreadable,
)
from megaspan.rope import RopeChoice, RopeReadback, read_back, require_exact, resolve_rope
from megaspan.world.quiet import bar_on_terminals_only

if TYPE_CHECKING:
    from megaspan.config import SFTConfig
    from megaspan.plan.facts import ModelFacts

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tekken.json")


@dataclass(frozen=True)
class LoadedModel:
    """A model as it came, before `prepare`.

    Attributes:
        model: an unmodified transformers model (or peft's, after `wrap_lora`), in training mode, on its device.
        tokenizer: its tokenizer, or None where there is none.
        facts: layers, widths, parameters, windows.
        name: as the user wrote it.
        commit: of the hub, or a hash of the folder.
        origin: where the weights came from, in words for the run header.
        rope: the rotary settings chosen, with their reason.
        rope_readback: what the live rotary modules really hold.
        random_weights: the model is a shape alone.
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase | None
    facts: ModelFacts
    name: str
    commit: str
    origin: str
    rope: RopeChoice
    rope_readback: RopeReadback
    random_weights: bool


def load_model(config: SFTConfig, device: torch.device | str) -> LoadedModel:
    """Load the model and the tokenizer that `config` names.

    Args:
        config: `model_name_or_path`, `model_revision`, `model_init_kwargs`, `dtype`, `trust_remote_code`, `max_length`, `seed`.
        device: where the weights go. bf16 on a GPU (fp32 masters live in the optimizer) and fp32 on a CPU, unless
            `dtype` or `bf16` say otherwise.

    Raises:
        UserError: there is no such model, it is of a kind that is not supported, an override is unknown, a weight is missing,
            a row would be longer than its positions, or the tokenizer knows more words than the model.
    """
    device = torch.device(device)
    source = find_source(config)
    model_config = read_config(source, trust_remote_code=config.trust_remote_code)
    commit = commit_of(source, model_config)
    apply_overrides(model_config, config.config_overrides)
    rope = resolve_rope(model_config.to_dict(), config.rope_parameters, config.max_length, config.allow_past_window)
    apply_rope(model_config, rope)
    dtype = live_dtype(config, device)
    unused = 0
    if source.kind == "shape":
        model = _random_model(source, model_config, device, dtype, config.seed)
    else:
        model, unused = _pretrained_model(source, model_config, device, dtype, config.trust_remote_code)
    return loaded(model, config, source, commit, rope, unused)


def loaded(model: Any, config: SFTConfig, source: Source, commit: str, rope: RopeChoice, unused: int) -> LoadedModel:
    """A model whose weights are there (a peft model too), checked, with its tokenizer.

    Args:
        model: the model.
        config: the options.
        source: where it came from.
        commit: which version of it.
        rope: its positions, as chosen.
        unused: weights of the checkpoint that the model has no place for.

    Raises:
        UserError: a kind of model that is not trained here, inexact positions, or a tokenizer that knows more words.
    """
    inner = unwrap(model)
    if source.kind == "shape":
        origin = f"random weights (seed {config.seed}): {source.name} is a shape without weights"
    else:
        origin = f"commit {commit}" if source.kind == "hub" else f"folder {commit}"
        origin += f", {unused} weights of the checkpoint are not used" if unused else ""
    if config.trust_remote_code:
        origin += ", with its own code (trust_remote_code)"
    check_trainable(inner)
    tokenizer = load_tokenizer(config)
    embeddings: Any = inner.get_input_embeddings()
    check_vocabulary(tokenizer, embeddings.weight.shape[0])
    return LoadedModel(
        model=model.train(),
        tokenizer=tokenizer,
        facts=facts_of(inner),
        name=source.name,
        commit=commit,
        origin=origin,
        rope=rope,
        rope_readback=require_exact(read_back(inner)),
        random_weights=source.kind == "shape",
    )


def check_adopted(model: Any, config: SFTConfig) -> RopeChoice:
    """Refuses a model that the user has made and that cannot be trained as `config` says; its positions, where it can.

    Raises:
        UserError: as `adopt_model`.
    """
    asked = sorted(config.config_overrides) + (["rope_parameters"] if config.rope_parameters is not None else [])
    if asked:
        raise UserError(
            f"model_init_kwargs ({', '.join(asked)}) cannot change a model that exists already",
            do="Pass the model's name instead of the model, or set them when you load it",
        )
    inner = unwrap(model)
    check_trainable(inner)
    if any(parameter.dtype == torch.float16 for parameter in model.parameters()):
        raise UserError(
            "the model is in half precision, which overflows in sums over this many tokens", do="Load it in bfloat16 or float32"
        )
    check_positions(inner, type(inner).__name__, config.max_length)
    return resolve_rope(inner.config.to_dict(), None, config.max_length, config.allow_past_window)


def adopt_model(model: Any, config: SFTConfig, device: torch.device | str) -> LoadedModel:
    """Take a model that the user has made; it is moved to `device`, and its positions must cover `max_length` as they are.

    Args:
        model: a transformers model, or a LoRA model of peft around one.
        config: `max_length` and `allow_past_window`.
        device: where to train.

    Raises:
        UserError: `config` also asks for changes that only loading can make, or the model is of a kind that is not supported.
    """
    inner, rope = unwrap(model), check_adopted(model, config)
    name = getattr(inner.config, "_name_or_path", "") or type(inner).__name__
    return LoadedModel(
        model=_moved(model, torch.device(device)).train(),
        tokenizer=None,
        facts=facts_of(inner),
        name=name,
        commit=str(getattr(inner.config, "_commit_hash", None) or "unknown"),
        origin="given as an object",
        rope=rope,
        rope_readback=require_exact(read_back(inner)),
        random_weights=False,
    )


def load_tokenizer(config: SFTConfig) -> PreTrainedTokenizerBase | None:
    """The tokenizer of `model_name_or_path`, its limit raised to the model's new length; None where there is none.

    Raises:
        UserError: there are tokenizer files, but they cannot be read.
    """
    source = find_source(config)
    place = Path(source.place).parent if source.kind == "shape" else Path(source.place)
    if source.kind != "hub" and not any((place / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source.place if source.kind == "hub" else str(place),
            revision=source.revision or "main",
            trust_remote_code=config.trust_remote_code,
            local_files_only=source.cache_only,
        )
    except Exception as error:  # tokenizers raises this very class, transformers whatever a broken file leads to
        if source.cache_only:
            raise UserError(
                f"the tokenizer of {source.name} is not in the hub's cache, and the hub cannot be reached: "
                f"{source.unreachable}",
                do=fill_the_cache(source),
            ) from error
        raise UserError(
            f"the tokenizer of {source.name} cannot be loaded: {first_line(error)}",
            do="Copy its tokenizer files again from the model it belongs to",
        ) from error
    tokenizer.model_max_length = max(tokenizer.model_max_length, config.max_length)
    return tokenizer


def check_token_ids(largest: int, vocabulary: int) -> None:
    """Token ids beyond the embedding table crash a GPU kernel with an assertion that names nothing.

    Raises:
        UserError: `largest` has no row in an embedding of `vocabulary` rows.
    """
    if largest >= vocabulary:
        raise UserError(
            "a row holds a token that the model does not know",
            got=largest,
            allowed=f"0 to {vocabulary - 1:,}",
            do="Prepare the data with the model's own tokenizer",
        )


def check_vocabulary(tokenizer: PreTrainedTokenizerBase | None, rows: int) -> None:
    """A vocabulary padded to a round number is fine; a tokenizer that knows more words than the model is not.

    Raises:
        UserError: a token has no row in an embedding of `rows` rows.
    """
    largest = max(tokenizer.get_vocab().values(), default=-1) if tokenizer is not None else -1
    if largest >= rows:
        raise UserError(
            f"the tokenizer has token {largest}, but the model has embeddings for {rows:,} tokens only",
            do="Use the model's own tokenizer, or resize the model: model.resize_token_embeddings(len(tokenizer))",
        )


def apply_rope(model_config: PretrainedConfig, rope: RopeChoice) -> None:
    """Write a rotary choice into a configuration, in place, before the model is built from it."""
    if rope.rope_parameters is not None:
        model_config.rope_parameters = copy.deepcopy(rope.rope_parameters)
    if rope.max_position_embeddings:
        model_config.max_position_embeddings = rope.max_position_embeddings


def live_dtype(config: SFTConfig, device: torch.device) -> torch.dtype:
    """The type that weights are held and multiplied in: bf16 on a GPU and fp32 on a CPU, unless the configuration says."""
    computes_in_bf16 = device.type == "cuda" if config.bf16 is None else config.bf16
    return torch.bfloat16 if computes_in_bf16 or config.weights_dtype == "bfloat16" else torch.float32


def _random_model(
    source: Source, model_config: PretrainedConfig, device: torch.device, dtype: torch.dtype, seed: int
) -> PreTrainedModel:
    """Weights by the model's own initialisation, drawn on the device, without touching the global random state."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        try:
            return AutoModelForCausalLM.from_config(copy.deepcopy(model_config), dtype=dtype)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever transformers' constructors do with values that do not go together
            raise unreadable(source, error) from error


def _pretrained_model(
    source: Source, model_config: PretrainedConfig, device: torch.device, dtype: torch.dtype, trust_remote_code: bool
) -> tuple[PreTrainedModel, int]:
    """The model, and how many weights of the checkpoint have no place in it."""
    # With accelerate, transformers reads every tensor straight onto the device; without, the host holds the model once.
    direct = device.type != "cpu" and importlib.util.find_spec("accelerate") is not None
    try:
        with bar_on_terminals_only():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source.place,
                config=copy.deepcopy(model_config),
                revision=getattr(model_config, "_commit_hash", None) or source.revision or "main",
                dtype=dtype,
                use_safetensors=True,
                local_files_only=source.cache_only,
                **({"adapter_kwargs": {"local_files_only": True}} if source.cache_only else {}),  # is looked for apart
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **({"device_map": {"": device}} if direct else {}),
            )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever transformers does with broken files, and with values that do not go together
        raise unreadable(source, error) from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(
            f"{source.name} lacks {len(missing)} weights that the model needs, so they would be random",
            found=", ".join(missing[:3]) + (", …" if len(missing) > 3 else ""),
            do="Check model_init_kwargs and the folder; the checkpoint is of another model or incomplete",
        )
    return _moved(model, device), len(info["unexpected_keys"])


def _moved(model: Any, device: torch.device) -> Any:
    """The model on a device; one that is cut over ranks stays, `to` would put other objects in the place of its parameters."""
    return model if any(isinstance(parameter, DTensor) for parameter in model.parameters()) else model.to(device)


def with_model(loaded: LoadedModel, model: Any) -> LoadedModel:
    """The same facts about another object, such as peft's wrapper."""
    return replace(loaded, model=model)
