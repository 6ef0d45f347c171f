"""The disk tier: what comes back is what was parked, at any order and length; each thing that goes wrong is a sentence."""

from __future__ import annotations

import errno
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megaspan.human import UserError
from megaspan.memory import disk, diskfile, diskspeed
from megaspan.memory.arena import PAGE, HostArena
from megaspan.memory.disk import DiskTier, Parked
from megaspan.memory.diskspeed import DiskSpeed, check_speed, measure
from megaspan.plan import localdisk

GB = 10**9
Make = Callable[..., DiskTier]


@pytest.fixture(autouse=True)
def small_pieces_on_any_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces of tiny tensors; and a temporary folder may well lie in memory on the machine that tests."""
    monkeypatch.setattr(disk, "PIECE", 2 * PAGE)
    monkeypatch.setattr(localdisk, "kind_of", lambda folder: "ext4")


@pytest.fixture(params=["direct", "cached"])
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes tiers, with O_DIRECT where the file system of the tests has it, and without."""
    made: list[DiskTier] = []
    if request.param == "cached":
        monkeypatch.delattr(os, "O_DIRECT", raising=False)

    def tier(**options: Any) -> DiskTier:
        made.append(DiskTier(tmp_path, **options))
        assert not (request.param == "cached" and made[-1].stats().direct)
        return made[-1]

    yield tier
    for each in made:
        each.close()


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    made = DiskTier(tmp_path, threads=2)
    yield made
    made.close()


def noise(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def back(tier: DiskTier, parked: Parked) -> torch.Tensor:
    into = torch.zeros(parked.bytes, dtype=torch.uint8)
    tier.recall(parked, into).result(10)
    return into


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, 2 * PAGE, 2 * PAGE + 1, 9 * PAGE + 7])
def test_any_length_comes_back(make: Make, size: int) -> None:
    tier = make(threads=3)
    neighbour = tier.park(noise(PAGE, 1))
    parked = tier.park(noise(size, 2))
    other = tier.park(noise(PAGE, 3))
    assert torch.equal(back(tier, parked), noise(size, 2))
    assert torch.equal(back(tier, neighbour), noise(PAGE, 1))
    assert torch.equal(back(tier, other), noise(PAGE, 3))
    stats = tier.stats()
    assert (stats.bytes_written, stats.bytes_read) == (size + 2 * PAGE, size + 2 * PAGE)
    assert stats.used == stats.peak == (max(-(-size // PAGE), 1) + 2) * PAGE


def test_any_type_and_slots_of_the_arena(make: Make) -> None:
    tier, arena = make(), HostArena(pinned=False)
    for shape, dtype in (((3, 5, 700), torch.bfloat16), ((), torch.float32), ((0, 4), torch.float64), ((11,), torch.bool)):
        source = torch.randn(shape).to(dtype)
        slot = arena.take(max(source.nbytes, 1)).view(shape, dtype)
        slot.copy_(source)
        parked = tier.park(slot)
        parked.stored().result(10)
        slot.zero_()
        tier.recall(parked, slot).result(10)
        assert torch.equal(slot, source)


def test_only_plain_host_memory_is_taken(tier: DiskTier) -> None:
    with pytest.raises(ValueError, match="contiguous tensors in host memory"):
        tier.park(torch.zeros(4, 4).t()[:2])
    with pytest.raises(ValueError, match="host memory"):
        tier.park(torch.zeros(4, device="meta"))
    parked = tier.park(torch.zeros(4))
    with pytest.raises(ValueError, match=r"16 bytes were parked.*into 12"):
        tier.recall(parked, torch.zeros(3))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from(["park", "recall", "drop", "forget", "discard"]), st.integers(0, 6 * PAGE)), max_size=30
    ),
    st.randoms(use_true_random=False),
)
def test_any_order(tmp_path: Path, actions: list[tuple[str, int]], chance: random.Random) -> None:
    """R64: bytes handed out twice are silent corruption. Sources are used again as soon as they are free, and never before."""
    tier = DiskTier(tmp_path, threads=3)
    out: list[tuple[Parked, int]] = []
    sources: list[tuple[torch.Tensor, Any]] = []
    coming: list[tuple[torch.Tensor, Any, int]] = []
    for seed, (action, size) in enumerate(actions):
        for source, stored in sources:
            if stored.done():
                source.fill_(255)
        if action == "park":
            source = noise(size, seed)
            ready = None if chance.random() < 0.5 else (lambda: time.sleep(1e-4))
            parked = tier.park(source, ready)
            out.append((parked, seed))
            sources.append((source, parked.stored()))
        elif action == "recall" and out:
            parked, of = chance.choice(out)
            into = torch.zeros(parked.bytes, dtype=torch.uint8)
            coming.append((into, tier.recall(parked, into, chance.choice([None, lambda: None])), of))
        elif action == "drop" and out:
            tier.drop(out.pop(chance.randrange(len(out)))[0])
        elif action == "forget" and out:
            parked = None
            out.pop(chance.randrange(len(out)))
        elif action == "discard":
            tier.discard()
            assert all(stored.done() for _, stored in sources)
            assert tier.stats().used == 0
            out.clear()
            coming = [(into, future, of) for into, future, of in coming if not isinstance(future.exception(0), CancelledError)]
    for into, future, of in coming:
        future.result(10)
        assert torch.equal(into, noise(len(into), of))
    for parked, of in out:
        assert torch.equal(back(tier, parked), noise(parked.bytes, of))
        tier.drop(parked)
    tier.discard()
    assert tier.stats().used == 0
    assert tier._runs.idle
    tier.close()


def test_flat_over_changing_lengths(tier: DiskTier) -> None:
    """What the longest row took serves all others."""
    held = []
    for length in (9, 2, 9, 5, 1, 9):
        sizes = [length * PAGE, length * 700] * 6
        tier.reserve(sizes)
        parked = [tier.park(noise(size)) for size in sizes]
        for each in reversed(parked):
            assert torch.equal(back(tier, each), noise(each.bytes))
            tier.drop(each)
        held.append(tier.stats().file_bytes)
    assert set(held) == {6 * (9 + 2) * PAGE}


def test_place_is_got_before_the_step(tier: DiskTier) -> None:
    tier.reserve([100 * PAGE, 1])
    status = os.fstat(tier._file._fd)
    assert status.st_size == 101 * PAGE
    assert status.st_blocks * 512 >= 101 * PAGE, "the file is only a promise"


def test_nothing_is_read_or_written_before_ready(tier: DiskTier) -> None:
    """The GPU's copy into the source may be a layer behind; meanwhile other tensors go on."""
    arrived, free = threading.Event(), threading.Event()
    source, into = torch.zeros(5 * PAGE, dtype=torch.uint8), torch.full((5 * PAGE,), 7, dtype=torch.uint8)
    late = tier.park(source, arrived.wait)  # type: ignore[arg-type]
    other = tier.park(noise(PAGE, 1))
    assert torch.equal(back(tier, other), noise(PAGE, 1))
    assert not late.stored().done()
    source.copy_(noise(5 * PAGE, 2))
    future = tier.recall(late, into, free.wait)  # type: ignore[arg-type]
    arrived.set()
    late.stored().result(10)
    time.sleep(0.02)
    assert not future.done()
    assert bool((into == 7).all())
    free.set()
    future.result(10)
    assert torch.equal(into, noise(5 * PAGE, 2))


def test_an_error_in_ready_reaches_who_waits(tier: DiskTier) -> None:
    def lost() -> None:
        raise RuntimeError("the GPU is lost")

    parked = tier.park(noise(9), lost)
    into = torch.zeros(9, dtype=torch.uint8)
    future = tier.recall(parked, into)
    for waiting in (parked.stored(), future):
        with pytest.raises(RuntimeError, match="GPU is lost"):
            waiting.result(10)


def test_reads_go_before_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer waits for a read; a write only holds host memory."""
    tier, gate, order = DiskTier(tmp_path, threads=1), threading.Event(), list[str]()
    first = tier.park(noise(PAGE))
    first.stored().result(10)
    for name in ("pwritev", "preadv"):
        real = getattr(os, name)

        def slow(*arguments: Any, real: Any = real, name: str = name) -> int:
            gate.wait()
            order.append(name)
            return real(*arguments)

        monkeypatch.setattr(os, name, slow)
    writes = [tier.park(noise(4 * PAGE)) for _ in range(3)]
    into = torch.zeros(PAGE, dtype=torch.uint8)
    future = tier.recall(first, into)
    gate.set()
    future.result(10)
    for each in writes:
        each.stored().result(10)
    assert order.index("preadv") <= 1
    assert len(order) == 7
    tier.close()


def test_a_large_tensor_uses_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, together = DiskTier(tmp_path, threads=3), threading.Barrier(3, timeout=10)
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *arguments: (together.wait(), real(*arguments))[1])
    tier.park(noise(6 * PAGE)).stored().result(20)
    tier.close()


@pytest.mark.parametrize("name", ["pwritev", "preadv"])
def test_the_kernel_may_move_less_than_asked(make: Make, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Signals and full queues cut a move short, a direct one perhaps inside a page."""
    tier, real, chance = make(), getattr(os, name), random.Random(0)
    least = PAGE if tier.stats().direct else 1

    def short(file: int, buffers: list[Any], offset: int) -> int:
        most = len(buffers[0])
        asked = chance.randint(min(least, most), most)
        if not tier.stats().direct:
            return real(file, [buffers[0][:asked]], offset)
        real(file, [buffers[0][: -(-asked // PAGE) * PAGE]], offset)
        return asked

    monkeypatch.setattr(os, name, short)
    for seed in range(10):
        parked = tier.park(noise(5 * PAGE + 3, seed))
        assert torch.equal(back(tier, parked), noise(5 * PAGE + 3, seed))


def test_a_flipped_bit_is_found(make: Make, tmp_path: Path) -> None:
    """Without the sum it would be a wrong gradient, and nobody would know."""
    tier = make()
    parked = tier.park(noise(7 * PAGE))
    parked.stored().result(10)
    file = os.open(f"/proc/self/fd/{tier._file._fd}", os.O_RDWR)
    byte = os.pread(file, 1, 5 * PAGE + 17)
    os.pwrite(file, bytes([byte[0] ^ 4]), 5 * PAGE + 17)
    os.fsync(file)
    os.close(file)
    with pytest.raises(UserError, match=rf"{tmp_path}/megaspan-kept-.*byte 16,384.*checksum.*smartctl.*resume_from_checkpoint"):
        back(tier, parked)
    other = tier.park(noise(PAGE, 1))
    assert torch.equal(back(tier, other), noise(PAGE, 1))


def test_a_file_cut_short_by_somebody_is_an_error(make: Make) -> None:
    tier = make()
    parked = tier.park(noise(7 * PAGE))
    parked.stored().result(10)
    os.ftruncate(tier._file._fd, 3 * PAGE)
    with pytest.raises(UserError, match="the file ends at byte"):
        back(tier, parked)


# Room


def test_a_disk_without_room_is_a_sentence_before_the_step(tier: DiskTier, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=rf"{tmp_path} must hold 1024\.0 TiB, but its file system has .* free\. Free.*raise host_memory"
    ):
        tier.reserve([2**50])
    assert os.fstat(tier._file._fd).st_size <= PAGE
    assert tier.stats().file_bytes == 0
    tier.park(noise(9)).stored().result(10)


def test_a_quota_is_a_sentence_too(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, start: int, more: int) -> None:
        os.ftruncate(file, start + more // 2)  # as far as it came
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    tier.reserve([PAGE])
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(UserError, match=r"beside the 4\.0 KiB it holds.*a quota allows less"):
        tier.reserve([9 * PAGE])
    assert os.fstat(tier._file._fd).st_size == tier.stats().file_bytes == PAGE


def test_a_file_system_that_cannot_reserve_is_taken(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    parked = tier.park(noise(3 * PAGE))
    assert torch.equal(back(tier, parked), noise(3 * PAGE))


def test_the_limit_holds(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, limit_bytes=10 * PAGE)
    kept = [tier.park(noise(5 * PAGE, seed)) for seed in range(2)]
    with pytest.raises(UserError, match=r"44\.0 KiB of offload_folder.*may hold 40\.0 KiB"):
        tier.park(noise(1))
    for seed, each in enumerate(kept):
        assert torch.equal(back(tier, each), noise(5 * PAGE, seed))
    tier.drop(kept[0])
    tier.park(noise(5 * PAGE)).stored().result(10)
    tier.close()


@pytest.mark.parametrize(("number", "words"), [(errno.ENOSPC, "is full"), (errno.EIO, "failed: Input/output error")])
def test_a_disk_that_fails_in_the_middle_of_a_step(
    make: Make, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    """File systems that copy on write may run full in a file whose place was got. The step ends; what lies there can go."""
    tier, real = make(), os.pwritev
    good = tier.park(noise(PAGE, 1))
    good.stored().result(10)

    def full(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwritev", full)
    bad = tier.park(noise(9 * PAGE))
    sentence = f"{words}; the step was abandoned.*go on from the last checkpoint"
    with pytest.raises(UserError, match=sentence):
        bad.stored().result(10)
    monkeypatch.setattr(os, "pwritev", real)
    # Who never asks `stored` hears of it at the next call.
    with pytest.raises(UserError, match=sentence):
        tier.park(noise(PAGE))
    with pytest.raises(UserError, match=sentence):
        tier.recall(good, torch.zeros(PAGE, dtype=torch.uint8))
    tier.discard()
    assert tier.stats().used == 0
    # The next step begins anew: there may be room again.
    assert torch.equal(back(tier, tier.park(noise(9 * PAGE, 3))), noise(9 * PAGE, 3))


def test_the_disk_is_given_back_between_runs(tier: DiskTier) -> None:
    tier.reserve([9 * PAGE])
    parked = tier.park(noise(9 * PAGE, 1))
    tier.shrink()
    assert (tier.stats().used, tier.stats().file_bytes, os.fstat(tier._file._fd).st_blocks) == (0, 0, 0)
    with pytest.raises(RuntimeError, match="dropped before"):
        tier.recall(parked, torch.zeros(9 * PAGE, dtype=torch.uint8))
    del parked
    assert torch.equal(back(tier, tier.park(noise(5 * PAGE, 2))), noise(5 * PAGE, 2))
    tier.close()
    tier.shrink()


# Folders


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"{tmp_path}/none is not a folder.*mkdir -p {tmp_path}/none"):
        DiskTier(tmp_path / "none")
    with pytest.raises(UserError, match="is not a folder"):
        DiskTier(Path(__file__))


def test_a_folder_that_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(diskfile.tempfile, "mkstemp", refuse)
    with pytest.raises(UserError, match=r"Permission denied.*Make it writable"):
        DiskTier(tmp_path)


def test_the_home_folder_may_be_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    tier = DiskTier("~")
    assert tier.folder == tmp_path
    tier.close()


MOUNTS = r"""
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
28 27 0:25 / /mnt/data rw shared:1 - nfs4 server:/data rw
29 27 0:26 / /mnt/data/fast\040disk rw - xfs /dev/nvme0n1 rw
30 27 0:27 / /tmp rw - ext4 /dev/vdb rw
31 27 0:28 / /tmp rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/", "ext4"), ("/mnt/database", "ext4"), ("/mnt/data", "nfs4"), ("/mnt/data/a/b", "nfs4"),
        ("/mnt/data/fast disk/x", "xfs"), ("/tmp/x", "tmpfs"),
    ],
)  # fmt: skip
def test_file_systems_are_recognised(tmp_path: Path, folder: str, kind: str) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTS.lstrip())
    # Undo the fixture, which knows nothing but ext4.
    assert KIND_OF(Path(folder), tmp_path / "mountinfo") == kind
    assert KIND_OF(Path(folder), tmp_path / "none") == ""


KIND_OF = localdisk.kind_of


def test_memory_is_no_disk_and_a_network_must_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(localdisk, "kind_of", lambda folder: "tmpfs")
    for allowed in (False, True):
        with pytest.raises(UserError, match=r"lies in memory \(tmpfs\).*raise host_memory"):
            DiskTier(tmp_path, allow_network=allowed)
    monkeypatch.setattr(localdisk, "kind_of", lambda folder: "nfs4")
    with pytest.raises(UserError, match=r"network file system \(nfs4\).*allow_slow_disk: true"):
        DiskTier(tmp_path)
    DiskTier(tmp_path, allow_network=True).close()


def test_a_file_system_without_direct_moves_is_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, tries = os.pwritev, list[int]()

    def refuse(*arguments: Any) -> int:
        tries.append(1)
        if len(tries) == 1:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(*arguments)

    monkeypatch.setattr(os, "pwritev", refuse)
    tier = DiskTier(tmp_path)
    assert not tier.stats().direct
    parked = tier.park(noise(5 * PAGE + 1))
    assert torch.equal(back(tier, parked), noise(5 * PAGE + 1))
    tier.close()


# Ends


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("megaspan-disk")]


def test_close_ends_threads_and_gives_everything_back(tmp_path: Path) -> None:
    gc.collect()
    before, known = descriptors(), len(ours())
    for _ in range(3):
        tier = DiskTier(tmp_path, threads=2)
        assert list(tmp_path.iterdir()) == []
        parked = tier.park(noise(20 * PAGE + 5))
        gate = threading.Event()
        waiting = tier.park(noise(PAGE), lambda gate=gate: gate.wait(0.05))  # type: ignore[misc]
        into = torch.zeros(PAGE, dtype=torch.uint8)
        never = tier.recall(waiting, into)
        assert len(ours()) == known + 4
        tier.close()
        tier.close()
        assert parked.stored().done()
        assert isinstance(never.exception(0), CancelledError)
        with pytest.raises(RuntimeError, match="closed"):
            tier.park(noise(1))
    assert descriptors() == before
    assert len(ours()) == known


def test_a_forgotten_tier_goes_by_itself(tmp_path: Path) -> None:
    gc.collect()
    before, known = descriptors(), len(ours())
    tier = DiskTier(tmp_path)
    parked = tier.park(noise(PAGE))
    parked.stored().result(10)
    del tier
    for _ in range(100):  # a thread may hold its last task a moment longer
        gc.collect()
        if (descriptors(), len(ours())) == (before, known):
            break
        time.sleep(0.02)
    assert (descriptors(), len(ours())) == (before, known)


RUN = """
import sys, time, torch
from megaspan.plan import localdisk
from megaspan.memory.disk import DiskTier
localdisk.kind_of = lambda folder: "ext4"
tier = DiskTier(sys.argv[1])
tier.reserve([2**24])
parked = [tier.park(torch.zeros(2**20), lambda: time.sleep(0.01)) for _ in range(3)]
parked[0].stored().result()
print("ready", flush=True)
if sys.argv[2] == "wait":
    time.sleep(60)
tier.park(torch.zeros(9), lambda: time.sleep(60))  # the GPU never answers
"""


def test_a_killed_run_leaves_nothing(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path), "wait"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    assert list(tmp_path.iterdir()) == []
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_ends_in_an_error_does_not_wait(tmp_path: Path) -> None:
    """Nobody closes the tier, and its threads have things to do."""
    began = time.perf_counter()
    ran = subprocess.run([sys.executable, "-c", RUN, str(tmp_path), "end"], capture_output=True, timeout=50, check=True)
    assert ran.stderr == b""
    assert time.perf_counter() - began < 40


def test_a_leftover_is_removed_and_nothing_else(tmp_path: Path) -> None:
    """A run that was killed in the moment between making its file and taking away the name."""
    leftover = tmp_path / f"{diskfile.PREFIX}x7_ab{diskfile.SUFFIX}"
    own = [tmp_path / name for name in ("model.safetensors", "megaspan-kept-notes.txt", "other.part")]
    for path in (leftover, *own):
        path.write_bytes(b"1")
    DiskTier(tmp_path).close()
    assert sorted(tmp_path.iterdir()) == sorted(own)


def test_two_runs_share_a_folder(tmp_path: Path) -> None:
    first = DiskTier(tmp_path)
    parked = first.park(noise(9 * PAGE, 1))
    second = DiskTier(tmp_path)
    other = second.park(noise(9 * PAGE, 2))
    assert torch.equal(back(first, parked), noise(9 * PAGE, 1))
    assert torch.equal(back(second, other), noise(9 * PAGE, 2))
    second.close()
    first.close()


def test_a_name_that_another_run_swept_away_is_no_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = diskfile.tempfile.mkstemp

    def swept(*arguments: Any) -> tuple[int, str]:
        made = real(*arguments)
        assert diskfile.remove_leftovers(tmp_path) == 1
        return made

    monkeypatch.setattr(diskfile.tempfile, "mkstemp", swept)
    tier = DiskTier(tmp_path)
    parked = tier.park(noise(9))
    assert torch.equal(back(tier, parked), noise(9))
    tier.close()


def test_what_was_dropped_cannot_be_recalled(tier: DiskTier) -> None:
    parked = tier.park(noise(PAGE))
    tier.drop(parked)
    tier.drop(parked)
    with pytest.raises(RuntimeError, match="dropped before"):
        tier.recall(parked, torch.zeros(PAGE, dtype=torch.uint8))


def test_a_recall_that_was_asked_for_comes_though_its_place_is_dropped(tier: DiskTier) -> None:
    """Asked and dropped at once, a hundred times: the place goes after the last piece, not before."""
    for seed in range(100):
        parked = tier.park(noise(5 * PAGE, seed))
        into = torch.zeros(5 * PAGE, dtype=torch.uint8)
        future = tier.recall(parked, into)
        tier.drop(parked)
        later = tier.park(noise(5 * PAGE, 1000 + seed))
        future.result(10)
        assert torch.equal(into, noise(5 * PAGE, seed))
        tier.drop(later)
    tier.discard()
    assert tier.stats().used == 0


# Speed


def test_speed_is_measured_on_real_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = {"pwritev": 0, "preadv": 0}
    for name in moved:
        real = getattr(os, name)

        def count(file: int, buffers: list[Any], offset: int, real: Any = real, name: str = name) -> int:
            done = real(file, buffers, offset)
            moved[name] += done
            return done

        monkeypatch.setattr(os, name, count)
    monkeypatch.setattr(diskspeed, "_BLOCK", 2**20)
    monkeypatch.setattr(disk, "PIECE", 2**18)
    began = time.perf_counter()
    speed = measure(tmp_path, bytes=5 * 2**20, threads=2)
    seconds = time.perf_counter() - began
    assert moved["preadv"] == 5 * 2**20
    assert moved["pwritev"] == 5 * 2**20 + (PAGE if hasattr(os, "O_DIRECT") else 0)
    assert min(speed.write_bytes_per_second, speed.read_bytes_per_second) > 5 * 2**20 / seconds
    assert list(tmp_path.iterdir()) == []


def test_a_measurement_needs_room_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a folder"):
        measure(tmp_path / "none")
    known = len(ours())
    with pytest.raises(UserError, match="its file system has"):
        measure(tmp_path, bytes=2**44)
    assert len(ours()) == known


def test_a_disk_that_keeps_up_costs_nothing() -> None:
    """8B at a million tokens: 309 GB in a step of half an hour."""
    assert check_speed(DiskSpeed(5 * GB, 5 * GB), 309 * GB, 1980, force=False) == 0


def test_a_slow_disk_is_refused_unless_forced() -> None:
    slow = DiskSpeed(0.4 * GB, 0.2 * GB)
    with pytest.raises(UserError) as caught:
        check_speed(slow, 309 * GB, 1980, force=False)
    sentence = str(caught.value)
    for part in ("309.0 GB", "0.40 GB/s", "0.20 GB/s", "33 min", "5 min 38 s", "17%", "allow_slow_disk: true", "10%"):
        assert part in sentence, sentence
    assert caught.value.option == "offload_folder"


@pytest.mark.parametrize(("gigabytes", "refused"), [(100, False), (174, False), (176, True)])
def test_a_tenth_is_the_bound(gigabytes: int, refused: bool) -> None:
    """100 s forward, 300 s backward; at 1.25 GB/s out, 40 s of waiting are 175 GB; 2 GB/s in are never late."""
    speed, size = DiskSpeed(1.25 * GB, 2 * GB), gigabytes * GB
    if refused:
        with pytest.raises(UserError, match="too slow"):
            check_speed(speed, size, 400, force=False)
    assert check_speed(speed, size, 400, force=refused) == pytest.approx(max(gigabytes / 1.25 - 100, 0))


def test_what_is_forgotten_gives_its_place_back(tier: DiskTier) -> None:
    for seed in range(20):
        parked = tier.park(noise(3 * PAGE, seed))
        parked.stored().result(10)
        del parked
        gc.collect(0)
    assert tier.stats().file_bytes == 3 * PAGE
    tier.park(noise(5 * PAGE)).stored().result(10)
    assert tier.stats().file_bytes == 5 * PAGE, "the free end of the file is continued"
