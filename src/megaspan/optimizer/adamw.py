"""AdamW by torch's own functions, on whole parameters or on pieces of them.

`torch.optim.adamw.adamw` is what `torch.optim.AdamW` calls; used directly it takes a piece of a parameter as well as all
parameters at once. Its arithmetic is element by element, so a cut changes no bit.

Source: Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization", arXiv 1711.05101.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megaspan.config import SFTConfig
from megaspan.optimizer.trained import Entry, Part, Rule, Trained


@final
class TorchAdamW(Rule):
    """torch's AdamW: moments in the type of what it works on.

    Args:
        config: `adam_*`, and `optim`: the fused kernel needs no memory, the loop some four times the part it works on, and
            torch's `foreach` variant, which would hold whole copies, is never used.
        device: the fused kernel runs on a GPU only; the loop is the reference.
    """

    def __init__(self, config: SFTConfig, device: torch.device) -> None:
        self._fused = config.optim == "adamw_torch_fused" and device.type == "cuda"
        self.steps_on_device = self.heeds = self._fused
        self._beta1, self._beta2, self._epsilon = config.adam_beta1, config.adam_beta2, config.adam_epsilon

    def entries(self, trained: Trained) -> dict[str, Entry]:
        """First and second moment."""
        entry = Entry(tuple(trained.weight.shape), trained.target_dtype)
        return {"exp_avg": entry, "exp_avg_sq": entry}

    def update(self, parts: Sequence[Part], *, rate: float, decay: float, stop: Tensor | None = None) -> None:
        """One call for all parts."""
        adamw(
            [part.weight for part in parts],
            [part.gradient for part in parts],
            [part.moments["exp_avg"] for part in parts],
            [part.moments["exp_avg_sq"] for part in parts],
            [],
            [part.step for part in parts],
            foreach=False,
            fused=self._fused,
            found_inf=stop,
            amsgrad=False,
            beta1=self._beta1,
            beta2=self._beta2,
            lr=rate,
            weight_decay=decay,
            eps=self._epsilon,
            maximize=False,
        )
