"""LoRA runs: an adapter that stock peft loads, and that says loudly which base it needs.

An adapter is trained against a base with certain rope settings, but its format has no place for them: whoever loads it on the
base as published gets the old frequencies without a word (case R51). So the folder also holds the base's settings as trained,
in `base/`, a README with the three lines that load both, and the same facts for programs in `megaspan.json`.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from megaspan.human import UserError

# Initialisations of peft that leave the base's weights as published; the others (pissa, olora, corda, …) change them, and an
# adapter saved after them is wrong on the published base.
_CLEAN_STARTS = (True, False, "gaussian", "orthogonal", "eva")


def is_adapter(model: Any) -> bool:
    """Whether `model` is a peft model. peft itself is not imported: without it, no model can be one."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def base_of(model: Any) -> Any:
    """The transformers model inside a peft model, or the model itself."""
    return model.get_base_model() if is_adapter(model) else model


def adapter_config(model: Any) -> Any:
    """peft's configuration of the adapter that is trained.

    Raises:
        UserError: the adapter would be wrong on the base model as published.
    """
    config = model.peft_config[model.active_adapter]
    start = getattr(config, "init_lora_weights", True)
    if start not in _CLEAN_STARTS:
        raise UserError(
            "this start of LoRA changes the base's weights, so the adapter would be wrong on the published base",
            found=f"init_lora_weights={start}",
            allowed="True, False, gaussian, orthogonal or eva",
        )
    return config


def save_adapter_settings(model: Any, folder: Path) -> None:
    """Writes `adapter_config.json` as it is in training (dropout on), so that a checkpoint can be rebuilt."""
    config = adapter_config(model)
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = origin(base_of(model))["base_model"]
    config.save_pretrained(folder)


def save_adapter(model: Any, folder: Path, weights: dict[str, Any] | None = None) -> None:
    """Writes the adapter by peft's own method, then the base's settings, README and facts.

    Args:
        model: the peft model.
        folder: where to.
        weights: in place of its own, by the names of its state: those of a sharded model, gathered.
    """
    adapter_config(model)
    base = base_of(model)
    config, published, resized = copy.deepcopy(base.config), _published(base), is_resized(base)
    model.save_pretrained(folder, save_embedding_layers=resized, **({} if weights is None else {"state_dict": weights}))
    facts = {
        **origin(base),
        "rope_parameters": getattr(config.get_text_config(), "rope_parameters", None),
        "max_position_embeddings": getattr(config.get_text_config(), "max_position_embeddings", None),
        "vocab_size": base.get_input_embeddings().weight.shape[0],
        "needs_resized_embeddings": resized,
    }
    facts["needs_own_rope"] = published is None or getattr(published, "rope_parameters", None) != facts["rope_parameters"]
    if published is not None:
        config.get_text_config().vocab_size = published.vocab_size  # the base's weights have that size
    config.save_pretrained(folder / "base")
    (folder / "megaspan.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(_readme(facts), encoding="utf-8")


def origin(base: Any) -> dict[str, str | None]:
    """Where the weights came from: name or folder, and the hub's commit; None for a shape or an object without a name."""
    return {
        "base_model": getattr(base.config, "_name_or_path", None) or None,
        "base_commit": getattr(base.config, "_commit_hash", None),
    }


def is_resized(base: Any) -> bool:
    """Whether tokens were added to the published base: its embeddings then belong to the adapter, trained or not (R91)."""
    published = _published(base)
    return published is not None and published.vocab_size != base.get_input_embeddings().weight.shape[0]


def _published(base: Any) -> Any:
    """The base's text config as published, from local files only; None when it cannot be known."""
    from transformers import AutoConfig

    found = origin(base)
    if found["base_model"] is None:
        return None
    try:
        config = AutoConfig.from_pretrained(found["base_model"], revision=found["base_commit"] or "main", local_files_only=True)
    except (OSError, ValueError):
        return None
    return config.get_text_config()


_LOUD = """> **This adapter needs its base model with the rope settings below.** On the base as published, positions are read
> with other frequencies, and long inputs go wrong without any error. Load it like this:"""
_PLAIN = "The base model's rope settings are those it was published with."


def _readme(facts: dict[str, Any]) -> str:
    name = facts["base_model"] or "THE BASE MODEL"
    revision = f', revision="{facts["base_commit"]}"' if facts["base_commit"] else ""
    resize = f"base.resize_token_embeddings({facts['vocab_size']})\n" if facts["needs_resized_embeddings"] else ""
    return f"""---
base_model: {json.dumps(facts["base_model"] or "")}
library_name: peft
---

# LoRA adapter

{_LOUD if facts["needs_own_rope"] else _PLAIN}

```python
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

config = AutoConfig.from_pretrained("THIS_FOLDER/base")
base = AutoModelForCausalLM.from_pretrained("{name}"{revision}, config=config)
{resize}model = PeftModel.from_pretrained(base, "THIS_FOLDER")
```

Positions up to {facts["max_position_embeddings"]}. `rope_parameters` of the base:

```json
{json.dumps(facts["rope_parameters"], indent=2)}
```

`megaspan export RUN OUT --merge` writes one ordinary model folder, with the adapter merged into its base.
"""
