"""The page as a whole: what page.html.j2 is filled with, for one run or several over each other."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from ...runlog.chart import DARK, LIGHT, Chart
from ...runlog.figures import charts, run_colour
from ...runlog.run import Run
from ...runlog.tables import PHASES
from ...runlog.units import clock_time, count, plural, step_time
from ...version import __version__
from . import facts
from .event_text import describe_event, describe_state, ranks_in_words, severity


def page(runs: Sequence[Run]) -> str:
    """A whole HTML document that needs no other file, of runs that have been read, at least one."""
    now_s = time.time()
    files = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    for show in (clock_time, count, plural, step_time, describe_event, facts.phases_in_words, pictures):
        files.filters[show.__name__] = show
    labels = labels_of(runs)
    text = files.get_template("page.html.j2").render(
        runs=[{**_facts(run, now_s), "label": labels[i], "colour": run_colour(i)} for i, run in enumerate(runs)],
        charts=charts(runs, labels),
        comparison=facts.comparison(runs),
        differences=facts.differences(runs),
        now_s=now_s,
        version=__version__,
        PHASES=PHASES,
        LIGHT=LIGHT,
        DARK=DARK,
        zip=zip,
    )
    return text.lstrip() + "\n"


def pictures(chart: Chart) -> tuple[str, str] | None:
    """Return addresses that hold the whole picture, for a light and a dark window; None without a number to draw."""
    light, dark = (base64.b64encode(chart.svg(colours).encode()).decode() for colours in (LIGHT, DARK))
    return (f"data:image/svg+xml;base64,{light}", f"data:image/svg+xml;base64,{dark}") if light else None


def labels_of(runs: Sequence[Run]) -> list[str]:
    """A name for each run, no two alike: the folder's, with as many folders above it as it takes."""
    paths = [run.folder.resolve() for run in runs]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        labels = [str(Path(*path.parts[-depth:])) for path in paths]
        if len(set(labels)) == len(set(paths)):
            break
    return labels


def _facts(run: Run, now_s: float) -> dict[str, Any]:
    state = run.state(now_s)
    events = facts.events(run)
    return {
        "name": run.name,
        "state": describe_state(run, state, now_s),
        "kind": severity(state),
        "summary": _summary(run),
        "tiles": facts.tiles(run),
        "notes": facts.notes(run),
        "bars": facts.bars(run),
        "epochs": facts.epochs(run),
        "wall_clock": facts.wall_clock(run),
        "events": events,
        "events_left_out": len(run.events) - len(events),
        "options": facts.options(run),
        "starts": facts.starts(run),
    }


def _summary(run: Run) -> str:
    done = int(run.epochs[-1]["epoch"]) if run.epochs else 0
    parts = [
        f"{count(done)} of {plural(run.epochs_wanted, 'epoch')}" if run.epochs_wanted else "",
        f"{count(run.step)} of {count(run.steps_wanted)} steps" if run.steps_wanted else f"step {count(run.step)}",
        ranks_in_words(run.world_size, run.hosts),
        f"started {clock_time(run.starts[0].time_s, with_date=True)}" if run.starts else "",
        str(run.folder),
    ]
    return " · ".join(filter(None, parts))
