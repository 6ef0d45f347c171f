"""How many parameters a LoRA adapter trains, from the options alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megaspan.plan.facts import ModelFacts

if TYPE_CHECKING:
    from megaspan.config import SFTConfig

_DEFAULT = ("q_proj", "v_proj")  # peft's choice for Llama and its kin


def adapter_size(facts: ModelFacts, config: SFTConfig) -> tuple[int, int]:
    """Trained parameters of the adapter, and input channels of the adapted projections of one layer; (0, 0) without LoRA.

    Projections of experts are not adapted; names that are none of the usual ones are not counted.
    """
    if not config.use_peft:
        return 0, 0
    e, q, kv, f = facts.hidden, facts.query_width, facts.kv_width, facts.mlp_width
    shapes = {"q_proj": (e, q), "k_proj": (e, kv), "v_proj": (e, kv), "o_proj": (q, e)}
    if facts.experts is None:
        shapes |= {"gate_proj": (e, f), "up_proj": (e, f), "down_proj": (f, e)}
    wanted = tuple(config.lora_target_modules or _DEFAULT)
    names = tuple(shapes) if wanted == ("all-linear",) else tuple(name for name in shapes if name in wanted)
    total = facts.layers * config.lora_r * sum(sum(shapes[name]) for name in names)
    if "lm_head" in wanted:
        total += config.lora_r * (e + facts.vocab)
    saved = [name for name in config.lora_modules_to_save or () if name in ("lm_head", "embed_tokens")]
    total += len(saved) * facts.head_parameters
    return total, sum(shapes[name][0] for name in names)
