"""The process and its machine: device, memory limits, allocator, launcher. The only file that reads the environment.

At a million tokens the limits decide: layer inputs of Qwen3-8B are 309 GB of host memory, and a container's limit, not the
size of the machine, says whether they fit. So the limit of the control group comes before MemTotal (which on some machines
grows with use), the GPU is asked through its driver without loading torch, and expandable segments are on before the first CUDA
allocation, because fixed segments fragment until a 1M-token step fails with tens of GiB free.

Several ranks plan for the weakest of them: each decides from the same numbers (`agree`), and before the first step they compare
what they decided (`same_everywhere`), since two ranks with different plans wait for each other for ever.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import resource
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaspan.human import UserError, format_bytes
from megaspan.plan.facts import Machine

if TYPE_CHECKING:
    import torch

PACKAGES = (
    "megaspan", "torch", "transformers", "accelerate", "datasets", "peft", "flash-attn-4", "safetensors", "numpy", "trl",
)  # fmt: skip
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"
_NO_LIMIT = 1 << 60  # control groups of version 1 write a number near 2**63 for "none"


@dataclass(frozen=True)
class Gpu:
    """One GPU as its driver describes it."""

    name: str
    total_bytes: int
    driver: str


@dataclass(frozen=True)
class Launch:
    """How this process was started."""

    by: str
    rank: int
    world_size: int
    local_rank: int


@dataclass(frozen=True)
class Allocator:
    """The setting of torch's CUDA allocator, as the live allocator has it."""

    expandable: bool
    reason: str


def machine() -> Machine:
    """The device this process will use and the host memory it may use, without loading torch."""
    found = gpus()
    local = launch().local_rank
    gpu = found[min(local, len(found) - 1)] if found else None
    host_bytes, source = host_limit()
    return Machine(
        device_name=gpu.name if gpu else "CPU",
        device_bytes=gpu.total_bytes if gpu else 0,
        host_bytes=host_bytes,
        cores=cores(),
        host_source=source,
    )


def device(use_cpu: bool = False) -> torch.device:
    """The device of this process.

    Raises:
        UserError: there is a GPU, but the installed torch cannot use it; or this is one of several processes.
    """
    refuse_launch()
    if use_cpu:
        import torch

        return torch.device("cpu")
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", launch().local_rank)
    if found := gpus():
        built = torch.version.cuda
        why = (
            f"is built for CUDA {built}, which driver {found[0].driver} does not run" if built else "is built for the CPU only"
        )
        raise UserError(
            f"this machine has an {found[0].name}, but the installed torch {torch.__version__} {why}",
            do="Install a torch for this driver, or add use_cpu: true",
        )
    return torch.device("cpu")


# Host


def host_limit(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> tuple[int, str]:
    """Bytes of host memory this process may use, and where the number comes from. The user's `host_memory` goes before it.

    MemTotal does not cap the limit of a control group: on some machines it grows with use. The words say which of the two is
    more, for nobody can know whether that much will be there.
    """
    limit = cgroup_limit(proc, groups)
    total = next((int(line.split()[1]) * 1024 for line in _lines(proc / "meminfo") if line.startswith("MemTotal:")), None)
    if limit is not None:
        return limit, "cgroup limit" if total is None or limit <= total else "cgroup limit, above MemTotal"
    if total is not None:
        return total, "MemTotal"
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "physical pages"


def cgroup_limit(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The smallest memory limit of the control groups around this process, version 2 or 1; None where there is none.

    `memory.high` counts: pages that wait for the GPU or are pinned cannot be reclaimed, so a process above it all but stops.
    """
    limits: list[int] = []
    names: tuple[str, ...]
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = groups, ("memory.max", "memory.high")
        elif "memory" in controllers.split(","):
            root, names = groups / "memory", ("memory.limit_in_bytes",)
        else:
            continue
        folder = root / path.lstrip("/")
        # A container often sees its own group as the root of the mount, while the path is the host's: look at both.
        for place in {folder, *(parent for parent in folder.parents if parent == root or root in parent.parents), root}:
            texts = ["".join(_lines(place / name)).strip() for name in names]
            # Version 1 also says here what groups outside the container's view allow.
            texts += [
                line.split()[1] for line in _lines(place / "memory.stat") if line.startswith("hierarchical_memory_limit ")
            ]
            limits += [int(text) for text in texts if text.isdigit() and int(text) < _NO_LIMIT]
    return min(limits, default=None)


def memlock_limit() -> int | None:
    """Bytes that this process may lock in memory, or None for no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def cores() -> int:
    """CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peak_host_bytes() -> int:
    """The most host memory that this process has held resident."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except OSError:
        return []


# GPU


class _Memory(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint), ("total", ctypes.c_ulonglong), ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong),
    ]  # fmt: skip


def gpus(environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """The NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves to this process, asked through the driver's management library."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2() != 0:
        return []
    try:
        return _ask(nvml, environ.get("CUDA_VISIBLE_DEVICES"))
    finally:
        nvml.nvmlShutdown()


def _ask(nvml: Any, visible: str | None) -> list[Gpu]:
    count = ctypes.c_uint()
    text = ctypes.create_string_buffer(96)
    driver = "unknown"
    if nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(96)) == 0:
        driver = text.value.decode()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    found: list[tuple[str, Gpu]] = []
    for index in range(count.value):
        handle = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
            continue
        nvml.nvmlDeviceGetName(handle, text, ctypes.c_uint(96))
        name = text.value.decode()
        uuid = text.value.decode() if nvml.nvmlDeviceGetUUID(handle, text, ctypes.c_uint(96)) == 0 else ""
        memory = _Memory(version=ctypes.sizeof(_Memory) | 2 << 24)
        nvml.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(memory))
        found.append((uuid, Gpu(name, memory.total - memory.reserved, driver)))
    return _visible(found, visible)


def _visible(found: list[tuple[str, Gpu]], visible: str | None) -> list[Gpu]:
    """Applies CUDA_VISIBLE_DEVICES as CUDA does: numbers or the beginnings of UUIDs, up to the first that is neither."""
    if visible is None:
        return [gpu for _, gpu in found]
    chosen: list[Gpu] = []
    for name in visible.split(","):
        name = name.strip()
        if name.isdigit() and int(name) < len(found):
            chosen.append(found[int(name)][1])
        elif name.startswith("GPU-") and (matches := [gpu for uuid, gpu in found if uuid.startswith(name)]):
            chosen.append(matches[0])
        else:
            break
    return chosen


def set_allocator(environ: Any = None) -> Allocator:
    """Turns expandable segments on before the first CUDA allocation; a user's own setting wins. Returns what then holds."""
    environ = os.environ if environ is None else environ
    own = next((name for name in ALLOCATOR_VARIABLES if environ.get(name) not in (None, EXPANDABLE)), None)
    import torch

    if own is None and torch.cuda.is_available():
        # For child processes by variable; for this one through torch, which may have read its environment already.
        environ[ALLOCATOR_VARIABLES[0]] = EXPANDABLE
        newest = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (newest or torch.cuda.memory._set_allocator_settings)(EXPANDABLE)
    return allocator(environ)


def allocator(environ: Any = None) -> Allocator:
    """Reads back whether the live allocator grows its segments."""
    environ = os.environ if environ is None else environ
    import torch

    if not torch.cuda.is_available():
        return Allocator(False, "no GPU")
    own = next((f"{name}={environ[name]}" for name in ALLOCATOR_VARIABLES if environ.get(name) not in (None, EXPANDABLE)), None)
    live = torch.cuda.memory._snapshot()["allocator_settings"]
    return Allocator(bool(live["expandable_segments"]), f"your own {own}" if own else "set by megaspan")


# Processes


def launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """How this process was started: torchrun, accelerate launch, or alone."""
    rank, size, local = (
        int(environ.get(name) or default) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    by = (
        "accelerate launch"
        if any(name.startswith("ACCELERATE_") for name in environ)
        else "torchrun"
        if "RANK" in environ
        else "python"
    )
    return Launch(by, rank, size, local)


def refuse_launch(environ: Mapping[str, str] = os.environ) -> None:
    """Refuses what a launcher asks for and this version does not do.

    Raises:
        UserError: more than one process, a parallel size above 1, or a precision or engine that megaspan has not.
    """
    started = launch(environ)
    if started.world_size > 1:
        raise UserError(
            f"{started.by} started {started.world_size} processes, but this version of megaspan trains on one device",
            do="Start one process: megaspan train CONFIG.yaml, or --num_processes 1",
        )
    for name in ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP"):
        size = environ.get(f"PARALLELISM_CONFIG_{name}_SIZE") or "1"
        if size not in ("1", "None"):
            raise UserError(
                f"{started.by} asks for {name.lower()}_size {size}, but this version of megaspan trains on one device",
                do=f"Remove parallelism_config_{name.lower()}_size from the launch file",
            )
    for name, neutral, do in (
        ("ACCELERATE_MIXED_PRECISION", ("no", "bf16"), "Write mixed_precision: bf16"),
        ("ACCELERATE_USE_DEEPSPEED", ("false",), "Remove the DeepSpeed section: nothing of it is needed"),
        ("ACCELERATE_USE_MEGATRON_LM", ("false",), "Remove the Megatron section"),
        ("ACCELERATE_DYNAMO_BACKEND", ("no",), "Remove the dynamo section"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", ("1",), "Write gradient_accumulation_steps in the options of the run"),
    ):
        value = environ.get(name, "")
        if value and value.lower() not in neutral:
            raise UserError(f"the launcher sets {name}, which megaspan does not follow", got=value, do=do)


def agree(machine: Machine) -> Machine:
    """What every rank can count on: the least device memory, and the least share of a node's host memory and cores.

    All ranks of an initialised process group (gloo or nccl) must call it, and all get the same. One rank gets `machine` back.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return machine
    facts = {name: getattr(machine, name) for name in ("device_name", "device_bytes", "host_bytes", "cores", "host_source")}
    said = [json.loads(text) for text in _everywhere(json.dumps(facts | {"node": _node()}))]
    ranks = Counter(each["node"] for each in said)
    weakest = min(said, key=lambda each: each["device_bytes"])
    tightest = min(said, key=lambda each: each["host_bytes"] // ranks[each["node"]])
    share = ranks[tightest["node"]]
    return Machine(
        device_name=weakest["device_name"],
        device_bytes=weakest["device_bytes"],
        host_bytes=tightest["host_bytes"] // share,
        cores=max(1, min(each["cores"] // ranks[each["node"]] for each in said)),
        host_source=f"{tightest['host_source']}, for each of {share} ranks" if share > 1 else tightest["host_source"],
    )


def same_everywhere(name: str, digest: str) -> None:
    """Compares a digest over all ranks, before the first step that would hang if they differed.

    Args:
        name: what the digest is of, in words that begin a sentence, such as "the plan".
        digest: any text, best a short one.

    Raises:
        UserError: on every rank, naming those that differ from most.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    said = _everywhere(digest)
    usual = Counter(said).most_common(1)[0][0]  # of two equally common ones, the lower rank's
    odd = [rank for rank, text in enumerate(said) if text != usual]
    if odd:
        others = ", ".join(f"rank {rank} has {said[rank][:16]}" for rank in odd[:4]) + ", …" * (len(odd) > 4)
        others += f", rank {said.index(usual)} has {usual[:16]}"
        raise UserError(
            f"{name} differs between ranks: {others}; they would wait for each other",
            do="Start every rank with the same options, files and package versions (megaspan env prints them)",
        )


def _node() -> str:
    """Names what shares one host memory: ranks of one boot of one machine that see the same host name (one container)."""
    boot = "".join(_lines(Path("/proc/sys/kernel/random/boot_id")))
    return hashlib.sha256(f"{boot} {platform.node()}".encode()).hexdigest()[:16]


def _everywhere(text: str) -> list[str]:
    """Every rank's text, in order of rank. Bytes in tensors: torch's own exchange of objects would unpickle them."""
    import torch
    import torch.distributed as dist

    on_host = "cpu:" in str(dist.get_backend_config())
    device = torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device))
    lengths = [int(size) for size in sizes]
    mine = torch.zeros(max(*lengths, 1), dtype=torch.uint8, device=device)
    mine[: len(data)] = data.to(device)
    texts = [torch.empty_like(mine) for _ in lengths]
    dist.all_gather(texts, mine)
    return [bytes(each[:length].tolist()).decode() for each, length in zip(texts, lengths, strict=True)]


# Reports


def versions() -> dict[str, str | None]:
    """Installed versions of the packages that shape a result; None where one is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def environment_report() -> dict[str, Any]:
    """Everything a bug report needs: versions, driver, kernels, memory and its limits."""
    import torch

    cuda = torch.cuda.is_available()
    setting = set_allocator()
    limit, source = host_limit()
    group, memlock = cgroup_limit(), memlock_limit()
    found = gpus()
    return {
        "versions": versions(),
        "platform": platform.platform(),
        "launcher": launch().by,
        "cores": cores(),
        "driver": found[0].driver if found else None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "gpus": [{"name": gpu.name, "memory": format_bytes(gpu.total_bytes)} for gpu in found],
        "torch_uses_gpu": cuda,
        "attention_kernels": _kernels(cuda),
        "expandable_segments": f"{'on' if setting.expandable else 'off'} ({setting.reason})",
        "host_memory": f"{format_bytes(limit)} ({source})",
        "cgroup_limit": format_bytes(group) if group is not None else "none",
        "locked_memory_limit": format_bytes(memlock) if memlock is not None else "none",
    }


def _kernels(cuda: bool) -> dict[str, str]:
    """Which attention kernels can be imported here, in words."""
    import torch

    flash = "not installed: pip install 'megaspan[flash]'"
    if util.find_spec("flash_attn") is not None and util.find_spec("flash_attn.cute") is not None:
        try:
            __import__("flash_attn.cute")
            flash = "ready" if cuda else "importable, but there is no GPU"
        except Exception as error:
            flash = f"installed, but its import fails: {type(error).__name__}: {error}"
    return {
        "flash-attn-4": flash,
        "cudnn": "ready" if cuda and torch.backends.cudnn.is_available() else "needs a GPU",
        "flash-attn-2 in torch": "ready" if cuda and torch.backends.cuda.is_flash_attention_available() else "needs a GPU",
        "cpu": "ready",
    }
