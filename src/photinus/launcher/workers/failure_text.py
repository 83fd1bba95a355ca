"""The words for workers that failed, or suspended themselves. Pure functions."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from .cgroup import OomKills
from .deaths import Death, Raised, first_cause, signature

__all__ = ["failure_text", "last_words", "suspension_text", "suspension_words"]

_TRACEBACK_LINES = 120
_LINE_CHARACTERS = 200


def failure_text(
    deaths: Sequence[Death],
    *,
    finished: Sequence[int],
    attempt: int,
    next_step: str,
    oom_before: OomKills | None = None,
    oom_after: OomKills | None = None,
    seen_before: bool = False,
) -> str:
    """The block that the launcher prints when an attempt has failed.

    Args:
        deaths: the ends of all ranks that did not finish well; not empty.
        finished: the ranks that had ended with exit code 0.
        attempt: 0 for the first start.
        next_step: last line: what the launcher does now.
        oom_before: the out-of-memory kills counted when the attempt began.
        oom_after: those counted now; a rise is the only ground on which memory is mentioned.
        seen_before: the same failure was shown for the attempt before; leaves out its traceback.
    """
    cause = first_cause(deaths)
    on = f" ({cause.gpu})" if cause.gpu else ""
    where = f"local rank {cause.local_rank}{on} of host {cause.host}, attempt {attempt}"
    lines = [_headline(cause), f"  {where}, {cause.lived_s:.1f} s after its start"]
    lines += [f"  {line}" for line in _details(cause, oom_before, oom_after)]
    trace = _stack(cause)
    block = ["", *(f"photinus: {line}" for line in lines)]
    if _last_lines_tell(cause):
        block += ["photinus:   the last that it wrote:", "", *(f"    {line}" for line in cause.last_lines), ""]
    if trace.strip():
        if seen_before:
            block.append("photinus:   (traceback as above)")
        else:
            block += ["", *(f"    {line}".rstrip() for line in _shorten(trace.rstrip().splitlines())), ""]
    block += [f"photinus: {line}" for line in _others(cause, deaths, finished)]
    block.append(f"photinus: {next_step}")
    return "\n".join(block) + "\n"


def last_words(death: Death) -> str:
    """What ends the log file of a worker: its traceback, which it did not print itself, or how it ended."""
    stack = _stack(death).rstrip()
    end = f"photinus: rank {death.rank} (pid {death.pid}) was ended by the launcher, because another rank had failed"
    if death.raised is not None and stack:
        return f"{stack}\n"
    if not death.ended_by_us:
        end = f"photinus: {_headline(death)}"
    return f"{stack}\n{end}\n" if stack else f"{end}\n"


def _stack(death: Death) -> str:
    return death.raised.traceback if death.raised is not None else death.fault_stack


def _last_lines_tell(death: Death) -> bool:
    """Whether the last lines of a worker say more than its exception does."""
    if death.raised is not None and death.raised.traceback.strip():
        return False
    said = "" if death.raised is None else death.raised.text
    return any(line.strip() not in said for line in death.last_lines)


def _headline(death: Death) -> str:
    who = f"rank {death.rank} (pid {death.pid})"
    if death.raised is not None:
        return f"{who} {_raised_text(death.raised)}"
    if death.signal_name is not None:
        return f"{who} was killed by {death.signal_name}"
    return f"{who} left with exit code {death.status}"


def _raised_text(raised: Raised) -> str:
    if raised.type_name == "SystemExit":
        words = f": {_one_line(raised.text)}" if raised.text != str(raised.exit_code) else ""
        return f"left with exit code {raised.exit_code}{words}"
    return f"raised {raised.type_name}: {_one_line(raised.text)}" if raised.text else f"raised {raised.type_name}"


def _details(cause: Death, oom_before: OomKills | None, oom_after: OomKills | None) -> list[str]:
    lines = []
    if cause.overdue_s is not None:
        lines.append(f"it had not left {cause.overdue_s:.0f} s after that, and was killed")
    child_killed = cause.raised is not None and cause.raised.lost_a_child
    killed = (cause.status == -signal.SIGKILL and cause.overdue_s is None) or child_killed
    if killed and oom_before is not None and oom_after is not None:
        struck = oom_after.count - oom_before.count
        if struck > 0:
            limit = f" (memory limit {oom_after.limit_bytes / 2**20:.0f} MiB)" if oom_after.limit_bytes else ""
            times = "once" if struck == 1 else f"{struck} times"
            lines.append(f"possibly the kernel's out-of-memory killer: it struck {times} in {oom_after.place}{limit}")
    if cause.status == -signal.SIGTERM and cause.raised is None:
        lines.append("the launcher did not send it")
    if cause.log:
        lines.append(f"its log is {cause.log}")
    return lines


def _others(cause: Death, deaths: Sequence[Death], finished: Sequence[int]) -> list[str]:
    rest = sorted((death for death in deaths if death is not cause), key=lambda death: death.rank)
    same = [d.rank for d in rest if not d.ended_by_us and d.raised is not None and signature(d) == signature(cause)]
    lines = [f"the same on {_ranks(same)}"] if same else []
    for death in rest:
        if death.ended_by_us or death.rank in same:
            continue
        words = _headline(death)
        if death.consequence and death.raised is not None:
            reason = f"{death.raised.type_name}: {_first_sentence(death.raised.text)}"
            words = f"rank {death.rank} (pid {death.pid}) failed as a consequence: {reason}"
        elif death.status == -signal.SIGABRT:
            words += ", probably as a consequence"
        else:
            words = f"also, {words}"
        lines.append(words)
    killed = [death.rank for death in rest if death.ended_by_us and death.status == -signal.SIGKILL]
    ended = [death.rank for death in rest if death.ended_by_us and death.status != -signal.SIGKILL]
    if ended:
        lines.append(f"{_ranks(ended)} ended by the launcher")
    if killed:
        lines.append(f"{_ranks(killed)} did not leave in time: killed by the launcher")
    if finished and cause.consequence:
        lines.append(f"{_ranks(finished)} had finished with exit code 0 before")
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (f", ... ({len(ranks)} ranks)" if len(ranks) > 8 else "")
    return f"ranks {shown}"


def _one_line(text: str) -> str:
    first = " ".join(text.split())
    return first if len(first) <= _LINE_CHARACTERS else first[: _LINE_CHARACTERS - 4] + " ..."


def _first_sentence(text: str) -> str:
    """Enough of a consequence to recognise it: without the place in gloo's sources and advice to look elsewhere."""
    sentence = re.split(r"(?<=[^.])\.\s", _one_line(re.sub(r"^\[\S+\.\w+:\d+\]\s*", "", text)), maxsplit=1)[0]
    return sentence if len(sentence) <= 120 else sentence[:116] + " ..."


def _shorten(lines: list[str]) -> list[str]:
    if len(lines) <= _TRACEBACK_LINES:
        return lines
    head = _TRACEBACK_LINES // 4
    left_out = len(lines) - _TRACEBACK_LINES
    return [*lines[:head], f"... {left_out} lines left out ...", *lines[left_out + head :]]


def suspension_words(suspensions: Sequence[Raised]) -> str:
    """`suspended at step 120, saved in PATH`: what the first worker says that says something."""
    said = next((raised.text for raised in suspensions if raised.text), "")
    return f"suspended at {said}" if said else "suspended"


def suspension_text(deaths: Sequence[Death], *, world_size: int, delay_s: float) -> str:
    """The words for the terminal when all workers have suspended themselves and are started again."""
    words = suspension_words(
        [death.raised for death in sorted(deaths, key=lambda d: d.rank) if death.raised and death.suspended]
    )
    soon = f" in {delay_s:.0f} s" if delay_s else ""
    workers = f"all {world_size} workers" if world_size > 1 else "the worker"
    return (
        f"photinus: {words}\nphotinus: starting {workers} again from there{soon} (no failure, and not counted as one)\n"
    )
