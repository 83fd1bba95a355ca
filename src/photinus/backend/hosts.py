"""How the ranks of a new group find one another in the store: who is there, on which host, and where to meet.

A store outlives a job's attempts (torchrun's agent keeps one for all of them) and a process may make the same group
several times, so keys from before may lie in it. Nothing here trusts a key that could be old:

1. Each rank r writes hello/r = a nonce of its own.
2. Rank 0 answers each nonce: welcome/<nonce> = session, a nonce of rank 0. Rank r now knows that rank 0 is alive.
3. Rank r writes session/<session>/r = its host and pid. Rank 0 now knows that rank r is alive.
4. Rank 0, when all have done so, writes session/<session>/plan = the hosts and, if there is only one, the address of
   the engine's rendezvous; all read it. When the group stands, rank 0 deletes the keys (the address holds a secret),
   but not hello/r, which may be the next group's already.

An old hello/r only gets a welcome that nobody reads, and rank 0 looks again until it changes. Nobody blocks in the
store (a blocking get holds up every other use of the same client, from other threads too): all waits poll.
Cost: a rank writes 2 keys and reads 2, rank 0 writes and reads one per rank on top.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from .. import engine
from ..errors import CollectiveTimeoutError, PeerLostError
from ..world.own_address import is_loopback, reaches_from

__all__ = ["Meeting", "Member", "meet", "tidy"]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.05


@dataclass(frozen=True)
class Member:
    """A rank of the group: the host that it shares memory on, that host's name, and its process.

    `address` is the one from which it reaches the store; None where that is no server.
    """

    host_id: str
    host_name: str
    pid: int
    address: str | None = None


@dataclass(frozen=True)
class Meeting:
    """What all ranks of a group agree on.

    Attributes:
        session: a text that no other group, attempt or job has.
        members: by group rank.
        address: of the engine's rendezvous; None where the ranks sit on several hosts.
    """

    session: str
    members: tuple[Member, ...]
    address: str | None

    @property
    def one_host(self) -> bool:
        """Whether all ranks can share memory."""
        return len({member.host_id for member in self.members}) == 1

    def own_address(self, rank: int) -> str | None:
        """The address at which ranks of other hosts reach this one; None where that cannot be known.

        The store's own host may reach it on loopback (127.0.1.1); there it is the address that reaches another host.
        """
        me = self.members[rank]
        others = [member for member in self.members if member.host_id != me.host_id]
        for member in (me, *others):
            if member.address is not None and not is_loopback(member.address):
                with contextlib.suppress(OSError):
                    return reaches_from(member.address)
        return me.address

    def hosts(self) -> str:
        """The hosts and their ranks, for messages: "a (ranks 0, 1), b (rank 2)"."""
        ranks: dict[tuple[str, str], list[int]] = {}
        for rank, member in enumerate(self.members):
            ranks.setdefault((member.host_name, member.host_id), []).append(rank)
        names = [name for name, _ in ranks]
        return ", ".join(
            f"{name if names.count(name) == 1 else f'{name} [{host_id}]'} "
            f"(rank{'s' if len(those) > 1 else ''} {', '.join(map(str, those))})"
            for (name, host_id), those in ranks.items()
        )


def meet(store: Store, rank: int, world_size: int, *, timeout_s: float, name: str) -> Meeting:
    """Waits until all ranks of the group are here and tells where they are. Called by every rank.

    Args:
        store: of this group (prefixed by torch).
        rank, world_size: in this group.
        timeout_s: how long to wait for the others.
        name: of the group, for messages.

    Raises:
        CollectiveTimeoutError: not all came in time; names those that did not.
        PeerLostError: the store's server is gone.
    """
    me = Member(engine.host_id(), socket.gethostname(), os.getpid(), _address_towards(store))
    if world_size == 1:
        return Meeting(secrets.token_hex(8), (me,), None)
    waiting = _Waiting(PrefixStore("photinus", store), rank, world_size, timeout_s, name)
    try:
        return _lead(waiting, me) if rank == 0 else _follow(waiting, me)
    except RuntimeError as error:
        if isinstance(error, CollectiveTimeoutError):
            raise
        raise PeerLostError(
            f"{waiting.who}: the rendezvous store failed ({type(error).__name__}: {str(error).splitlines()[0]}); "
            f"the process that serves it, mostly rank 0 or the launcher's, may have ended"
        ) from error


def _address_towards(store: Store) -> str | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        with contextlib.suppress(OSError):  # reached, but not by a name that resolves here
            return reaches_from(store.host)
    return None


def tidy(store: Store, meeting: Meeting) -> None:
    """Deletes the meeting's keys. For rank 0, after something that every rank took part in after `meet`."""
    store = PrefixStore("photinus", store)
    for part in ("plan", *range(1, len(meeting.members))):
        store.delete_key(f"session/{meeting.session}/{part}")


@dataclass
class _Waiting:
    store: Store
    rank: int
    world_size: int
    timeout_s: float
    name: str

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.timeout_s

    @property
    def who(self) -> str:
        return f"[rank {self.rank} of {self.world_size}, group {self.name}]"

    def read(self, key: str) -> str | None:
        return self.store.get(key).decode() if self.store.check([key]) else None

    def until(self, done: Callable[[], bool], missing: Callable[[], str]) -> None:
        pause_s = _FIRST_PAUSE_S
        while not done():
            if time.monotonic() > self.deadline:
                raise CollectiveTimeoutError(
                    f"{self.who}: the group was not complete within {self.timeout_s:g} s: {missing()}. Start every "
                    f"rank with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE (or init_method), "
                    f"or raise the timeout."
                )
            time.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 1.5)


def _lead(waiting: _Waiting, me: Member) -> Meeting:
    store, session = waiting.store, secrets.token_hex(8)
    members: dict[int, Member] = {0: me}
    welcomed: set[str] = set()
    store.set("hello/0", session)

    def all_here() -> bool:
        for rank in range(1, waiting.world_size):
            if rank in members:
                continue
            if (text := waiting.read(f"session/{session}/{rank}")) is not None:
                members[rank] = Member(**json.loads(text))
            elif (nonce := waiting.read(f"hello/{rank}")) is not None and nonce not in welcomed:
                welcomed.add(nonce)
                store.set(f"welcome/{nonce}", session)
        return len(members) == waiting.world_size

    waiting.until(all_here, lambda: _named(sorted(set(range(waiting.world_size)) - members.keys()), "did not come"))
    meeting = Meeting(session, tuple(members[rank] for rank in range(waiting.world_size)), None)
    if meeting.one_host:
        meeting = Meeting(session, meeting.members, engine.new_address())
    store.set(f"session/{session}/plan", json.dumps(asdict(meeting)))
    for nonce in welcomed:
        store.delete_key(f"welcome/{nonce}")
    return meeting


def _follow(waiting: _Waiting, me: Member) -> Meeting:
    store, nonce = waiting.store, secrets.token_hex(8)
    store.set(f"hello/{waiting.rank}", nonce)

    def missing() -> str:
        others = [rank for rank in range(waiting.world_size) if not store.check([f"hello/{rank}"])]
        return _named(others, "did not come") if others else "rank 0 does not answer"

    waiting.until(lambda: store.check([f"welcome/{nonce}"]), missing)
    session = store.get(f"welcome/{nonce}").decode()
    store.set(f"session/{session}/{waiting.rank}", json.dumps(asdict(me)))
    waiting.until(lambda: store.check([f"session/{session}/plan"]), missing)
    plan = json.loads(store.get(f"session/{session}/plan"))
    return Meeting(plan["session"], tuple(Member(**member) for member in plan["members"]), plan["address"])


def _named(ranks: list[int], what: str) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} {what}"
