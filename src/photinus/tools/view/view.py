"""The picture of a run for a terminal of some size (tests/unit/test_top.py has one). The same run, the same picture."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...runlog.curve import Curve
from ...runlog.events import OF_A_ROW
from ...runlog.run import Run
from ...runlog.stragglers import RankShare, shares, slow_links, stragglers
from ...runlog.tables import PHASES, Window
from ...runlog.units import clock_time, count, duration, number, percent, plural, size, step_time
from .event_text import describe_event, describe_state, printable, ranks_in_words, severity, speed

_ALARM = "bold yellow"
_COLOURS = dict(zip(PHASES, ("yellow", "cyan", "blue", "red", "green", "bright_black"), strict=True))
_LETTERS = dict(zip(PHASES, "dfbwo·", strict=True))
_RECENT = 10
_POINTS = 400
_WIDEST = 120
_LEVELS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉"
_MISSING = "×"


def view(run: Run, *, width: int, height: int | None, now_s: float, colour: bool) -> Group:
    """Return what shows a run, in lines that do not wrap, on a terminal of this size (`height` None: any).

    `now_s`: Unix time. `colour`: whether there are colours; without them the phases are letters.
    """
    width = min(width, _WIDEST)
    picture: list[RenderableType] = [*_head(run, width, now_s), Text()]
    picture += _curves(run, width)
    going = run.state(now_s).word == "running"
    windows = recent_windows(run, ended=not going)
    pids = [printable(pid) for pid in run.pids] if going else []  # later they may be other processes
    if ranks := shares(windows):
        picture += [Text(), *_breakdown(ranks, windows, width, colour)]
    ranks = ranks or [RankShare(rank, (0.0,) * len(PHASES), 1.0) for rank in range(len(pids))]
    lines_left = None if height is None else max(2, height - len(picture) - 1)
    events = _events(run, 6 if lines_left is None else max(2, min(6, lines_left // 3)))
    if ranks:
        room = len(ranks) if lines_left is None else max(1, lines_left - len(events) - 4)
        picture += [Text(), *_ranks(run, ranks, windows, pids, width, room)]
    if events:
        picture += [Text(), *events]
    return Group(*picture)


def recent_windows(run: Run, *, ended: bool) -> list[Window]:
    """The windows that say how the run does now: the last ten of its newest start; all of that start once it ended."""
    return run.newest_windows if ended else run.newest_windows[-_RECENT:]


def parts(values: Sequence[float], width: int) -> list[int]:
    """Return the characters of a bar that each share gets, `width` in all; a share well above 0 gets at least one."""
    total = sum(values)
    if not total > 0:
        return [0] * len(values)
    lengths = [max(round(value / total * width), int(value / total >= 0.005)) for value in values]
    longest = lengths.index(max(lengths))
    lengths[longest] = max(0, lengths[longest] + width - sum(lengths))
    return lengths


def _line(*pieces: str | tuple[str, str] | Text) -> Text:
    """Pieces of text, with their styles; on one line, and cut with an ellipsis where the terminal ends."""
    return Text.assemble(*pieces, no_wrap=True, overflow="ellipsis")


def _wrap(facts: Sequence[Text], width: int, gap: str) -> list[Text]:
    """As many facts on each line as fit."""
    lines: list[Text] = []
    for fact in facts:
        if lines and lines[-1].cell_len + len(gap) + fact.cell_len <= width:
            lines[-1] = _line(lines[-1], gap, fact)
        else:
            lines.append(_line(fact))
    return lines


# -- the head ---------------------------------------------------------------------------------------------------------


def _head(run: Run, width: int, now_s: float) -> list[Text]:
    state = run.state(now_s)
    style = {"bad": "red", "good": "green", "warn": "bold"}[severity(state)]
    name = _line((printable(run.name), "bold"), "  ", (describe_state(run, state, now_s), style))
    where = printable(ranks_in_words(run.world_size, run.hosts))
    clock = clock_time(now_s)
    first = _wrap([name, *([Text(where)] if where else [])], width, "  ")
    gap = width - first[0].cell_len - len(clock)
    if len(first) == 1 and gap >= 2:
        first = [_line(first[0], " " * gap, (clock, "dim"))]
    if state.why:
        first += [_line((text, "red")) for text in textwrap.wrap(printable(state.why), max(width, 20), max_lines=3)]
    facts = [Text(fact) for fact in _facts(run, state.word != "running")]
    return [*first, *_progress(run, width, going=state.word == "running"), *_wrap(facts, width, "  ")]


def _progress(run: Run, width: int, *, going: bool) -> list[Text]:
    steps = run.steps_wanted
    if not run.step:
        return [_line(f"no step{f' of {count(steps)} steps' if steps else ''} done yet")]
    epoch = f"epoch {run.epoch}" + (f" of {run.epochs_wanted}" if run.epochs_wanted else "")
    text = f"{epoch}  step {count(run.step)}" + (f" of {count(steps)}" if steps else "")
    if not steps:
        return [_line(text)]
    left_s = _left_s(run) if going else math.nan
    remaining = f"  about {duration(left_s)} left" if math.isfinite(left_s) else ""
    tail = f"{percent(run.step / steps)}{remaining}"
    room = width - len(text) - len(tail) - 4
    if room >= 10:
        return [_line(f"{text}  ", (_bar(run.step / steps, room), "cyan"), f"  {tail}")]
    return [_line(text), _line((_bar(run.step / steps, max(0, width - len(tail) - 2)), "cyan"), f"  {tail}")]


def _bar(share: float, width: int) -> str:
    """Return a bar that fills this share of a width, in steps of an eighth of a character."""
    whole, eighths = divmod(int(min(1.0, max(0.0, share)) * width * 8), 8)
    return ("█" * whole + _EIGHTHS[eighths]).ljust(width)[:width]


def _left_s(run: Run) -> float:
    """Seconds to the end at the pace of this start, validation and saving included; NaN when it cannot be known."""
    if not run.starts or not run.windows or not run.steps_wanted:
        return math.nan
    began, last = run.starts[-1], run.windows[-1]
    steps, seconds = last.step - began.step, last.time_s - began.time_s
    if steps <= 0 or seconds <= 0:
        return math.nan
    return max(0, run.steps_wanted - last.step) * seconds / steps


def _facts(run: Run, ended: bool) -> list[str]:
    windows = recent_windows(run, ended=ended)
    facts = []
    samples_per_s, step_s = speed(windows)
    if math.isfinite(step_s):
        facts += [f"{count(samples_per_s)} samples/s", f"{step_time(step_s)} a step"]
    elif not windows and run.epochs and run.epochs[-1].get("samples_per_s"):
        facts.append(f"{count(run.epochs[-1]['samples_per_s'])} samples/s")
    if run.epochs and "elapsed_s" in run.epochs[-1]:
        facts.append(f"trained {duration(run.epochs[-1]['elapsed_s'])}")
    if run.restarts > 0:
        facts.append(plural(run.restarts, "restart"))
    return facts


# -- curves -----------------------------------------------------------------------------------------------------------


def _curves(run: Run, width: int) -> list[Text]:
    rows: list[tuple[str, float, str, Curve]] = []
    if run.losses.count:
        rows.append(("loss (step)", run.last_loss, f"lowest {number(run.losses.low)}", run.losses))
    elif run.epochs:
        curve = Curve(_POINTS, ((row["step"], row.get("loss", math.nan)) for row in run.epochs))
        rows.append(("loss", run.epochs[-1].get("loss", math.nan), f"lowest {number(curve.low)}", curve))
    for name in run.logged[:4]:
        values = [(row["step"], row[name]) for row in run.epochs if name in row]
        curve = Curve(_POINTS, values)
        span = f"{number(curve.low)} to {number(curve.high)}" if len(values) > 1 else ""
        rows.append((printable(name.replace("_", " ")), values[-1][1], span, curve))
    if not rows:
        return [_line(("no loss is known yet", "dim"))]
    names = min(16, max(cell_len(name) for name, *_ in rows))
    lasts = max(len(number(last)) for _, last, *_ in rows)
    spans = 2 + max(len(span) for *_, span, _ in rows) if width >= 60 else 0
    room = min(60, width - names - lasts - spans - 4)
    lines = []
    for name, last, span, curve in rows:
        drawn = sparkline(curve.means(room)) if room >= 4 and len(curve.bins) > 1 else ""
        label = Text(name)
        label.truncate(names, overflow="ellipsis", pad=True)
        beside = f"  {span}".ljust(spans)[:spans]
        lines.append(_line(label, "  ", (number(last).rjust(lasts), "bold"), (beside, "dim"), "  ", (drawn, "cyan")))
    if run.losses.missing:
        what = "step's loss was" if run.losses.missing == 1 else "steps' losses were"
        text = f"{count(run.losses.missing)} {what} no number (×), the last at step {count(run.not_finite[-1])}"
        lines.append(_line((text, _ALARM)))
    return lines


def sparkline(values: Sequence[float]) -> str:
    """A character per value, from the lowest to the highest one; × where there is none (NaN, infinite).

    Values that are all equal lie in the middle. Where all are positive and span more than a factor of 20, heights
    follow their logarithms, or the end of a falling loss would be a flat line.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return _MISSING * len(values)
    low, high = min(finite), max(finite)
    if low > 0 and high > 20 * low:
        values = [math.log(value) if math.isfinite(value) else value for value in values]
        low, high = math.log(low), math.log(high)
    top = len(_LEVELS) - 1

    def level(value: float) -> str:
        return _LEVELS[round((value - low) / (high - low) * top) if high > low else 3]

    return "".join(level(value) if math.isfinite(value) else _MISSING for value in values)


# -- where the time goes ----------------------------------------------------------------------------------------------


def _breakdown(ranks: Sequence[RankShare], windows: Sequence[Window], width: int, colour: bool) -> list[Text]:
    means = [sum(rank.phases[i] for rank in ranks) / len(ranks) for i in range(len(PHASES))]
    total = sum(means)
    steps = sum(window.steps for window in windows)
    of = "" if len(ranks) == 1 or width < 60 else f" and {len(ranks)} ranks"
    head = _line((f"a step of {step_time(total)}", "bold"), (f", mean of {plural(steps, 'step')}{of}", "dim"))
    if not total > 0:
        return [head]
    marks = {phase: "█" if colour else _LETTERS[phase] for phase in PHASES}
    bar = [(marks[phase] * length, _COLOURS[phase]) for phase, length in zip(PHASES, parts(means, width), strict=True)]
    key = [
        _line((marks[phase], _COLOURS[phase]), f" {phase} {percent(seconds / total)}")
        for phase, seconds in zip(PHASES, means, strict=True)
    ]
    return [head, _line(*bar), *_wrap(key, width, "   ")]


def _ranks(
    run: Run, ranks: Sequence[RankShare], windows: Sequence[Window], pids: Sequence[str], width: int, room: int
) -> list[RenderableType]:
    slow = stragglers(windows)
    late = {each.rank for each in slow}
    # Without room for all, the slowest ranks are shown.
    by_need = sorted(ranks, key=lambda rank: (-rank.ratio, rank.rank))
    visible = ranks if len(ranks) <= room else sorted(by_need[: max(1, room - 1)], key=lambda rank: rank.rank)
    hosts = [printable(host) for host in run.hosts]
    timed, waiting = bool(windows), PHASES.index("waiting")  # the first steps have no times yet
    peak, with_pid = " (peak)" if width >= 60 else "", bool(pids) and (width >= 44 or not timed)
    spare = width - (52 if with_pid else 43)  # rank, pid, times and memory take the rest
    spare -= 18 * (with_host := len(set(hosts)) > 1 and spare >= 18)
    spare -= 19 * (with_gpu := timed and spare >= 19 and any(windows[-1].memory["cuda"]))
    most_s, with_bar = max(rank.own_s for rank in ranks) or 1.0, timed and spare >= 18
    right, colour = {"justify": "right"}, dict.fromkeys(late, "yellow")
    columns: list[tuple[bool, str, dict[str, Any], Callable[[RankShare], RenderableType]]] = [
        (True, "rank", right, lambda r: str(r.rank)),
        (with_host, "host", {"max_width": 16}, lambda r: "".join(hosts[r.rank : r.rank + 1])),
        (with_pid, "pid", right, lambda r: "".join(pids[r.rank : r.rank + 1])),
        (timed, "own time", right, lambda r: step_time(r.own_s)),
        (timed, " waiting", right, lambda r: step_time(r.phases[waiting])),
        (with_bar, "", {"width": 16}, lambda r: Text(_bar(r.own_s / most_s, 16), colour.get(r.rank, "cyan"))),
        (timed, f"memory{peak}", {}, lambda r: _memory(windows[-1], r.rank, "resident", peak and "peak")),
        (with_gpu, "GPU (peak)", {}, lambda r: _memory(windows[-1], r.rank, "cuda", "cuda_peak")),
    ]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for is_shown, head, options, _ in columns:
        if is_shown:
            table.add_column(head, no_wrap=True, **options)
    for rank in visible:
        cells = [cell(rank) for is_shown, _, _, cell in columns if is_shown]
        table.add_row(*cells, style=_ALARM if rank.rank in late else "")
    lines: list[RenderableType] = [table]
    if len(visible) < len(ranks):
        more = plural(len(ranks) - len(visible), "rank")
        lines.append(_line((f"     and {more} more" + ", none of them slower" * timed, "dim")))
    alarms = [link.text(hosts, step_time(link.excess_s)) for link in slow_links(windows, hosts)]
    if slow:
        also = f" (and {plural(len(slow) - 1, 'rank')} more)" if len(slow) > 1 else ""
        excess = f"{step_time(slow[0].excess_s)} a step, in {slow[0].phase}"
        alarms = [f"rank {slow[0].rank} holds the others up{also}: {excess}", *alarms]
    return [*lines, *(_line((part, _ALARM)) for text in alarms for part in textwrap.wrap(text, max(width, 20)))]


def _memory(window: Window, rank: int, now: str, peak: str = "") -> str:
    amount = window.memory[now][rank]
    if not amount:
        return "?"
    return size(amount) + (f" ({size(window.memory[peak][rank])})" if peak else "")


# -- events -----------------------------------------------------------------------------------------------------------


def _events(run: Run, most: int) -> list[Text]:
    events = [event for event in run.events if event.kind not in OF_A_ROW]
    # Of consecutive checkpoint events only the last is shown.
    alone = [a for a, b in itertools.pairwise(events) if {a.kind, b.kind} != {"checkpoint"}]
    styles = {"error": "red", "warning": _ALARM}
    return [
        _line((clock_time(e.time_s), "dim"), "  ", (printable(describe_event(e)), styles.get(e.kind, "")))
        for e in [*alone, *events[-1:]][-most:]
    ]
