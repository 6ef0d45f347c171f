"""The training job: `SFTTrainer`, and `run` for the verb `megaspan train`."""

from megaspan.trainer.sft import SFTTrainer as SFTTrainer
from megaspan.trainer.sft import run as run

__all__ = ["SFTTrainer", "run"]
