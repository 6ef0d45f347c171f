"""Tiny random models, batches, a byte tokenizer and model folders, shared by every test.

Nothing here is left at a value that hides a mistake: norms are not one, biases and sinks are not zero, soft caps and
multipliers bite, windows are shorter than the shortest useful batch, two KV heads serve four query heads, and the MLP is not as
wide as anything else. The attention is `eager`, the plain formula, so that an unprepared model is the reference.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB, WINDOW = 64, 4, 2, 16, 96, 128, 8
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "qwen3_moe", "olmo2", "granite", "cohere")

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {
        "sliding_window": WINDOW,
        "final_logit_softcapping": 5.0,
        "attn_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 24,
    },
    "gemma3": {
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    },
    "gpt_oss": {
        "sliding_window": WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
            "rope_theta": 150_000.0,
        },
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 56,
        "mlp_only_layers": [0],
    },
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
    },
    "olmo2": {},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.2, "logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.0625},
}
_TYPES = {"gemma3": "gemma3_text"}
_ALTERNATING = ("gemma2", "gemma3", "gpt_oss")


def tiny_config(family: str, *, tied: bool = False, layers: int = 2, **overrides: Any) -> Any:
    """The transformers configuration behind `tiny`; the first layer of an alternating family has the window."""
    own = copy.deepcopy(_COMMON | _OWN[family])
    if family in _ALTERNATING:
        own["layer_types"] = [("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)]
    own |= {"num_hidden_layers": layers, "tie_word_embeddings": tied}
    return AutoConfig.for_model(_TYPES.get(family, family), **(own | overrides))


def tiny(
    family: str, *, tied: bool = False, dtype: torch.dtype = torch.float32, layers: int = 2, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """An unmodified transformers model of `family` (one of `FAMILIES`) with random weights that depend on `seed` only.

    Hidden 64, 4 query and 2 KV heads of 16, vocabulary 128, window 8 where the family has one. `overrides` go to its
    configuration. Rotary buffers stay fp32 whatever `dtype` is, as after `from_pretrained`. In training mode.
    """
    config = tiny_config(family, tied=tied, layers=layers, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # sinks are random from the start, and only moved by `randomise`
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomise(model, seed)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model.train()


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter: matrices with std 1/sqrt(64), embeddings 0.3, vectors (norms, biases, sinks) moved by 0.3."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2 or name.endswith("_bias"):
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise * (0.3 if "embed" in name or "lm_head" in name else HIDDEN**-0.5))


def batch(length: int, vocab: int = VOCAB, seed: int = 0, *, rows: int = 1, ignored: float = 0.1) -> dict[str, torch.Tensor]:
    """Random `input_ids` and unshifted `labels`, int64 [rows, length]; the first label and a share of the rest are -100."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(vocab, (rows, length), generator=generator)
    labels = input_ids.clone()
    labels[torch.rand(rows, length, generator=generator) < ignored] = -100
    labels[:, 0] = -100
    return {"input_ids": input_ids, "labels": labels}


def tiny_tokenizer(folder: Path | None = None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: ids 0-255 are bytes, then 256 `<|endoftext|>` (eos), 257 `<|im_start|>`, 258 `<|im_end|>`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    if folder is not None:
        tokenizer.save_pretrained(folder)
    return tokenizer


def save_model_folder(folder: Path, family: str = "qwen3", **settings: Any) -> Path:
    """A local model folder as the hub has them: config.json, model.safetensors, byte tokenizer (vocabulary 320, padded)."""
    tiny(family, **({"vocab_size": 320, "eos_token_id": 256} | settings)).save_pretrained(folder)
    tiny_tokenizer(folder)
    return folder


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every parameter's gradient by name (zeros where there is none)."""
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def assert_same_gradients(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    """Each gradient within `tolerance` relative L2, with a floor of 1e-7 of the global gradient norm (P1)."""
    assert got.keys() == want.keys()
    floor = 1e-7 * sum(float(tensor.double().square().sum()) for tensor in want.values()) ** 0.5
    assert floor > 0
    for name, reference in want.items():
        distance = float((got[name].double() - reference.double()).norm())
        allowed = max(tolerance * float(reference.double().norm()), floor)
        assert distance <= allowed, f"{name}: distance {distance:.3e}, allowed {allowed:.3e}"
