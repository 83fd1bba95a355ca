"""What the page says apart from its charts, as plain data: key figures, notes, bars of the ranks, rows of tables."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ...runlog.events import OF_A_ROW, Event
from ...runlog.run import Run
from ...runlog.stragglers import RankShare, shares, slow_links, stragglers
from ...runlog.tables import PHASES, Row, Window
from ...runlog.units import count, duration, number, percent, plural, size, step_time
from .event_text import hosts_in_words, speed

_ROWS = 200
_ALL_EVENTS = 50
_BARS = 64


def tiles(run: Run) -> list[tuple[str, str]]:
    """The key figures of a run: (value, what it is)."""
    samples_per_s, step_s, trained = _speed(run)
    peak = max((max(w.memory["peak"]) for w in run.windows), default=0)
    facts = [
        (number(run.last_loss) if run.losses.count else "", "training loss, last step"),
        *((_last(run, name), name.replace("_", " ")) for name in run.logged[:4]),
        (count(run.step) + (f" of {count(run.steps_wanted)}" if run.steps_wanted else ""), "steps"),
        (samples_per_s, "samples per second"),
        (step_s, "a step"),
        (trained, "of training"),
        (count(run.world_size) if run.world_size else "", "rank" + "s" * (run.world_size != 1)),
        (size(peak) if peak else "", "peak memory of a rank"),
        (count(run.restarts) if run.restarts else "", "restart" + "s" * (run.restarts != 1)),
    ]
    # Numbers stay on one line.
    return [(v.replace(" of ", "\n").replace(" ", "\u00a0").replace("\n", " of "), what) for v, what in facts if v]


def _last(run: Run, name: str) -> str:
    return "".join(map(number, [row[name] for row in run.epochs if name in row][-1:]))


def _speed(run: Run) -> tuple[str, str, str]:
    """Samples per second, the time of a step and of training, over the whole run; "" where nothing says so."""
    samples_per_s, step_s = speed(run.windows)
    known = [row["samples_per_s"] for row in run.epochs if row.get("samples_per_s")]
    if known and not math.isfinite(samples_per_s):
        samples_per_s = sum(known) / len(known)
    trained_s = run.epochs[-1].get("elapsed_s", math.nan) if run.epochs else math.nan
    shown = ((samples_per_s, count), (step_s, step_time), (trained_s, duration))
    first, second, third = (show(value) if math.isfinite(value) else "" for value, show in shown)
    return first, second, third


def notes(run: Run) -> list[tuple[str, str]]:
    """What somebody should know before believing the figures, as (class, text): stragglers, odd losses, damage."""
    found: list[tuple[str, str]] = []
    state = run.state()
    if state.word == "failed":
        found.append(("bad", f"The run failed. {state.why}"))
    elif state.word == "died":
        found.append(("bad", f"The run ended after step {count(run.step)} without a word: its process is gone."))
    for slow in stragglers(_newest(run))[:3]:
        text = f"Rank {slow.rank} holds the others up: its own time is {slow.ratio:.2f} times the median rank's, "
        found.append(("", f"{text}{step_time(slow.excess_s)} a step more, most of it in {slow.phase}."))
    for link in slow_links(_newest(run), run.hosts):
        found.append(("", f"{link.text(run.hosts, step_time(link.excess_s))}."))
    if run.losses.missing:
        what = "step has" if run.losses.missing == 1 else "steps have"
        text = f"{count(run.losses.missing)} {what} a loss that is no number (NaN or infinite)"
        found.append(("bad", f"{text}, the last known at step {count(run.not_finite[-1])}; marked × in the curves."))
    if run.damaged:
        found.append(("", f"{plural(run.damaged, 'line')} of the run's files could not be read and were left out."))
    return found


def _newest(run: Run) -> list[Window]:
    """All windows of the newest start."""
    return [w for w in run.windows if w.start == run.windows[-1].start] if run.windows else []


def bars(run: Run) -> dict[str, Any] | None:
    """The mean step of each rank by phases, of the newest start: the slowest of very many; None without times."""
    windows = _newest(run)
    ranks = shares(windows)
    if not ranks:
        return None
    slowest = sorted(ranks, key=lambda rank: (-rank.ratio, rank.rank))[:_BARS]
    return {
        "ranks": sorted(slowest, key=lambda rank: rank.rank),
        "of": len(ranks),
        "most_s": max(rank.step_s for rank in ranks),
        "late": {slow.rank for slow in stragglers(windows)},
    }


def phases_in_words(rank: RankShare) -> list[str]:
    """Each phase of a rank's mean step: `forward 1.00 ms (34 %)`."""
    whole = rank.step_s or math.inf
    return [f"{p} {step_time(s)} ({percent(s / whole)})" for p, s in zip(PHASES, rank.phases, strict=True)]


def wall_clock(run: Run) -> str:
    """What the time from the first start to the last sign was spent on, as a sentence; "" when it is not known."""
    if not run.starts or not run.windows:
        return ""
    begin = run.starts[0].time_s
    end = max(run.events[-1].time_s, run.windows[-1].time_s)
    total = end - begin
    if total <= 0:
        return ""
    training = sum(window.step_s(0) * window.steps for window in run.windows)
    aside = [_seconds(event.facts.get("validation_s")) for event in run.events if event.kind in OF_A_ROW]
    saving = [_seconds(event.facts.get("seconds")) for event in run.events if event.kind == "checkpoint"]
    parts = [("training steps", training), ("validation", sum(aside)), ("saving checkpoints", sum(saving))]
    rest = max(0.0, total - sum(seconds for _, seconds in parts))
    parts.append(("all else (starting, restarting, what was lost and done again)", rest))
    known = ", ".join(f"{percent(seconds / total)} {what}" for what, seconds in parts if seconds / total >= 0.005)
    return f"Of {duration(total)} from the first start on: {known}."


def _seconds(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) and value > 0 else 0.0


def epochs(run: Run) -> dict[str, Any]:
    """A row per epoch with all its numbers; of very many epochs some, evenly spaced, and the last."""
    every = max(1, -(-len(run.epochs) // _ROWS))
    chosen = [row for index, row in enumerate(run.epochs) if index % every == 0 or row is run.epochs[-1]]
    names = [name for name in dict.fromkeys(name for row in run.epochs for name in row) if name != "start"]
    return {
        "of": len(run.epochs),
        "every": every,
        "names": names,
        "rows": [[_cell(r, n) for n in names] for r in chosen],
    }


def _cell(row: Row, name: str) -> str:
    if name not in row:
        return ""
    value = row[name]
    if name in ("epoch", "step", "samples_per_s") and math.isfinite(value):
        return count(value)
    return duration(value) if name == "elapsed_s" else number(value)


def events(run: Run) -> list[Event]:
    """What happened; of very many events the ends of epochs and older checkpoints are left out."""
    if len(run.events) <= _ALL_EVENTS:
        return list(run.events)
    known = [event for event in run.events if event.kind not in (*OF_A_ROW, "checkpoint")]
    checkpoints = [event for event in run.events if event.kind == "checkpoint"]
    return sorted([*known[-_ROWS:], *checkpoints[-5:]], key=lambda event: event.time_s)


def options(run: Run) -> list[tuple[str, list[tuple[str, str]]]]:
    """How the run came about: cards of names and values, of its options, the script's own, versions and the machine."""
    cards: list[tuple[str, Mapping[str, Any]]] = [
        ("Options of the run", _dict(run.config.get("options"))),
        ("Options of the script", _dict(run.config.get("user"))),
    ]
    if run.config_starts:
        last = run.config_starts[-1]
        known: dict[str, Any] = {n: value for n, value in _dict(last.get("versions")).items() if value is not None}
        if git := _dict(last.get("git")):
            known["git commit"] = str(git.get("commit")) + (", with changes" if git.get("changed") else "")
        known |= {"device": last.get("device"), "backend": last.get("backend"), "launcher": last.get("launcher")}
        known["hosts"] = hosts_in_words(last.get("hosts")).removeprefix("on ")
        cards += [("Versions and place", known), ("Machine of rank 0", _machine(_dict(last.get("machine"))))]
    found = [(title, [(n.replace("_", " "), _text(v)) for n, v in card.items()]) for title, card in cards if card]
    environ = _dict(run.config_starts[-1].get("environ")) if run.config_starts else {}
    return found + ([("Environment", [(name, _text(value)) for name, value in environ.items()])] if environ else [])


def starts(run: Run) -> list[tuple[str, ...]]:
    """(number, when, from step, ranks, command) of each start."""
    facts = [[str(start.get(n, "")) for n in ("time", "resumed_step", "world_size")] for start in run.config_starts]
    commands = [_command(start) for start in run.config_starts]
    return [(str(i), *fact, command) for i, (fact, command) in enumerate(zip(facts, commands, strict=True), 1)]


def _machine(machine: Mapping[str, Any]) -> dict[str, str]:
    def shown(name: str, value: Any) -> str:
        return size(value) if name.endswith("_bytes") and isinstance(value, (int, float)) else str(value)

    return {name.removesuffix("_bytes"): shown(name, value) for name, value in machine.items()}


def _command(start: Mapping[str, Any]) -> str:
    typed = start.get("started_with")  # by the user; `command` is what a worker was given
    command = start.get("command") or []
    if isinstance(typed, str) or not isinstance(command, list):
        return str(typed or command)
    return shlex.join(str(word) for word in command)


def started_with(run: Run) -> str:
    """Return what to paste into a shell to go on with the run; empty where its config does not tell."""
    command = _command(run.config_starts[-1]) if run.config_starts else ""
    folder = run.config_starts[-1].get("folder") if command else None
    return f"cd {shlex.quote(folder)} && {command}" if isinstance(folder, str) else command


def _text(value: Any) -> str:
    return "–" if value is None else "yes" if value is True else "no" if value is False else str(value)


# -- several runs -----------------------------------------------------------------------------------------------------


def comparison(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """The last numbers of the runs side by side: names of the columns, and a row for each run."""
    metrics = list(dict.fromkeys(name for run in runs for name in run.logged))[:6]
    head = ["state", "steps", "ranks", "loss", "lowest loss", *(name.replace("_", " ") for name in metrics)]
    rows = []
    for run in runs:
        row = [run.state().word, count(run.step), count(run.world_size) if run.world_size else ""]
        row += [number(run.last_loss), number(run.losses.low)]
        row += [_last(run, name) for name in metrics]
        rows.append([*row, *_speed(run)])
    return [*head, "samples/s", "a step", "trained"], rows


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """The options in which the runs differ: (name, its value in each run)."""
    every = [{**run.option, **_dict(run.config.get("user"))} for run in runs]
    names = dict.fromkeys(name for options_ in every for name in options_)
    rows = [(name.replace("_", " "), [_text(options_.get(name)) for options_ in every]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _dict(found: object) -> Mapping[str, Any]:
    return found if isinstance(found, dict) else {}
