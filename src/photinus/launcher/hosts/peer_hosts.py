"""What an agent needs from the other hosts of its job: a `member.Member`, or `OneHost` where there are none.

An agent meets its peers before each attempt, asks for their orders while its workers run, and tells how they ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from ...errors import LaunchError
from ..workers.job import Formation, Job
from ..workers.store import StoreProcess
from .restart_policy import Report, RestartPolicy, Verdict


class JobEndedError(LaunchError):
    """The job is over for a reason that lies outside this host's workers."""


Order = Literal["stop", "regroup", "save", "done"]
"""What the peers want this host to do while its workers run.

    stop     a worker of another host failed: end the workers, report, and wait for the verdict
    regroup  hosts came or went: end the workers and meet again
    save     the same, but no worker has ended yet, so those that can may save before
    done     all hosts finished well
"""


class OneHost:
    """No peers to meet or to hear of: meets at once, decides by itself, and is done when its workers are."""

    def __init__(self, job: Job, say: Callable[[str, bool], None], store: StoreProcess) -> None:
        self._job = job
        self._policy = RestartPolicy(job.flags.max_restarts)
        self._say = say
        self._store = store
        self._attempt = -1
        self._finished = False

    fd = None  # nobody gives orders

    def meet(self, check: Callable[[], None]) -> Formation:
        """The next attempt, with a store of its own."""
        check()
        self._attempt += 1
        port = self._store.open(self._job.flags.hosts.port or 0)
        workers, restarts = (self._job.local_world_size,), self._policy.restarts
        return Formation(workers, 0, self._attempt, self._job.job_id, port, restarts=restarts)

    def order(self) -> Order | None:
        """Done, once the workers are; to meet again, when the store is lost and a restart is left."""
        lost = self._store.loss()
        if not lost:
            return "done" if self._finished else None
        restart = self._policy.spend_restart()
        if not restart:
            raise JobEndedError(f"{lost}, and no restart is left of {self._job.flags.max_restarts}")
        self._say(f"photinus: {lost}: starting all workers again ({restart})\n", True)
        return "regroup"

    def report_ended(self, ranks: Sequence[int]) -> None:
        """The other workers find it in their store."""
        self._store.tell_ended(ranks)

    def report_finished(self) -> None:
        """All is done."""
        self._finished = True

    def verdict_on(self, report: Report, check: Callable[[], None]) -> Verdict | Order:
        """The verdict on this host's workers."""
        verdict = self._policy.decide([report], world_size=self._job.local_world_size, attempt=self._attempt)
        self._say(verdict.text, not verdict.suspended)
        return verdict

    def leave(self, reason: str, exit_code: int) -> None:
        """Nobody is there to be told."""
