"""q, k and v of one head group of a whole row, made of its hidden states tile by tile."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias, final

from torch import Tensor

from megaspan.attention import AttentionCall

Three: TypeAlias = tuple[Tensor, Tensor, Tensor]


@final
class Projection:
    """What a row asks attention for in one head group, once all of its tiles have been added. Outside any graph.

    Args:
        tokens: of the row.
        like: what one token asks for, where tiles are written in place (`into`); None leaves the form to the first tile.

    Attributes:
        tokens: of the row.
    """

    def __init__(self, tokens: int, like: AttentionCall | None) -> None:
        self.tokens, self._in_place = tokens, like is not None
        self._last: AttentionCall | None = None
        self._whole: list[Tensor] = []
        if like is not None:
            parts = like.q_BHTD, like.k_BGSD, like.v_BGSD
            self._whole = [part.new_empty(1, tokens, part.shape[1], part.shape[3]) for part in parts]

    def into(self, tokens: slice) -> Three | None:
        """Where q, k, v [1, t, heads, D] of a tile are to be written, None where `add` copies them."""
        if not self._in_place:
            return None
        q, k, v = (buffer[:, tokens] for buffer in self._whole)
        return q, k, v

    def add(self, tokens: slice, call: AttentionCall) -> None:
        """One tile's; what `into` gave has been written to."""
        self._last = call
        if self._in_place:
            return
        tiled = [part.transpose(1, 2) for part in (call.q_BHTD, call.k_BGSD, call.v_BGSD)]
        self._whole = self._whole or [part.new_empty(1, self.tokens, *part.shape[2:]) for part in tiled]
        for buffer, part in zip(self._whole, tiled, strict=True):
            buffer[:, tokens] = part

    def whole(self) -> AttentionCall:
        """The row's, once: the memory is the caller's. q, k, v lie in it as [1, T, heads, D]."""
        assert self._last is not None
        (q, k, v), self._whole = (buffer.transpose(1, 2) for buffer in self._whole), []
        last, self._last = self._last, None
        return replace(last, q_BHTD=q, k_BGSD=k, v_BGSD=v)
