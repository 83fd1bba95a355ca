"""`events.jsonl`: what happened in a run, a line each, only ever added to; and the process that a start names.

| event | what it says beside time and step |
|---|---|
| start | which start it is, world size, host and pid of each rank, attempt, the run's length, rank 0's process |
| world_size | the world was "before" and is "now" |
| epoch | an epoch ended; how many seconds validation took |
| validation | the same, of a run that validates by steps, in place of "epoch" |
| checkpoint | its name, and how many seconds saving took |
| warning | something to look at, in "text": a loss that is not finite |
| stop | the run was told to stop early |
| error | what a rank raised |
| end | the run is over, or its body was left |
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .files import Tail, plain_file

EVENTS = "events.jsonl"
OF_A_ROW = ("epoch", "validation")
"""The kinds that come with a row of metrics.csv: as many as there are numbers."""
_MOST_TEXT = 2000  # characters of a value: an error may quote a whole tensor


@dataclass(frozen=True)
class Event:
    """Something that happened.

    Attributes:
        time_s: when, Unix time on the host that wrote it.
        kind: see the module.
        step: steps of the run done by then.
        facts: what else is known.
    """

    time_s: float
    kind: str
    step: int
    facts: Mapping[str, Any] = field(default_factory=dict)


def cause_of(error: Event) -> str:
    """Return the cause in an event "error": `rank 1: ValueError: ...`.

    If the error is a consequence of another rank's end, return that: `rank 1 (pid 4711 on a) was killed by SIGKILL`.
    """
    text = str(error.facts.get("text", ""))
    if not error.facts.get("consequence"):
        return f"rank {error.facts.get('rank', '?')}: {text}"
    _, colon, cause = text.partition(": ")
    return cause.partition(". ")[0] if colon else text


def append_event(folder: Path, kind: str, step: int, **facts: Any) -> None:
    """Adds an event that happens now.

    Raises:
        OSError: it could not be written.
    """
    short = {key: value[:_MOST_TEXT] if isinstance(value, str) else value for key, value in facts.items()}
    line = json.dumps({"time": round(time.time(), 3), "event": kind, "step": step, **short}) + "\n"
    data = line.encode()
    # One write to a file open for appending: whole, also when two ranks of a host write at the same time.
    descriptor = plain_file(folder / EVENTS, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":  # what a killed process wrote half of
            data = b"\n" + data
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def read_events(folder: Path) -> list[Event]:
    """All events of a run, the newest last; [] when there are none."""
    _, lines = Tail(folder / EVENTS).read()
    return [event for event in map(read_event, lines) if event is not None]


def read_event(line: str) -> Event | None:
    """The event of a line of events.jsonl; None when it is none, or only a part of one."""
    try:
        found: Any = json.loads(line)
        facts = {key: value for key, value in found.items() if key not in ("time", "event", "step")}
        event = Event(float(found["time"]), str(found["event"]), int(found["step"]), facts)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    return event if 0 <= event.time_s < 1e11 and 0 <= event.step < 1e15 else None


def this_process(pid: int | None = None) -> dict[str, Any]:
    """Identify this process (or that of a pid) among all: the kernel's boot, namespace, pid and start time."""
    pid = os.getpid() if pid is None else pid
    return {"boot": boot_id(), "namespace": _namespace(), "pid": pid, "began": _began(pid)}


def is_alive(facts: Mapping[str, Any]) -> bool | None:
    """Return whether the process that `this_process` described runs; None if this process cannot know."""
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
