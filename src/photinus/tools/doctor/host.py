"""Processors, memory and limits of this host: whether the engine finds what it needs."""

from __future__ import annotations

import os
import platform
import resource
import socket
from pathlib import Path

from ...job.own_address import interfaces
from ...run.local.cgroup import cpu_quota_cores, memory_limit, text_of
from ...run.local.devices import usable_cores
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


_NETWORK = "Network"
_VIRTUAL = ("lo", "docker", "veth", "br-", "virbr", "ifb", "dummy", "tun", "tap", "cni", "flannel", "cali")


def look_at_network(root: Path = Path("/")) -> list[Finding]:
    """All findings of the network. `root` is where /sys and /proc are looked for (for tests)."""
    return [_loopback(), *_interfaces(root), _own_name(), _congestion(root), _rdma(root)]


def _loopback() -> Finding:
    """Workers of one host meet over 127.0.0.1."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            with socket.create_connection(server.getsockname(), timeout=2) as client, server.accept()[0] as accepted:
                client.sendall(b"x")
                assert accepted.recv(1) == b"x"
    except OSError as error:
        advice = "Workers of one host meet there. Bring it up (ip link set lo up), or let the firewall pass it."
        return assess(_NETWORK, "loopback", f"127.0.0.1 cannot be reached: {error.strerror or error}", bad=advice)
    return assess(_NETWORK, "loopback", "127.0.0.1 answers")


def _interfaces(root: Path) -> list[Finding]:
    found: list[Finding] = []
    addresses = {name: str(address) for name, address, _ in reversed(interfaces())}  # IPv4 before IPv6
    for folder in sorted((root / "sys/class/net").glob("*")):
        if folder.name.startswith(_VIRTUAL):
            continue
        address, speed = addresses.get(folder.name, ""), text_of(folder / "speed").strip()
        up = text_of(folder / "operstate").strip() in ("up", "unknown")
        parts = [address or "no address", "up" if up else "down"]
        if speed.lstrip("-").isdigit() and int(speed) > 0:
            parts.append(f"{int(speed) / 1000:g} Gbit/s")
        facts = {"address": address, "up": up, "speed_mbit": speed, "mtu": text_of(folder / "mtu").strip()}
        state = "good" if up and address else "absent"
        found.append(Finding(_NETWORK, folder.name, state, ", ".join(parts), facts=facts))
    return found or [Finding(_NETWORK, "interfaces", "absent", "none but loopback: this host cannot meet others")]


def _own_name() -> Finding:
    """gloo and torch look up the host's own name; where it does not resolve, gloo fails or listens elsewhere."""
    name = socket.gethostname()
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET)})
    except OSError as error:
        advice = "One host needs nothing: `photinus run` sets GLOO_SOCKET_IFNAME=lo. For several, name the interface "
        advice += "(GLOO_SOCKET_IFNAME=eth0) or add the name to /etc/hosts."
        return assess(_NETWORK, "host name", f"{name} does not resolve: {error.strerror}", note=advice)
    value = f"{name} is {', '.join(addresses)}"
    if all(address.startswith("127.") for address in addresses):
        advice = "Several hosts over gloo: set GLOO_SOCKET_IFNAME to the interface between them."
        return assess(_NETWORK, "host name", f"{value}, which other hosts cannot reach", note=advice)
    return assess(_NETWORK, "host name", value)


def _congestion(root: Path) -> Finding:
    control = text_of(root / "proc/sys/net/ipv4/tcp_congestion_control").strip()
    if control == "bbr":
        value = "bbr, which paces traffic inside the host too and slows gloo by a third or so"
        advice = "sysctl -w net.ipv4.tcp_congestion_control=reno (or cubic), unless the hosts are far apart."
        return assess(_NETWORK, "TCP congestion", value, note=advice)
    return Finding(_NETWORK, "TCP congestion", "good" if control else "absent", control or "not told by the kernel")


def _rdma(root: Path) -> Finding:
    devices = sorted(folder.name for folder in (root / "sys/class/infiniband").glob("*"))
    if devices:
        return Finding(_NETWORK, "RDMA", "good", ", ".join(devices), facts={"devices": devices})
    return Finding(_NETWORK, "RDMA", "absent", "no InfiniBand or RoCE device; hosts meet over TCP")
