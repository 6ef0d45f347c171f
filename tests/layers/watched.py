"""What a tape's pieces take while a step runs: every storage that a store was given or made, as long as anybody holds it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

from megaspan.layers.stream import LayerRun
from megaspan.layers.streamed import Streaming
from megaspan.layers.tape import Kept, Tape
from megaspan.memory.offload import LayerInputs
from tests.plan.live import Storages


class Moment(NamedTuple):
    """A moment of a step: "forward", "loss", "again", "MLP", "attention", "projections" or "between", and of which layer.

    `of` is the layer whose backward runs its segment again; -1 otherwise.
    """

    name: str
    layer: int
    of: int = -1


class Watched(Storages):
    """Follows one model's steps.

    Attributes:
        device: most bytes of pieces on the device at each moment: kept there, on their way, fetched, or still held by anybody.
        host: most bytes of pieces on the host at each moment, in whole pages.
    """

    def __init__(self, streaming: Streaming) -> None:
        super().__init__()
        self.streaming = streaming
        self.device: dict[Moment, int] = {}
        self.host: dict[Moment, int] = {}
        self._at = Moment("between", 0)

    def add(self, tensor: torch.Tensor) -> None:
        """A store was given this tensor, or has made it."""
        self.follow(tensor)
        self._look()

    def enter(self, at: Moment) -> None:
        """Another moment begins."""
        self._at = at
        self._look()

    def _look(self) -> None:
        stores = self.streaming._stores
        self.device[self._at] = max(self.device.get(self._at, 0), self.now)
        self.host[self._at] = max(self.host.get(self._at, 0), 0 if stores is None else stores.used)


@contextmanager
def watched(streaming: Streaming) -> Iterator[Watched]:
    """Inside, everything that a step's layers keep is followed."""
    found, patch = Watched(streaming), pytest.MonkeyPatch()

    def around(owner: Any, name: str, before: Any = None, after: Any = None) -> None:
        own = getattr(owner, name)

        def call(self: Any, *args: Any, **options: Any) -> Any:
            if before is not None:
                before(self, *args)
            result = own(self, *args, **options)
            if after is not None:
                after(self, result, *args)
            return result

        patch.setattr(owner, name, call)

    of: list[int] = []

    def runs(run: LayerRun, *_: Any) -> None:
        found.enter(Moment("again", run.index, of[-1]) if of else Moment("forward", run.index))

    def over(kept: Kept) -> None:
        if of and found._at.name == "again":
            found.enter(Moment("MLP", of[-1]))

    def back(tape: Tape, index: int, *_: Any) -> None:
        of.append(index)
        found.enter(Moment("between", index))

    def reached(tape: Tape, *_: Any) -> None:
        found.enter(Moment("MLP", of.pop()))

    around(LayerInputs, "pack", None, lambda _, saved, *__: found.add(saved.tensor))
    around(LayerInputs, "_to_device_from", None, lambda _, tensor, *__: found.add(tensor))
    around(LayerRun, "forward", runs)
    around(Tape, "leave", None, lambda tape, _, index, *__: found.enter(Moment("between", index)))
    around(Kept, "prefetch", over)
    around(Tape, "back_at", back, reached)

    def attends(run: LayerRun, *_: Any) -> None:
        if found._at.name not in ("forward", "again"):
            found.enter(Moment("attends", run.index))

    around(LayerRun, "_attend", attends)
    around(LayerRun, "_second_half", lambda run, *_: found.enter(Moment("MLP", run.index)))
    around(LayerRun, "_attend_backward", lambda run, *_: found.enter(Moment("attention", run.index)))
    around(LayerRun, "_first_half", None, lambda run, *_: found.enter(Moment("projections", run.index)))
    around(Kept, "let_go_of_outputs", None, lambda kept, *_: found.enter(Moment("projections", found._at.layer)))
    around(Tape, "done", None, lambda tape, _, index: found.enter(Moment("between", index)))
    try:
        yield found
    finally:
        patch.undo()
