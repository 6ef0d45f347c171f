"""One optimizer step: rows in, loss and gradients out.

The loss of a step is one number over all its rows: the sum over trained tokens divided by their count, whatever the rows'
lengths and however they are cut into micro-batches (the mean of per-row means weighs short rows too much: cases R09, R10). So
the tokens of the whole window are counted first, and every row's gradient is scaled by that one count. Rows go through the
model one at a time: at these lengths a single row fills the device, no row is ever padded to another's length, and a window
may hold rows of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megaspan.data import Row


@dataclass
class Sums:
    """Totals over rows, from which every reported mean is made.

    Attributes:
        loss: sum of the negative log-likelihood of trained tokens, nats.
        correct: trained tokens whose most likely prediction is right.
        entropy: sum of the predictive entropy at trained tokens, nats.
        trained: tokens with a label.
        tokens: tokens the model read, padding not counted.
    """

    loss: float = 0.0
    correct: int = 0
    entropy: float = 0.0
    trained: int = 0
    tokens: int = 0

    def add(self, other: Sums) -> None:
        """Adds the totals of other rows."""
        self.loss += other.loss
        self.correct += other.correct
        self.entropy += other.entropy
        self.trained += other.trained
        self.tokens += other.tokens

    def clear(self) -> None:
        """Back to zero."""
        self.loss, self.correct, self.entropy, self.trained, self.tokens = 0.0, 0, 0.0, 0, 0

    def means(self) -> dict[str, float]:
        """`loss`, `mean_token_accuracy` and `entropy` per trained token; a run of masked rows has none of them."""
        if self.trained == 0:
            return {}
        return {
            "loss": self.loss / self.trained,
            "mean_token_accuracy": self.correct / self.trained,
            "entropy": self.entropy / self.trained,
        }


@dataclass
class _OnDevice:
    """Totals of one row, still on the device: reading them would make the host wait in the middle of a step."""

    loss: torch.Tensor
    correct: torch.Tensor
    entropy: torch.Tensor
    trained: int
    tokens: int


@dataclass
class Accumulator:
    """Runs rows and keeps their totals on the device until the step is over."""

    model: torch.nn.Module
    device: torch.device
    _rows: list[_OnDevice] = field(default_factory=list)

    def backward(self, rows: Sequence[Row], last_row: Callable[[], None] = lambda: None) -> None:
        """Forward and backward of one window; gradients are those of the window's mean loss over trained tokens.

        Args:
            rows: the window.
            last_row: called before the last row, whose backward completes the gradients; not in a window without a trained
                token, whose gradients are nothing to update by.
        """
        total = sum(trained_tokens(row) for row in rows)
        for number, row in enumerate(rows):
            if total and number == len(rows) - 1:
                last_row()
            output = self._forward(row, total)
            # The loss of a fully masked row is a constant 0 without a graph on some paths: there is nothing to add.
            if output.loss.requires_grad:
                output.loss.backward()

    @torch.no_grad()
    def evaluate(self, row: Row) -> None:
        """Forward of one row."""
        self._forward(row, trained_tokens(row))

    def _forward(self, row: Row, total: int) -> Any:
        inputs = {name: torch.from_numpy(array)[None].to(self.device) for name, array in model_inputs(row).items()}
        output = self.model(**inputs, num_items_in_batch=max(total, 1), use_cache=False)
        trained = trained_tokens(row)
        loss = output.loss.detach().float() * max(total, 1)
        self._rows.append(_OnDevice(loss, output.correct, output.entropy, trained, len(row.input_ids) - row.padding))
        return output

    def sums(self) -> Sums:
        """Totals since the last call; waits for the device."""
        sums = Sums()
        for row in self._rows:
            sums.add(Sums(row.loss.item(), int(row.correct.item()), row.entropy.item(), row.trained, row.tokens))
        self._rows.clear()
        return sums


def model_inputs(row: Row) -> dict[str, np.ndarray]:
    """`input_ids`, `labels` and `position_ids` of a row, each int64 of shape [T]; labels are not shifted."""
    return {"input_ids": row.input_ids, "labels": row.labels, "position_ids": np.arange(len(row.input_ids))}


def trained_tokens(row: Row) -> int:
    """Tokens of the row that the loss is taken over: those with a label and a predecessor to predict them from."""
    return int((row.labels[1:] != -100).sum())
