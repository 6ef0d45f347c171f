"""One rank of `test_ranks.py`, started by torchrun: trains a step of every case that FOLDER/cases.json lists, keeps gradients.

A case is a name, megaspan's options and the record of the dataset. The run goes through `SFTTrainer`, as a user's would; before
the optimizer's step the gradients of all ranks are put together, and rank 0 writes them to FOLDER/NAME.pt.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.case import age
from benchmarks.start import end_with_parent
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from megaspan import SFTConfig, SFTTrainer, world
from megaspan.model import levers


class Keep(TrainerCallback):
    """Whole gradients on the host, on rank 0."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}
        self.begun = time.monotonic()
        self.seconds = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begun = time.monotonic()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            if world.launch().rank == 0:
                self.gradients[name.replace("_fsdp_wrapped_module.", "")] = whole.float().cpu()
        self.seconds = time.monotonic() - self.begun


def train(folder: Path, case: dict[str, Any]) -> None:
    """One case; all ranks call it."""
    keep = Keep()
    options = {"output_dir": str(folder / "runs" / case["name"]), "max_steps": 1, "save_strategy": "no", "disable_tqdm": True}
    options |= {"packing": False, "learning_rate": 1e-6, "logging_steps": 1}
    trainer = SFTTrainer(args=SFTConfig(**(options | case["options"])), train_dataset=[case["record"]], callbacks=[keep])
    placed, ready = levers(trainer.model), age()
    assert placed is not None
    trainer.train()
    if world.launch().rank == 0:
        print(f"CASE {case['name']}: its process was {ready:.1f} s old before training, {age():.1f} s after", flush=True)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        told = {"kernel": placed.kernel.name, "seconds": keep.seconds}
        torch.save({"gradients": keep.gradients, "loss": losses[0], **told}, folder / f"{case['name']}.pt")


def main(folder: Path) -> None:
    """All cases in one pair of processes: starting one takes longer than a case."""
    end_with_parent()
    for case in json.loads((folder / "cases.json").read_text()):
        train(folder, case)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
