"""Which rows of a window are this rank's, and which tokens of them.

Ranks that share a row run it together, each with its own tokens; the others have rows of their own. Layer by layer all of them
meet where weights are gathered, so they run the same number of rows, and a round of rows lasts as long as its longest: rows of
a window are dealt by length. A window of 1,000,000, 900,000, 20,000 and 10,000 tokens on two ranks takes as long as
1,020,000 tokens then, and 1,900,000 where luck is against it. A rank that has no row left in the last round runs one untrained
token. The rows of a micro-batch (`per_device_train_batch_size`) run as one packed row.

Everything here follows from the rows alone and is the same on every rank, without a word between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch

from megaspan.attention.context import RowContext, RowRanks
from megaspan.attention.layout import TokenLayout, lay_out
from megaspan.attention.planned import packed_row
from megaspan.attention.seam import work_of
from megaspan.attention.work import Work
from megaspan.data import Row, Rows, join
from megaspan.data.rows import IGNORED
from megaspan.plan import ModelFacts
from megaspan.plan.packed import PackedRow
from megaspan.world import DeviceAxes, Mesh


@final
@dataclass(frozen=True, eq=False)
class Share:
    """This rank's part of rows; made by `of`.

    Attributes:
        device: where its tokens go.
        mesh: its place among the ranks.
        row_ranks: those that it shares a row with.
        work: what the layers of the model cost, to balance a row by.
        together: rows that run in one forward, packed.
    """

    device: torch.device
    mesh: Mesh = field(default_factory=Mesh)
    row_ranks: RowRanks = field(default_factory=RowRanks)
    work: Work = field(default_factory=Work)
    together: int = 1

    @classmethod
    def of(cls, model: torch.nn.Module, device: torch.device, mesh: Mesh, axes: DeviceAxes | None, together: int = 1) -> Share:
        """The part of this rank.

        Args:
            model: the model that sees the rows.
            device: of this rank.
            mesh: its place.
            axes: the process groups; None for one rank.
            together: rows that run in one forward.
        """
        cp = axes.group("cp") if axes is not None and mesh.cp > 1 else None
        sp = axes.group("sp") if axes is not None and mesh.sp > 1 else None
        return cls(device, mesh, RowRanks(cp, sp), work_of(model), together)

    @property
    def shares_rows(self) -> bool:
        """Whether other ranks have tokens of the same row."""
        return self.mesh.size("row") > 1

    @property
    def counts(self) -> bool:
        """Whether this rank is the one, of those that share a row, that counts its tokens."""
        return self.mesh.coordinate("row") == 0

    def rounds(self, rows: int) -> int:
        """Forwards that each rank runs over so many rows."""
        return -(-rows // (self.mesh.size("data") * self.together))

    def deal(self, lengths: Sequence[int] | np.ndarray, together: int = 1) -> list[tuple[int, ...]]:
        """The places of this rank's rows among rows of these lengths, those of each forward; none for one token instead.

        With no other rank that has rows of its own they are all rows, in their order.

        Args:
            lengths: tokens of each row.
            together: rows of a forward.
        """
        ranks, rank = self.mesh.size("data"), self.mesh.coordinate("data")
        order = list(range(len(lengths)))
        if ranks > 1:
            order.sort(key=lambda place: (-int(lengths[place]), place))
        mine = []
        for start in range(0, len(order), ranks * together):
            # Every other turn goes backwards: who has the longest row of one has the shortest of the next.
            turns = [order[start + turn * ranks :][:ranks][:: (-1) ** turn] for turn in range(together)]
            mine.append(tuple(turn[rank] for turn in turns if rank < len(turn)))
        return mine

    @staticmethod
    def stretches(row: Row) -> tuple[int, ...]:
        """Tokens of each stretch of a row that attends to itself only, padding that was asked for being the last one."""
        return (*row.attention_lengths, *[row.padding] * (row.padding > 0))

    def layout(self, row: Row) -> TokenLayout:
        """Where the tokens of a row are."""
        return lay_out(self.stretches(row), self.mesh.cp, sp_size=self.mesh.sp, work=self.work)

    def packed(self, rows: Rows, facts: ModelFacts) -> PackedRow | None:
        """The documents of the longest row (of the one with most attention where many are as long); None where it is plain."""
        row = join([rows[number] for number in rows.heaviest(self.together)])
        return packed_row(self.layout(row), facts) if len(row.attention_lengths) > 1 else None

    def slots(self, rows: Iterable[Row]) -> int:
        """The most tokens, padding included, that this rank holds of one of these rows."""
        if not self.shares_rows:
            return max(len(row.input_ids) for row in rows)
        return max(self.layout(row).shard_tokens // self.mesh.sp for row in rows)

    def inputs(self, row: Row) -> dict[str, Any]:
        """What the model's forward is given of a row: this rank's tokens of it, [1, slots], and how the row lies.

        Labels are moved by one before the row is cut: the last token of a shard is trained by the first of another one.
        """
        if not self.shares_rows and len(row.attention_lengths) == 1:
            positions = np.arange(len(row.input_ids))
            whole = {"input_ids": row.input_ids, "labels": row.labels, "position_ids": positions}
            return {name: self._on_device(values) for name, values in whole.items()} | _padding(row)
        context = RowContext(self.layout(row), self.row_ranks, self.device)
        return {
            "input_ids": self._on_device(context.shard(row.input_ids, 0)),
            "shift_labels": self._on_device(context.shard(np.append(row.labels[1:], IGNORED), IGNORED)),
            "position_ids": context.positions[None],
            "megaspan_row": context,
        } | _padding(row)

    def _on_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values)[None].to(self.device)


def _padding(row: Row) -> dict[str, int]:
    """How many tokens at the end of the whole row are padding, where any are: experts are not balanced by them."""
    return {"megaspan_padding": row.padding} if row.padding else {}


def untrained(row: Row) -> Row:
    """One token of a row, without a label: what a rank runs that has no row left."""
    return Row(row.input_ids[:1].copy(), np.full(1, IGNORED, np.int64), (1,))


def trained_tokens(row: Row) -> int:
    """Tokens of the row that the loss is taken over: those with a label and a predecessor to predict them from."""
    return int((row.labels[1:] != IGNORED).sum())
