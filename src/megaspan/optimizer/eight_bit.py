"""AdamW with moments of 8 bits, by bitsandbytes: 2 bytes a parameter in place of 8, 16 GB in place of 64 for 8B parameters.

Each run of 256 moments shares one fp32 scale and each moment is a number in a table of 256. As in transformers (`optim:
adamw_8bit`), tables of embeddings keep moments of 32 bits, and so do tensors below 4,096 elements. The tables of numbers are
the library's own and no part of a checkpoint.

Source: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from megaspan.config import SFTConfig
from megaspan.human import UserError
from megaspan.layers.shards import shard_ranks
from megaspan.optimizer.trained import Entry, Part, Rule, Trained

BLOCK = 256
SMALLEST = 4096


@final
class EightBitAdamW(Rule):
    """bitsandbytes' block-wise AdamW.

    Args:
        config: `adam_*`.
        device: where the weights are.

    Raises:
        UserError: bitsandbytes is not installed, or this version does not run on the device.
    """

    steps_on_device = False
    heeds = False

    def __init__(self, config: SFTConfig, device: torch.device) -> None:
        self._library = _library()
        self._beta1, self._beta2, self._epsilon = config.adam_beta1, config.adam_beta2, config.adam_epsilon
        self._codes = [self._library.create_dynamic_map(signed=signed).to(device) for signed in (True, False)]
        self._try(device)

    def entries(self, trained: Trained) -> dict[str, Entry]:
        """Both moments, of 8 bits with their scales or of 32."""
        shape, count = tuple(trained.weight.shape), trained.weight.numel()
        # What is kept in 8 bits does not depend on how a parameter is cut: runs of weights that share a scale end with a row.
        whole, row = trained.parameter.numel(), torch.Size(trained.parameter.shape[1:]).numel()
        cut = shard_ranks(trained.parameter, alone=True) is not None
        if trained.embedding or whole < SMALLEST or (cut and row % BLOCK):
            entry = Entry(shape, torch.float32)
            return {"state1": entry, "state2": entry}
        entry, scale = Entry(shape, torch.uint8), Entry((-(-count // BLOCK),), torch.float32, BLOCK)
        return {"state1": entry, "state2": entry, "absmax1": scale, "absmax2": scale}

    def update(self, parts: Sequence[Part], *, rate: float, decay: float, stop: Tensor | None = None) -> None:
        """One call of the library for each part."""
        assert stop is None, "bitsandbytes does not heed a flag"
        for part in parts:
            part.step += 1
            if part.weight.numel() == 0:
                continue
            self._update(part, int(part.step), rate, decay)

    def _update(self, part: Part, step: int, rate: float, decay: float) -> None:
        one, two = part.moments["state1"], part.moments["state2"]
        if one.dtype == torch.uint8:
            scales = part.moments["absmax1"], part.moments["absmax2"]
            self._library.optimizer_update_8bit_blockwise(
                "adam", part.gradient, part.weight, one, two, self._beta1, self._beta2, 0.0, 0.0, self._epsilon, step, rate,
                *self._codes, *scales, weight_decay=decay,
            )  # fmt: skip
        else:
            self._library.optimizer_update_32bit(
                "adam", part.gradient, part.weight, one, self._beta1, self._epsilon, step, rate, two, self._beta2,
                weight_decay=decay,
            )  # fmt: skip

    def _try(self, device: torch.device) -> None:
        """One update of nothing: a version without kernels for this device is found out now, not after the first backward."""

        def zeros(count: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        eight = {"state1": zeros(BLOCK, torch.uint8), "state2": zeros(BLOCK, torch.uint8)}
        eight |= {"absmax1": zeros(1, torch.float32), "absmax2": zeros(1, torch.float32)}
        full = {"state1": zeros(BLOCK, torch.float32), "state2": zeros(BLOCK, torch.float32)}
        try:
            for moments in (eight, full):
                part = Part(zeros(BLOCK, torch.float32), zeros(BLOCK, torch.float32), moments, torch.zeros(()))
                self._update(part, 1, 0.0, 0.0)
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            raise UserError(
                f"optim: adamw_8bit does not run on {device.type} with the bitsandbytes that is installed: {error}",
                do="Run pip install -U 'megaspan[optim8]', or set optim: adamw_torch_fused",
            ) from error


def check_optim(config: SFTConfig) -> None:
    """Tries what `optim` needs, before any text is read or weight loaded.

    Raises:
        UserError: bitsandbytes is not installed.
    """
    if config.optim == "adamw_8bit":
        _library()


def _library() -> Any:
    """bitsandbytes' functions."""
    try:
        return importlib.import_module("bitsandbytes.functional")
    except ImportError as error:
        raise UserError(
            f"optim: adamw_8bit needs bitsandbytes, which cannot be imported ({error})",
            do="Run pip install 'megaspan[optim8]', or set optim: adamw_torch_fused",
        ) from error
