"""Layer inputs come back as they went, in any order of rows, however late the copies run."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.human import UserError
from megaspan.memory import arena, offload
from megaspan.memory.offload import LayerInputs, SavedInput
from tests.memory.lanes import Lanes

CPU = torch.device("cpu")
LAYERS = 5


def row(number: int, length: int) -> list[torch.Tensor]:
    """The layer inputs of a row, each unlike all others."""
    return [torch.arange(length * 3.0).view(1, length, 3) + 10_000 * number + 100_000 * layer for layer in range(LAYERS)]


def forward(
    inputs: LayerInputs, values: list[torch.Tensor], kept: int = 0, stir: Callable[[], None] = lambda: None
) -> list[SavedInput]:
    inputs.start_row(LAYERS - kept)
    saved = []
    for layer, value in enumerate(values):
        hidden = value.clone()
        saved.append(inputs.pack(hidden, keep=layer >= LAYERS - kept))
        del hidden
        stir()
    return saved


def backward(
    inputs: LayerInputs,
    saved: list[SavedInput],
    values: list[torch.Tensor],
    stir: Callable[[], None] = lambda: None,
    stop: int = 0,
) -> None:
    for layer in reversed(range(stop, len(saved))):
        tensor = inputs.unpack(saved[layer])
        stir()
        assert torch.equal(tensor, values[layer]), f"layer {layer}"
        del saved[layer]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_order_of_rows_however_late_the_copies(data: st.DataObject) -> None:
    """R64: rows of other lengths, several forwards before their backwards, dropped rows, abandoned backwards."""
    lanes = Lanes(data.draw(st.integers(0, 2**20)))
    inputs = LayerInputs(CPU, in_flight=data.draw(st.integers(0, 3)), backend=lanes)
    kept = data.draw(st.integers(0, LAYERS + 1))
    open_rows: list[tuple[list[SavedInput], list[torch.Tensor]]] = []
    abandoned: list[list[SavedInput]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "_copy", lanes.copy)
        patch.setattr(arena._Block, "close", lambda block: lanes.assert_idle())
        for number in range(data.draw(st.integers(1, 8))):
            action = data.draw(st.sampled_from(["forward", "forward", "backward", "backward", "drop", "half", "discard"]))
            if action == "forward" or not open_rows:
                values = row(number, data.draw(st.sampled_from([1, 33, 64, 8, 3000])))
                open_rows.append((forward(inputs, values, kept, lanes.stir), values))
                continue
            if action == "discard":
                inputs.discard()
                open_rows.clear()
                continue
            saved, values = open_rows.pop(data.draw(st.integers(0, len(open_rows) - 1)))
            if action == "backward":
                backward(inputs, saved, values, lanes.stir)
            elif action == "half":
                backward(inputs, saved, values, lanes.stir, stop=data.draw(st.integers(1, 4)))
                fate = data.draw(st.sampled_from(["dropped", "held by somebody", "continued later"]))
                if fate == "held by somebody":
                    abandoned.append(saved)
                elif fate == "continued later":
                    open_rows.append((saved, values))
            del saved
        while open_rows:
            backward(inputs, *open_rows.pop(), lanes.stir)
        inputs.discard()
        assert inputs.arena.used == 0
        lanes.synchronize(CPU)
        inputs.close()


def test_room_that_is_still_being_read_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row packed between two layers of another row's backward gets the room of an input that is on its way to the device."""
    lanes = Lanes(0)
    inputs = LayerInputs(CPU, in_flight=0, backend=lanes)
    monkeypatch.setattr(offload, "_copy", lanes.copy)
    inputs.reserve(2 * LAYERS, 40 * 3 * 4)
    first, second = row(1, 40), row(2, 40)
    saved = forward(inputs, first)
    inputs.unpack(saved.pop())
    between = forward(inputs, second)
    backward(inputs, saved, first)
    backward(inputs, between, second)


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
    saved = inputs.pack(hidden, keep=keep)
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
