"""Models: loaded unmodified from transformers, made long by `prepare`, adapted by LoRA.

`load_model` brings the model, its tokenizer and its positions; `prepare` puts the levers on it (long attention, checkpointing
with offload, the loss in tiles), also in somebody's own loop; `wrap_lora` puts a peft adapter on it.
"""

from megaspan.model.forward import LongOutput
from megaspan.model.kinds import unwrap
from megaspan.model.load import LoadedModel, adopt_model, check_token_ids, check_vocabulary, load_model, load_tokenizer
from megaspan.model.lora import wrap_lora
from megaspan.model.prepared import Levers, levers, plan_of, prepare, unprepare

__all__ = [
    "Levers",
    "LoadedModel",
    "LongOutput",
    "adopt_model",
    "check_token_ids",
    "check_vocabulary",
    "levers",
    "load_model",
    "load_tokenizer",
    "plan_of",
    "prepare",
    "unprepare",
    "unwrap",
    "wrap_lora",
]
