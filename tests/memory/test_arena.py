"""Host memory cut by hand: slots never overlap, come back whole, grow in few steps, and a failure to pin is a sentence."""

from __future__ import annotations

import gc
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.human import UserError
from megaspan.memory.arena import PAGE, HostArena, Slot, pages

MIB = 2**20


class Cudart:
    """Counts what is registered; refuses once more than `limit` bytes would be."""

    def __init__(self, limit: int = 2**60) -> None:
        self.limit, self.registered = limit, dict[int, int]()

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        assert flags == 1
        if sum(self.registered.values()) + size > self.limit:
            return 2
        self.registered[pointer] = size
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        del self.registered[pointer]
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    fake = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    return fake


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["take", "give", "reserve"]), st.integers(1, 40_000), st.integers(0, 99)), max_size=60)
)
def test_slots_never_overlap_and_come_back_whole(actions: list[tuple[str, int, int]]) -> None:
    """R64: memory handed out twice is silent corruption; every slot keeps what was written while others come and go."""
    arena = HostArena(pinned=False)
    out: list[tuple[Slot, torch.Tensor, int]] = []
    for number, (action, size, choice) in enumerate(actions):
        if action == "take":
            slot = arena.take(size)
            view = slot.view((size,), torch.uint8)
            view.fill_(number)
            out.append((slot, view, number))
        elif action == "reserve":
            arena.reserve(choice % 4, size)
            assert arena.missing(choice % 4, size) == 0
        elif out:
            arena.give(out.pop(choice % len(out))[0])
        assert all(bool((view == number).all()) for _, view, number in out)
        assert arena.used == sum(slot.size for slot, _, _ in out) <= arena.bytes
    for slot, _, _ in out:
        arena.give(slot)
    assert arena.used == 0
    assert all(block.idle for block in arena._blocks)


def test_no_rounding_beyond_a_page() -> None:
    """A third of a gigabyte stays that: torch's own host allocator would hold the next power of two."""
    arena = HostArena(pinned=False)
    arena.reserve(3, 100 * MIB + 1)
    assert arena.bytes == 3 * (100 * MIB + PAGE)


def test_flat_over_changing_lengths() -> None:
    """R64, R71: 64k, 8k, 64k, 33k, 1k tokens (scaled down): what the longest row took serves all others."""
    arena, layers = HostArena(pinned=False), 7
    held = []
    for length in (64, 8, 64, 33, 1, 64):
        arena.reserve(layers, length * 4096)
        slots = [arena.take(length * 4096) for _ in range(layers)]
        for slot in reversed(slots):
            arena.give(slot)
        held.append(arena.bytes)
    assert set(held) == {layers * 64 * 4096}


@pytest.mark.parametrize("step", [1, 7])
def test_slow_growth_leaves_no_trail_of_blocks(step: int) -> None:
    """Rows that grow a little every step: never an eighth more than the longest row needs, and seldom anew from scratch."""
    arena, layers, held = HostArena(pinned=False), 36, list[int]()
    for length in range(64, 400, step):
        arena.reserve(layers, length * PAGE)
        for slot in [arena.take(length * PAGE) for _ in range(layers)]:
            arena.give(slot)
        held.append(arena.bytes)
        assert arena.bytes <= 1.125 * layers * length * PAGE
    assert sum(later < earlier for earlier, later in itertools.pairwise(held)) < 20


def test_the_limit_is_worth_cutting_anew() -> None:
    """Room that old pieces waste is taken back before a run is refused."""
    arena = HostArena(pinned=False, limit=10 * MIB)
    arena.reserve(9, MIB)
    arena.reserve(1, 10 * MIB)
    assert arena.bytes == 10 * MIB


def test_growth_keeps_slots_that_are_out() -> None:
    arena = HostArena(pinned=False)
    small = arena.take(10)
    small.view((10,), torch.uint8).fill_(7)
    arena.reserve(4, 10 * MIB)
    assert small.view((10,), torch.uint8).tolist() == [7] * 10
    arena.give(small)
    assert arena.used == 0


def test_views_share_bytes_and_know_their_room() -> None:
    slot = HostArena(pinned=False).take(4 * 6)
    slot.view((2, 3), torch.float32).copy_(torch.arange(6.0).view(2, 3))
    assert slot.view((6,), torch.float32).tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="do not fit"):
        slot.view((PAGE + 1,), torch.uint8)
    with pytest.raises(ValueError, match="at least one byte"):
        HostArena(pinned=False).take(0)


def test_limit_is_checked_before_anything_is_taken() -> None:
    arena = HostArena(pinned=False, limit=MIB)
    with pytest.raises(UserError, match=r"2\.0 MiB of host memory.*limit of 1\.0 MiB.*host_memory"):
        arena.reserve(2, MIB)
    assert arena.bytes == 0
    arena.reserve(1, MIB)


def test_pinning_is_registered_timed_and_undone(cudart: Cudart) -> None:
    arena = HostArena(pinned=True)
    arena.reserve(2, MIB)
    arena.reserve(3, MIB)
    assert sorted(cudart.registered.values()) == [MIB, 2 * MIB]
    assert arena.seconds_pinning > 0
    before = arena.seconds_pinning
    arena.give(arena.take(MIB))
    assert arena.seconds_pinning == before
    arena.close()
    assert not cudart.registered
    assert arena.bytes == 0


def test_a_forgotten_arena_leaves_no_registration(cudart: Cudart) -> None:
    HostArena(pinned=True).reserve(1, MIB)
    gc.collect()
    assert not cudart.registered


def test_failure_to_pin_says_what_to_do(monkeypatch: pytest.MonkeyPatch, cudart: Cudart) -> None:
    """A locked-memory limit: one sentence with the two ways out, and nothing left behind."""
    cudart.limit = MIB
    arena = HostArena(pinned=True)
    with pytest.raises(UserError, match=r"could not be pinned \(CUDA error 2\).*ulimit -l.*offload: false"):
        arena.reserve(2, MIB)
    assert arena.bytes == 0
    assert not cudart.registered


def test_no_address_space_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("megaspan.memory.arena.mmap.mmap", refuse)
    with pytest.raises(UserError, match=r"Cannot allocate memory.*lower max_length"):
        HostArena(pinned=False).reserve(1, MIB)


def test_many_sizes_that_stay_are_pinned_in_one_piece(cudart: Cudart) -> None:
    """The optimizer's states: hundreds of tensors of some ten sizes. One registration, no byte beyond a page each."""
    arena = HostArena(pinned=True)
    sizes = [1, PAGE, 10 * PAGE, 3, 7 * PAGE + 1] * 40
    arena.reserve(1, sum(map(pages, sizes)))
    slots = [arena.take(size) for size in sizes]
    assert len(cudart.registered) == 1
    assert arena.used == arena.bytes == 40 * (1 + 1 + 10 + 1 + 8) * PAGE
    assert len({(slot.block, slot.start) for slot in slots}) == 200


def test_a_slot_given_back_twice_is_an_error() -> None:
    """Its bytes may be somebody else's by then."""
    arena = HostArena(pinned=False)
    first, second = arena.take(PAGE), arena.take(3 * PAGE)
    arena.give(first)
    with pytest.raises(RuntimeError, match="twice"):
        arena.give(first)
    arena.give(second)
    with pytest.raises(RuntimeError, match="twice"):
        arena.give(second)
    assert arena.used == 0


def test_a_slot_that_comes_back_after_close_counts_nothing() -> None:
    arena = HostArena(pinned=False)
    slot = arena.take(PAGE)
    arena.close()
    arena.give(slot)
    assert arena.used == 0


def test_errors_name_what_the_memory_was_for() -> None:
    arena = HostArena(pinned=False, limit=MIB, purpose="optimizer states")
    with pytest.raises(UserError, match=r"optimizer states need 2\.0 MiB"):
        arena.take(2 * MIB)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks the Linux kernel")
def test_forked_processes_get_no_copy(tmp_path: Path) -> None:
    """A fork makes each page of a private mapping move at its next write, away from a copy that is under way to it."""
    slot = HostArena(pinned=False).take(PAGE)
    address = f"{slot.view((1,), torch.uint8).data_ptr():x}"
    slot.view((PAGE,), torch.uint8).fill_(7)
    seen = tmp_path / "maps"
    if not (child := os.fork()):
        seen.write_bytes(Path("/proc/self/maps").read_bytes())
        os._exit(0)
    os.waitpid(child, 0)
    ranges = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in seen.read_text().splitlines()]
    assert not any(start <= int(address, 16) < end for start, end in ranges)
