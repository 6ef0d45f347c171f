"""Whether a model is taken, from its files alone: before its weights are read, and before a row is.

A run of hours should not find out after the data is prepared, nor a plan promise a fit for what is refused then. So training
asks this first, and `megaspan plan` asks it too where the files do not speak for themselves (`plan/plain.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers
from transformers import PretrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from megaspan.human import UserError
from megaspan.model.kinds import check_switches
from megaspan.model.source import apply_overrides, find_source, read_config
from megaspan.plan.families import FAMILIES
from megaspan.plan.plain import ACTIVATIONS
from megaspan.plan.rope_native import read_rope

if TYPE_CHECKING:
    from megaspan.config import SFTConfig


def check_files(config: SFTConfig) -> None:
    """Refuse what `model_name_or_path` names, if it is a kind of model that is not trained here.

    Raises:
        UserError: there is no such model, its files are damaged or of another format, it is of a kind that is not trained here,
            or `model_init_kwargs` do not go with it.
    """
    source = find_source(config)
    found = read_config(source, trust_remote_code=config.trust_remote_code)
    apply_overrides(found, config.config_overrides)
    if not config.trust_remote_code:  # the code of such a model may know more than transformers
        _check_names(found)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(found), type(found))
    model_class = model_class[0] if isinstance(model_class, tuple) else model_class
    check_switches(found.to_dict(), model_class.__name__)
    if found.model_type not in FAMILIES:
        from megaspan.model.trial import try_family

        try_family(source, found, config)


def _check_names(found: PretrainedConfig) -> None:
    """A name that transformers does not know would be a KeyError in the constructor of the model, after the text is read."""
    entries = found.to_dict()
    rope = ("default", *ROPE_INIT_FUNCTIONS)
    named = [("rope_type", read_rope(entries).kind, rope), *((key, entries.get(key), tuple(ACT2FN)) for key in ACTIVATIONS)]
    for key, value, known in named:
        if isinstance(value, str) and value not in known:
            raise UserError(
                f"the model's configuration has a {key} that transformers {transformers.__version__} does not know",
                got=value,
                allowed=", ".join(known),
                do="Correct it in the model's config.json, or install the release of transformers that the model was made with",
            )
