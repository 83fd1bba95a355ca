"""Read this process's control group from the kernel, versions 1 and 2: CPU quota, memory limit, kills."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT = 2**60  # version 1 writes "no limit" as a number near 2**63


@dataclass(frozen=True)
class OomKills:
    """Number of kills by the out-of-memory killer so far, and the place of the count."""

    count: int
    place: str
    limit_bytes: int | None = None


def cpu_quota_cores(root: Path = Path("/")) -> float | None:
    """The tightest CPU quota of this control group and those around it, in cores; None when there is none."""
    quotas = []
    for folder in _folders("cpu", root):
        version_2 = text_of(folder / "cpu.max").split()
        if len(version_2) == 2 and version_2[0] != "max":
            quotas.append(int(version_2[0]) / int(version_2[1]))
        quota_us, period_us = (text_of(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota_us and period_us and int(quota_us) > 0:
            quotas.append(int(quota_us) / int(period_us))
    return min(quotas, default=None)


def memory_limit(root: Path = Path("/")) -> int | None:
    """The tightest memory limit of this control group and those around it, in bytes; None when there is none."""
    limits = []
    for folder in _folders("memory", root):
        limits += [_limit_bytes(folder / name) for name in ("memory.max", "memory.limit_in_bytes")]
    return min((limit for limit in limits if limit is not None), default=None)


def free_memory(root: Path = Path("/")) -> int:
    """Return how many bytes this process can still take: of the machine, and of this control group and those around."""
    free = [(_field(text_of(root / "proc/meminfo").replace(":", "").replace(" kB", ""), "MemAvailable") or 0) << 10]
    for folder in _folders("memory", root):
        for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            most = _limit_bytes(folder / limit)
            if most is not None:  # pages of files that nobody uses make room
                statistics = text_of(folder / "memory.stat")
                idle = _field(statistics, "total_inactive_file") or _field(statistics, "inactive_file") or 0
                free.append(most - (_limit_bytes(folder / usage) or 0) + idle)
    return max(0, min(free))


def oom_kills(root: Path = Path("/")) -> OomKills | None:
    """The counter of out-of-memory kills among the processes of this control group.

    A process of the root group has no such counter; then the whole machine's is read. None when the kernel says
    nothing at all.
    """
    own = next(_folders("memory", root), None)
    if own is not None:
        for name, limit in (("memory.events", "memory.max"), ("memory.oom_control", "memory.limit_in_bytes")):
            count = _field(text_of(own / name), "oom_kill")
            if count is not None:
                return OomKills(count, "this control group", _limit_bytes(own / limit))
    count = _field(text_of(root / "proc/vmstat"), "oom_kill")
    return None if count is None else OomKills(count, "this machine")


def oom_since(before: OomKills | None, root: Path = Path("/")) -> str:
    """Describe the kills since then, and their place; "" if there are none, or the count is unknown."""
    now = oom_kills(root)
    if before is None or now is None or now.count <= before.count:
        return ""
    struck = now.count - before.count
    limit = f" (memory limit {now.limit_bytes / 2**20:.0f} MiB)" if now.limit_bytes else ""
    return f"it struck {'once' if struck == 1 else f'{struck} times'} in {now.place}{limit}"


def _folders(controller: str, root: Path) -> Iterator[Path]:
    """The folders of this process's control group and its parents, own first, for version 1 and then version 2."""
    mounts = list(_mounts(root))
    for line in text_of(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        version_2 = number == "0" and controllers == ""
        if not version_2 and controller not in controllers.split(","):
            continue
        for kind, options, mount_root, mount_point in mounts:
            if kind != ("cgroup2" if version_2 else "cgroup") or not (version_2 or controller in options):
                continue
            # In a container the mount may show only the part of the tree below `mount_root`.
            inside = path if mount_root == "/" else path.removeprefix(mount_root)
            top = root / mount_point.lstrip("/")
            folder = top / inside.lstrip("/")
            yield from (each for each in (folder, *folder.parents) if each.is_relative_to(top))


def _mounts(root: Path) -> Iterator[tuple[str, list[str], str, str]]:
    for line in text_of(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) >= 5 and len(rest) >= 3 and rest[0].startswith("cgroup"):
            yield rest[0], rest[2].split(","), fields[3], fields[4]


def _limit_bytes(path: Path) -> int | None:
    text = text_of(path).strip()
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT else None


def _field(text: str, name: str) -> int | None:
    for line in text.splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == name:
            return int(words[1])
    return None


def text_of(path: Path) -> str:
    """The text of a file in /proc or /sys; "" where it is absent, on this kernel or at all, or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")  # paths of mounts may be in any encoding
    except OSError:
        return ""
