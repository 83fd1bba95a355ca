"""Which run of mpiexec this process belongs to, where that is MPICH's or Intel's (Hydra), which does not say it."""

from __future__ import annotations

from pathlib import Path

_PROXY = "hydra_pmi_proxy"  # one on each host for each run of mpiexec, an ancestor of all that it starts there
_GENERATIONS = 64


def hydra_proxy(pid: int | str = "self", root: Path = Path("/proc")) -> int | None:
    """The process id of the proxy that started this process, alike for all ranks of its host; None without one."""
    for _ in range(_GENERATIONS):
        try:
            stat = (root / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # /proc is not there, or hides other users' processes
            return None
        number, _, rest = stat.partition(" (")
        name, _, fields = rest.rpartition(") ")
        if name == _PROXY:
            return int(number)
        pid = int(fields.split()[1])
        if pid <= 1:
            return None
    return None
