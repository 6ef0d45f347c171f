"""Layer inputs come back as they went, in any order of rows, however late the copies run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.human import UserError
from megaspan.memory import arena, offload
from megaspan.memory.offload import LayerInputs
from megaspan.memory.saved import SavedInput
from megaspan.plan.keep import PLACES, Place
from tests.memory.lanes import Lanes
from tests.memory.latedisk import LateDisk

CPU = torch.device("cpu")
LAYERS = 5


def row(number: int, length: int) -> list[torch.Tensor]:
    """The layer inputs of a row, each unlike all others."""
    return [torch.arange(length * 3.0).view(1, length, 3) + 10_000 * number + 100_000 * layer for layer in range(LAYERS)]


def forward(
    inputs: LayerInputs,
    values: list[torch.Tensor],
    kept: int = 0,
    stir: Callable[[], None] = lambda: None,
    places: Sequence[Place] = (),
) -> list[SavedInput]:
    places = places or ["device" if layer >= LAYERS - kept else "host" for layer in range(LAYERS)]
    inputs.start_row(places.count("host"))
    saved = []
    for value, place in zip(values, places, strict=True):
        hidden = value.clone()
        saved.append(inputs.pack(hidden, place))
        del hidden
        stir()
    return saved


def backward(
    inputs: LayerInputs,
    saved: list[SavedInput],
    values: list[torch.Tensor],
    stir: Callable[[], None] = lambda: None,
    stop: int = 0,
    by_tiles: bool = False,
) -> None:
    for layer in reversed(range(stop, len(saved))):
        if by_tiles:
            for one in saved[layer : max(layer - 3, -1) : -1] if layer > 2 else saved[layer::-1]:
                inputs.recall(one)
            tensor = torch.cat(list(inputs.tiles(saved[layer], [slice(0, 2), slice(2, 3), slice(3, None)])), dim=1)
            inputs.land()
            stir()
            inputs.release(saved[layer])
        else:
            tensor = inputs.unpack(saved[layer])
            stir()
        assert torch.equal(tensor, values[layer]), f"layer {layer}"
        del saved[layer]


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_any_order_of_rows_however_late_the_copies(data: st.DataObject) -> None:
    """R64: rows of other lengths, several forwards before their backwards, dropped rows, abandoned backwards; with a disk."""
    seed = data.draw(st.integers(0, 2**20))
    lanes, disk = Lanes(seed), LateDisk(seed)
    staged = data.draw(st.integers(1, 3))
    inputs = LayerInputs(CPU, in_flight=data.draw(st.integers(0, 3)), backend=lanes, disk=cast(Any, disk), staged=staged)
    places = data.draw(st.lists(st.sampled_from(PLACES), min_size=LAYERS, max_size=LAYERS))
    open_rows: list[tuple[list[SavedInput], list[torch.Tensor]]] = []
    abandoned: list[list[SavedInput]] = []

    def stir() -> None:
        lanes.stir()
        disk.stir()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "_copy", lanes.copy)
        patch.setattr(arena._Block, "close", lambda block: lanes.assert_idle())
        for number in range(data.draw(st.integers(1, 8))):
            action = data.draw(st.sampled_from(["forward", "forward", "backward", "backward", "drop", "half", "discard"]))
            tiled = data.draw(st.booleans())
            if action == "forward" or not open_rows:
                values = row(number, data.draw(st.sampled_from([4, 33, 64, 8, 3000])))
                open_rows.append((forward(inputs, values, 0, stir, places), values))
                continue
            if action == "discard":
                inputs.discard()
                disk.discard()
                open_rows.clear()
                continue
            saved, values = open_rows.pop(data.draw(st.integers(0, len(open_rows) - 1)))
            if action == "backward":
                backward(inputs, saved, values, stir, by_tiles=tiled)
            elif action == "half":
                backward(inputs, saved, values, stir, stop=data.draw(st.integers(1, 4)), by_tiles=tiled)
                fate = data.draw(st.sampled_from(["dropped", "held by somebody", "continued later"]))
                if fate == "held by somebody":
                    abandoned.append(saved)
                elif fate == "continued later":
                    open_rows.append((saved, values))
            del saved
        while open_rows:
            backward(inputs, *open_rows.pop(), stir)
        inputs.discard()
        assert inputs.arena.used == inputs.staged_bytes
        assert inputs.staged_bytes <= staged * 36864
        disk.discard()
        lanes.synchronize(CPU)
        inputs.close()


def on_disk(lanes: Lanes, disk: LateDisk, staged: int, monkeypatch: pytest.MonkeyPatch) -> LayerInputs:
    monkeypatch.setattr(offload, "_copy", lanes.copy)
    return LayerInputs(CPU, in_flight=0, backend=lanes, disk=cast(Any, disk), staged=staged)


@pytest.mark.parametrize("place", ["host", "disk"])
def test_room_that_is_still_being_read_is_not_overwritten(monkeypatch: pytest.MonkeyPatch, place: Place) -> None:
    """A row packed between two layers of another row's backward gets the room of an input that is on its way to the device."""
    lanes, disk = Lanes(0), LateDisk(chance=0)
    inputs = on_disk(lanes, disk, 1, monkeypatch)
    inputs.reserve(2 * LAYERS, 40 * 3 * 4)
    first, second = row(1, 40), row(2, 40)
    saved = forward(inputs, first, places=[place] * LAYERS)
    inputs.unpack(saved.pop())
    between = forward(inputs, second, places=[place] * LAYERS)
    backward(inputs, saved, first)
    backward(inputs, between, second)


@pytest.mark.parametrize("next_place", ["host", "disk"])
def test_a_slot_in_front_of_the_disk_is_not_read_into_while_a_tile_leaves_it(
    monkeypatch: pytest.MonkeyPatch, next_place: Place
) -> None:
    """One slot for two inputs: the tile of the upper one is still to be copied when the lower one's read may begin."""
    lanes, disk = Lanes(0), LateDisk(chance=0)
    inputs = on_disk(lanes, disk, 1, monkeypatch)
    values = row(1, 40)
    saved = forward(inputs, values, places=["disk"] * LAYERS)
    upper, lower = saved[-1], saved[-2]
    upper_tiles = inputs.tiles(upper, [slice(0, 20), slice(20, 40)])
    first = next(upper_tiles)
    assert torch.equal(first, values[-1][:, :20])  # the second is queued, and nobody waits for it yet
    if next_place == "disk":
        lower_tiles = inputs.tiles(lower, [slice(0, 40)])
        assert torch.equal(next(lower_tiles), values[-2])
    else:
        inputs.release(upper)
        (between,) = forward(inputs, row(2, 40)[:1], places=["disk"])
        disk.stir()
        assert torch.equal(inputs.unpack(between), row(2, 40)[0])
    assert torch.equal(next(upper_tiles), values[-1][:, 20:])


def test_the_first_slot_in_front_of_the_disk_is_not_one_that_is_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory that came back while its copy to the device was queued; then a read from the disk goes there."""
    lanes, disk = Lanes(0), LateDisk(chance=0)
    inputs = on_disk(lanes, disk, 2, monkeypatch)
    values = row(1, 40)
    low, *_, high = saved = forward(inputs, values, places=["disk", "device", "device", "device", "host"])
    inputs.prefetch(high)
    again = forward(inputs, row(2, 40), places=["disk", "disk", "device", "device", "device"])
    assert torch.equal(inputs.unpack(low), values[0])
    assert torch.equal(inputs.unpack(high), values[4])
    backward(inputs, again, row(2, 40))
    del saved


def test_a_read_for_a_tensor_that_is_gone_ends_before_its_slot_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes, disk = Lanes(0), LateDisk(chance=0)
    inputs = on_disk(lanes, disk, 1, monkeypatch)
    values = row(1, 40)
    saved = forward(inputs, values, places=["disk"] * LAYERS)
    inputs.recall(saved[0])
    del saved[0]
    backward(inputs, saved, values[1:], disk.stir)
    disk.discard()


def test_the_disk_is_asked_two_layers_ahead_and_not_for_what_is_still_on_the_host() -> None:
    """Of five, the upper two wait in their slots; the others are asked for before anybody needs them."""
    disk = LateDisk(chance=1)
    inputs = LayerInputs(CPU, disk=cast(Any, disk))
    values = row(1, 64)
    saved = forward(inputs, values, places=["disk"] * LAYERS)
    asked = []
    for layer in reversed(range(LAYERS)):
        assert torch.equal(inputs.unpack(saved[layer]), values[layer])
        asked.append(disk.reads)
    assert asked == [1, 2, 3, 3, 3]
    assert inputs.stats().late == 0
    assert not disk.living


def test_what_the_disk_never_had_to_write_is_not_written() -> None:
    """A backward that comes at once finds the last inputs in their slots, and takes back what was to be written."""
    disk = LateDisk(chance=0)
    inputs = LayerInputs(CPU, disk=cast(Any, disk))
    values = row(1, 64)
    backward(inputs, forward(inputs, values, places=["device", "device", "device", "disk", "disk"]), values)
    for move in disk.moves:
        move.run()
    assert disk.written == disk.reads == 0


def test_host_memory_in_front_of_the_disk_is_reserved_and_bounded() -> None:
    disk = LateDisk(chance=0)
    inputs = LayerInputs(CPU, disk=cast(Any, disk))
    size = 4096 * 3 * 4
    inputs.reserve(1, size, on_disk=LAYERS - 1)
    assert inputs.staged_bytes == 2 * size
    assert inputs.stats().host_bytes == 3 * size
    for number, length in enumerate((4096, 512, 4096, 33)):
        values = row(number, length)
        backward(inputs, forward(inputs, values, places=["disk"] * 4 + ["host"]), values)
        assert inputs.stats().host_bytes == 3 * size
    values = row(9, 5000)
    backward(inputs, forward(inputs, values, places=["disk"] * 4 + ["host"]), values)
    assert inputs.staged_bytes == 2 * 61440


def test_a_layer_waits_for_the_oldest_write_and_the_wait_is_counted() -> None:
    disk = LateDisk(chance=0)
    inputs = LayerInputs(CPU, disk=cast(Any, disk))
    forward_saved = forward(inputs, row(1, 64), places=["disk"] * LAYERS)
    assert disk.written == (LAYERS - 2) * 64 * 3 * 4
    assert inputs.stats().seconds_waiting > 0
    del forward_saved


def test_a_write_that_fails_stops_the_step_and_not_the_next_one() -> None:
    disk = LateDisk(chance=0)
    inputs = LayerInputs(CPU, disk=cast(Any, disk))
    values = row(1, 64)
    disk.failure = UserError("the disk is full", do="Free space on it")
    with pytest.raises(UserError, match="is full"):
        forward(inputs, values, places=["disk"] * LAYERS)
    inputs.discard()
    disk.discard()
    backward(inputs, forward(inputs, values, places=["disk"] * LAYERS), values)
    assert inputs.arena.used == inputs.staged_bytes


def test_a_tensor_that_the_disk_refused_keeps_its_slot_until_its_step_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = LateDisk()
    inputs = LayerInputs(CPU, disk=cast(Any, disk), staged=1)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "park", lambda *_: (_ for _ in ()).throw(UserError("no room", do="Free space")))
        with pytest.raises(UserError) as held:
            inputs.pack(torch.ones(1, 4, 3), "disk")
    with pytest.raises(RuntimeError, match="must be discarded first"):
        inputs.pack(torch.ones(1, 4, 3), "disk")
    inputs.discard()
    assert torch.equal(inputs.unpack(inputs.pack(torch.ones(1, 4, 3), "disk")), torch.ones(1, 4, 3))
    del held


def test_without_a_disk_there_is_no_place_disk() -> None:
    with pytest.raises(RuntimeError, match="there is none"):
        LayerInputs(CPU).pack(torch.ones(3), "disk")


def test_memory_is_not_given_up_under_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer row comes while copies of a dropped one are still queued: the short row's memory is too small and goes."""
    lanes, closed = Lanes(0), []
    inputs = LayerInputs(CPU, backend=lanes)
    monkeypatch.setattr(offload, "_copy", lanes.copy)
    monkeypatch.setattr(arena._Block, "close", lambda block: closed.append(lanes.assert_idle()))
    forward(inputs, row(1, 1))
    values = row(2, 3000)
    backward(inputs, forward(inputs, values), values)
    assert closed


def test_the_adversary_catches_a_missing_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above means something: without the wait for the copy back, the values are wrong."""
    lanes = Lanes(0)
    inputs = LayerInputs(CPU, backend=lanes)
    monkeypatch.setattr(offload, "_copy", lanes.copy)
    values = row(1, 40)
    saved = forward(inputs, values)
    monkeypatch.setattr(type(lanes.compute), "wait_event", lambda self, event: None)
    with pytest.raises(AssertionError):
        backward(inputs, saved, values)


def test_at_most_two_sources_stay_on_the_device() -> None:
    """What frees the device: all but two inputs have left after the forward, and those as well where two are kept anyway."""
    inputs = LayerInputs(CPU)
    forward_saved = forward(inputs, row(1, 64))
    assert sum(saved.tensor is not None for saved in forward_saved) == 2
    kept = forward(inputs, row(2, 64), kept=2)
    assert [saved.tensor is not None for saved in kept] == [False, False, False, True, True]
    assert not inputs._in_flight


def test_each_input_is_fetched_one_layer_ahead() -> None:
    """Prefetch: when a layer asks, its input is on the way; nothing more than the next one is."""
    inputs = LayerInputs(CPU)
    values = row(1, 64)
    saved = forward(inputs, values, kept=1)
    for layer in reversed(range(LAYERS)):
        assert torch.equal(inputs.unpack(saved[layer]), values[layer])
        assert [one.tensor is not None for one in saved] == [other == layer - 1 for other in range(LAYERS)]
    assert inputs.stats().late == 0
    assert inputs.arena.used == 0


def test_bytes_are_counted_and_host_memory_is_flat() -> None:
    """R64, R65: host memory is layers x tokens x hidden x bytes of the longest row, flat after it; moved bytes are exact."""
    inputs = LayerInputs(CPU)
    held, moved = [], 0
    for number, length in enumerate((4096, 512, 4096, 2112, 1024)):
        values = row(number, length)
        backward(inputs, forward(inputs, values, kept=2), values)
        held.append(inputs.stats().host_bytes)
        moved += (LAYERS - 2) * length * 3 * 4
    assert held == [(LAYERS - 2) * 4096 * 3 * 4] * 5
    assert inputs.stats().bytes_to_host == inputs.stats().bytes_to_device == moved


def test_forwards_without_backward_leave_nothing_behind() -> None:
    """Evaluation, or an exception between forward and backward: the room comes back with the graph, without a collection."""
    inputs = LayerInputs(CPU)
    gc.disable()
    try:
        for number in range(4):
            forward(inputs, row(number, 64))
    finally:
        gc.enable()
    assert inputs.stats().host_bytes <= LAYERS * 4096
    inputs.discard()
    assert inputs.arena.used == 0


def test_a_second_backward_is_refused() -> None:
    inputs = LayerInputs(CPU)
    saved = forward(inputs, row(1, 8))
    inputs.unpack(saved[-1])
    with pytest.raises(RuntimeError, match="second backward"):
        inputs.unpack(saved[-1])
    inputs.discard()
    with pytest.raises(RuntimeError, match="abandoned"):
        inputs.unpack(saved[0])


@pytest.mark.parametrize("keep", [False, True])
def test_overwriting_an_input_is_noticed(keep: bool) -> None:
    """A model that adds in place onto a saved input would train on garbage; autograd's own check does not see through hooks."""
    inputs = LayerInputs(CPU)
    hidden = torch.ones(1, 4, 3)
    saved = inputs.pack(hidden, "device" if keep else "host")
    hidden += 1
    with pytest.raises(RuntimeError, match="overwritten in place"):
        inputs.unpack(saved)


def test_odd_tensors_come_back_too() -> None:
    """Not contiguous, empty, bf16, a scalar: value, shape and type hold."""
    inputs = LayerInputs(CPU, in_flight=0)
    for tensor in (torch.arange(12.0).view(3, 4).T, torch.empty(1, 0, 3), torch.randn(2, 5).bfloat16(), torch.tensor(3.0)):
        back = inputs.unpack(inputs.pack(tensor))
        assert back.dtype == tensor.dtype
        assert torch.equal(back, tensor)


def test_the_host_limit_is_a_sentence() -> None:
    inputs = LayerInputs(CPU, limit=4096)
    with pytest.raises(UserError, match="host_memory"):
        forward(inputs, row(1, 700))


def test_reserving_first_means_no_growth_in_the_step() -> None:
    inputs = LayerInputs(CPU)
    inputs.reserve(LAYERS, 64 * 3 * 4)
    before = inputs.stats()
    values = row(1, 64)
    backward(inputs, forward(inputs, values), values)
    assert inputs.stats().host_bytes == before.host_bytes > 0
    assert inputs.stats().seconds_pinning == before.seconds_pinning > 0


def test_another_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match="layer inputs are on cpu, got one on meta"):
        LayerInputs(CPU).pack(torch.empty(3, device="meta"))


def test_a_copy_that_is_on_its_way_is_there_when_its_event_has_been_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = Lanes(0)
    monkeypatch.setattr(offload, "_copy", lanes.copy)
    inputs = LayerInputs(CPU, in_flight=0, backend=lanes)
    (saved,) = forward(inputs, row(0, 8)[:1], places=["host"])
    coming: list[Any] = []
    tensor = inputs.copy_of(saved, coming)
    assert tensor.isnan().all(), "it was waited for at once"
    (arrived,) = coming
    lanes.compute.wait_event(arrived)
    assert torch.equal(tensor, row(0, 8)[0])
    assert torch.equal(inputs.copy_of(saved), row(0, 8)[0])
    inputs.discard()


@pytest.mark.parametrize("read", [1, 2])
def test_a_tile_on_its_way_to_a_reader_that_has_failed_is_waited_for(monkeypatch: pytest.MonkeyPatch, read: int) -> None:
    """The next one is fetched while one is worked on: its memory is free, and somebody else's, when the error is caught."""
    lanes = Lanes(0)
    monkeypatch.setattr(offload, "_copy", lanes.copy)
    inputs = LayerInputs(CPU, in_flight=0, backend=lanes)
    (saved,) = forward(inputs, row(0, 8)[:1], places=["host"])
    tiles = inputs.tiles(saved, [slice(0, 3), slice(3, 6), slice(6, 8)])
    for _ in range(read):
        next(tiles)
    del tiles
    lanes.synchronize(CPU)  # the copy into a tile that was let go of would be an error here
    inputs.discard()
