"""Let the ranks of a new group find each other in the store: the ranks, their hosts, and the address to connect to.

A store outlives a job's attempts (torchrun's agent keeps one for all of them) and a process may make the same group
several times, so keys from before may lie in it. Nothing here trusts a key that could be old:

1. Each rank r writes hello/r = a nonce of its own.
2. Rank 0 answers each nonce: welcome/<nonce> = session, a nonce of rank 0. Rank r now knows that rank 0 is alive.
3. Rank r writes session/<session>/r = its host and pid, and which group it means. Rank 0 now knows that rank r is
   alive, and whether it means the same. While ranks are missing, rank 0 writes which: session/<session>/missing.
4. Rank 0, when all have done so, writes session/<session>/plan = the hosts and the address of the engine's
   rendezvous; all read it.
5. If there are several hosts, each rank listens, writes session/<session>/links/r = where, and rank 0, when all have
   done so, session/<session>/links = all of it. A rank that cannot listen writes why in its place.

When the group stands, rank 0 deletes the keys (the address holds a secret), but not hello/r, which may be the next
group's already.

An old hello/r only gets a welcome that nobody reads, and rank 0 looks again until it changes. Nobody blocks in the
store (a blocking get holds up every other use of the same client, from other threads too): all waits poll.
Cost: a rank writes 2 keys and reads 2 (over several hosts 3), rank 0 writes and reads one per rank on top (two).

While a rank waits for the others it prints a line after some seconds, and ends with an error when a missing rank has
ended or the time is over. Where the default group is one of ours, the engine watches all ranks of it, also those that
wait for this rank elsewhere. Else all that is known is what stands in the store, and what the launcher writes there.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from .. import engine, env
from ..errors import CollectiveError, CollectiveTimeoutError, HostError, MismatchError, PeerLostError
from ..job.attempt import ended
from ..job.own_address import addresses_of_interfaces, interface_of, is_loopback, outside_addresses, reaches_from
from ..job.world import name_ranks

LOOPBACK = "127.0.0.1"

# Ranks of one host come within milliseconds; later each look costs the server of the store, for every rank.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.05
_LOOK_EVERY_S = 0.1
_WELCOME_S = 2.0  # within which rank 0 answers where it can, or a quarter of the timeout
_SHOWN = 8  # ranks with their pids, or hosts, in a message

_addresses: list[str] = []  # by this process's first group over several hosts; it has one listener for all


@dataclass(frozen=True)
class RankInfo:
    """A rank of the group: where it is, and how it is reached.

    Attributes:
        host_id: equal for ranks that share memory.
        host_name, pid: for messages, and for those who share its host.
        network: equal for ranks that reach each other over loopback, whether they share memory or not.
        address: the one from which it reaches the store; None where that is no server.
        links: where ranks of other hosts reach it, "ip:port"; empty while that is not known, or there are none.
        cards: the network interfaces of these.
    """

    host_id: str
    host_name: str
    pid: int
    network: str = ""
    address: str | None = None
    links: tuple[str, ...] = ()
    cards: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rendezvous:
    """The facts on which all ranks of a group agree.

    Attributes:
        session: a text that no other group, attempt or job has.
        members: by group rank.
        address: of the engine's rendezvous.
        job, attempt: rank 0's, from its launcher. (Those of torchrun count restarts of their own.)
    """

    session: str
    members: tuple[RankInfo, ...]
    address: str
    job: str = ""
    attempt: int = 0

    @property
    def one_host(self) -> bool:
        """Return whether all ranks can share memory."""
        return len({member.host_id for member in self.members}) == 1

    def places(self) -> list[engine.Place]:
        """Return the place of each rank, for the engine; empty when all are on one host."""
        if self.one_host:
            return []
        return [engine.Place(m.host_id, m.host_name, m.pid, list(m.links)) for m in self.members]

    def hosts(self) -> str:
        """The hosts with their ranks and cards, for people: "2 hosts: a (ranks 0, 1; eth0), b (rank 2; eth0)"."""
        ranks: dict[tuple[str, str], list[int]] = {}
        for rank, member in enumerate(self.members):
            ranks.setdefault((member.host_name, member.host_id), []).append(rank)
        names = [name for name, _ in ranks]
        texts = [
            f"{name if names.count(name) == 1 else f'{name} [{host_id}]'} "
            f"({'; '.join(filter(None, (name_ranks(those, _SHOWN), ', '.join(self.members[those[0]].cards))))})"
            for (name, host_id), those in list(ranks.items())[:_SHOWN]
        ]
        return f"{len(names)} host{'s' * (len(names) > 1)}: {', '.join(texts)}{', ...' * (len(names) > _SHOWN)}"


def meet(store: Store, rank: int, world_size: int, **how: Any) -> Rendezvous:
    """Waits until all ranks of the group are here and returns where they are. Called by every rank.

    Args:
        how: the other arguments of `RendezvousWait`.

    Raises:
        CollectiveTimeoutError: not all came in time; names those that did not.
        PeerLostError: one of them has ended, or the store's server is gone.
        MismatchError: ranks make different groups under one name, or wait for each other in different calls.
        ValueError, HostError: this host has no card that was named, or no address, or the process may not listen there.
    """
    me = RankInfo(engine.host_id(), socket.gethostname(), os.getpid(), engine.network_id(), _address_towards(store))
    # Nobody to wait for, so the store is not even touched.
    if world_size == 1:
        return Rendezvous(secrets.token_hex(8), (me,), engine.new_address())
    wait = RendezvousWait(store, rank, world_size, **how)
    store = PrefixStore("photinus", store)
    try:
        rendezvous = _lead(store, wait, me) if rank == 0 else _follow(store, wait, me)
        # Ranks that share memory need no listener.
        return rendezvous if rendezvous.one_host else _exchange_links(store, wait, rendezvous)
    except RuntimeError as error:
        # Ours say more already.
        if isinstance(error, CollectiveError):
            raise
        raise PeerLostError(
            f"{wait.who}: the rendezvous store failed ({type(error).__name__}: {str(error).splitlines()[0]}); "
            f"the process that serves it, mostly rank 0 or the launcher's, may have ended"
        ) from None  # torch's C++ frames say no more
    finally:
        wait.close()


def _address_towards(store: Store) -> str | None:
    store = _without_prefix(store)
    if isinstance(store, TCPStore):
        with contextlib.suppress(OSError):  # reached, but not by a name that resolves here
            return reaches_from(store.host)
    return None


def tidy(store: Store, rendezvous: Rendezvous) -> None:
    """Deletes the rendezvous's keys. For rank 0, after something that every rank took part in after `meet`."""
    store = PrefixStore("photinus", store)
    ranks = range(1, len(rendezvous.members))
    links = () if rendezvous.one_host else ("links", *(f"links/{rank}" for rank in ranks))
    for part in ("plan", "missing", *ranks, *links):
        store.delete_key(f"session/{rendezvous.session}/{part}")


def _lead(store: Store, wait: RendezvousWait, me: RankInfo) -> Rendezvous:
    # Random, so that no key of an earlier attempt can be taken for one of this group.
    session, size = secrets.token_hex(8), wait.world_size
    here: dict[int, RankInfo] = {0: me}
    welcomed: set[str] = set()
    store.set("hello/0", session)

    def all_here() -> bool:
        for rank in range(1, size):
            if rank in here:
                continue
            if (reply := _read(store, f"session/{session}/{rank}")) is not None:
                came = json.loads(reply)
                # Else ranks of two different groups would exchange with each other.
                if came["group"] != wait.members:
                    _refuse(store, session, wait, rank, came)
                here[rank] = _member(came["member"])
            # Each nonce once: an old one stays in the store until its rank writes a new one.
            elif (nonce := _read(store, f"hello/{rank}")) is not None and nonce not in welcomed:
                welcomed.add(nonce)
                store.set(f"welcome/{nonce}", session)
        return len(here) == size

    def came() -> str:
        return name_came({rank: f"pid {member.pid} on {member.host_name}" for rank, member in here.items()})

    wait.until(all_here, _tell_missing(store, session, size, here), came)
    members = tuple(here[rank] for rank in range(size))
    rendezvous = Rendezvous(session, members, engine.new_address(), env.JOB_ID.get(), env.ATTEMPT.get())
    store.set(f"session/{session}/plan", json.dumps(asdict(rendezvous)))
    # All have answered, so nobody looks for a welcome any more.
    for nonce in welcomed:
        store.delete_key(f"welcome/{nonce}")
    return rendezvous


def _tell_missing(store: Store, session: str, size: int, here: dict[int, Any]) -> Callable[[], list[int]]:
    """Tells who is not here, and writes it for the others, who cannot know."""
    last: list[int] = []

    def missing() -> list[int]:
        ranks = sorted(set(range(size)) - here.keys())
        # Written when it changes only: all ranks that wait read it.
        if ranks != last:
            last[:] = ranks
            store.set(f"session/{session}/missing", json.dumps(last))
        return ranks

    return missing


def _refuse(store: Store, session: str, wait: RendezvousWait, rank: int, came: dict[str, Any]) -> NoReturn:
    """Ends it for all who have come: somebody means another group by this name."""
    text = (
        f"the ranks create different groups under one name: rank {wait.members[0]} creates group {wait.name} of "
        f"ranks {wait.members} ({wait.call}), but another rank, its rank {rank}, one of ranks {came['group']} "
        f"({came['call']}). Every rank must create all groups in the same order, also groups without this rank."
    )
    store.set(f"session/{session}/plan", json.dumps({"refused": text}))
    for other in range(1, len(came["group"])):  # those who only belong to the other group would wait for an answer
        if (nonce := _read(store, f"hello/{other}")) is not None:
            store.set(f"welcome/{nonce}", session)
    raise MismatchError(f"{wait.who}: {text}")


def _follow(store: Store, wait: RendezvousWait, me: RankInfo) -> Rendezvous:
    # A welcome for an earlier hello of this rank must not count.
    nonce, began_s = secrets.token_hex(8), time.monotonic()
    store.set(f"hello/{wait.rank}", nonce)

    def missing() -> list[int]:
        if wait.is_world and time.monotonic() - began_s > min(_WELCOME_S, wait.timeout_s / 4):
            _release_rank_0(store, wait.world_size)
        return [0]

    wait.until(lambda: store.check([f"welcome/{nonce}"]), missing)
    session = store.get(f"welcome/{nonce}").decode()
    reply = {"member": asdict(me), "group": wait.members, "call": wait.call}
    store.set(f"session/{session}/{wait.rank}", json.dumps(reply))
    plan = _await(store, wait, session, "plan")
    if "refused" in plan:
        raise MismatchError(f"{wait.who}: {plan['refused']}")
    return Rendezvous(**{**plan, "members": tuple(map(_member, plan["members"]))})


def _release_rank_0(store: Store, world_size: int) -> None:
    """Let rank 0 go on if it waits in torch's store for all ranks, where nobody says which are missing.

    That store counts clients. One rank connects once more for each that has not joined, and rank 0 comes here.
    """
    server = _without_prefix(store)
    if not isinstance(server, TCPStore) or store.add("released", 1) != 1:
        return
    joined = sum(store.check([f"hello/{rank}"]) for rank in range(1, world_size))
    clients: list[TCPStore] = []  # kept until all are counted
    for _ in range(world_size - 1 - joined):
        clients.append(TCPStore(server.host, server.port, world_size, is_master=False))


def _await(store: Store, wait: RendezvousWait, session: str, part: str) -> dict[str, Any]:
    """Waits for what rank 0 writes for all, and returns it."""

    def missing() -> list[int]:
        # [0] while nothing is known: then it is rank 0 that is waited for.
        return json.loads(_read(store, f"session/{session}/missing") or "[]") or [0]

    key = f"session/{session}/{part}"
    wait.until(lambda: store.check([key]), missing)
    found: dict[str, Any] = json.loads(store.get(key))
    return found


def _exchange_links(store: Store, wait: RendezvousWait, rendezvous: Rendezvous) -> Rendezvous:
    """Opens this process's listener, if it has none yet, and brings together where those of all ranks are."""
    rank, size, key = wait.rank, wait.world_size, f"session/{rendezvous.session}/links"
    try:
        own = engine.listen(addresses := choose_addresses(rendezvous.members, rank))
    except (ValueError, OSError) as error:
        # The others need a reason now, not a timeout later.
        store.set(key, json.dumps({"refused": f"rank {rank} cannot be reached by other hosts: {error}"}))
        raise
    # Names of cards are for messages: an address means little to people.
    mine = {"links": own, "cards": [interface_of(address) or address for address in addresses]}
    here: dict[int, Any] = {}
    if rank == 0:
        here[0] = mine

        def all_here() -> bool:
            for other in range(1, size):
                if other not in here and (text := _read(store, f"{key}/{other}")) is not None:
                    here[other] = json.loads(text)
            # The key is there early when a rank has refused.
            return len(here) == size or store.check([key])

        wait.until(all_here, _tell_missing(store, rendezvous.session, size, here))
        if len(here) == size:
            store.set(key, json.dumps({"all": [here[other] for other in range(size)]}))
    else:
        store.set(f"{key}/{rank}", json.dumps(mine))
    answer = _await(store, wait, rendezvous.session, "links")
    if "refused" in answer:
        raise PeerLostError(f"{wait.who}: {answer['refused']}")
    members = tuple(
        _member({**asdict(member), **more}) for member, more in zip(rendezvous.members, answer["all"], strict=True)
    )
    _check_cards(wait.who, members)
    return replace(rendezvous, members=members)


def _check_cards(who: str, members: Sequence[RankInfo]) -> None:
    """Links have a connection for each card, so both their ends need as many."""
    first = members[0]
    # Found here, on every rank, instead of by a link that never comes up.
    other = next((member for member in members if len(member.cards) != len(first.cards)), first)
    if other is not first:
        raise ValueError(
            f"{who}: {first.host_name} has {len(first.cards)} network cards for this job ({', '.join(first.cards)}) "
            f"and {other.host_name} has {len(other.cards)} ({', '.join(other.cards)}): all hosts need the same number. "
            f"Set PHOTINUS_INTERFACE on each host to choose the cards"
        )


def _member(fields: dict[str, Any]) -> RankInfo:
    return RankInfo(**{**fields, "links": tuple(fields["links"]), "cards": tuple(fields["cards"])})


def _read(store: Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


class RendezvousWait:
    """A rank's wait for the others of a group that is being made: what it prints meanwhile, and what ends it.

    Args:
        store: of the group, with any prefixes; those are passed over, as the launcher knows none.
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
        self.is_world, self.members = not members, list(members or range(world_size))
        call, site = "new_group" if members else "init_process_group", engine.call_site()
        self.call = f"{call} called at {site}" if site else call
        # The launcher writes ends of ranks without the prefixes of groups.
        self._store = _without_prefix(store)
        self.timeout_s = timeout_s
        self._began_s = self._look_at_s = time.monotonic()
        self._look_at_s += _LOOK_EVERY_S
        self._has_spoken = False
        self._outside = None
        if world is not None:
            # The engine of the default group sees deaths and deadlocks of all its ranks, which a store never tells.
            self._outside = world.wait_outside(f"{name} {self.members}", timeout_s)

    def close(self) -> None:
        """The wait is over: peers no longer see it."""
        self._outside = None

    @property
    def who(self) -> str:
        """This rank, for messages."""
        return f"[rank {self.rank} of {self.world_size}, group {self.name}]"

    def until(
        self,
        is_done: Callable[[], bool],
        missing: Callable[[], list[int]] = lambda: [0],
        came: Callable[[], str] = lambda: "",
    ) -> None:
        """Polls until it is done.

        Args:
            missing: the ranks of the group that are waited for; asked now and then.
            came: text on those that are there.

        Raises:
            CollectiveTimeoutError: the deadline has passed; names the missing ranks.
            PeerLostError: one of them has ended.
            MismatchError: one of them waits for this rank in something else.
        """
        pause_s = _FIRST_PAUSE_S
        while not is_done():
            now = time.monotonic()
            # Seldom, as it may ask the store about every rank.
            if now >= self._look_at_s or now - self._began_s >= self.timeout_s:
                self._look_at_s = now + _LOOK_EVERY_S
                self._look(missing(), came(), now - self._began_s)
            time.sleep(pause_s)
            # Longer with time: who is late by seconds is not found sooner by looking more often.
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 1.5)

    def _look(self, missing: list[int], came: str, waited_s: float) -> None:
        there = f"; {came}" if came else ""
        # The engine has the deadline, the deaths and the line about waiting, so nothing below is needed.
        if self._outside is not None:
            described = f"making group {self.name}{there}; {self.call}"
            self._outside.look([self.members[rank] for rank in missing], described)
            return
        # A rank that ended well closes no connection of ours yet: only the launcher knows.
        ranks = [rank for rank in missing if self.members[rank] in ended(self._store)]
        if ranks:
            raise PeerLostError(
                f"{self.who}: {name_ranks(ranks)} exited with code 0 before joining the group, which waited for "
                f"{'it' if len(ranks) == 1 else 'them'} {waited_s:.1f} s in {self.call}. Every rank must join. Did "
                f"the script exit early there (sys.exit, a branch that returns)?"
            )
        if waited_s >= self.timeout_s:
            raise CollectiveTimeoutError(
                f"{self.who}: the group was not complete within {self.timeout_s:g} s: "
                f"{name_ranks(missing)} did not join{there}. "
                f"This rank waited in {self.call}. Start every rank with the same MASTER_ADDR, MASTER_PORT and "
                f"WORLD_SIZE (or init_method), make the same groups in the same order on every rank, or raise the "
                f"timeout."
            )
        if waited_s >= env.WAITING_S.get() and not self._has_spoken:
            self._has_spoken = True
            line = (
                f"photinus: rank {self.rank} of {self.world_size} has been waiting for {waited_s:.0f} s for "
                f"{name_ranks(missing)} to join group {self.name}{there}; {self.call}; it gives up in "
                f"{self.timeout_s - waited_s:.0f} s"
            )
            print(line, file=sys.stderr, flush=True)


def name_came(here: Mapping[int, str]) -> str:
    """For messages: `ranks 0 (pid 12 on a), 2 (pid 14 on a) came`; of many, their numbers."""
    texts = [f"{rank} ({who})" if len(here) <= _SHOWN else rank for rank, who in sorted(here.items())]
    return f"{name_ranks(texts)} joined"


def _without_prefix(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def choose_addresses(members: Sequence[RankInfo], rank: int) -> list[str]:
    """The addresses, in digits, on which a rank is to listen for the ranks of the other hosts.

    Those of the cards that PHOTINUS_INTERFACE names; loopback where the "hosts" lie on one network stack (one machine,
    distinguished by PHOTINUS_HOST_ID or by user); those that GLOO_SOCKET_IFNAME names, as `photinus run` does; else the
    one with the way to the store or, for ranks beside it, to the other hosts; else the first that there is.

    Raises:
        ValueError: a card that is named is not there, or has no address.
        HostError: this host has no address but loopback.
    """
    one_network = all(member.network == members[rank].network for member in members)
    # The first group decides, except that loopback does not do once ranks of other hosts are in a group.
    if not _addresses or (not one_network and all(map(is_loopback, _addresses))):
        _addresses[:] = _choose(members, rank, one_network=one_network)
    return list(_addresses)


def _choose(members: Sequence[RankInfo], rank: int, *, one_network: bool) -> list[str]:
    if names := env.INTERFACE.get():
        return addresses_of_interfaces(names)
    # The "hosts" are one machine, so loopback reaches them all.
    if one_network:
        return [LOOPBACK]
    if names := tuple(name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name):
        return addresses_of_interfaces(names)
    me = members[rank]
    # The store's own host may reach it on loopback (127.0.1.1); there it is the address that reaches another host.
    for member in (me, *(member for member in members if member.host_id != me.host_id)):
        if member.address is not None and not is_loopback(member.address):
            with contextlib.suppress(OSError):
                return [reaches_from(member.address)]
    # Nothing tells which card is right. One that is connected is a better guess than an error.
    if outside := outside_addresses():
        return outside[:1]
    raise HostError(
        f"host {me.host_name} has no network card that is connected and has an address, so ranks on other hosts "
        f"cannot reach it. To use a card all the same, set PHOTINUS_INTERFACE to its name"
    )
