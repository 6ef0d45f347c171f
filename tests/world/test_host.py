"""The host memory of this process, read from made-up files."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megaspan import world

GIB = 2**30


@pytest.fixture
def host(tmp_path):
    """A made-up /proc and /sys/fs/cgroup: give the lines of /proc/self/cgroup and the limits by path."""

    def make(groups: str, limits: dict[str, str], total_kb: int = 24 * 2**20):
        proc, tree = tmp_path / "proc", tmp_path / "cgroup"
        (proc / "self").mkdir(parents=True)
        (proc / "self" / "cgroup").write_text(groups)
        (proc / "meminfo").write_text(f"MemTotal:       {total_kb} kB\nMemFree: 1 kB\n")
        tree.mkdir()
        for path, text in limits.items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_text(text + "\n")
        return proc, tree

    return make


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/job/step", {"job/step/memory.max": str(8 * GIB), "job/memory.max": "max"}, 8 * GIB),
        ("0::/job/step", {"job/step/memory.max": "max", "job/memory.max": str(4 * GIB)}, 4 * GIB),
        ("0::/a/container/of/the/host", {"memory.max": str(2 * GIB)}, 2 * GIB),
        ("0::/", {}, None),
        ("0::/job", {"job/memory.max": "max"}, None),
        ("4:memory:/job\n0::/", {"memory/job/memory.limit_in_bytes": str(3 * GIB)}, 3 * GIB),
        ("4:cpu,memory:/host/path", {"memory/memory.limit_in_bytes": str(3 * GIB)}, 3 * GIB),
        ("4:memory:/job", {"memory/job/memory.limit_in_bytes": "9223372036854771712"}, None),
        (
            "0::/job/step",
            {"job/step/memory.max": "max", "job/memory.high": str(5 * GIB), "job/memory.max": str(6 * GIB)},
            5 * GIB,
        ),
        (
            "0::/a/b/c",
            {"a/memory.max": str(7 * GIB), "a/b/memory.max": str(3 * GIB), "a/b/c/memory.max": str(9 * GIB)},
            3 * GIB,
        ),
        ("3:memory:/a/b\n1:name=systemd:/a\n0::/", {"memory/a/memory.limit_in_bytes": str(2 * GIB)}, 2 * GIB),
        (
            "4:memory:/host/path",
            {
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.stat": f"cache 1\nhierarchical_memory_limit {2 * GIB}\nhierarchical_memsw_limit 1",
            },
            2 * GIB,
        ),
    ],
)
def test_the_limit_of_the_control_group_is_found(host, groups, limits, expected):
    proc, tree = host(groups, limits)
    assert world.cgroup_limit(proc, tree) == expected


def test_the_control_group_comes_before_the_size_of_the_machine(host):
    """MemTotal grows with use on some machines, so it is only asked where there is no limit, and never caps one."""
    proc, tree = host("0::/job", {"job/memory.max": str(100 * GIB)})
    assert world.host_limit(proc, tree) == (95 * GIB, "95% of the cgroup limit, which is above MemTotal")
    (tree / "job" / "memory.max").write_text(str(10 * GIB))
    assert world.host_limit(proc, tree) == (9.5 * GIB, "95% of the cgroup limit")
    (tree / "job" / "memory.max").write_text("max")
    assert world.host_limit(proc, tree) == (int(24 * GIB * 0.95), "95% of MemTotal")


def test_without_any_of_these_files_there_is_still_a_number(tmp_path):
    assert world.host_limit(tmp_path, tmp_path)[0] > 0


def test_the_machine_is_described_without_torch():
    code = "import sys; from megaspan import world; m = world.machine(); print(m.cores, m.host_bytes, 'torch' in sys.modules)"
    cores, host_bytes, torch = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert int(cores) >= 1
    assert int(host_bytes) > GIB // 4
    assert torch == "False"


def test_peak_host_memory_grows_with_use():
    before = world.peak_host_bytes()
    block = bytearray(64 * 2**20)
    assert world.peak_host_bytes() >= before
    assert world.peak_host_bytes() > len(block) // 2


def test_the_machine_says_where_its_host_memory_came_from():
    assert world.machine().host_source == world.host_limit()[1]
