"""One optimizer step: rows in, loss and gradients out.

The loss of a step is one number over all its rows: the sum over trained tokens divided by their count, whatever the rows'
lengths and however they are cut into micro-batches (the mean of per-row means weighs short rows too much: cases R09, R10). So
the tokens of the whole window are counted first, on every rank those of all of them, and every row's gradient is scaled by that
one count. Rows go through the model one at a time, on several ranks a micro-batch as one packed row: at these lengths a single
row fills the device, no row is ever padded to another's length, and a window may hold rows of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch

from megaspan import world
from megaspan.data import Row, Rows, join
from megaspan.layers.dropout import row_seed
from megaspan.trainer.share import Share, trained_tokens, untrained


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
    """Totals of this rank's tokens of a row, still on the device: reading them would make the host wait inside a step."""

    loss: torch.Tensor
    correct: torch.Tensor
    entropy: torch.Tensor
    trained: int
    tokens: int


@dataclass
class Accumulator:
    """Runs this rank's part of rows and keeps its totals on the device until the step is over.

    Attributes:
        model: the prepared model.
        share: which rows and tokens are this rank's.
        seed: of the run, for dropout.
    """

    model: torch.nn.Module
    share: Share
    seed: int
    _rows: list[_OnDevice] = field(default_factory=list)

    def backward(self, rows: Sequence[Row], step: int, last_row: Callable[[], None] = lambda: None) -> None:
        """Forward and backward of one window; gradients are those of the window's mean loss over trained tokens.

        Args:
            rows: the window, of all ranks.
            step: its number.
            last_row: called before the last row, whose backward completes the gradients; not in a window without a trained
                token, whose gradients are nothing to update by.
        """
        total = sum(trained_tokens(row) for row in rows)
        mine = self.share.deal([len(row.input_ids) for row in rows], self.share.together)
        for number, places in enumerate(mine):
            if total and number == len(mine) - 1:
                last_row()
            # The number of a forward is its row's, so dropout is the same on any ranks.
            if not places:
                loss = self._forward(untrained(rows[0]), total, row_seed(self.seed, step, len(rows)), counts=False)
            else:
                chosen = [rows[place] for place in places]
                row = chosen[0] if len(chosen) == 1 else join(chosen)
                loss = self._forward(row, total, row_seed(self.seed, step, places[0]))
            if loss.requires_grad:
                loss.backward()
            elif self.share.mesh.ranks > 1:
                raise RuntimeError("a forward has no gradient, and other ranks would wait for this one in the backward")

    @torch.no_grad()
    def evaluate(self, rows: Rows, begins: Callable[[int], None]) -> None:
        """Forward of rows.

        Args:
            rows: of all ranks.
            begins: called before each forward, with its number, as often on every rank.
        """
        for number, places in enumerate(self.share.deal(rows.lengths)):
            begins(number)
            row = rows[places[0]] if places else untrained(rows[0])
            self._forward(row, trained_tokens(row), None, counts=bool(places))

    def _forward(self, row: Row, total: int, seed: int | None, *, counts: bool = True) -> torch.Tensor:
        more = {} if seed is None else {"megaspan_seed": seed}
        inputs: dict[str, Any] = self.share.inputs(row)
        output = self.model(**inputs, num_items_in_batch=max(total, 1), use_cache=False, **more)
        loss = output.loss.detach().float() * max(total, 1)
        tokens = (trained_tokens(row), len(row.input_ids) - row.padding) if counts and self.share.counts else (0, 0)
        self._rows.append(_OnDevice(loss, output.correct, output.entropy, *tokens))
        found: torch.Tensor = output.loss
        return found

    def sums(self) -> Sums:
        """Totals since the last call, over all ranks; waits for the device."""
        sums = Sums()
        for row in self._rows:
            sums.add(Sums(row.loss.item(), int(row.correct.item()), row.entropy.item(), row.trained, row.tokens))
        self._rows.clear()
        loss, correct, entropy, trained, tokens = world.summed(astuple(sums))
        return Sums(loss, int(correct), entropy, int(trained), int(tokens))
