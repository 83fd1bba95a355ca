"""After a failed attempt: what is said, and whether there is another."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from .deaths import (
    Death,
    Raised,
    ended_by_suspension,
    exit_code_of,
    failure_text,
    root_cause,
    signature,
    suspension_text,
)
from .world import name_ranks

_QUICK_S = 10.0
_BACKOFF_LIMIT_S = 5.0
_CLOSED = ("closed by peer", "reset by peer", "broken pipe")


def backoff_s(quick_failures: int) -> float:
    """Seconds to wait before the next attempt after so many in a row that failed soon: 0, 0, 1, 2, 4, then 5."""
    return min(_BACKOFF_LIMIT_S, 2.0 ** (quick_failures - 2)) if quick_failures >= 2 else 0.0


@dataclass(frozen=True)
class Report:
    """The ends of the workers of one host, or of all, in an attempt that failed.

    Attributes:
        deaths: of those that did not end well; empty when the host's workers only had to be stopped.
        finished: the ranks that ended with exit code 0.
        steps: the most that a worker has reported (see status.py).
        run: the run that the steps are counted in; empty where each process counts its own from 0.
        oom: kills for want of memory during the attempt, in words.
        host: the name of the one host; empty for all.
    """

    deaths: tuple[Death, ...]
    finished: tuple[int, ...]
    steps: int = 0
    oom: str = ""
    run: str = ""
    host: str = ""

    @property
    def cause(self) -> Death:
        """The first cause; there must be deaths."""
        return root_cause(self.deaths)

    @property
    def error(self) -> tuple[str, str] | None:
        """Type and place of the exception that ended the attempt; None when something else did."""
        raised = self.cause.raised
        return None if raised is None else (raised.type_name, raised.place)

    def to_json(self) -> dict[str, Any]:
        """Return the report for another host, with the time on this host's clock."""
        return {**asdict(self), "now_s": time.monotonic()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Report:
        """Return the report in the times of this host. ValueError: fields are missing or of other types."""
        try:
            report = dict(fields)
            later_s = time.monotonic() - report.pop("now_s")
            deaths = []
            for death in report["deaths"]:
                raised = death["raised"]
                if raised is not None:
                    at_s = None if raised["raised_at_s"] is None else raised["raised_at_s"] + later_s
                    chain = tuple((str(name), str(text)) for name, text in raised["chain"])
                    raised = Raised(**{**raised, "raised_at_s": at_s, "chain": chain, "by": tuple(raised["by"])})
                own = {"seen_at_s": death["seen_at_s"] + later_s, "raised": raised}
                deaths.append(Death(**{**death, **own, "last_lines": tuple(death["last_lines"])}))
            return cls(**{**report, "deaths": tuple(deaths), "finished": tuple(report["finished"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a report: {type(error).__name__}: {error}") from None


def of_all_hosts(reports: Sequence[Report]) -> Report:
    """One report of those of all hosts. Memory ran out where the first cause was, or that does not matter."""
    furthest = max(reports, key=lambda report: report.steps)
    deaths = tuple(death for report in reports for death in report.deaths)
    cause = root_cause(deaths)
    return Report(
        deaths,
        finished=tuple(sorted(rank for report in reports for rank in report.finished)),
        steps=furthest.steps,
        oom=next(report.oom for report in reports if cause in report.deaths),
        run=furthest.run,
    )


def reason_to_stop(now: Report, earlier: Sequence[Report], *, unknown: bool = False) -> str | None:
    """Why another attempt would fail as this one did; None when it may go better.

    That is asked of exceptions only. A signal, a lost rank or host, and a process killed for want of memory have their
    causes outside the program. An exception mostly has not:

        before the first step of a run   it comes again: what it needs is as it was
        later, for the first time        it may have been the moment's fault
        at the same place again          unless training got no further than before: no step in this attempt, or a
                                         step of the run that an earlier attempt had reached. Steps that each process
                                         counts from 0 do not tell how far a script is that resumes by itself

    An audit's error says that nothing computed here can be relied on, whatever the step.

    A rank that ended with exit code 0 while others still needed it made no mistake that they could see, and does the
    same again: it has fewer batches, or leaves its loop alone.

    Args:
        now: the attempt that has just failed.
        earlier: those before it, in order.
        unknown: there were more, of which nobody knows how many steps they did.
    """
    raised, error = now.cause.raised, now.error
    if any(death.is_faulty for death in now.deaths):
        return "an audit found that this hardware may compute wrong"
    if _left_early(now):
        return f"{name_ranks(now.finished, 8)} exited with code 0 while others had more to do. This would happen again"
    if raised is None or error is None or now.cause.consequence or raised.lost_a_child:
        return None
    name, place = (f"exit code {raised.exit_code}" if error[0] == "SystemExit" else error[0]), error[1]
    if not unknown and not any(attempt.steps for attempt in (*earlier, now)):
        return f"{name} before the first training step would happen again"
    reached = max((attempt.steps for attempt in earlier if now.run and attempt.run == now.run), default=0)
    if now.steps <= reached and any(attempt.error == error for attempt in earlier):
        return f"{name} happened again{f' at {place}' if place else ''}, and training got no further than before"
    return None


def _left_early(report: Report) -> bool:
    """Return whether the first to fail missed a rank that had finished; gloo only reports a closed connection."""
    raised = report.cause.raised
    if not report.finished or raised is None or not raised.lost_a_peer:
        return False
    signs = ("has left the group",) if raised.type_name == "PeerLostError" else _CLOSED
    return any(sign in raised.text.lower() for sign in signs)


class Verdict(NamedTuple):
    """Decide what follows from a failure.

    Attributes:
        restart: whether there is another attempt.
        delay_s: seconds to wait before it.
        rank, host: of the first cause.
        exit_code: of the job, if this was the last attempt.
        text: the whole block for the terminal.
        short: the same in two lines, for the other hosts' terminals.
        suspended: nothing failed: the workers saved and left, and are started again.
        restarts: how many have been spent: on failed workers, lost hosts and a lost store.
    """

    restart: bool
    delay_s: float
    rank: int
    host: str
    exit_code: int
    text: str
    short: str
    suspended: bool = False
    restarts: int = 0


class RestartPolicy:
    """Knows the failures of a job so far. `restarts` is the number of restarts ordered."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self.restarts = 0
        self._quick_failures = 0
        self._quick_suspensions = 0
        self._attempts: list[Report] = []

    def spend_restart(self) -> str:
        """Takes one of the restarts: "restart 1 of 3", or "" when none is left."""
        if self.restarts >= self._max_restarts:
            return ""
        self.restarts += 1
        return f"restart {self.restarts} of {self._max_restarts}"

    def decide(self, reports: Sequence[Report], *, world_size: int, attempt: int) -> Verdict:
        """Finds the first cause among the deaths that all hosts report (at least one) and decides."""
        now, earlier = of_all_hosts(reports), tuple(self._attempts)
        cause = now.cause
        self._attempts.append(now)
        if ended_by_suspension(now.deaths):
            return self._after_suspension(now, world_size)
        self._quick_suspensions = 0
        self._quick_failures = self._quick_failures + 1 if cause.lived_s < _QUICK_S else 0
        # Attempts that ended because hosts came or went were judged by nobody.
        why_not = reason_to_stop(now, earlier, unknown=attempt > len(earlier))
        again = bool(earlier) and signature(cause) == signature(earlier[-1].cause)
        restart = self.spend_restart() if why_not is None else ""
        delay_s = backoff_s(self._quick_failures) if restart else 0.0
        if restart:
            workers = f"all {world_size} workers" if world_size > 1 else "the worker"
            next_step = f"restarting {workers} ({restart})" + (f" in {delay_s:.0f} s" if delay_s else "")
        elif why_not is not None:
            next_step = f"not restarting: {why_not}"
        elif self._max_restarts == 0:
            next_step = "not restarting (--max-restarts 0)"
        else:
            next_step = f"no restarts left (--max-restarts {self._max_restarts})"
        text = failure_text(
            now.deaths,
            finished=now.finished,
            attempt=attempt,
            next_step=next_step,
            oom=now.oom,
            seen_before=again and restart != "",
        )
        head = next(line for line in text.splitlines() if line.startswith("photinus: "))
        short = f"{head} (host {cause.host})\nphotinus: {next_step}\n"
        where = cause.rank, cause.host, exit_code_of(cause)
        if _left_early(now):
            first = now.finished[0]
            host = next(report.host for report in reports if first in report.finished)
            where = first, host, exit_code_of(cause)
        return Verdict(restart != "", delay_s, *where, text, short, restarts=self.restarts)

    def _after_suspension(self, now: Report, world_size: int) -> Verdict:
        """Another attempt, which costs none of the restarts; but workers that suspend at once again are slowed down."""
        cause = now.cause
        self._quick_suspensions = self._quick_suspensions + 1 if cause.lived_s < _QUICK_S else 0
        delay_s = backoff_s(self._quick_suspensions)
        text = suspension_text(now.deaths, world_size=world_size, delay_s=delay_s)
        return Verdict(True, delay_s, cause.rank, cause.host, exit_code_of(cause), text, text, suspended=True)
