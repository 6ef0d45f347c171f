"""Which models are taken, and the sentence for those that are not.

What is not proven exact is refused before a weight is loaded: a linear-attention layer, a second encoder or a quantised
weight would train without complaint under levers that know only softmax attention over all earlier tokens, and be wrong in
silence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megaspan.attention.seam import ANOTHER
from megaspan.human import UserError
from megaspan.plan.plain import DROPOUTS, EXACT_LAYERS, KEPT_STATES, OTHER_SENSES

_OVER_TOKENS = re.compile(r"(Mamba|DeltaNet|LinearAttention|LightningAttention|Rwkv|LSTM|Recurrent|ShortConv)(?!.*Norm)")
"""Modules of transformers that keep a state along the row, or convolve over it."""


def check_config(config: Mapping[str, Any], name: str) -> None:
    """Refuse a model by its config.json, as a mapping.

    Raises:
        UserError: it is quantised, sees or hears, has an encoder, is no causal language model, or has layers that are not
            exact.
    """
    kind = str(config.get("model_type", "unknown"))
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method", "an unknown method")
        raise UserError(
            f"{name} is quantised ({method}), and quantised weights cannot be trained",
            do="Use the checkpoint that it was made from",
        )
    if any(config.get(key) is not None for key in OTHER_SENSES) or isinstance(config.get("text_config"), Mapping):
        raise UserError(
            f"{name} ({kind}) is more than a language model: it has vision, audio or nested configurations",
            do="Use the text-only model of the family",
        )
    if config.get("is_encoder_decoder"):
        raise UserError(f"{name} ({kind}) is an encoder-decoder model", allowed="causal language models", do=ANOTHER)
    architectures = list(config.get("architectures") or [])
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    remote = "AutoModelForCausalLM" in dict(config.get("auto_map") or {})
    causal_names = set(causal) if isinstance(causal, tuple) else {causal}
    if (causal is None and not remote) or (architectures and causal is not None and not causal_names & set(architectures)):
        what = architectures[0] if architectures else kind
        raise UserError(
            f"{name} ({what}) is not a causal language model",
            allowed="models that transformers loads as ...ForCausalLM",
            do=ANOTHER,
        )
    check_layers(config, name)


def check_layers(config: Mapping[str, Any], name: str) -> None:
    """Refuse layers that are not softmax attention over all earlier tokens or a window of them, by their names.

    Raises:
        UserError: there is such a layer, or attention that also looks ahead.
    """
    strange = sorted({str(layer) for layer in _layer_types(config)} - set(EXACT_LAYERS) - {"attention"})
    if strange:
        raise UserError(
            f"{name} has layers of type {', '.join(strange)}, which are not supported yet",
            allowed=" and ".join(EXACT_LAYERS),
            do=ANOTHER,
        )
    looks_ahead = config.get("use_bidirectional_attention") or config.get("is_causal") is False
    if looks_ahead or (config.get("is_decoder") is False and not _is_causal(config)):
        raise _looks_ahead(name)


def _layer_types(config: Mapping[str, Any]) -> Sequence[str]:
    """What a configuration says of its layers, one after the other; nothing where it does not."""
    return config.get("layer_types") or config.get("layers_block_type") or ()


def _is_causal(config: Mapping[str, Any]) -> bool:
    """Whether the attention of a configuration that is no decoder's sees earlier tokens only, as GPT-NeoX's does.

    Models of the BERT kind are causal only as decoders, others carry `is_decoder: false` without reading it. What the attention
    modules say decides, of one layer that is built without memory.
    """
    entries = {key: value for key, value in config.items() if key not in ("model_type", "num_hidden_layers", "layer_types")}
    try:
        made = AutoConfig.for_model(str(config.get("model_type")), **entries, num_hidden_layers=1)
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(made)]
        model_class = model_class[0] if isinstance(model_class, tuple) else model_class
        with torch.device("meta"):
            says = [module.is_causal for module in model_class(made).modules() if hasattr(module, "is_causal")]
    except Exception:  # an unknown family, or one that cannot be built by its configuration: its word is taken
        return False
    return bool(says) and all(says)


def _looks_ahead(name: str) -> UserError:
    return UserError(f"{name} attends to later tokens too", allowed="causal attention", do=ANOTHER)


def check_class(config: PretrainedConfig, name: str) -> None:
    """Refuse a model by the class that transformers would build, before its weights are loaded.

    Raises:
        UserError: it keeps a state (Mamba, linear attention), or its attention is in its own code.
    """
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model_class = model_class[0] if isinstance(model_class, tuple) else model_class
    if getattr(model_class, "_is_stateful", False) and _keeps_state(model_class, config):
        raise _stateful(model_class, name)
    _check_attention(model_class, name)


def _keeps_state(model_class: Any, config: PretrainedConfig) -> bool:
    """Whether a model of a class that can keep a state has layers that do: Granite 4 has such models, and some without."""
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    if not types or set(types) - {*EXACT_LAYERS, "attention"}:
        return True
    try:
        with torch.device("meta"):
            return _over_tokens(model_class(config)) is not None
    except Exception:  # whatever a constructor does that wants memory: its class is taken at its word
        return True


def _over_tokens(model: torch.nn.Module) -> str | None:
    """A module that brings tokens together outside attention, as its class shows; the outermost that holds no other such."""
    found: str | None = None
    for name, module in model.named_modules():
        known = _OVER_TOKENS.search(type(module).__name__) or isinstance(module, torch.nn.Conv1d | torch.nn.RNNBase)
        # From the model down to the first such module that holds no other: that one is named.
        if known and name.startswith(f"{found}." if found else ""):
            found = name
    return found


def _stateful(model_class: Any, name: str) -> UserError:
    return UserError(
        f"{name} ({model_class.__name__}) has layers that carry a state (linear attention, Mamba), not supported yet",
        allowed="models whose layers are all softmax attention",
        do=ANOTHER,
    )


def check_trainable(model: PreTrainedModel) -> None:
    """Refuse a live model that the levers would train wrongly.

    Raises:
        UserError: its attention cannot be exchanged, its kind or its layers are not exact, or it has attention dropout.
    """
    name = type(model).__name__
    config = model.config.to_dict()
    if type(model.config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        check_config(config | {"architectures": []}, name)  # the class itself is better than its name
        _check_causal(model)
    if getattr(model, "_is_stateful", False) and (not _layer_types(config) or _over_tokens(model) is not None):
        raise _stateful(type(model), name)
    _check_attention(type(model), name)
    if any(getattr(module, "is_causal", True) is False for module in model.modules()):
        raise _looks_ahead(name)
    check_switches(config, name)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UserError(f"{name} has no weights yet (it lies on the meta device)", do="Load or initialise it first")


def _check_causal(model: PreTrainedModel) -> None:
    """Refuse a class that is not made from the one of its kind; whether it does more than that one is seen when it runs."""
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(model.config)]
    if not isinstance(model, known):
        classes = known if isinstance(known, tuple) else (known,)
        raise UserError(
            f"{type(model).__name__} is not transformers' causal language model of {model.config.model_type}, nor made from it",
            allowed=f"{' or '.join(each.__name__ for each in classes)} and classes that inherit from it",
            do="Load it with AutoModelForCausalLM, or make the class from the known one",
        )


def check_loss_function(model: PreTrainedModel) -> None:
    """Refuse a loss that is not transformers' for causal language models. One comparison, so that every call can make it.

    Raises:
        UserError: `model.loss_function` was set, or the class has another.
    """
    function: Any = model.loss_function
    if function is not ForCausalLMLoss:
        raise UserError(
            f"the loss function of {type(model).__name__} is {getattr(function, '__name__', type(function).__name__)}, and it "
            "would not be called: the loss is taken tile by tile",
            allowed="transformers' ForCausalLMLoss",
            do="Leave model.loss_function as the model was loaded",
        )


def check_switches(config: Mapping[str, Any], name: str) -> None:
    """Refuse what a configuration switches on that the levers do not know.

    Args:
        config: as a mapping.
        name: the class of the model.

    Raises:
        UserError: it has attention dropout, gives every layer's states, or tuples in place of what has names.
    """
    for key in DROPOUTS:
        if config.get(key):
            raise UserError(
                f"{name} has {key}: {config[key]}, and dropout inside attention is not supported",
                do=f"Set model_init_kwargs: {{{key}: 0.0}}",
            )
    for key in KEPT_STATES:
        if config.get(key):
            raise UserError(f"{name} has {key}: true, which keeps every layer's", do=f"Set model.config.{key} = False")
    if not config.get("return_dict", True):
        raise UserError(
            f"{name} has return_dict: {json.dumps(config['return_dict'])}, and what it gives is read by name",
            do="Set model.config.return_dict = True, or remove it from config.json",
        )


def _check_attention(model_class: Any, name: str) -> None:
    # Not every class that can says so: StableLM's does not.
    if not (getattr(model_class, "_supports_attention_backend", False) or model_class._can_set_attn_implementation()):
        raise UserError(
            f"{name} ({model_class.__name__}) computes attention in its own code, where no other kernel can go",
            allowed="models on transformers' AttentionInterface",
            do=ANOTHER,
        )


def refuse_shared_rows(model: torch.nn.Module | PretrainedConfig | Mapping[str, Any]) -> None:
    """Refuse a model whose rows cannot lie on several ranks, or hold documents that see only themselves.

    There a rank has some of the row's tokens, in any order, and attention alone brings them together. A layer that reads its
    neighbours otherwise (a convolution, a state, a shift) would read whatever token lies next to it, and say nothing.

    Args:
        model: a configuration, before weights are loaded; or a live model (peft around it or not). One that was prepared is
            tried on a few tokens (`proof.prove_token_wise`); all ranks of a sharded one must call this together.

    Raises:
        UserError: the sentence names the layer.
    """
    if not isinstance(model, torch.nn.Module):
        _refuse_by_config(model)
        return
    inner = unwrap(model)
    for name, module in inner.named_modules():
        if getattr(module, "is_causal", True) is False:
            raise _not_shared(type(inner).__name__, f"{name} ({type(module).__name__}), whose tokens see later ones")
    over_tokens = _over_tokens(inner)
    if over_tokens is not None:
        module = inner.get_submodule(over_tokens)
        raise _not_shared(type(inner).__name__, f"{over_tokens} ({type(module).__name__})")
    _refuse_by_config(inner.config)
    placed = inner.__dict__.get("_megaspan")
    if placed is None:
        return
    _refuse_dropout(inner, placed)
    if not any(parameter.is_meta for parameter in inner.parameters()):
        from megaspan.model.proof import prove_token_wise

        prove_token_wise(inner)


def _refuse_dropout(model: PreTrainedModel, placed: Any) -> None:
    """Dropout goes by a token's number where layers are checkpointed, else by generators, of which each rank has its own."""
    if placed.checkpointing is not None or placed.args.cp_size * placed.args.sp_size == 1:
        return
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0:
            raise UserError(
                f"dropout ({name}, {module.p}) over ranks that share a row needs checkpointed layers",
                do="Set gradient_checkpointing: true, or the rate (lora_dropout) to 0",
            )


def _refuse_by_config(config: PretrainedConfig | Mapping[str, Any]) -> None:
    entries = config if isinstance(config, Mapping) else config.to_dict()
    name = str(entries.get("model_type", "unknown"))
    strange = sorted({str(layer) for layer in _layer_types(entries)} - set(EXACT_LAYERS) - {"attention"})
    if strange:
        raise _not_shared(name, f"layers of type {', '.join(strange)}")
    if entries.get("attention_chunk_size"):
        raise _not_shared(name, f"attention in chunks of {entries['attention_chunk_size']} tokens")
    check_layers(entries, name)
    if isinstance(config, PretrainedConfig) and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        check_class(config, name)


def _not_shared(name: str, layer: str) -> UserError:
    return UserError(
        f"{name} has {layer}: its rows can neither be split over ranks nor hold packed documents",
        allowed="layers of softmax attention, full or windowed",
        do="Set cp_size: 1, sp_size: 1, packing_strategy: wrapped and per_device_train_batch_size: 1",
    )


def unwrap(model: torch.nn.Module) -> PreTrainedModel:
    """The transformers model itself, without peft around it.

    Raises:
        UserError: there is none.
    """
    inner: Any = model
    inner = inner.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else inner
    if not isinstance(inner, PreTrainedModel):
        raise UserError(
            "only transformers models can be prepared",
            found=type(inner).__name__,
            do="Load the model with AutoModelForCausalLM, and pass it without a wrapper around it",
        )
    return inner
