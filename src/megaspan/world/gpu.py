"""The GPUs of this process, asked through the driver without loading torch, and torch's allocator on them.

Expandable segments are on before the first CUDA allocation: fixed segments fragment until a step of a million tokens fails
with tens of GiB free.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"


@dataclass(frozen=True)
class Gpu:
    """One GPU as its driver describes it."""

    name: str
    total_bytes: int
    driver: str


@dataclass(frozen=True)
class Allocator:
    """The setting of torch's CUDA allocator, as the live allocator has it."""

    expandable: bool
    reason: str


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
