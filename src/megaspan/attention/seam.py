"""Where attention goes into an unmodified transformers model: the attention function named "megaspan".

transformers calls it with unexpanded keys and values and with what the mask function returned. Two things are easily lost
there and are kept here. Masks: transformers would build a tokens x tokens mask (1 TiB at 1,048,576) for anything unusual,
so the mask function builds none; it refuses padding and packed rows, and passes on the window it was asked for, which is
compared with the window of the layer (a window that never reaches the kernel makes a layer silently full causal). And the
model: two models built from one config object share its attention setting, so this model gets its own copy first.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from megaspan.attention.attend import attend_with, settle
from megaspan.attention.choose import KERNELS, KernelChoice, case_of, choose_for
from megaspan.attention.context import RowContext
from megaspan.attention.kernel import Case, Kernel, Scoring
from megaspan.attention.mask import Mask
from megaspan.attention.proof import SegmentProof, choose_proven
from megaspan.attention.rowattend import attend_row
from megaspan.attention.work import Work
from megaspan.human import UserError
from megaspan.plan.facts import ModelFacts

NAME = "megaspan"
# What a decoder layer hands down to its attention function beside the tensors, without any influence on the result.
_HARMLESS = frozenset(
    {
        "cache", "past_key_values", "use_cache", "cache_position", "num_items_in_batch", "output_hidden_states",
        "output_router_logits", "return_dict", "position_embeddings", "labels", "shift_labels", "logits_to_keep",
    }
)  # fmt: skip
_UNREACHED = "this model has no attention layers that AttentionInterface reaches"
ANOTHER = "Choose a model whose layers are all softmax attention, such as Llama, Qwen 3, Gemma 3, OLMo 3 or gpt-oss"
"""What to do about a model that is not taken."""


@dataclass(frozen=True)
class AttentionCall:
    """One attention call as a transformers layer states it, checked.

    Attributes:
        q_BHTD: queries [batch, H, t, D]; keys and values are [batch, G, s, D].
        k_BGSD: keys.
        v_BGSD: values.
        scoring: scale, window and soft cap.
        sink_H: one sink logit per head, None for none.
        kernels: the kernels that may compute it, fastest first.
    """

    q_BHTD: Tensor
    k_BGSD: Tensor
    v_BGSD: Tensor
    scoring: Scoring
    sink_H: Tensor | None
    kernels: tuple[Kernel, ...]


def install(
    model: nn.Module, *, dtype: torch.dtype | None = None, prove: bool = True, packed: bool = False, sp_size: int = 1
) -> KernelChoice:
    """Makes `megaspan` the attention of this model and of no other.

    Args:
        model: an unmodified transformers causal language model, or one wrapped by peft.
        dtype: what attention computes in; the dtype of the parameters by default.
        prove: on a GPU, try each kernel against fp32 before it is taken.
        packed: rows will hold several documents: kernels are tried, and chosen, for those too. Without it they are tried when
            such a row comes.
        sp_size: ranks that share a row's heads.

    Returns:
        The kernel of the layers with full attention; kernels of windowed layers and of packed rows are in `also`.

    Raises:
        UserError: the model cannot take another attention, or has attention that is not causal, has dropout or is chunked.
    """
    language_model = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if language_model is None or not language_model._can_set_attn_implementation():
        raise UserError(
            "this model computes attention in its own code, where no other kernel can go",
            found=type(language_model or model).__name__,
            allowed="models that use transformers' AttentionInterface",
            do=ANOTHER,
        )
    _refuse(model, language_model)
    _own_config(model)
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    language_model.set_attn_implementation(NAME)
    return _choices(model, language_model, dtype, prove, sp_size if packed else None)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    megaspan_capture: Callable[[AttentionCall], Tensor] | None = None,
    megaspan_row: RowContext | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: q [batch, H, t, D], k and v [batch, G, s, D] to [batch, t, H, D] and no weights.

    With `megaspan_row` the batch is this rank's part of one row, of documents that see themselves only.

    Raises:
        UserError: whatever could change the result and is not computed here: a mask, dropout, packed rows, an unknown argument.
    """
    if dropout:
        raise UserError("attention dropout is not supported", got=dropout, allowed="0.0", do=_no_dropout())
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UserError("attention that is not causal is not supported", found=_name(module))
    unknown = [name for name, value in others.items() if name not in _HARMLESS and value is not None and value is not False]
    if unknown:
        raise UserError(f"{_name(module)} passes attention arguments that are not supported", found=", ".join(sorted(unknown)))
    if megaspan_row is None and getattr(module, "layer_idx", 0) in (0, None):
        refuse_packed(position_ids)  # one look for all layers: it waits for the device
    keys = key.shape[2] if megaspan_row is None else megaspan_row.layout.tokens
    _check_window(module, attention_mask, sliding_window, keys)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    kernels = _kernels(module, megaspan_row)
    call = AttentionCall(
        *_one_dtype(query, key, _as_wide(value, key)), Scoring(scale, sliding_window or None, softcap or None), s_aux, kernels
    )
    out = megaspan_capture(call) if megaspan_capture is not None else run_call(call, megaspan_row)
    return out[..., : value.shape[-1]], None


def run_call(call: AttentionCall, row: RowContext | None = None) -> Tensor:
    """Attention of every row of a batch, or of this rank's part of one row: [batch, t, H, D]."""
    if row is not None:
        if call.q_BHTD.shape[0] != 1:
            raise ValueError(f"one row at a time has a RowContext, not a batch of {call.q_BHTD.shape[0]}")
        q_tHD, k_tGD, v_tGD = (x[0].transpose(0, 1) for x in (call.q_BHTD, call.k_BGSD, call.v_BGSD))
        return attend_row(q_tHD, k_tGD, v_tGD, call.sink_H, call.scoring, call.kernels, row)[None]
    outs = []
    for q, k, v in zip(call.q_BHTD, call.k_BGSD, call.v_BGSD, strict=True):
        q_tHD, k_sGD, v_sGD = (x.transpose(0, 1) for x in (q, k, v))
        kernel, scoring = settle(q_tHD, k_sGD, v_sGD, call.scoring, kernels=call.kernels)
        outs.append(attend_with(kernel, q_tHD, k_sGD, v_sGD, call.sink_H, scoring))
    return outs[0][None] if len(outs) == 1 else torch.stack(outs)


class OtherMask(UserError):
    """A row whose mask is more than causal or a window: packed documents, or a mask function of the model's own."""


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    **_: Any,
) -> Tensor:
    """transformers' mask function: no mask, only the window that this kind of layer was promised, as a scalar (0: none).

    Raises:
        OtherMask: packed rows, or a mask function of the model's own.
        UserError: padding, or a cache of fixed size.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        raise UserError(
            "padded batches are not supported",
            found="an attention_mask with zeros",
            allowed="rows without padding: leave attention_mask away",
            do="Use one row a batch, or rows of equal length",
        )
    if q_offset + q_length != kv_offset + kv_length:
        raise UserError("a key-value cache of fixed size is not supported", do="Use the default (dynamic) cache in generate()")
    if not allow_is_causal_skip:
        raise OtherMask(
            "this row asks for another mask than causal (packed documents, or a mask function of the model)",
            found="position_ids that restart, or a model with its own mask",
            allowed="one text a row, positions counting up by one",
            do="Use packing_strategy: wrapped, which joins documents without masks",
        )
    return torch.tensor(local_size or 0)


def refuse_packed(position_ids: Tensor | None) -> None:
    """Stops at positions that do not count up by one, which transformers reads as several documents in one row.

    An all-ones `attention_mask` switches transformers' own detection off, so it is not relied on.
    """
    if position_ids is None or position_ids.shape[-1] < 2 or bool((position_ids.diff(dim=-1) == 1).all()):
        return
    raise UserError(
        "packed rows are not supported: attention would look across documents",
        found="position_ids that restart or jump",
        allowed="positions that count up by one along the row",
        do="Use packing_strategy: wrapped, which joins documents without masks",
    )


def work_of(model: nn.Module) -> Work:
    """What a row costs in this model: its layers by mask, and a token's linear layers in pairs; for `lay_out`.

    Args:
        model: a transformers causal language model, or one wrapped by peft; sharded or not.
    """
    layers = Counter(Mask(_window_of(module)) for module in model.modules() if is_attention(module))
    language_model = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if language_model is None or not layers:
        raise UserError(_UNREACHED, found=type(model).__name__, do=ANOTHER)
    facts = ModelFacts.from_config(language_model.config.to_dict())
    weights = sum(facts.linear_parameters(layer) for layer in range(facts.layers))
    return Work(dict(layers), weights // (2 * facts.query_width * facts.layers))


def is_attention(module: nn.Module) -> bool:
    """Whether a module calls transformers' attention function, as far as its attributes show."""
    # The second pair is GPT-NeoX's, the third that of latent attention (MLA).
    names = (("num_key_value_groups", "head_dim"), ("is_causal", "head_size"), ("num_key_value_groups", "qk_head_dim"))
    return any(all(hasattr(module, name) for name in pair) for pair in names)


def _head_size(module: Any) -> int:
    """Channels of a head."""
    return int(next(getattr(module, name) for name in ("qk_head_dim", "head_dim", "head_size") if hasattr(module, name)))


def _window_of(module: Any) -> int | None:
    """The window of an attention module; some families read it from their configuration when they attend."""
    window = getattr(module, "sliding_window", getattr(getattr(module, "config", None), "sliding_window", None))
    return int(window) if window else None


def _kernels(module: nn.Module, row: RowContext | None) -> tuple[Kernel, ...]:
    """What `install` found usable for the module; all kernels for a module that it did not see."""
    kernels: tuple[Kernel, ...] = getattr(module, "megaspan_kernels", KERNELS)
    if row is not None and (proof := module.__dict__.pop("megaspan_segments", None)) is not None:
        kernels = proof.applied_to(kernels, _share(module, row.ranks.sizes[1]))
        module.megaspan_kernels = kernels  # type: ignore[assignment]
    return kernels


def _share(module: Any, sp_size: int) -> int | None:
    """Query heads of a KV head in one call: fewer where several ranks share a KV head."""
    heads = getattr(getattr(module, "config", None), "num_attention_heads", None)
    share = int(getattr(module, "num_key_value_groups", 1))
    return share if heads is None else max(1, min(share, heads // sp_size))


def _check_window(module: nn.Module, attention_mask: Tensor | None, sliding_window: int | None, keys: int) -> None:
    if attention_mask is None:
        return
    if attention_mask.ndim:
        raise UserError(
            "attention masks are not supported",
            found=f"a mask of shape {tuple(attention_mask.shape)} in {_name(module)}",
            allowed="no attention_mask: every token sees all earlier ones (or the layer's window)",
        )
    promised = int(attention_mask)
    # A window as long as the row hides nothing, whatever its size.
    if min(promised or keys, keys) != min(sliding_window or keys, keys):
        raise UserError(
            f"the mask of {_name(module)} and its attention disagree about the window",
            found=f"mask {promised or 'none'}, attention {sliding_window or 'none'}",
            do="This model cannot be trained exactly here; please report it",
        )


def _as_wide(value: Tensor, key: Tensor) -> Tensor:
    """Values as wide as keys: kernels are proven for one head size, and zeros behind a value are zeros behind its output."""
    return F.pad(value, (0, key.shape[-1] - value.shape[-1])) if value.shape[-1] < key.shape[-1] else value


def _one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One dtype: autocast's when it is on, else the values' (rotary tables in fp32 lift only queries and keys)."""
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _refuse(model: nn.Module, language_model: PreTrainedModel) -> None:
    config = language_model.config.get_text_config()
    if dropout := getattr(config, "attention_dropout", 0.0):
        raise UserError(
            "attention dropout is not supported", found=f"attention_dropout {dropout}", allowed="0.0", do=_no_dropout()
        )
    if chunk := getattr(config, "attention_chunk_size", None):
        raise UserError("attention in fixed chunks is not supported", found=f"attention_chunk_size {chunk}")
    for name, module in model.named_modules():
        if getattr(module, "is_causal", True) is False:
            raise UserError("attention that is not causal is not supported", found=name)


def _own_config(model: nn.Module) -> None:
    """Gives the model its own copy of every config object it holds, so that a model built from the same one is left alone."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PretrainedConfig):
                setattr(module, name, copy.deepcopy(value, memo))


def _choices(
    model: nn.Module, language_model: PreTrainedModel, dtype: torch.dtype | None, prove: bool, packed_over: int | None
) -> KernelChoice:
    """A choice for each kind of layer. `packed_over`: sp ranks of packed rows, None where none are expected."""
    config, parameter = language_model.config.get_text_config(), next(model.parameters())
    length, dtype = int(getattr(config, "max_position_embeddings", 2**20)), dtype or parameter.dtype
    kinds: dict[tuple, _Kind] = {}
    for module in model.modules():
        if is_attention(module):
            window, softcap = _window_of(module), getattr(module, "attn_logit_softcapping", None)
            share = _share(module, packed_over or 1)  # kernels are compiled for it, so it is this one that has to be tried
            case = case_of(parameter.device, dtype, _head_size(module), window, softcap, length, length, share=share)
            sinks = getattr(module, "sinks", None) is not None
            if (case, sinks) not in kinds:
                kinds[case, sinks] = _kind(case, sinks, parameter.device, prove, packed_over is not None)
            kind = kinds[case, sinks]
            # What the layer may use later. A kernel that is not there is left out: to look for its package takes 0.1 ms a call.
            module.megaspan_kernels = tuple(kernel for kernel in kind.kernels if kernel.installed())  # type: ignore[assignment]
            if kind.unproven is not None:
                module.megaspan_segments = kind.unproven  # type: ignore[assignment]
    if not kinds:
        raise UserError(_UNREACHED, found=type(model).__name__, do=ANOTHER)
    in_order = [kind for _, kind in sorted(kinds.items(), key=lambda kind: kind[0][0].window or 0)]
    first, *rest = [kind.choice for kind in in_order] + [kind.packed for kind in in_order if kind.packed is not None]
    return replace(first, also=tuple(rest))


class _Kind(NamedTuple):
    """What was found for one kind of layer: its kernel, that of packed rows if they are expected, and the candidates."""

    choice: KernelChoice
    kernels: tuple[Kernel, ...]
    packed: KernelChoice | None
    unproven: SegmentProof | None


def _kind(case: Case, sinks: bool, device: torch.device, prove: bool, packed: bool) -> _Kind:
    if not prove or device.type != "cuda":
        return _Kind(choose_for(case, sinks), KERNELS, choose_for(replace(case, segments=2), sinks) if packed else None, None)
    choice, kernels = choose_proven(case, sinks, device)
    proof = SegmentProof(case, sinks, device, kernels)
    if not packed:
        return _Kind(choice, kernels, None, proof)
    in_segments, kernels = proof.choose(case.share)
    return _Kind(choice, kernels, in_segments, None)


def _no_dropout() -> str:
    return "Set it to 0: model_init_kwargs: {attention_dropout: 0.0}"


def _name(module: nn.Module) -> str:
    index = getattr(module, "layer_idx", None)
    return type(module).__name__ + (f" of layer {index}" if index is not None else "")
