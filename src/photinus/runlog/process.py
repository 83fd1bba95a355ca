"""Rank 0's process as a start describes it, and whether it still runs."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def this_process(pid: int | None = None) -> dict[str, Any]:
    """What tells this process (or that of a pid) from all others: the kernel's boot, namespace, pid and its start."""
    pid = os.getpid() if pid is None else pid
    return {"boot": boot_id(), "namespace": _namespace(), "pid": pid, "began": _began(pid)}


def is_alive(facts: Mapping[str, Any]) -> bool | None:
    """Whether the process that `this_process` described runs; None where that cannot be told from here."""
    if (facts.get("boot"), facts.get("namespace")) != (boot_id(), _namespace()):
        return None
    pid = facts.get("pid")
    return isinstance(pid, int) and pid > 0 and _began(pid) == facts.get("began") is not None


def boot_id() -> str:
    """The same for all processes since this kernel was booted: their monotonic clocks agree."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _began(pid: int) -> int | None:
    """In clock ticks since the boot; None when there is no such process, or it is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text[text.rfind(")") + 2 :].split()  # the name in brackets may hold anything
    return None if fields[0] in "ZX" else int(fields[19])
