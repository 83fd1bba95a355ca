"""The parts of the page that are no charts: key figures, bars of the ranks, tables of epochs, events and options."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ....relaunch import Launch
from ....runlog.events import OF_A_ROW
from ....runlog.run import Run
from ....runlog.stragglers import RankShare, shares, stragglers
from ....runlog.tables import Row
from ....runlog.windows import PHASES
from ..event_text import describe_event, hosts_in_words
from ..units import clock_time, count, duration, number, percent, plural, size, step_time
from .style import phase_colour

__all__ = ["bars", "comparison", "epochs_table", "events_table", "notes", "options", "tiles", "wall_clock"]

_ROWS = 200
_ALL_EVENTS = 50
_BARS = 64


def tiles(run: Run) -> str:
    """The key figures of a run."""
    facts: list[tuple[str, str]] = []
    if math.isfinite(run.last_loss) or run.losses.count:
        facts.append((number(run.last_loss), "training loss, last step"))
    for name in run.logged[:4]:
        last = [row[name] for row in run.epochs if name in row][-1]
        facts.append((number(last), name.replace("_", " ")))
    done = count(run.step) + (f" of {count(run.steps_wanted)}" if run.steps_wanted else "")
    facts.append((done, "steps"))
    speed, step_s = _speed(run)
    if math.isfinite(speed):
        facts.append((count(speed), "samples per second"))
    if math.isfinite(step_s):
        facts.append((step_time(step_s), "a step"))
    trained = run.epochs[-1].get("elapsed_s", math.nan) if run.epochs else math.nan
    if math.isfinite(trained):
        facts.append((duration(trained), "of training"))
    if run.world_size:
        facts.append((count(run.world_size), "rank" + "s" * (run.world_size != 1)))
    peak = max((max(w.memory["peak"]) for w in run.windows if w.memory.get("peak")), default=0)
    if peak:
        facts.append((size(peak), "peak memory of a rank"))
    if run.restarts > 0:
        facts.append((count(run.restarts), "restart" + "s" * (run.restarts != 1)))
    return f'<div class="tiles">{"".join(_tile(value, what) for value, what in facts)}</div>'


def _tile(value: str, what: str) -> str:
    value = value.replace(" of ", "\n").replace(" ", "\u00a0").replace("\n", " of ")  # numbers stay on one line
    return f'<div class="tile"><b>{escape(value)}</b><span>{escape(what)}</span></div>'


def _speed(run: Run) -> tuple[float, float]:
    """(samples per second, seconds of a step) over the whole run; NaN where nothing says so."""
    seconds = sum(window.step_s(0) * window.steps for window in run.windows)
    steps = sum(window.steps for window in run.windows)
    if seconds > 0:
        return sum(window.samples for window in run.windows) / seconds, seconds / steps
    known = [row["samples_per_s"] for row in run.epochs if row.get("samples_per_s")]
    return (sum(known) / len(known) if known else math.nan), math.nan


def notes(run: Run) -> str:
    """What somebody should know before believing the figures: stragglers, losses that are no numbers, damage."""
    found: list[tuple[str, str]] = []
    state = run.state()
    if state.word == "failed":
        found.append(("bad", f"The run failed. {state.why}"))
    elif state.word == "died":
        found.append(("bad", f"The run ended after step {count(run.step)} without a word: its process is gone."))
    for slow in stragglers(_newest(run))[:3]:
        found.append(
            (
                "",
                f"Rank {slow.rank} holds the others up: its own time is {slow.ratio:.2f} times the median rank's, "
                f"{step_time(slow.excess_s)} a step more, most of it in {slow.phase}.",
            )
        )
    if run.losses.missing:
        what = "step has" if run.losses.missing == 1 else "steps have"
        last = f", the last known at step {count(run.not_finite[-1])}" if run.not_finite else ""
        found.append(
            (
                "bad",
                f"{count(run.losses.missing)} {what} a loss that is no number (NaN or infinite){last}; "
                f"marked × in the curves.",
            )
        )
    if run.damaged:
        found.append(("", f"{plural(run.damaged, 'line')} of the run's files could not be read and were left out."))
    return "".join(f'<p class="note {kind}">{escape(text)}</p>' for kind, text in found)


def _newest(run: Run) -> list[Any]:
    """All windows of the newest start."""
    return [w for w in run.windows if w.start == run.windows[-1].start] if run.windows else []


def bars(run: Run) -> str:
    """A bar per rank: its mean step by phases, of the newest start; "" without times."""
    windows = _newest(run)
    ranks = shares(windows)
    if not ranks:
        return ""
    most_s = max(rank.step_s for rank in ranks)
    late = {slow.rank for slow in stragglers(windows)}
    shown = ranks
    if len(ranks) > _BARS:
        slowest = sorted(ranks, key=lambda rank: (-rank.ratio, rank.rank))[:_BARS]
        shown = sorted(slowest, key=lambda rank: rank.rank)
    rows = "".join(_bar(rank, most_s, rank.rank in late) for rank in shown)
    more = f'<p class="soft">The {_BARS} slowest of {len(ranks)} ranks.</p>' if len(shown) < len(ranks) else ""
    key = "".join(f'<li><i style="background:{phase_colour(phase)}"></i>{phase}</li>' for phase in PHASES)
    heads = "".join(f'<th class="n">{phase}</th>' for phase in PHASES)
    table = "".join(
        f'<tr><th>rank {rank.rank}</th><td class="n">{step_time(rank.own_s)}</td><td class="n">{rank.ratio:.2f}</td>'
        + "".join(f'<td class="n">{step_time(seconds)}</td>' for seconds in rank.phases)
        + "</tr>"
        for rank in shown
    )
    return (
        f'<ul class="key">{key}</ul><div class="bars">{rows}</div>{more}<details><summary>as a table</summary>'
        f'<div class="scroll"><table><tr><th></th><th class="n">own time</th><th class="n">by median</th>{heads}</tr>'
        f"{table}</table></div></details>"
    )


def _bar(rank: RankShare, most_s: float, late: bool) -> str:
    pieces = ""
    told = []
    for phase, seconds in zip(PHASES, rank.phases, strict=True):
        share = seconds / most_s if most_s > 0 else 0.0
        told.append(f"{phase} {step_time(seconds)} ({percent(seconds / rank.step_s if rank.step_s else 0.0)})")
        if share >= 0.0005:
            pieces += (
                f'<i style="width:{share * 100:.2f}%;background:{phase_colour(phase)}" title="{escape(told[-1])}"></i>'
            )
    mark = ' <span class="warn">straggler</span>' if late else ""
    text = escape(f"rank {rank.rank}: {', '.join(told)}")
    return (
        f'<span>rank {rank.rank}{mark}</span><div class="bar" role="img" aria-label="{text}">{pieces}</div>'
        f'<span class="last soft">own {step_time(rank.own_s)}</span>'
    )


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
    told = ", ".join(f"{percent(seconds / total)} {what}" for what, seconds in parts if seconds / total >= 0.005)
    return f"<p>Of {escape(duration(total))} from the first start on: {escape(told)}.</p>"


def _seconds(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) and value > 0 else 0.0


def epochs_table(run: Run) -> str:
    """A row per epoch with all its numbers; of very many epochs some, evenly spaced, and the last."""
    if not run.epochs:
        return '<p class="soft">No epoch is done yet.</p>'
    rows = run.epochs
    every = -(-len(rows) // _ROWS)
    chosen = [row for index, row in enumerate(rows) if index % every == 0 or row is rows[-1]]
    hidden = {"start"}
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in hidden]
    head = "".join(f'<th class="n">{escape(name.replace("_", " "))}</th>' for name in names)
    body = "".join(
        "<tr>" + "".join(f'<td class="n">{escape(_cell(row, name))}</td>' for name in names) + "</tr>" for row in chosen
    )
    left_out = f"; every {every}th is shown" if every > 1 else ""
    return (
        f"<details{' open' if len(chosen) <= 12 else ''}><summary>{plural(len(rows), 'epoch')}{left_out}</summary>"
        f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div></details>'
    )


def _cell(row: Row, name: str) -> str:
    if name not in row:
        return ""
    value = row[name]
    if name in ("epoch", "step", "samples_per_s") and math.isfinite(value):
        return count(value)
    return duration(value) if name == "elapsed_s" else number(value)


def events_table(run: Run) -> str:
    """What happened, with times; of very many events the ends of epochs and older checkpoints are left out."""
    events = run.events
    told = events
    if len(events) > _ALL_EVENTS:
        told = [event for event in events if event.kind not in (*OF_A_ROW, "checkpoint")]
        told = sorted([*told[-_ROWS:], *[e for e in events if e.kind == "checkpoint"][-5:]], key=lambda e: e.time_s)
    if not told:
        return '<p class="soft">No events were recorded.</p>'
    kinds = {"error": "bad", "warning": "warn"}
    body = "".join(
        f'<tr><td class="when">{clock_time(event.time_s, with_date=True)}</td><td class="n">{count(event.step)}</td>'
        f'<td class="w {kinds.get(event.kind, "")}">{escape(describe_event(event))}</td></tr>'
        for event in told
    )
    left_out = len(events) - len(told)
    more = (
        f'<p class="soft">{plural(left_out, "end")} of epochs and older checkpoints are left out.</p>'
        if left_out
        else ""
    )
    head = '<tr><th>when</th><th class="n">step</th><th>what</th></tr>'
    return f'<div class="scroll"><table>{head}{body}</table></div>{more}'


def options(run: Run) -> str:
    """How the run came about: its options, the script's own, each start, and the machine."""
    config = run.config
    starts = run.config_starts
    parts = []
    for title, found in (("of the run", config.get("options")), ("of the script", config.get("user"))):
        if isinstance(found, dict) and found:
            parts.append(f'<div class="card"><h3>Options {title}</h3>{_pairs(found)}</div>')
    if starts:
        last = starts[-1]
        versions = last.get("versions") if isinstance(last.get("versions"), dict) else {}
        git = last.get("git") if isinstance(last.get("git"), dict) else None
        known: dict[str, Any] = {name: value for name, value in (versions or {}).items() if value is not None}
        if git:
            known["git commit"] = str(git.get("commit")) + (", with changes" if git.get("changed") else "")
        known |= {"device": last.get("device"), "backend": last.get("backend"), "launcher": last.get("launcher")}
        known["hosts"] = hosts_in_words(last.get("hosts")).removeprefix("on ")
        parts.append(f'<div class="card"><h3>Versions and place</h3>{_pairs(known)}</div>')
        machine = last.get("machine")
        if isinstance(machine, dict) and machine:
            parts.append(f'<div class="card"><h3>Machine of rank 0</h3>{_pairs(_machine(machine))}</div>')
        environ = last.get("environ")
        if isinstance(environ, dict) and environ:
            parts.append(f'<div class="card"><h3>Environment</h3>{_pairs(environ, plain=True)}</div>')
        rows = "".join(_start_row(number_, start) for number_, start in enumerate(starts, 1))
        parts.append(
            '<div class="card wide"><h3>Starts</h3><div class="scroll"><table><tr><th class="n"></th><th>when</th>'
            f'<th class="n">from step</th><th class="n">ranks</th><th>command</th></tr>{rows}</table></div></div>'
        )
    if not parts:
        return '<p class="soft">The folder has no config.json.</p>'
    return f'<div class="grid">{"".join(parts)}</div>'


def _machine(machine: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name, value in machine.items():
        is_size = name.endswith("_bytes") and isinstance(value, (int, float))
        found[name.removesuffix("_bytes").replace("_", " ")] = size(value) if is_size else str(value)
    return found


def _start_row(index: int, start: Mapping[str, Any]) -> str:
    try:
        launch = Launch.from_fields(start.get("launch"))  # what the user typed; `command` is what a worker was given
        command: Any = ["photinus", "run", *launch.words, *launch.arguments]
    except ValueError:
        command = start.get("command") or []
    text = shlex.join(str(word) for word in command) if isinstance(command, list) else str(command)
    return (
        f'<tr><td class="n">{index}</td><td class="when">{escape(str(start.get("time", "")))}</td>'
        f'<td class="n">{escape(str(start.get("resumed_step", "")))}</td>'
        f'<td class="n">{escape(str(start.get("world_size", "")))}</td>'
        f'<td class="w"><code>{escape(text)}</code></td></tr>'
    )


def _pairs(found: Mapping[str, Any], *, plain: bool = False) -> str:
    """A table of names and values; `plain` leaves the names as they are."""
    rows = ""
    for name, value in found.items():
        head = str(name) if plain else str(name).replace("_", " ")
        rows += f'<tr><th>{escape(head)}</th><td class="w">{escape(_text(value))}</td></tr>'
    return f'<table class="pairs">{rows}</table>'


def _text(value: Any) -> str:
    return "–" if value is None else "yes" if value is True else "no" if value is False else str(value)


# -- several runs -----------------------------------------------------------------------------------------------------


def comparison(runs: Sequence[Run], colours: Sequence[str], labels: Sequence[str]) -> str:
    """The runs side by side: their last numbers, and the options in which they differ."""
    metrics = list(dict.fromkeys(name for run in runs for name in run.logged))[:6]
    head = ["run", "state", "steps", "ranks", "loss", "lowest loss", *(name.replace("_", " ") for name in metrics)]
    head += ["samples/s", "a step", "trained"]
    body = ""
    for run, colour, label in zip(runs, colours, labels, strict=True):
        speed, step_s = _speed(run)
        trained = run.epochs[-1].get("elapsed_s", math.nan) if run.epochs else math.nan
        last = {name: [row[name] for row in run.epochs if name in row] for name in metrics}
        cells = [
            run.state().word,
            count(run.step),
            count(run.world_size) if run.world_size else "",
            number(run.last_loss),
        ]
        cells += [number(run.losses.low), *(number(last[name][-1]) if last[name] else "" for name in metrics)]
        cells += [_known(speed, count), _known(step_s, step_time), _known(trained, duration)]
        name = f'<i style="display:inline-block;width:11px;height:11px;border-radius:2px;background:{colour}"></i>'
        body += (
            f'<tr><th class="when">{name} {escape(label)}</th>'
            + "".join(f'<td class="n">{escape(c)}</td>' for c in cells)
            + "</tr>"
        )
    heads = "".join(f"<th{' class=n' if index else ''}>{escape(name)}</th>" for index, name in enumerate(head))
    return f'<div class="card scroll"><table><tr>{heads}</tr>{body}</table></div>{_differences(runs, labels)}'


def _known(value: float, show: Any) -> str:
    return str(show(value)) if math.isfinite(value) else ""


def _differences(runs: Sequence[Run], labels: Sequence[str]) -> str:
    every = [{**run.option, **_user(run)} for run in runs]
    names = dict.fromkeys(name for options_ in every for name in options_)
    differing = [name for name in names if len({_text(options_.get(name)) for options_ in every}) > 1]
    if not differing:
        return '<p class="soft">The runs have the same options.</p>'
    heads = "".join(f"<th>{escape(label)}</th>" for label in labels)
    rows = "".join(
        f"<tr><th>{escape(name.replace('_', ' '))}</th>"
        + "".join(f"<td>{escape(_text(options_.get(name)))}</td>" for options_ in every)
        + "</tr>"
        for name in differing
    )
    return f'<h2>Options that differ</h2><div class="card scroll"><table><tr><th></th>{heads}</tr>{rows}</table></div>'


def _user(run: Run) -> dict[str, Any]:
    found = run.config.get("user")
    return found if isinstance(found, dict) else {}
