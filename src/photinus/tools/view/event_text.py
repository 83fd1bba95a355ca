"""Texts about a run that terminals and pages share: its events, state and speed."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ...runlog.events import Event, cause_of
from ...runlog.run import Run, State
from ...runlog.tables import Window
from ...runlog.units import count, duration, plural

_STATES = {
    "running": "running",
    "finished": "finished",
    "stopped": "stopped early",
    "left": "left before its end",
    "failed": "failed",
    "died": "died: its process is gone and left no word",
    "silent": "silent",
    "empty": "not begun",
}


def severity(state: State) -> str:
    """ "bad" where somebody should look after the run, "good", or "warn"."""
    if state.word in ("failed", "died", "silent"):
        return "bad"
    return "good" if state.word in ("running", "finished") else "warn"


def describe_state(run: Run, state: State, now_s: float) -> str:
    """Return whether the run goes on, in a few words."""
    if state.word == "silent":
        return f"silent for {duration(run.silent_s(now_s))}"
    return _STATES[state.word]


def describe_event(event: Event) -> str:
    """An event as a sentence without its time."""
    facts = event.facts
    tell = {
        "start": _start,
        "world_size": lambda e: f"world size {printable(facts.get('before'))} -> {printable(facts.get('now'))}",
        "epoch": lambda e: (
            f"epoch {printable(facts.get('epoch'))} done" + _took(facts.get("validation_s"), "validation ")
        ),
        "validation": lambda e: f"validation at step {count(e.step)}" + _took(facts.get("validation_s")),
        "checkpoint": lambda e: f"checkpoint of step {count(e.step)}" + _took(facts.get("seconds")),
        "warning": lambda e: f"warning: {printable(facts.get('text'))} (step {count(e.step)})",
        "stop": lambda e: f"told to stop at step {count(e.step)}",
        "error": lambda e: f"failed at step {count(e.step)}: {printable(cause_of(e))}",
        "end": _end,
    }.get(event.kind)
    return tell(event) if tell is not None else f"{event.kind} at step {count(event.step)}"


def hosts_in_words(hosts: object) -> str:
    """The hosts of the ranks: `on a`, `on a and b`, `on 4 hosts (a, b, c, ...)`; "" for what is no list of hosts."""
    names = list(dict.fromkeys(str(host) for host in hosts)) if isinstance(hosts, list) else []
    if not names:
        return ""
    if len(names) <= 2:
        return f"on {' and '.join(names)}"
    return f"on {len(names)} hosts ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


def ranks_in_words(world_size: object, hosts: object) -> str:
    """`2 ranks on a`; "" where it is not known how many."""
    if not isinstance(world_size, int) or not world_size:
        return ""
    return f"{plural(world_size, 'rank')} {hosts_in_words(hosts)}".strip()


def command_of(start: Mapping[str, Any]) -> str:
    """Return the command of a start in config.json."""
    typed = start.get("started_with")  # by the user; `command` is what a worker was given
    command = start.get("command") or []
    if isinstance(typed, str) or not isinstance(command, list):
        return str(typed or command)
    return shlex.join(str(word) for word in command)


def speed(windows: Sequence[Window]) -> tuple[float, float]:
    """(samples per second, seconds of a step) over these windows; NaN where nothing says so."""
    seconds = sum(window.step_s(0) * window.steps for window in windows)
    if not seconds > 0:
        return math.nan, math.nan
    return sum(window.samples for window in windows) / seconds, seconds / sum(window.steps for window in windows)


def _start(event: Event) -> str:
    facts = event.facts
    who = ranks_in_words(facts.get("world_size"), facts.get("hosts"))
    attempt = facts.get("attempt")
    again = f", restart {attempt} of the launcher" if isinstance(attempt, int) and attempt > 0 else ""
    if facts.get("resumed_from"):
        return f"resumed from step {count(event.step)}: {who}{again}"
    return f"started: {who}{again}"


def _end(event: Event) -> str:
    how = str(event.facts.get("how", "finished"))
    why = f" ({printable(event.facts['text'])})" if event.facts.get("text") else ""
    if how == "finished":
        return f"finished at step {count(event.step)}"
    return f"{_STATES.get(how, how)} at step {count(event.step)}{why}"


def _took(seconds: Any, what: str = "") -> str:
    return f", {what}{duration(seconds)}" if isinstance(seconds, (int, float)) and seconds >= 0.05 else ""


def printable(value: object) -> str:
    """On one line, and without control characters, which would move a terminal's cursor."""
    return "".join(c if c.isprintable() else " " for c in " ".join(str(value).split()))
