"""A rank's wait for the others of a group that is being made: what it says meanwhile, and what ends it.

Where the default group is one of ours, the engine watches all ranks of it, so the wait is one like any other: a line
after some seconds, an error at once when a missing rank has ended or waits for this one elsewhere, and a deadline. Else
(as for the default group itself) all that is known is what stands in the store, and what the launcher writes there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence

from torch._C._distributed_c10d import PrefixStore, Store

from .. import engine, env
from ..errors import CollectiveTimeoutError, PeerLostError
from ..job.attempt import ended
from ..job.world import name_ranks

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.05
_LOOK_EVERY_S = 0.1
_SHOWN = 8  # ranks with their pids in a message


class Joining:
    """See the module.

    Args:
        store: of the group; no prefix of it is looked through, as the launcher knows none.
        members: the group's ranks in the default group.
        world: the default group, where it is there already and one of ours.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        timeout_s: float,
        name: str,
        members: Sequence[int] | None = None,
        world: engine.Communicator | None = None,
    ) -> None:
        self.rank, self.world_size, self.name = rank, world_size, name
        self.members = list(members or range(world_size))
        call, site = "new_group" if members else "init_process_group", engine.call_site()
        self.call = f"{call} called at {site}" if site else call
        self._store = _without_prefix(store)
        self._timeout_s = timeout_s
        self._began_s = self._look_at_s = time.monotonic()
        self._look_at_s += _LOOK_EVERY_S
        self._has_spoken = False
        self._outside = None
        if world is not None:
            self._outside = world.wait_outside(f"{name} {self.members}", timeout_s)

    def close(self) -> None:
        """The wait is over: peers no longer see it."""
        self._outside = None

    @property
    def who(self) -> str:
        """This rank, for messages."""
        return f"[rank {self.rank} of {self.world_size}, group {self.name}]"

    def until(self, done: Callable[[], bool], missing: Callable[[], list[int]], came: Callable[[], str]) -> None:
        """Polls until it is done.

        Args:
            missing: the ranks of the group that are waited for; asked now and then.
            came: words on those that are there.

        Raises:
            CollectiveTimeoutError: the deadline has passed; names the missing ranks.
            PeerLostError: one of them has ended.
            MismatchError: one of them waits for this rank in something else.
        """
        pause_s = _FIRST_PAUSE_S
        while not done():
            now = time.monotonic()
            if now >= self._look_at_s or now - self._began_s >= self._timeout_s:
                self._look_at_s = now + _LOOK_EVERY_S
                self._look(missing(), came(), now - self._began_s)
            time.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 1.5)

    def _look(self, missing: list[int], came: str, waited_s: float) -> None:
        there = f"; {came}" if came else ""
        if self._outside is not None:
            described = f"making group {self.name}{there}; {self.call}"
            self._outside.look([self.members[rank] for rank in missing], described)
            return
        gone = [rank for rank in missing if self.members[rank] in ended(self._store)]
        if gone:
            raise PeerLostError(
                f"{self.who}: {name_ranks(gone)} ended with exit code 0 before joining the group, which waited for "
                f"{'it' if len(gone) == 1 else 'them'} {waited_s:.1f} s in {self.call}. Every rank has to come; did "
                f"the script leave early there (sys.exit, a branch that returns)?"
            )
        if waited_s >= self._timeout_s:
            raise CollectiveTimeoutError(
                f"{self.who}: the group was not complete within {self._timeout_s:g} s: "
                f"{name_ranks(missing)} did not come{there}. "
                f"Waited in {self.call}. Start every rank with the same MASTER_ADDR, MASTER_PORT and "
                f"WORLD_SIZE (or init_method), make the same groups in the same order on every rank, or raise the "
                f"timeout."
            )
        if waited_s >= env.WAITING_S.get() and not self._has_spoken:
            self._has_spoken = True
            line = (
                f"photinus: rank {self.rank} of {self.world_size} has been waiting for {waited_s:.0f} s for "
                f"{name_ranks(missing)} to join group {self.name}{there}; {self.call}; it gives up in "
                f"{self._timeout_s - waited_s:.0f} s"
            )
            print(line, file=sys.stderr, flush=True)


def name_came(here: Mapping[int, str]) -> str:
    """For messages: `ranks 0 (pid 12 on a), 2 (pid 14 on a) came`; of many, their numbers."""
    shown = [f"{rank} ({who})" if len(here) <= _SHOWN else rank for rank, who in sorted(here.items())]
    return f"{name_ranks(shown)} came"


def _without_prefix(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
