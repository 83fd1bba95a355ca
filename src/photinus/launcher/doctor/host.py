"""Processors, memory and limits of this host: whether the engine finds what it needs."""

from __future__ import annotations

import os
import platform
import resource
from pathlib import Path

from ..workers.cgroup import cpu_quota_cores, memory_limit, text_of
from ..workers.devices import usable_cores
from .finding import Finding, assess

_SECTION = "This host"
_FEW_FILES = 1024
_LITTLE_MEMORY_BYTES = 2 << 30


def look_at_host(root: Path = Path("/")) -> list[Finding]:
    """All findings of this host. `root` is where /proc and /sys are looked for (for tests)."""
    limits = [_files(), _locked_memory()]
    return [_system(root), _processors(root), _memory(root), _shared_memory(), _dev_shm(root), *limits]


def _system(root: Path) -> Finding:
    name = platform.freedesktop_os_release().get("PRETTY_NAME", "") if (root / "etc/os-release").exists() else ""
    inside = " in a container" if any((root / mark).exists() for mark in (".dockerenv", "run/.containerenv")) else ""
    value = f"{platform.system()} {platform.release()}, {platform.machine()}{inside}" + (f" ({name})" if name else "")
    wrong = "" if platform.system() == "Linux" else "Photinus runs on Linux only."
    return assess(_SECTION, "system", value, bad=wrong)


def _processors(root: Path) -> Finding:
    present, allowed = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    quota, usable = cpu_quota_cores(root), usable_cores()
    model = next((line.split(":", 1)[1].strip() for line in _lines(root / "proc/cpuinfo", "model name")), "")
    nodes = len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or 1
    parts = [f"{usable} usable core{'s' * (usable != 1)} of {present}" + (f" ({model})" if model else "")]
    if allowed < present:
        parts.append(f"affinity allows {allowed}")
    if quota is not None:
        parts.append(f"the control group allows {quota:g}")
    if nodes > 1:
        parts.append(f"{nodes} NUMA nodes")
    facts = {"present": present, "affinity": allowed, "quota": quota, "usable": usable, "numa_nodes": nodes}
    advice = "Processes beyond the quota are stopped for parts of each 100 ms; start no more workers than it allows."
    note = advice if quota is not None and quota < allowed else ""
    return assess(_SECTION, "processors", "; ".join(parts), note=note, facts=facts)


def _memory(root: Path) -> Finding:
    meminfo = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in _lines(root / "proc/meminfo", "Mem")}
    total, available = meminfo.get("MemTotal", 0), meminfo.get("MemAvailable", 0)
    limit = memory_limit(root)
    value = f"{_gib(total)}, {_gib(available)} available"
    if limit is not None and limit < total:
        value += f"; the control group allows {_gib(limit)}"
        available = min(available, limit)
    facts = {"total_bytes": total, "available_bytes": available, "limit_bytes": limit}
    advice = "A worker takes some 400 MB before the model is there. End other programs or raise the limit."
    return assess(_SECTION, "memory", value, bad=advice if available < _LITTLE_MEMORY_BYTES else "", facts=facts)


def _shared_memory() -> Finding:
    """The engine's memory is a memfd: a file without a name, passed between processes by descriptor."""
    try:
        descriptor = os.memfd_create("photinus-doctor")
    except OSError as error:
        advice = "The engine needs memfd_create; a container's seccomp profile may forbid it. Allow it there."
        return assess(_SECTION, "memfd", f"memfd_create fails: {error.strerror}", bad=advice)
    try:
        with open(descriptor, "wb") as file:
            file.write(bytes(1 << 20))
    except OSError as error:
        value = f"a memfd cannot be written: {error.strerror}"
        return assess(_SECTION, "memfd", value, bad="Raise the memory limit.")
    return assess(_SECTION, "memfd", "shared memory without names: the engine works whatever /dev/shm holds")


def _dev_shm(root: Path) -> Finding:
    try:
        stat = os.statvfs(root / "dev/shm")
    except OSError as error:
        advice = "The engine does without, but DataLoader workers and NCCL use it; mount a tmpfs there."
        return assess(_SECTION, "/dev/shm", f"not there ({error.strerror})", note=advice)
    size, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    advice = "The engine does not use it, but DataLoader workers pass batches through it and die with a bus error when "
    advice += "it is full. In Docker: --shm-size 8g, or --ipc host."
    note, facts = advice if free < 512 << 20 else "", {"bytes": size, "free_bytes": free}
    return assess(_SECTION, "/dev/shm", f"{_gib(size)}, {_gib(free)} free", note=note, facts=facts)


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"{_limit(soft)} (up to {_limit(hard)} on request)"
    advice = f"A worker holds some files for each other rank and each DataLoader worker: ulimit -n {hard}."
    bad = advice if soft != resource.RLIM_INFINITY and soft < _FEW_FILES else ""
    return assess(_SECTION, "open files", value, bad=bad, facts={"soft": soft, "hard": hard})


def _locked_memory() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    value = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
    advice = "RDMA registers memory, which counts as locked: ulimit -l unlimited, or memlock in limits.conf."
    bad = advice if soft != resource.RLIM_INFINITY and Path("/sys/class/infiniband").is_dir() else ""
    return assess(_SECTION, "locked memory", value, bad=bad, facts={"soft": soft, "hard": hard})


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"


def _lines(path: Path, start: str) -> list[str]:
    return [line for line in text_of(path).splitlines() if line.startswith(start)]
