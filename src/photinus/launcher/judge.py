"""After a failed attempt: what is said, and whether there is another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .cgroup import OomKills
from .report import Death, exit_code_of, first_cause, hopeless, signature, tell_failure
from .suspension import ended_suspended, tell_suspension

__all__ = ["Judge", "Verdict", "backoff_s"]

_QUICK_S = 10.0
_BACKOFF_LIMIT_S = 5.0


def backoff_s(quick_failures: int) -> float:
    """Seconds to wait before the next attempt after so many in a row that failed soon: 0, 0, 1, 2, 4, then 5."""
    return min(_BACKOFF_LIMIT_S, 2.0 ** (quick_failures - 2)) if quick_failures >= 2 else 0.0


@dataclass(frozen=True)
class Verdict:
    """What follows from a failure.

    Attributes:
        restart: whether there is another attempt.
        delay_s: seconds to wait before it.
        rank, host: of the first cause.
        exit_code: of the job, if this was the last attempt.
        text: the whole block for the terminal.
        short: the same in two lines, for the other hosts' terminals.
        suspended: nothing failed: the workers saved and left, and are started again.
    """

    restart: bool
    delay_s: float
    rank: int
    host: str
    exit_code: int
    text: str
    short: str
    suspended: bool = False


class Judge:
    """Knows the failures of a job so far.

    Args:
        max_restarts: attempts after the first.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._restarts = 0
        self._quick_failures = 0
        self._quick_suspensions = 0
        self._cause: Death | None = None

    @property
    def restarts(self) -> int:
        """Number of restarts ordered so far."""
        return self._restarts

    def judge(
        self,
        deaths: Sequence[Death],
        *,
        finished: Sequence[int],
        world_size: int,
        attempt: int,
        oom_before: OomKills | None,
        oom_after: OomKills | None,
    ) -> Verdict:
        """Finds the first cause among the deaths of all hosts (not empty) and decides."""
        cause = first_cause(deaths)
        if ended_suspended(deaths):
            return self._suspended(cause, deaths, world_size)
        self._quick_suspensions = 0
        self._quick_failures = self._quick_failures + 1 if cause.lived_s < _QUICK_S else 0
        why_not = hopeless(cause, deaths, world_size)
        again = self._cause is not None and signature(cause) == signature(self._cause)
        self._cause = cause
        restart = why_not is None and self._restarts < self._max_restarts
        delay_s = backoff_s(self._quick_failures) if restart else 0.0
        if restart:
            self._restarts += 1
            next_step = (
                f"restarting all {world_size} workers from the last checkpoint "
                f"(restart {self._restarts} of {self._max_restarts})" + (f" in {delay_s:.0f} s" if delay_s else "")
            )
        elif why_not is not None:
            next_step = f"not restarting: {why_not}"
        elif self._max_restarts == 0:
            next_step = "not restarting (--max-restarts 0)"
        else:
            next_step = f"no restart is left of {self._max_restarts}"
        text = tell_failure(
            deaths,
            finished=finished,
            attempt=attempt,
            next_step=next_step,
            oom_before=oom_before,
            oom_after=oom_after,
            seen_before=again and restart,
        )
        head = next(line for line in text.splitlines() if line.startswith("photinus: "))
        short = f"{head} (host {cause.host})\nphotinus: {next_step}\n"
        return Verdict(restart, delay_s, cause.rank, cause.host, exit_code_of(cause), text, short)

    def _suspended(self, cause: Death, deaths: Sequence[Death], world_size: int) -> Verdict:
        """Another attempt, which costs none of the restarts; but workers that suspend at once again are slowed down."""
        self._quick_suspensions = self._quick_suspensions + 1 if cause.lived_s < _QUICK_S else 0
        delay_s = backoff_s(self._quick_suspensions)
        text = tell_suspension(deaths, world_size=world_size, delay_s=delay_s)
        return Verdict(True, delay_s, cause.rank, cause.host, exit_code_of(cause), text, text, suspended=True)
