"""How busy this host is, and how long something may take here before it counts as broken."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..workers.devices import usable_cores
from .finding import Finding

__all__ = ["LATE", "Load", "finding_if_busy", "look_at_load", "read_load"]

LATE = "no answer within {:g} s"

_BUSY = 1.5
_MOST_PATIENT = 5.0


@dataclass(frozen=True)
class Load:
    """How many threads want to compute (the average of the last minute, or those of now if more), on how many cores."""

    threads: float
    cores: int

    @property
    def is_busy(self) -> bool:
        """Whether what is tried now gets clearly less than a core of its own."""
        return self.threads > _BUSY * self.cores

    def allow(self, timeout_s: float) -> float:
        """What a deadline for a quiet host comes to here: longer where cores are shared, up to five times."""
        return timeout_s * min(max(1.0, self.threads / self.cores), _MOST_PATIENT)

    def __str__(self) -> str:
        return f"load {self.threads:.1f} on {self.cores} usable core{'s' * (self.cores != 1)}"


def read_load(root: Path = Path("/")) -> Load:
    """The load as the kernel tells it. `root` is where /proc is looked for (for tests)."""
    try:
        words = (root / "proc/loadavg").read_text().split()
    except OSError:  # a sandbox without it
        return Load(os.getloadavg()[0], usable_cores())
    computing_now = int(words[3].split("/")[0]) - 1  # this process reads it just now
    return Load(max(float(words[0]), computing_now), usable_cores())


def look_at_load(load: Load) -> Finding:
    """The load, and what it does to all that is tried and measured."""
    if not load.is_busy:
        return Finding("This host", "load", "good", f"{load.threads:.1f}")
    advice = "The machine is busy: what is tried gets more time, and the speeds below are those of a busy machine."
    return Finding("This host", "load", "note", str(load), advice, {"threads": load.threads, "cores": load.cores})


def finding_if_busy(section: str, name: str, error: str) -> Finding | None:
    """The finding of something that was late, where the host is too busy to blame it; None where it is not."""
    load = read_load()
    if not load.is_busy or not error.startswith(LATE.split("{")[0]):
        return None
    advice = "Run it again when the machine is quiet, or with --timeout and more seconds."
    return Finding(section, name, "unknown", f"not judged: {load}; {error}", advice)
