"""One host's rendezvous: a fresh store for each attempt, hosted by the launcher, heard on 127.0.0.1 only.

Torch's own rendezvous keeps one store for all attempts; after a restart, workers find the addresses of dead ones in
it and dial them (failures of that kind were 6 of 8 measured restarts). Here nothing of an attempt outlives it. The
store lives in the launcher, not in rank 0, so that rank 0 may die like any other. Agents of a single host have
nothing to agree upon, so there is no port on which they would unpickle what a stranger sends.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

__all__ = ["OneHostRendezvous"]

_ADDRESS = "127.0.0.1"
_BACKLOG = 4096
_STORE_TIMEOUT = timedelta(seconds=300)


class OneHostRendezvous(RendezvousHandler):
    """Meets nobody: rank 0 of 1 host, at once, with a new store each time.

    Args:
        job_id: identity of the job, the workers' TORCHELASTIC_RUN_ID.
    """

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._store: TCPStore | None = None
        self._closed = False

    def next_rendezvous(self) -> RendezvousInfo:
        """Binds a port that nobody else can take before the store has it: the store gets the listening socket."""
        self._store = None  # the last attempt's, with its port and all that was written to it
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind((_ADDRESS, 0))
            listener.listen(_BACKLOG)
            port: int = listener.getsockname()[1]
            self._store = TCPStore(
                _ADDRESS,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=_STORE_TIMEOUT,
                master_listen_fd=listener.detach(),
            )
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(_ADDRESS, port))

    @property
    def use_agent_store(self) -> bool:
        """Workers connect to the launcher's store as clients; none of them hosts one."""
        return True

    def get_backend(self) -> str:
        """Name of this kind of rendezvous."""
        return "photinus-one-host"

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
        """No other host can wait for admission."""
        return 0

    def shutdown(self) -> bool:
        """Closes the store and its port."""
        self._store = None
        self._closed = True
        return True
