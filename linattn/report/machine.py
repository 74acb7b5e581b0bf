"""Description of the machine on which a report's figures were measured."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import linattn


def machine() -> dict:
    """Processor, accelerator (None: none), cores, threads of torch, memory in bytes (None where unknown), system and versions."""
    return {
        "cpu": _processor(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": _memory(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "linattn": linattn.__version__,
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine() or "unknown"


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None  # Windows


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
