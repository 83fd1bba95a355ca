"""The page as a whole: one run with all that is known of it, or several over each other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

from ....runlog.run import Run
from ....version import __version__
from ..event_text import describe_state, hosts_in_words, is_bad
from ..units import clock_time, count, plural
from .figures import charts
from .sections import bars, comparison, epochs_table, events_table, notes, options, tiles, wall_clock
from .style import css, run_colour

__all__ = ["labels_of", "page"]


def page(runs: Sequence[Run], *, now_s: float | None = None) -> str:
    """A whole HTML document that needs no other file.

    Args:
        runs: read already; at least one.
        now_s: when the page is made, Unix time; default: now.
    """
    now_s = time.time() if now_s is None else now_s
    body = _one(runs[0], now_s) if len(runs) == 1 else _several(runs, now_s)
    title = f"{runs[0].name}: training run" if len(runs) == 1 else f"{len(runs)} training runs"
    made = f"Made by photinus {__version__} report on {clock_time(now_s, with_date=True)}."
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{css()}</style>\n</head>\n<body>\n<main>\n{body}\n"
        f"<footer>{escape(made)}</footer>\n</main>\n</body>\n</html>\n"
    )


def labels_of(runs: Sequence[Run]) -> list[str]:
    """A name for each run, no two alike: the folder's, with as many folders above it as it takes."""
    paths = [run.folder.resolve() for run in runs]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        labels = [str(Path(*path.parts[-depth:])) for path in paths]
        if len(set(labels)) == len(set(paths)):
            break
    return labels


def _one(run: Run, now_s: float) -> str:
    state = run.state(now_s)
    kind = "bad" if is_bad(state) else "good" if state.word in ("running", "finished") else "warn"
    said = describe_state(run, state, now_s)
    return "\n".join(
        [
            f'<div class="head"><h1>{escape(run.name)}</h1><span class="state {kind}">{escape(said)}</span></div>',
            f'<p class="soft">{escape(_summary(run))}</p>',
            tiles(run),
            notes(run),
            "<h2>Curves</h2>",
            f'<div class="grid">{_figures([run], [run.name])}</div>',
            _time_of_ranks(run),
            "<h2>Epochs</h2>",
            f'<div class="card">{epochs_table(run)}</div>',
            "<h2>What happened</h2>",
            f'<div class="card">{wall_clock(run)}{events_table(run)}</div>',
            "<h2>How the run came about</h2>",
            options(run),
        ]
    )


def _several(runs: Sequence[Run], now_s: float) -> str:
    labels = labels_of(runs)
    parts = [
        f'<div class="head"><h1>{len(runs)} runs</h1></div>',
        f'<p class="soft">{escape(", ".join(labels))}</p>',
        f"<h2>Results</h2>{comparison(runs, [run_colour(i) for i in range(len(runs))], labels)}",
        "<h2>Curves</h2>",
        f'<div class="grid">{_figures(runs, labels)}</div>',
    ]
    for run, label in zip(runs, labels, strict=True):
        state = run.state(now_s)
        parts += [
            f"<h2>{escape(label)}: {escape(describe_state(run, state, now_s))}</h2>",
            f'<p class="soft">{escape(_summary(run))}</p>',
            notes(run),
            f'<div class="card">{bars(run) or "<p>No times of ranks were recorded.</p>"}</div>',
            f"<details><summary>What happened</summary>{wall_clock(run)}{events_table(run)}</details>",
            f"<details><summary>How the run came about</summary>{options(run)}</details>",
        ]
    return "\n".join(parts)


def _figures(runs: Sequence[Run], labels: Sequence[str]) -> str:
    found = [chart.html(f"c{index}") for index, chart in enumerate(charts(runs, labels))]
    return "".join(found) or '<p class="soft">There are no numbers to draw yet.</p>'


def _time_of_ranks(run: Run) -> str:
    found = bars(run)
    if not found:
        return ""
    return f'<h2>Where each rank\'s time goes</h2><div class="card">{found}</div>'


def _summary(run: Run) -> str:
    parts = []
    if run.epochs_wanted:
        done = int(run.epochs[-1]["epoch"]) if run.epochs else 0
        parts.append(f"{count(done)} of {plural(run.epochs_wanted, 'epoch')}")
    parts.append(
        f"{count(run.step)} of {count(run.steps_wanted)} steps" if run.steps_wanted else f"step {count(run.step)}"
    )
    if run.world_size:
        parts.append(f"{plural(run.world_size, 'rank')} {hosts_in_words(run.hosts)}".strip())
    if run.starts:
        parts.append(f"started {clock_time(run.starts[0].time_s, with_date=True)}")
    return " · ".join([*parts, str(run.folder)])
