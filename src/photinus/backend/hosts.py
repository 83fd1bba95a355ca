"""How the ranks of a new group find one another in the store: who is there, on which host, and where to meet.

A store outlives a job's attempts (torchrun's agent keeps one for all of them) and a process may make the same group
several times, so keys from before may lie in it. Nothing here trusts a key that could be old:

1. Each rank r writes hello/r = a nonce of its own.
2. Rank 0 answers each nonce: welcome/<nonce> = session, a nonce of rank 0. Rank r now knows that rank 0 is alive.
3. Rank r writes session/<session>/r = its host and pid, and which group it means. Rank 0 now knows that rank r is
   alive, and whether it means the same. While ranks are missing, rank 0 writes which: session/<session>/missing.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from .. import engine
from ..errors import CollectiveError, MismatchError, PeerLostError
from ..world.own_address import is_loopback, reaches_from
from ..world.ranks import name_ranks
from .joining import Joining

__all__ = ["Meeting", "Member", "meet", "tidy"]

_SHOWN = 8  # ranks with their pids in a message


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
            f"{name if names.count(name) == 1 else f'{name} [{host_id}]'} ({name_ranks(those)})"
            for (name, host_id), those in ranks.items()
        )


def meet(
    store: Store,
    rank: int,
    world_size: int,
    *,
    timeout_s: float,
    name: str,
    members: Sequence[int] | None = None,
    world: engine.Communicator | None = None,
) -> Meeting:
    """Waits until all ranks of the group are here and tells where they are. Called by every rank.

    Args:
        store: of this group (prefixed by torch).
        rank, world_size: in this group.
        timeout_s: how long to wait for the others.
        name: of the group, for messages.
        members, world: see Joining.

    Raises:
        CollectiveTimeoutError: not all came in time; names those that did not.
        PeerLostError: one of them has ended, or the store's server is gone.
        MismatchError: ranks make different groups under one name, or wait for each other in different calls.
    """
    me = Member(engine.host_id(), socket.gethostname(), os.getpid(), _address_towards(store))
    if world_size == 1:
        return Meeting(secrets.token_hex(8), (me,), None)
    joining = Joining(store, rank, world_size, timeout_s=timeout_s, name=name, members=members, world=world)
    store = PrefixStore("photinus", store)
    try:
        return _lead(store, joining, me) if rank == 0 else _follow(store, joining, me)
    except RuntimeError as error:
        if isinstance(error, CollectiveError):
            raise
        raise PeerLostError(
            f"{joining.who}: the rendezvous store failed ({type(error).__name__}: {str(error).splitlines()[0]}); "
            f"the process that serves it, mostly rank 0 or the launcher's, may have ended"
        ) from error
    finally:
        joining.close()


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
    for part in ("plan", "missing", *range(1, len(meeting.members))):
        store.delete_key(f"session/{meeting.session}/{part}")


def _lead(store: Store, joining: Joining, me: Member) -> Meeting:
    session, size = secrets.token_hex(8), joining.world_size
    here: dict[int, Member] = {0: me}
    welcomed: set[str] = set()
    told: list[int] = []
    store.set("hello/0", session)

    def all_here() -> bool:
        for rank in range(1, size):
            if rank in here:
                continue
            if (reply := _read(store, f"session/{session}/{rank}")) is not None:
                came = json.loads(reply)
                if came["group"] != joining.members:
                    _refuse(store, session, joining, rank, came)
                here[rank] = Member(**came["member"])
            elif (nonce := _read(store, f"hello/{rank}")) is not None and nonce not in welcomed:
                welcomed.add(nonce)
                store.set(f"welcome/{nonce}", session)
        return len(here) == size

    def missing() -> list[int]:
        nonlocal told
        ranks = sorted(set(range(size)) - here.keys())
        if ranks != told:  # for the others, who cannot know
            told = ranks
            store.set(f"session/{session}/missing", json.dumps(told))
        return ranks

    def came() -> str:
        shown = [f"{rank} (pid {here[rank].pid} on {here[rank].host_name})" for rank in sorted(here)]
        return f"{name_ranks(shown if size <= _SHOWN else sorted(here))} came"

    joining.until(all_here, missing, came)
    meeting = Meeting(session, tuple(here[rank] for rank in range(size)), None)
    if meeting.one_host:
        meeting = Meeting(session, meeting.members, engine.new_address())
    store.set(f"session/{session}/plan", json.dumps(asdict(meeting)))
    for nonce in welcomed:
        store.delete_key(f"welcome/{nonce}")
    return meeting


def _refuse(store: Store, session: str, joining: Joining, rank: int, came: dict[str, Any]) -> NoReturn:
    """Ends it for all who have come: somebody means another group by this name."""
    text = (
        f"the ranks make different groups under one name: rank {joining.members[0]} makes group {joining.name} of "
        f"ranks {joining.members} ({joining.call}), but another rank, its rank {rank}, one of ranks {came['group']} "
        f"({came['call']}). Every rank must make the same groups in the same order, those that it is not in too."
    )
    store.set(f"session/{session}/plan", json.dumps({"refused": text}))
    for other in range(1, len(came["group"])):  # those who only belong to the other group would wait for an answer
        if (nonce := _read(store, f"hello/{other}")) is not None:
            store.set(f"welcome/{nonce}", session)
    raise MismatchError(f"{joining.who}: {text}")


def _follow(store: Store, joining: Joining, me: Member) -> Meeting:
    nonce = secrets.token_hex(8)
    store.set(f"hello/{joining.rank}", nonce)
    joining.until(lambda: store.check([f"welcome/{nonce}"]), lambda: [0], lambda: "")
    session = store.get(f"welcome/{nonce}").decode()
    reply = {"member": asdict(me), "group": joining.members, "call": joining.call}
    store.set(f"session/{session}/{joining.rank}", json.dumps(reply))

    def missing() -> list[int]:
        return json.loads(_read(store, f"session/{session}/missing") or "[]") or [0]

    joining.until(lambda: store.check([f"session/{session}/plan"]), missing, lambda: "")
    plan = json.loads(store.get(f"session/{session}/plan"))
    if "refused" in plan:
        raise MismatchError(f"{joining.who}: {plan['refused']}")
    return Meeting(plan["session"], tuple(Member(**member) for member in plan["members"]), plan["address"])


def _read(store: Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None
