"""What a run ran on, for its config.json: processor, memory, GPU. A few files are read; nothing is measured."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

__all__ = ["describe_machine"]


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Facts of this host; those that cannot be found out are left out.

    Returns:
        "processor" (its name), "cores" (usable by this process), "memory_bytes" (of the machine), "system", and for a
        CUDA device "gpu" (its name), "gpus" (how many are visible) and "gpu_memory_bytes" (of one).
    """
    facts: dict[str, Any] = {"system": f"{platform.system()} {platform.release()}"}
    model = _first("/proc/cpuinfo", "model name") or platform.machine()
    facts["processor"] = " ".join(model.split())
    facts["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = _first("/proc/meminfo", "MemTotal")
    if memory and memory.split()[0].isdigit():
        facts["memory_bytes"] = int(memory.split()[0]) * 1024
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": properties.name,
            "gpus": torch.cuda.device_count(),
            "gpu_memory_bytes": properties.total_memory,
        }
    return facts


def _first(path: str, name: str) -> str:
    """The value of the first line `name : value` of a file, "" when there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                key, colon, value = line.partition(":")
                if colon and key.strip() == name:
                    return value.strip()
    except OSError:
        pass
    return ""
