"""The page of one run, or of several over each other: the values that are filled into page.html.j2."""

from __future__ import annotations

import math
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jinja2

from ...runlog import units
from ...runlog.comparison import verdict
from ...runlog.events import OF_A_ROW, Event
from ...runlog.figures import PHASE_COLOURS, charts, run_colour
from ...runlog.run import Run
from ...runlog.stragglers import RankShare, limit, shares, slow_links, stragglers
from ...runlog.tables import PHASES, Row
from ...runlog.units import count, duration, number, percent, size, step_time
from ...version import __version__
from .event_text import command_of, describe_event, describe_state, hosts_in_words, ranks_in_words, severity, speed

_ROWS = 200
_ALL_EVENTS = 50
_BARS = 64


def page(runs: Sequence[Run]) -> str:
    """Return an HTML document of runs that have been read, at least one. It needs no other file."""
    labels = labels_of(runs)
    names = list(dict.fromkeys(name for run in runs for name in run.logged))[:6]
    text = _template().render(
        runs=[
            {"run": run, "state": run.state(), "label": label, "colour": run_colour(i)}
            for i, (run, label) in enumerate(zip(runs, labels, strict=True))
        ],
        metrics=names,
        charts=charts(runs, labels),
        differences=differences(runs),
        distance=distance(runs),
        verified=verdict(*runs)[1] if len(runs) == 2 else [],
        now_s=time.time(),
        version=__version__,
        PHASES=PHASES,
        PHASE_COLOURS=PHASE_COLOURS,
        zip=zip,
    )
    return text.lstrip() + "\n"


@cache
def _template() -> jinja2.Template:
    files = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    formats = (count, number, size, step_time, units.clock_time, units.plural)
    descriptions = (command_of, describe_event, describe_state, hosts_in_words, ranks_in_words, severity)
    found = (base64, bars, epochs, events, last, options, phases_in_words, speed_in_words, wall_clock)
    files.filters |= {each.__name__: each for each in (*formats, *descriptions, *found, slow_links, stragglers)}
    return files.get_template("page.html.j2")


def base64(text: str) -> str:
    """Return the base64 of text in UTF-8."""
    return b64encode(text.encode()).decode()


def labels_of(runs: Sequence[Run]) -> list[str]:
    """Return a name for each run, no two alike: the folder's, with as many folders above it as it takes."""
    paths = [run.folder.resolve() for run in runs]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        labels = [str(Path(*path.parts[-depth:])) for path in paths]
        if len(set(labels)) == len(set(paths)):
            break
    return labels


def last(run: Run, name: str) -> str:
    """Return the last value of a metric; "" without one."""
    return "".join(map(number, [row[name] for row in run.epochs if name in row][-1:]))


def speed_in_words(run: Run) -> tuple[str, str, str]:
    """Return samples per second, the time of a step and of training, over the whole run; "" where it is not known."""
    samples_per_s, step_s = speed(run.windows)
    speeds = [row["samples_per_s"] for row in run.epochs if row.get("samples_per_s")]
    if speeds and not math.isfinite(samples_per_s):
        samples_per_s = sum(speeds) / len(speeds)
    trained_s = run.epochs[-1].get("elapsed_s", math.nan) if run.epochs else math.nan
    figures = ((samples_per_s, count), (step_s, step_time), (trained_s, duration))
    first, second, third = (show(value) if math.isfinite(value) else "" for value, show in figures)
    return first, second, third


def bars(run: Run) -> dict[str, Any] | None:
    """Return the mean step of each rank (the slowest of many) by phases, of the newest start; None without times."""
    windows = run.newest_windows
    ranks = shares(windows)
    if not ranks:
        return None
    slowest = sorted(ranks, key=lambda rank: (-rank.ratio, rank.rank))[:_BARS]
    return {
        "ranks": sorted(slowest, key=lambda rank: rank.rank),
        "of": len(ranks),
        "most_s": max(rank.step_s for rank in ranks),
        "late": {slow.rank for slow in stragglers(windows)},
        "limit": limit(windows),
    }


def phases_in_words(rank: RankShare) -> list[str]:
    """Return each phase of a rank's mean step: `forward 1.00 ms (34 %)`."""
    whole = rank.step_s or math.inf
    return [f"{p} {step_time(s)} ({percent(s / whole)})" for p, s in zip(PHASES, rank.phases, strict=True)]


def wall_clock(run: Run) -> str:
    """Return what the time since the first start was spent on, as a sentence; "" when it is not known."""
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
    text = ", ".join(f"{percent(seconds / total)} {what}" for what, seconds in parts if seconds / total >= 0.005)
    return f"Of {duration(total)} from the first start on: {text}."


def _seconds(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) and value > 0 else 0.0


def epochs(run: Run) -> dict[str, Any]:
    """Return a row per epoch with all its numbers; of very many epochs some, evenly spaced, and the last."""
    every = max(1, -(-len(run.epochs) // _ROWS))
    rows = [row for index, row in enumerate(run.epochs) if index % every == 0 or row is run.epochs[-1]]
    names = [name for name in dict.fromkeys(name for row in run.epochs for name in row) if name != "start"]
    return {"of": len(run.epochs), "every": every, "names": names, "rows": [[_cell(r, n) for n in names] for r in rows]}


def _cell(row: Row, name: str) -> str:
    if name not in row:
        return ""
    value = row[name]
    if name in ("epoch", "step", "samples_per_s") and math.isfinite(value):
        return count(value)
    return duration(value) if name == "elapsed_s" else number(value)


def events(run: Run) -> list[Event]:
    """Return what happened; of very many events the ends of epochs and older checkpoints are left out."""
    if len(run.events) <= _ALL_EVENTS:
        return list(run.events)
    others = [event for event in run.events if event.kind not in (*OF_A_ROW, "checkpoint")]
    checkpoints = [event for event in run.events if event.kind == "checkpoint"]
    return sorted([*others[-_ROWS:], *checkpoints[-5:]], key=lambda event: event.time_s)


def options(run: Run) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return cards of names and values: options of the run and of the script, versions, the machine."""
    cards: list[tuple[str, Mapping[str, Any]]] = [
        ("Options of the run", _dict(run.config.get("options"))),
        ("Options of the script", _dict(run.config.get("user"))),
    ]
    if run.config_starts:
        last = run.config_starts[-1]
        facts: dict[str, Any] = {n: value for n, value in _dict(last.get("versions")).items() if value is not None}
        if git := _dict(last.get("git")):
            facts["git commit"] = str(git.get("commit")) + (", with changes" if git.get("changed") else "")
        facts |= {"device": last.get("device"), "backend": last.get("backend"), "launcher": last.get("launcher")}
        facts["hosts"] = hosts_in_words(last.get("hosts")).removeprefix("on ")
        cards += [("Versions and place", facts), ("Machine of rank 0", _machine(_dict(last.get("machine"))))]
    found = [(title, [(n.replace("_", " "), _text(v)) for n, v in card.items()]) for title, card in cards if card]
    environ = _dict(run.config_starts[-1].get("environ")) if run.config_starts else {}
    return found + ([("Environment", [(name, _text(value)) for name, value in environ.items()])] if environ else [])


def _machine(machine: Mapping[str, Any]) -> dict[str, str]:
    def shown(name: str, value: Any) -> str:
        return size(value) if name.endswith("_bytes") and isinstance(value, (int, float)) else str(value)

    return {name.removesuffix("_bytes"): shown(name, value) for name, value in machine.items()}


def _text(value: Any) -> str:
    return "–" if value is None else "yes" if value is True else "no" if value is False else str(value)


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return the options in which the runs differ: (name, its value in each run)."""
    every = [{**run.option, **_dict(run.config.get("user"))} for run in runs]
    names = dict.fromkeys(name for options_ in every for name in options_)
    rows = [(name.replace("_", " "), [_text(options_.get(name)) for options_ in every]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def distance(runs: Sequence[Run]) -> str:
    """Return a sentence where the losses of the runs' steps are about equal, so that one curve hides the others."""
    first, *others = [[each.mean for each in run.losses.bins] for run in runs]
    gaps = [abs(a - b) for other in others for a, b in zip_longest(first, other, fillvalue=math.inf)]
    how = f"differ by at most {number(max(gaps))}" if any(gaps) else "are equal"
    text = f"The losses of the steps {how}: the runs' curves of the loss lie on each other."
    # Half a percent of the largest loss is a pixel of the chart.
    return text if gaps and all(gap <= 0.005 * max(map(abs, first), default=0.0) for gap in gaps) else ""


def _dict(found: object) -> Mapping[str, Any]:
    return found if isinstance(found, dict) else {}
