"""One head group of a streamed layer between its projection and its attention: here, or on its way between ranks.

Where a row lies on many ranks, the keys of a head group are brought together while the group before is attended: of
Qwen3-8B at 1,048,576 tokens 0.5 GB a group, 0.2 to 0.6 ms of an attention that takes a hundred times as long. On one rank
nothing is on its way: a group is projected when it is attended, so that the q, k and v of one group are there at a time. Where
that waits for the host link, and there is room, the next group is projected beside this one's attention (`memory/aside.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, final

from torch import Tensor

from megaspan.attention import AttentionCall
from megaspan.attention.attend import backward_with, forward_with, settle
from megaspan.attention.context import ContextPlan
from megaspan.attention.onway import OnTheWay


class Landing(Protocol):
    """Gradients of a head group that may still be on their way."""

    @property
    def d_sink_H(self) -> Tensor | None:
        """Of the sinks, None without; of a row on many ranks this rank's part."""

    def land(self) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv of this rank's tokens, [t, heads, D] each, once. All ranks of the row call it."""


@final
class Attending:
    """A head group that is to be attended, once. Its q, k and v are let go of with it."""

    def __init__(
        self,
        call: AttentionCall,
        context: ContextPlan | None,
        kept: tuple[Tensor, Tensor, Tensor] | None = None,
        arrive: Callable[[], None] | None = None,
    ) -> None:
        """Begins the exchange, if there is one; all ranks of the row do.

        Args:
            call: the group's part of the layer's call, of one row.
            context: how the row lies; None for one document on this rank.
            kept: in the backward: what `forward` gave, and the gradient of its output.
            arrive: makes the computing stream wait until all that is there; None: it is.
        """
        self._arrive = arrive
        self._scoring, self._kernels, self._context = call.scoring, call.kernels, context
        self._sink = None if call.sink_H is None else call.sink_H.detach()
        q, k, v = (part[0].detach().transpose(0, 1) for part in (call.q_BHTD, call.k_BGSD, call.v_BGSD))
        out, lse, d_out = kept or (None, None, None)
        self._lse = lse
        if context is None:
            self._here = q, k, v, out, d_out
        else:
            self._started = context.start(q, k, v, out, d_out)

    def arrive(self) -> None:
        """Makes the computing stream wait until all that is attended is there; nothing of it may be let go of before."""
        if self._arrive is not None:
            self._arrive()
        self._arrive = None

    def forward(self) -> tuple[OnTheWay, Tensor]:
        """Attention's output [t, heads, D] and its log-sum-exp, of the heads that this rank attended [heads, slots]."""
        self.arrive()
        if self._context is not None:
            return self._context.attend(self._started, self._scoring, self._sink, self._kernels)
        q, k, v, *_ = self._here
        kernel, scoring = settle(q, k, v, self._scoring, kernels=self._kernels)
        out, lse = forward_with(kernel, q, k, v, self._sink, scoring)
        return OnTheWay(out), lse

    def backward(self) -> Landing:
        """The gradients, from what was kept."""
        assert self._lse is not None, "this head group was begun without what its backward reads"
        self.arrive()
        if self._context is not None:
            return self._context.attend_backward(self._started, self._lse, self._scoring, self._sink, self._kernels)
        q, k, v, out, d_out = self._here
        assert out is not None
        assert d_out is not None
        kernel, scoring = settle(q, k, v, self._scoring, kernels=self._kernels)
        *gradients, d_sink = backward_with(kernel, d_out, q, k, v, out, self._lse, self._sink, scoring)
        return _Landed(d_sink, (gradients[0], gradients[1], gradients[2]))


def one_ahead(
    groups: int, begin: Callable[[int], Attending], context: ContextPlan | None, ahead: bool = False
) -> Iterator[tuple[int, Attending]]:
    """Each head group in turn with its number. Where something is exchanged the next one is begun before: that hides it.

    So it is with `ahead`, where groups are made beside the attention of others. Whoever iterates lets go of a group before
    asking for the next one.
    """
    ahead = ahead or (context is not None and (context.exchanges or context.ranks.sp is not None))
    now: Attending | None = None
    coming: Attending | None = None
    try:
        for number in range(groups):
            now, coming = coming or begin(number), None
            coming = begin(number + 1) if ahead and number + 1 < groups else None
            yield number, now
            now = None
    finally:
        for each in (now, coming):  # whoever iterates, or begins, has failed: what is being made may not outlive its memory
            if each is not None:
                each.arrive()


def attended(
    groups: int,
    begin: Callable[[int], Attending],
    context: ContextPlan | None,
    ready: Callable[[int], None],
    ahead: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Output [t, heads, D] and log-sum-exp of each head group in turn; `ready(number)` is called before it is attended.

    An output that travels to its tokens' ranks does so while the next group is attended, and is given one group late. Whoever
    iterates lets go of a group before asking for the next one.
    """
    coming: list[tuple[OnTheWay, Tensor]] = []
    late = 1 if context is not None and context.ranks.sp is not None else 0
    for number, now in one_ahead(groups, begin, context, ahead):
        ready(number)
        coming.append(now.forward())
        del now
        if len(coming) > late:
            yield _arrived(coming)
    while coming:
        yield _arrived(coming)


def _arrived(coming: list[tuple[OnTheWay, Tensor]]) -> tuple[Tensor, Tensor]:
    out, lse = coming.pop(0)
    return out.land(), lse


@dataclass(frozen=True, eq=False)
class _Landed:
    """Gradients that are here."""

    d_sink_H: Tensor | None
    gradients: tuple[Tensor, Tensor, Tensor]

    def land(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.gradients
