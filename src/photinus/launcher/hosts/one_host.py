"""A job on one host, for its agent: no peers to meet or to hear of (see `peer_hosts`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..workers.job import Formation
from ..workers.store import StoreProcess
from .messages import Report
from .peer_hosts import Order
from .restart_policy import RestartPolicy, Verdict

__all__ = ["OneHost"]


class OneHost:
    """Meets at once, decides by itself, and is done when its workers are."""

    def __init__(
        self,
        job_id: str,
        workers: int,
        max_restarts: int,
        say: Callable[[str, bool], None],
        *,
        store: StoreProcess,
        port: int = 0,
    ) -> None:
        self._job_id = job_id
        self._workers = workers
        self._policy = RestartPolicy(max_restarts)
        self._say = say
        self._port = port
        self._store = store
        self._attempt = -1
        self._finished = False

    @property
    def fd(self) -> int | None:
        """Nobody gives orders."""
        return None

    def meet(self, check: Callable[[], None]) -> Formation:
        """The next attempt, with a store of its own."""
        check()
        self._attempt += 1
        return Formation((self._workers,), 0, self._attempt, self._job_id, self._store.open(self._port))

    def order(self) -> Order | None:
        """Done, once the workers are."""
        self._store.check()
        return Order("done") if self._finished else None

    def report_ended(self, ranks: Sequence[int]) -> None:
        """The other workers find it in their store."""
        self._store.tell_ended(ranks)

    def report_finished(self) -> None:
        """All is done."""
        self._finished = True

    def verdict_on(self, report: Report, check: Callable[[], None]) -> Verdict | Order:
        """The verdict on this host's workers."""
        verdict = self._policy.decide([report], world_size=self._workers, attempt=self._attempt)
        self._say(verdict.text, not verdict.suspended)
        return verdict

    def leave(self, reason: str, exit_code: int) -> None:
        """Nobody is there to be told."""
