"""Work aside begins after what was queued before it, and whoever reads what it made waits for its end; played on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megaspan.memory import offload
from megaspan.memory.aside import Aside
from megaspan.memory.link import Link
from megaspan.memory.offload import LayerInputs
from tests.memory.lanes import Lanes

CPU = torch.device("cpu")


def test_it_begins_after_what_the_computing_stream_was_given_and_ends_with_an_event() -> None:
    lanes = Lanes(0)
    aside = Aside(CPU, lanes)
    assert aside.done is None
    (side,) = lanes.sides
    for _ in range(2):
        lanes.clock += 3  # something was computed
        with aside:
            assert lanes.current is side
            assert side.waited_for_compute == lanes.clock
            side.push("work", lambda: None)
        assert lanes.current is lanes.compute
        assert (aside.done.stream, aside.done.position) == (side, side.queued)
        assert side.done < side.queued, "the computing stream was made to wait for it"
        lanes.compute.wait_event(aside.done)
        assert side.done == side.queued


def test_an_error_inside_is_waited_for() -> None:
    """What was half made is let go of by whoever catches it."""
    lanes = Lanes(0)
    aside = Aside(CPU, lanes)
    (side,) = lanes.sides

    def fails() -> None:
        with aside:
            side.push("work", lambda: None)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert lanes.current is lanes.compute
    assert side.done == side.queued == 1


def test_a_link_has_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = Lanes(0)
    link = Link(CPU, backend=lanes)
    before = len(lanes.sides)
    assert link.aside is link.aside
    assert len(lanes.sides) == before + 1


def test_tiles_that_are_read_aside_are_waited_for_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The computing stream goes on: that is what hides them."""
    lanes = Lanes(0)
    monkeypatch.setattr(offload, "_copy", lanes.copy)
    link = Link(CPU, backend=lanes)
    inputs = LayerInputs(CPU, in_flight=0, link=link)
    value = torch.arange(24.0).view(1, 8, 3)
    inputs.start_row(1)
    saved = inputs.pack(value.clone(), "host")
    waited: list[Any] = []
    monkeypatch.setattr(lanes.compute, "wait_event", waited.append)
    with link.aside:
        tiles = [tile.clone() for tile in inputs.tiles(saved, [slice(0, 3), slice(3, 6), slice(6, 8)])]
    assert torch.equal(torch.cat(tiles, dim=1), value)
    assert not waited
