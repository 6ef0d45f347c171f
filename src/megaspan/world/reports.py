"""What a bug report needs: versions, driver, kernels, memory and its limits."""

from __future__ import annotations

import platform
from importlib import metadata, util
from typing import Any

from megaspan.human import format_bytes
from megaspan.world.gpu import gpus, set_allocator
from megaspan.world.host import cgroup_limit, cores, host_limit, memlock_limit
from megaspan.world.kernelcache import keep_kernels
from megaspan.world.launched import launch

PACKAGES = (
    "megaspan", "torch", "transformers", "accelerate", "datasets", "peft", "flash-attn-4", "safetensors", "numpy", "trl",
)  # fmt: skip


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
    setting, kept = set_allocator(), keep_kernels() if cuda else "none: there is no GPU"
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
        "compiled_kernels": kept,
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
