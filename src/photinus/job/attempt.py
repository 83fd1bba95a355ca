"""One attempt at a job: who takes part, which ranks have ended, and what the other hosts want.

A launcher meets its peers before each attempt, follows their orders while its workers run, and reports how they ended.

A worker that fails ends the attempt. A worker may also end well before the others have joined a group with it. They
would wait for it in vain, and it has no connection to them yet. So its launcher notes its end in the attempt's store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from ..errors import LaunchError
from .restart_policy import Report, Verdict

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_ENDED = "photinus/ended"


class JobEndedError(LaunchError):
    """The job is over for a reason that lies outside this host's workers."""


Order = Literal["stop", "regroup", "save", "done"]
"""What the peers want this host to do while its workers run.

    stop     a worker of another host failed: end the workers, report, and wait for the verdict
    regroup  hosts came or went: end the workers and meet again
    save     the same, but no worker has ended yet, so those that can may save before
    done     all hosts finished well
"""


class AttemptMembers(NamedTuple):
    """One attempt: who takes part.

    Attributes:
        workers: number of workers of each host, in the order of the hosts' ranks.
        host_rank: this host's place among them.
        attempt: 0 for the first start; counts every start, also those for hosts that came or went.
        restarts: how many of them cost a restart.
        job_id: the same on all hosts.
        store_port: where this host's workers find the attempt's store, on the loopback interface.
        interface: over which workers of several hosts meet; None for one host, or when it is not known.
    """

    workers: tuple[int, ...]
    host_rank: int
    attempt: int
    job_id: str
    store_port: int
    interface: str | None = None
    restarts: int = 0

    @property
    def first_rank(self) -> int:
        """Rank of this host's first worker."""
        return sum(self.workers[: self.host_rank])

    @property
    def world_size(self) -> int:
        """Workers of all hosts."""
        return sum(self.workers)


class Peers(Protocol):
    """The hosts of the job, for this host's agent: `agent.OneHost` or `client.SeveralHosts`.

    The agent calls `meet` first. Then, while workers run, `order` again and again and the two reports; after a failure
    of this host's workers `verdict_on`; `leave` before it goes because of a signal. `check` is called often and may
    raise, which ends the wait. JobEndedError: the job is over.
    """

    @property
    def fd(self) -> int | None:
        """Return a descriptor that is readable when `order` may have one; None: there never is one."""

    @property
    def leads(self) -> bool:
        """Return whether this host's terminal shows what concerns all hosts."""

    def meet(self, check: Callable[[], None]) -> AttemptMembers:
        """Wait for the next attempt, in which all hosts are ready, and return who takes part."""

    def order(self) -> Order | None:
        """Return what this host has to do, if it is anything else than to go on."""

    def report_ended(self, ranks: Sequence[int]) -> None:
        """Report that these workers ended well while others run: these may wait for them in vain."""

    def report_finished(self) -> None:
        """Report that all workers of this host ended well; "done" follows, or another order."""

    def verdict_on(self, report: Report, check: Callable[[], None]) -> Verdict | None:
        """Return what follows from a failed attempt; None when another host failed, and all gather again."""

    def leave(self, reason: str, exit_code: int) -> None:
        """Report that this host goes."""


class AttemptStore(Protocol):
    """The store of an attempt, as the launcher of its host sees it (`run.store.StoreProcess`)."""

    def open(self, port: int = 0) -> int:
        """Opens a fresh store in place of the one before, if there was one, and returns its port."""

    def tell_ended(self, ranks: Iterable[int]) -> None:
        """Lets workers know which others have ended well."""

    def loss(self) -> str:
        """Says once that the store was lost; empty while it is there."""

    def close(self) -> None:
        """Ends it."""


def tell_ended(store: Store, ranks: Iterable[int]) -> None:
    """Adds ranks whose processes have exited with code 0."""
    store.append(_ENDED, "".join(f"{rank} " for rank in ranks))  # type: ignore[attr-defined]


def ended(store: Store) -> set[int]:
    """Returns the ranks that have ended; the store is that of the job, without prefixes."""
    return {int(rank) for rank in store.get(_ENDED).split()} if store.check([_ENDED]) else set()
