"""Processors, memory, limits and the name of this host: whether workers find what they need."""

from __future__ import annotations

import os
import platform
import resource
import socket
from pathlib import Path

from ...job.cgroup import cpu_quota_cores, memory_limit, text_of
from ...process_memory import huge_pages
from ...run.local.devices import usable_cores
from ...runlog.units import size
from .finding import Finding, assess

_SECTION = "This host"
# A rank has connections to ranks of other hosts, and pipes to each DataLoader worker.
_FEW_FILES = 1024
_LITTLE_MEMORY_BYTES, _LITTLE_SHM_BYTES = 2 << 30, 512 << 20


def look_at_host(root: Path = Path("/")) -> list[Finding]:
    """Return all findings of this host. `root` is where /proc and /sys are (for tests)."""
    return [_system(root), _processors(root), _memory(root), _pages(root), _memfd(), _dev_shm(root), _files(), _name()]


def _system(root: Path) -> Finding:
    name = platform.freedesktop_os_release().get("PRETTY_NAME", "") if (root / "etc/os-release").exists() else ""
    inside = " in a container" if any((root / mark).exists() for mark in (".dockerenv", "run/.containerenv")) else ""
    value = f"{platform.system()} {platform.release()}, {platform.machine()}{inside}" + (f" ({name})" if name else "")
    wrong = "" if platform.system() == "Linux" else "Photinus runs on Linux only."
    return assess(_SECTION, "system", value, bad=wrong)


def _processors(root: Path) -> Finding:
    present, allowed = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    quota, usable = cpu_quota_cores(root), usable_cores()
    model = _values(root / "proc/cpuinfo").get("model name", "")
    value = f"{usable} usable core{'s' * (usable != 1)} of {present}" + (f" ({model})" if model else "")
    value += f"; affinity allows {allowed}" if allowed < present else ""
    value += f"; the control group allows {quota:g}" if quota is not None else ""
    facts = {"present": present, "affinity": allowed, "quota": quota, "usable": usable}
    advice = "Processes beyond the quota are stopped for parts of each 100 ms; start no more workers than it allows."
    note = advice if quota is not None and quota < allowed else ""
    return assess(_SECTION, "processors", value, note=note, facts=facts)


def _memory(root: Path) -> Finding:
    meminfo = _values(root / "proc/meminfo")
    total, available = (int(meminfo.get(name, "0 kB").split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    limit = memory_limit(root)
    value = f"{size(total)}, {size(available)} available"
    if limit is not None and limit < total:
        value += f"; the control group allows {size(limit)}"
        available = min(available, limit)
    facts = {"total_bytes": total, "available_bytes": available, "limit_bytes": limit}
    advice = "A worker takes some 400 MB before the model is there. End other programs or raise the limit."
    return assess(_SECTION, "memory", value, bad=advice if available < _LITTLE_MEMORY_BYTES else "", facts=facts)


def _pages(root: Path) -> Finding:
    value = {"always": "for all memory", "madvise": "for torch's large CPU tensors"}.get(huge_pages(root), "off")
    advice = "Steps on CPUs take more time without. As root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    return assess(_SECTION, "huge pages", value, note=advice if value == "off" else "")


def _memfd() -> Finding:
    try:  # the engine's memory: a file without a name, passed between processes by descriptor
        with open(os.memfd_create("photinus-doctor"), "wb") as file:
            file.write(bytes(1 << 20))
    except OSError as error:
        advice = "The engine needs memfd_create, which a container's seccomp profile may forbid, and memory for it."
        return assess(_SECTION, "memfd", f"a memfd cannot be made and written: {error.strerror}", bad=advice)
    return assess(_SECTION, "memfd", "shared memory without names: the engine works whatever /dev/shm holds")


def _dev_shm(root: Path) -> Finding:
    try:
        stat = os.statvfs(root / "dev/shm")
    except OSError as error:
        advice = "The engine does without, but DataLoader workers and NCCL use it; mount a tmpfs there."
        return assess(_SECTION, "/dev/shm", f"not there ({error.strerror})", note=advice)
    whole, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    advice = "The engine does not use it, but DataLoader workers pass batches through it and die with a bus error when "
    advice += "it is full. In Docker: --shm-size 8g, or --ipc host."
    note, facts = advice if free < _LITTLE_SHM_BYTES else "", {"bytes": whole, "free_bytes": free}
    return assess(_SECTION, "/dev/shm", f"{size(whole)}, {size(free)} free", note=note, facts=facts)


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    names = ["unlimited" if limit == resource.RLIM_INFINITY else str(limit) for limit in (soft, hard)]
    advice = f"A worker holds some files for each other rank and each DataLoader worker: ulimit -n {names[1]}."
    bad = advice if soft != resource.RLIM_INFINITY and soft < _FEW_FILES else ""
    value = f"{names[0]} (up to {names[1]} on request)"
    return assess(_SECTION, "open files", value, bad=bad, facts={"soft": soft, "hard": hard})


def _name() -> Finding:
    # gloo and torch look up the host's own name: if it does not resolve, gloo fails or listens elsewhere.
    name = socket.gethostname()
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET)})
    except OSError as error:
        advice = "One host needs nothing: `photinus run` sets GLOO_SOCKET_IFNAME=lo. For several, name the interface "
        advice += "(GLOO_SOCKET_IFNAME=eth0) or add the name to /etc/hosts."
        return assess(_SECTION, "host name", f"{name} does not resolve: {error.strerror}", note=advice)
    value, note = f"{name} is {', '.join(addresses)}", ""
    if all(address.startswith("127.") for address in addresses):
        value += ", which other hosts cannot reach"
        note = "Several hosts over gloo: set GLOO_SOCKET_IFNAME to the interface between them."
    return assess(_SECTION, "host name", value, note=note)


def _values(path: Path) -> dict[str, str]:
    """Return a file of the kernel as names and values; of a name that comes often, the last."""
    pairs = (line.partition(":") for line in text_of(path).splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
