"""The machine and the launcher, read from made-up files and environments; the allocator on the GPU."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from megaspan import world
from megaspan.human import UserError
from megaspan.plan.facts import Machine

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
    assert world.host_limit(proc, tree) == (100 * GIB, "cgroup limit, above MemTotal")
    (tree / "job" / "memory.max").write_text(str(10 * GIB))
    assert world.host_limit(proc, tree) == (10 * GIB, "cgroup limit")
    (tree / "job" / "memory.max").write_text("max")
    assert world.host_limit(proc, tree) == (24 * GIB, "MemTotal")


def test_without_any_of_these_files_there_is_still_a_number(tmp_path):
    assert world.host_limit(tmp_path, tmp_path)[0] > 0


@pytest.mark.parametrize(
    ("visible", "names"),
    [(None, "abc"), ("1", "b"), ("2,0", "ca"), ("GPU-b", "b"), ("", ""), ("-1", ""), ("0,9,1", "a"), ("NoDevFiles", "")],
)
def test_visible_devices_are_counted_as_cuda_counts_them(visible, names):
    found = [(f"GPU-{name}", world.Gpu(name, GIB, "1")) for name in "abc"]
    assert "".join(gpu.name for gpu in world._visible(found, visible)) == names


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        ({}, world.Launch("python", 0, 1, 0)),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, world.Launch("torchrun", 3, 8, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1", "ACCELERATE_MIXED_PRECISION": "bf16"}, world.Launch("accelerate launch", 0, 1, 0)),
    ],
)
def test_the_launcher_is_recognised(environ, launch):
    assert world.launch(environ) == launch


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"RANK": "0", "WORLD_SIZE": "8"}, "torchrun started 8 processes"),
        ({"PARALLELISM_CONFIG_CP_SIZE": "8", "ACCELERATE_X": "1"}, "accelerate launch asks for cp_size 8"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "mixed_precision: bf16"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "gradient_accumulation_steps"),
    ],
)
def test_what_this_version_does_not_do_is_refused(environ, sentence):
    with pytest.raises(UserError, match=sentence):
        world.refuse_launch(environ)


def test_one_process_of_any_launcher_passes():
    world.refuse_launch({})
    world.refuse_launch({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    world.refuse_launch(
        {
            "ACCELERATE_MIXED_PRECISION": "bf16",
            "ACCELERATE_USE_FSDP": "true",
            "PARALLELISM_CONFIG_CP_SIZE": "1",
            "ACCELERATE_DYNAMO_BACKEND": "no",
        }
    )


def test_what_accelerate_launch_really_sets_for_one_process_passes(tmp_path):
    """The names in the environment are those of the installed accelerate, not of our memory of it."""
    script = tmp_path / "script.py"
    script.write_text("from megaspan import world\nworld.refuse_launch()\nprint(world.launch().by)\n")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--cpu", "--mixed_precision"]
    passed = subprocess.run([*command, "bf16", str(script)], capture_output=True, text=True, check=True)
    assert "accelerate launch" in passed.stdout
    refused = subprocess.run([*command, "fp16", str(script)], capture_output=True, text=True, check=False)
    assert "ACCELERATE_MIXED_PRECISION" in refused.stderr


def test_the_machine_is_described_without_torch():
    code = "import sys; from megaspan import world; m = world.machine(); print(m.cores, m.host_bytes, 'torch' in sys.modules)"
    cores, host_bytes, torch = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert int(cores) >= 1
    assert int(host_bytes) > GIB // 4
    assert torch == "False"


def test_a_gpu_that_torch_cannot_use_is_no_silent_cpu_run(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(world, "gpus", lambda: [world.Gpu("NVIDIA H200", 140 * GIB, "570.1")])
    with pytest.raises(UserError, match=r"NVIDIA H200.*use_cpu: true"):
        world.device()
    assert world.device(use_cpu=True) == torch.device("cpu")


def test_peak_host_memory_grows_with_use():
    before = world.peak_host_bytes()
    block = bytearray(64 * 2**20)
    assert world.peak_host_bytes() >= before
    assert world.peak_host_bytes() > len(block) // 2


def test_versions_and_the_report_name_everything_a_bug_report_needs():
    report = world.environment_report()
    assert report["versions"]["torch"]
    assert set(world.PACKAGES) <= set(report["versions"])
    assert {
        "driver",
        "gpus",
        "cudnn",
        "cuda",
        "attention_kernels",
        "expandable_segments",
        "host_memory",
        "cgroup_limit",
        "locked_memory_limit",
    } <= set(report)


def test_no_gpu_leaves_the_environment_alone(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    environ: dict[str, str] = {}
    assert not world.set_allocator(environ).expandable
    assert environ == {}


def test_the_machine_says_where_its_host_memory_came_from():
    assert world.machine().host_source == world.host_limit()[1]


def test_one_process_agrees_with_itself():
    machine = Machine("CPU", 0, 7 * GIB, 3, "MemTotal")
    assert world.agree(machine) is machine
    world.same_everywhere("the plan", "abc")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(rank: int, port: int, size: int) -> None:
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=size)
    # Rank 1 has the smaller GPU, rank 0 the smaller host.
    mine = Machine(f"GPU {rank}", (80 - 40 * rank) * GIB, (64 + 100 * rank) * GIB, 16 - rank, f"limit of {rank}")
    assert world.agree(mine) == Machine("GPU 1", 40 * GIB, 32 * GIB, 7, "limit of 0, for each of 2 ranks")
    world._node = lambda: f"node {rank}"
    assert world.agree(mine) == Machine("GPU 1", 40 * GIB, 64 * GIB, 15, "limit of 0")
    for digest in ("", "abc", "a" * 300, "Größe"):
        world.same_everywhere("the plan", digest)
    for digest, words in (
        (f"{rank} way", r"the plan differs between ranks: rank 1 has 1 way, rank 0 has 0 way"),
        ("abcdef"[: 3 + rank], r"rank 1 has abcd, rank 0 has abc;"),
    ):
        with pytest.raises(UserError, match=words):
            world.same_everywhere("the plan", digest)
    dist.destroy_process_group()


def test_ranks_that_see_different_memory_agree():
    """Two ranks that plan from their own numbers run different sequences of collectives, and hang. On one node and on two."""
    import torch.multiprocessing as mp

    mp.spawn(_rank, (_free_port(), 2), nprocs=2)


@pytest.mark.parametrize(
    ("said", "odd"),
    [
        ("aab", "rank 2 has b, rank 0 has a"),
        ("baa", "rank 0 has b, rank 1 has a"),
        ("abcdefg", "rank 4 has e, …, rank 0 has a"),
    ],
)
def test_the_rank_that_differs_is_named(monkeypatch, said, odd):
    import torch.distributed as dist

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: len(said))
    monkeypatch.setattr(world, "_everywhere", lambda text: list(said))
    with pytest.raises(UserError, match=odd):
        world.same_everywhere("the order of gathers", "x")


ALLOCATE = """
import torch
from megaspan import world
{before}
setting = world.set_allocator()
torch.zeros(2**28, device="cuda")
print(world.allocator().expandable, world.allocator().reason, torch.cuda.memory_stats()["num_alloc_retries"])
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("environ", "before", "expected"),
    [
        ({}, "", "True set by megaspan"),
        ({}, "torch.zeros(1, device='cuda')", "True set by megaspan"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "", "False your own PYTORCH_CUDA_ALLOC_CONF"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}, "", "False your own PYTORCH_ALLOC_CONF"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "", "True"),
    ],
)
def test_the_live_allocator_has_the_setting(environ, before, expected):
    import os

    clean = {name: value for name, value in os.environ.items() if name not in world.ALLOCATOR_VARIABLES}
    code = ALLOCATE.format(before=before)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=clean | environ)
    assert ran.stdout.startswith(expected)


@pytest.mark.gpu
def test_the_driver_and_torch_see_the_same_gpus():
    import torch

    found = world.gpus()
    assert len(found) == torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(0)
    assert found[0].name == properties.name
    assert abs(found[0].total_bytes - properties.total_memory) < 2 * GIB
