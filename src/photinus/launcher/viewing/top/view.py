"""The picture of a run for a terminal of some size. Pure functions: the same run gives the same lines.

digits  running  2 ranks on a                                        14:03:22
epoch 3 of 15  step 57 of 330  ███▌░░░░░░░░░░░░░░░░░░  17 %  about 12 s left
12 345 samples/s  5.21 ms a step  1 restart

loss         0.3812  lowest 0.3640  █▇▆▅▄▄▃▃▂▂▂▂▁▁▁▁

a step of 5.21 ms, mean of 160
██████████████████████████████████████████████████████████████
...
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence

from ....runlog.curve import Curve
from ....runlog.events import OF_A_ROW
from ....runlog.run import Run
from ....runlog.stragglers import RankShare, shares, stragglers
from ....runlog.windows import PHASES, Window
from ..event_text import describe_event, describe_state, hosts_in_words, is_bad
from ..units import clock_time, count, duration, number, percent, plural, size, step_time
from .marks import parts, progress_bar, sparkline
from .text import Line, Piece, columns, line, painted, printable

__all__ = ["recent_windows", "view"]

_BOLD, _FAINT, _GOOD, _BAD, _ALARM = "1", "2", "32", "31", "1;33"
_COLOURS = {"data": "33", "forward": "36", "backward": "34", "waiting": "31", "optimizer": "32", "other": "90"}
_LETTERS = {"data": "d", "forward": "f", "backward": "b", "waiting": "w", "optimizer": "o", "other": "·"}
_RECENT = 10
_WIDEST = 120


def view(run: Run, *, width: int, height: int | None, now_s: float, colour: bool) -> list[str]:
    """The lines that show a run.

    Args:
        run: as it was read last.
        width: columns of the terminal; lines are never longer.
        height: rows of the terminal; None: as many as it takes.
        now_s: Unix time.
        colour: whether to use colours; without them the phases are letters.
    """
    width_used = min(width, _WIDEST)
    lines = [*_head(run, width_used, now_s), line()]
    lines += _curves(run, width_used)
    windows = recent_windows(run, ended=run.state(now_s).word != "running")
    ranks = shares(windows)
    if ranks:
        lines += [line(), *_breakdown(ranks, windows, width_used, colour)]
    left = None if height is None else max(2, height - len(lines) - 1)
    events = _events(run, width_used, 6 if left is None else max(2, min(6, left // 3)))
    if ranks:
        room = None if left is None else max(1, left - len(events) - 4)
        lines += [line(), *_ranks(run, ranks, windows, width_used, room)]
    if events:
        lines += [line(), *events]
    return painted(lines if height is None else lines[:height], width=width, colour=colour)


def recent_windows(run: Run, *, ended: bool) -> list[Window]:
    """The windows that say how the run does now: the last ten of its newest start; all of that start once it ended."""
    if not run.windows:
        return []
    newest = run.windows[-1]
    same = [w for w in run.windows if w.start == newest.start and w.world_size == newest.world_size]
    return same if ended else same[-_RECENT:]


# -- the head ---------------------------------------------------------------------------------------------------------


def _head(run: Run, width: int, now_s: float) -> list[Line]:
    state = run.state(now_s)
    style = _BAD if is_bad(state) else _GOOD if state.word in ("running", "finished") else _BOLD
    clock = clock_time(now_s)
    said = describe_state(run, state, now_s)
    name = printable(run.name)
    where = printable(f"{plural(run.world_size, 'rank')} {hosts_in_words(run.hosts)}") if run.world_size else ""
    used = columns(f"{name}  {said}  {where}")
    gap = width - used - len(clock)
    lines = [line(Piece(name, _BOLD), "  ", Piece(said, style), f"  {where}" if where else "")]
    if gap >= 2:
        lines = [line(*lines[0], " " * gap, Piece(clock, _FAINT))]
    elif columns(f"{name}  {said}") > width or (where and used > width):
        lines = [line(Piece(name, _BOLD), "  ", Piece(said, style)), *([line(where)] if where else [])]
    if state.why:
        lines += [line(Piece(text, _BAD)) for text in textwrap.wrap(printable(state.why), max(width, 20), max_lines=3)]
    lines += _progress(run, width, now_s, going=state.word == "running")
    facts = _facts(run, state.word != "running")
    lines += _wrapped(facts, width)
    return lines


def _progress(run: Run, width: int, now_s: float, *, going: bool) -> list[Line]:
    if not run.step:
        wanted = f" of {count(run.steps_wanted)} steps" if run.steps_wanted else ""
        return [line(f"no step{wanted} done yet")]
    epoch = f"epoch {run.epoch}" + (f" of {run.epochs_wanted}" if run.epochs_wanted else "")
    steps = run.steps_wanted
    step = f"step {count(run.step)}" + (f" of {count(steps)}" if steps else "")
    if not steps:
        return [line(f"{epoch}  {step}")]
    share = run.step / steps
    left_s = _left_s(run) if going else math.nan
    left = f"  about {duration(left_s)} left" if math.isfinite(left_s) else ""
    text = f"{epoch}  {step}  "
    tail = f"  {percent(share)}{left}"
    room = width - columns(text) - columns(tail)
    if room >= 10:
        return [line(text, Piece(progress_bar(share, room), "36"), tail)]
    bar = max(5, width - columns(tail))
    return [line(f"{epoch}  {step}"), line(Piece(progress_bar(share, bar), "36"), tail)]


def _left_s(run: Run) -> float:
    """Seconds to the end at the pace of this start, validation and saving included; NaN when it cannot be known."""
    if not run.starts or not run.windows or not run.steps_wanted:
        return math.nan
    began, last = run.starts[-1], run.windows[-1]
    done, seconds = last.step - began.step, last.time_s - began.time_s
    if done <= 0 or seconds <= 0:
        return math.nan
    return max(0, run.steps_wanted - last.step) * seconds / done


def _facts(run: Run, ended: bool) -> list[str]:
    windows = recent_windows(run, ended=ended)
    facts = []
    if windows:
        seconds = sum(window.step_s(0) * window.steps for window in windows)
        steps = sum(window.steps for window in windows)
        if seconds > 0:
            facts.append(f"{count(sum(window.samples for window in windows) / seconds)} samples/s")
            facts.append(f"{step_time(seconds / steps)} a step")
    elif run.epochs and run.epochs[-1].get("samples_per_s"):
        facts.append(f"{count(run.epochs[-1]['samples_per_s'])} samples/s")
    if run.epochs and "elapsed_s" in run.epochs[-1]:
        facts.append(f"trained {duration(run.epochs[-1]['elapsed_s'])}")
    if run.restarts > 0:
        facts.append(plural(run.restarts, "restart"))
    return facts


def _wrapped(facts: Sequence[str], width: int) -> list[Line]:
    lines: list[str] = []
    for fact in facts:
        if lines and columns(f"{lines[-1]}  {fact}") <= width:
            lines[-1] += f"  {fact}"
        else:
            lines.append(fact)
    return [line(text) for text in lines]


# -- curves -----------------------------------------------------------------------------------------------------------


def _curves(run: Run, width: int) -> list[Line]:
    rows: list[tuple[str, str, str, Curve]] = []
    if run.losses.count:
        low = run.losses.low
        rows.append(("loss", number(run.last_loss), f"lowest {number(low)}", run.losses))
    elif run.epochs:
        curve = Curve(400, ((row["step"], row.get("loss", math.nan)) for row in run.epochs))
        rows.append(("loss", number(run.epochs[-1].get("loss", math.nan)), f"lowest {number(curve.low)}", curve))
    for name in run.logged[:4]:
        values = [(row["step"], row[name]) for row in run.epochs if name in row]
        curve = Curve(400, values)
        told = f"{number(curve.low)} to {number(curve.high)}" if len(values) > 1 else ""
        rows.append((printable(name.replace("_", " ")), number(values[-1][1]), told, curve))
    if not rows:
        return [line(Piece("no loss is known yet", _FAINT))]
    name_width = min(max(columns(name) for name, *_ in rows), 16)
    value_width = max(len(value) for _, value, *_ in rows)
    told_width = max(len(told) for _, _, told, _ in rows)
    if width < 60:
        told_width = 0
    lines = []
    for name, value, told, curve in rows:
        shown = name if columns(name) <= name_width else name[: name_width - 1] + "…"
        head = f"{shown}{' ' * (name_width - columns(shown))}  "
        middle = f"  {told:<{told_width}}" if told_width else ""
        room = width - name_width - 2 - value_width - len(middle) - 2
        spark = sparkline(curve.means(min(room, 60))) if room >= 4 and len(curve.buckets) > 1 else ""
        lines.append(
            line(head, Piece(f"{value:>{value_width}}", _BOLD), Piece(middle, _FAINT), "  ", Piece(spark, "36"))
        )
    if run.losses.missing:
        last = f", the last at step {count(run.not_finite[-1])}" if run.not_finite else ""
        what = "step's loss was" if run.losses.missing == 1 else "steps' losses were"
        lines.append(line(Piece(f"{count(run.losses.missing)} {what} no number (×){last}", _ALARM)))
    return lines


# -- the breakdown ----------------------------------------------------------------------------------------------------


def _breakdown(ranks: Sequence[RankShare], windows: Sequence[Window], width: int, colour: bool) -> list[Line]:
    means = [sum(rank.phases[i] for rank in ranks) / len(ranks) for i in range(len(PHASES))]
    total = sum(means)
    steps = sum(window.steps for window in windows)
    of = "" if len(ranks) == 1 or width < 60 else f" and {len(ranks)} ranks"
    lines = [
        line(Piece(f"a step of {step_time(total)}", _BOLD), Piece(f", mean of {plural(steps, 'step')}{of}", _FAINT))
    ]
    if not total > 0:
        return lines
    lengths = parts(means, width)
    lines.append(
        line(
            *(
                Piece(("█" if colour else _LETTERS[phase]) * length, _COLOURS[phase])
                for phase, length in zip(PHASES, lengths, strict=True)
            )
        )
    )
    row: list[Piece] = []
    for phase, seconds in zip(PHASES, means, strict=True):
        mark = Piece("█ " if colour else f"{_LETTERS[phase]} ", _COLOURS[phase])
        text = Piece(f"{phase} {percent(seconds / total)}")
        so_far = sum(columns(piece.text) for piece in row)
        if row and so_far + 3 + columns(mark.text + text.text) > width:
            lines.append(row)
            row = []
        row += [*([Piece("   ")] if row else []), mark, text]
    return [*lines, row]


# -- the ranks --------------------------------------------------------------------------------------------------------


def _ranks(run: Run, ranks: Sequence[RankShare], windows: Sequence[Window], width: int, room: int | None) -> list[Line]:
    slow, window = stragglers(windows), windows[-1]
    chosen = list(ranks)
    if room is not None and len(ranks) > room:
        # The slowest are worth seeing; the others stand for themselves.
        by_need = sorted(ranks, key=lambda rank: (-rank.ratio, rank.rank))[: max(1, room - 1)]
        chosen = sorted(by_need, key=lambda rank: rank.rank)
    hosts = [printable(host) for host in run.hosts]
    host_width = (
        min(max((columns(host) for host in hosts), default=0), 16) if width >= 60 and len(set(hosts)) > 1 else 0
    )
    gpu = any(window.memory.get("cuda", ()))
    bar_width = 16 if width >= 70 else 0
    most_s = max(rank.own_s for rank in ranks)
    head = f"{'rank':>4}" + (f"  {'host':<{host_width}}" if host_width else "") + f"  {'own time':>8}  {'waiting':>8}"
    head += (f"  {'':<{bar_width}}" if bar_width else "") + "  memory" + (" (peak)" if width >= 60 else "")
    head += "  GPU (peak)" if gpu and width >= 80 else ""
    lines: list[Line] = [line(Piece(head, _FAINT))]
    late = {each.rank for each in slow}
    waiting = PHASES.index("waiting")
    for rank in chosen:
        text = f"{rank.rank:>4}"
        if host_width:
            host = hosts[rank.rank] if rank.rank < len(hosts) else ""
            text += f"  {host[:host_width]:<{host_width}}"
        text += f"  {step_time(rank.own_s):>8}  {step_time(rank.phases[waiting]):>8}"
        pieces = [Piece(text, _ALARM if rank.rank in late else "")]
        if bar_width:
            bar = progress_bar(rank.own_s / most_s if most_s > 0 else 0.0, bar_width).replace("░", " ")
            pieces.append(Piece(f"  {bar}", "33" if rank.rank in late else "36"))
        pieces.append(Piece("  " + _memory(window, rank.rank, "resident", "peak", with_peak=width >= 60)))
        if gpu and width >= 80:
            pieces.append(Piece("  " + _memory(window, rank.rank, "cuda", "cuda_peak", with_peak=True)))
        lines.append(pieces)
    if len(chosen) < len(ranks):
        lines.append(
            line(Piece(f"     and {plural(len(ranks) - len(chosen), 'rank')} more, none of them slower", _FAINT))
        )
    if slow:
        first = slow[0]
        also = f" (and {plural(len(slow) - 1, 'rank')} more)" if len(slow) > 1 else ""
        told = f"rank {first.rank} holds the others up{also}: {step_time(first.excess_s)} a step, in {first.phase}"
        lines += [line(Piece(text, _ALARM)) for text in textwrap.wrap(told, max(width, 20))]
    return lines


def _memory(window: Window, rank: int, now: str, peak: str, *, with_peak: bool) -> str:
    held = window.memory.get(now)
    most = window.memory.get(peak)
    if not held or not most or not held[rank]:
        return "?"
    return f"{size(held[rank])} ({size(most[rank])})" if with_peak else size(held[rank])


# -- events -----------------------------------------------------------------------------------------------------------


def _events(run: Run, width: int, most: int) -> list[Line]:
    known = [event for event in run.events if event.kind not in OF_A_ROW]
    # Of checkpoints in a row the last one is enough.
    alone = [a for a, b in itertools.pairwise(known) if {a.kind, b.kind} != {"checkpoint"}]
    told = [*alone, *known[-1:]]
    lines = []
    for event in told[-most:]:
        style = _BAD if event.kind == "error" else _ALARM if event.kind == "warning" else ""
        lines.append(
            line(Piece(clock_time(event.time_s), _FAINT), "  ", Piece(printable(describe_event(event)), style))
        )
    return lines
