"""Elastic's rendezvous: meets the colleagues, and hands elastic what they agreed on.

Nothing of an attempt outlives it, and nothing that a stranger sends is unpickled: hosts talk in JSON, to those only
that know the job's secret, and the store of an attempt is heard on loopback interfaces alone.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from .colleagues import LOOPBACK, Colleagues, Formation

__all__ = ["JobRendezvous"]


class JobRendezvous(RendezvousHandler):
    """Meets before each attempt. `formation` is the outcome of the last meeting, `called` an order to meet anew.

    Args:
        colleagues: the other hosts.
        job_id: identity of the job.
        check: called often while waiting; may raise.
    """

    def __init__(self, colleagues: Colleagues, job_id: str, check: Callable[[], None]) -> None:
        self._colleagues = colleagues
        self._job_id = job_id
        self._check = check
        self._closed = False
        self.formation: Formation | None = None
        self.called = False

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits for the other hosts."""
        self.called = False
        self.formation = formation = self._colleagues.meet(self._check)
        # The workers' store is where the formation says; elastic itself needs none (see `Agent`).
        return RendezvousInfo(
            HashStore(),
            formation.host_rank,
            len(formation.workers),
            RendezvousStoreInfo(LOOPBACK, formation.store_port),
        )

    @property
    def use_agent_store(self) -> bool:
        """Workers connect to the launcher's store as clients; none of them hosts one."""
        return True

    def get_backend(self) -> str:
        """Name of this kind of rendezvous."""
        return "photinus"

    def get_run_id(self) -> str:
        """Identity of the job."""
        return self._job_id

    def is_closed(self) -> bool:
        """Whether the job is over."""
        return self._closed

    def set_closed(self) -> None:
        """The job is over."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Above 0 when the colleagues want to meet anew; elastic then restarts the workers and counts no failure."""
        return int(self.called)

    def shutdown(self) -> bool:
        """The job is over."""
        self._closed = True
        return True
