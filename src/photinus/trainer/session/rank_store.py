"""The rendezvous of ranks that no agent gave a store: rank 0 serves one, and all ranks call a roll in it.

Address and port come from MASTER_ADDR and MASTER_PORT, or from what srun and mpirun tell each task (see
`photinus.job.rendezvous`). The roll names the ranks that have joined and those that are missing. Its keys hold the name
of the job and a number of the session, so ranks of another job at the same port never meet these.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent import futures
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ... import env
from ...errors import CollectiveTimeoutError, NotInitializedError, PhotinusError
from ...job.channel import key_of
from ...job.own_address import own_address
from ...job.rendezvous import RendezvousAddress
from ...job.slurm import reachable_address
from ...job.world import World
from .progress import say

if TYPE_CHECKING:
    from ...backend.hosts import RendezvousWait

_CONNECT_S = 5.0
_SAY_AFTER_S = 5.0
_SAY_EVERY_S = 30.0
_RETRY_S = 0.1
_SESSION = "session"
_sessions: set[tuple[int, str]] = set()  # (rank, session) of this process: an ending store may still answer
_served: dict[str, Store] = {}  # by address, at ports that this process opened itself: it cannot open one twice


def open_store(world: World, rendezvous: RendezvousAddress, timeout_s: float) -> Store:
    """Join all ranks at torch's store, which rank 0 serves; return when all have joined.

    torch's own way waits for all ranks inside C++, where nobody says who is missing.

    Args:
        timeout_s: how long ranks may be apart in coming, in seconds; the store's own timeout, too.

    Raises:
        NotInitializedError: the port is taken or somebody else's, rank 0's host cannot be found, ranks did not come in
            time, or one came twice; names port, host and ranks.
    """
    deadline = time.monotonic() + timeout_s
    address = _address_of_rank_0(world, rendezvous)
    where = f"{address}:{rendezvous.port}"
    job = "" if rendezvous.given else key_of(env.JOB_SECRET.get() or "", rendezvous.job).hex()[:16]
    while True:
        try:
            if world.rank > 0:
                _connect(world, rendezvous, address, deadline).close()
            left_s = round(max(_RETRY_S, deadline - time.monotonic()), 1)
            store = _store(world, rendezvous, address, left_s)
            of_session = _call_roll(PrefixStore(f"photinus/{job}", store), world, where, left_s)
        except (RuntimeError, OSError) as error:
            if isinstance(error, PhotinusError):
                raise
            if world.rank == 0 or time.monotonic() >= deadline:
                what = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
                raise NotInitializedError(
                    f"rank {world.rank} ({_own_name()}) and the store at {where}, which rank 0 serves and to which "
                    f"{rendezvous.source} lead: {what.splitlines()[0]}. If another program, or another rank 0, holds "
                    f"the port (`ss -ltnp` shows it), set MASTER_PORT to a free one for all ranks; if this is not the "
                    f"address of rank 0's host, set MASTER_ADDR; if rank 0 has ended, see its output."
                ) from None  # torch's C++ frames say no more
            time.sleep(_RETRY_S)  # rank 0 is ending the session before this one
        else:
            of_session.set_timeout(timedelta(seconds=timeout_s))
            return of_session


def _own_name() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"


def _address_of_rank_0(world: World, rendezvous: RendezvousAddress) -> str:
    if rendezvous.given:
        return rendezvous.address
    address = reachable_address(rendezvous.address)
    if world.host_rank > 0:
        return address
    try:
        return own_address(address, rendezvous.hosts[1:2])
    except OSError as error:
        raise NotInitializedError(_unknown(address, rendezvous, error)) from error


def _store(world: World, rendezvous: RendezvousAddress, address: str, timeout_s: float) -> Store:
    """Return the store itself on rank 0, else a client of it."""
    port = rendezvous.port
    make = partial(TCPStore, address, port, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    if world.rank > 0:
        return _connected(partial(make, is_master=False), timeout_s)
    if rendezvous.given:
        # torch listens on all interfaces: a given address may be one that this host does not have (NAT).
        return make(is_master=True, multi_tenant=True)
    where = f"{address}:{port}"
    if where not in _served:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family, backlog=min(4096, world.world_size + 16))
        _served[where] = make(is_master=True, master_listen_fd=listener.detach())
    return _served[where]


def _connected(make: Callable[[], Store], timeout_s: float) -> Store:
    """Return what `make` connects to: torch waits without a limit where something accepts and then stays silent."""
    found: futures.Future[Store] = futures.Future()

    def connect() -> None:
        try:
            found.set_result(make())
        except Exception as error:  # noqa: BLE001 - raised by the thread that waits
            found.set_exception(error)

    threading.Thread(target=connect, name="photinus-store", daemon=True).start()
    try:
        return found.result(timeout_s + 1)
    except futures.TimeoutError:
        raise OSError("it accepts connections, but does not answer as torch's store does") from None


def _call_roll(store: Store, world: World, where: str, timeout_s: float) -> Store:
    """Wait until each rank has joined the session that rank 0 begins; return the session's part of the store.

    Raises:
        NotInitializedError: ranks did not come in time, one came twice, or worlds differ; names them.
    """
    from ...backend.hosts import RendezvousWait, name_came  # which needs the engine

    wait = RendezvousWait(store, world.rank, world.world_size, timeout_s=timeout_s, name="world")
    if world.rank == 0:
        store.set(_SESSION, f"{secrets.token_hex(8)} of {world.world_size}")

    def in_session() -> bool:
        if not store.check([_SESSION]):
            return False
        return world.rank == 0 or (world.rank, store.get(_SESSION).decode()) not in _sessions

    who = _own_name()
    own = f"{who}#{secrets.token_hex(8)}"  # two containers may have one host name, and both this pid
    taken: list[str] = []
    while True:
        _wait(wait, where, in_session, lambda: [0], lambda: "; ".join(taken[-1:]))
        session = store.get(_SESSION).decode()
        if not session.endswith(f" of {world.world_size}"):
            ranks = f"rank 0 expects {session.split()[-1]} ranks, and this is rank {world.rank} of {world.world_size}"
            raise NotInitializedError(f"{ranks}: start all ranks with one world size. Rank 0 is at {where}.")
        _sessions.add((world.rank, session))
        of_session = PrefixStore(session, store)
        roll = PrefixStore("roll", of_session)
        if (first := roll.compare_set(str(world.rank), "", own).decode()) == own:
            roll.add("count", 1)
            break
        first = first.partition("#")[0]
        if world.rank == 0 or roll.add("count", 0) < world.world_size:
            same = f"rank {world.rank} is {first}, and {who} says that it is the same"
            roll.set("refused", f"{same}. Each process needs a RANK of its own.")
            break
        # All of that session have joined: it is of the program before (`srun sh -c "a; b"`), whose rank 0 still runs.
        taken.append(f"the session there is complete, and has {first} as rank {world.rank}")
    here: dict[int, str] = {}

    def all_here() -> bool:
        if roll.check(["refused"]):
            raise NotInitializedError(roll.get("refused").decode())
        return roll.add("count", 0) == world.world_size  # one call: all ranks ask for all ranks

    def missing() -> list[int]:
        for rank in range(world.world_size):
            if rank not in here and roll.check([str(rank)]):
                here[rank] = roll.get(str(rank)).decode().partition("#")[0]
        return sorted(set(range(world.world_size)) - here.keys())

    try:
        _wait(wait, where, all_here, missing, lambda: name_came(here))
    except NotInitializedError as error:
        if world.rank == 0 and not roll.check(["refused"]):  # with which the store goes
            roll.set("refused", str(error))
            time.sleep(5 * _RETRY_S)
        raise
    return of_session


def _wait(wait: RendezvousWait, where: str, *until: Any) -> None:
    try:
        wait.until(*until)
    except CollectiveTimeoutError as error:
        raise NotInitializedError(
            f"{error} Rank 0 is at {where}. Look at what the missing ranks printed. A firewall between the hosts has "
            f"the same effect, and so has another job at that port ({where}): set MASTER_PORT to a free one."
        ) from None


def _connect(world: World, rendezvous: RendezvousAddress, address: str, deadline: float) -> socket.socket:
    """A connection to rank 0, which may come later than this rank."""
    begun = time.monotonic()
    say_at = begun + _SAY_AFTER_S
    where = f"{address}:{rendezvous.port}"
    while True:
        try:
            return socket.create_connection((address, rendezvous.port), timeout=_CONNECT_S)
        except OSError as error:
            if isinstance(error, socket.gaierror) and not rendezvous.given:
                raise NotInitializedError(_unknown(address, rendezvous, error)) from error
            now = time.monotonic()
            if now >= deadline:
                raise NotInitializedError(
                    f"rank {world.rank} waited {now - begun:.0f} s for rank 0 at {where}: {error}. Look at what rank 0 "
                    f"printed; a firewall between the hosts has the same effect."
                ) from error
            if now >= say_at:
                say(f"photinus: rank {world.rank} waits for rank 0 at {where}: {error}")
                say_at = now + _SAY_EVERY_S
            time.sleep(_RETRY_S)


def _unknown(address: str, rendezvous: RendezvousAddress, error: OSError) -> str:
    return (
        f"rank 0's host {address}, to which {rendezvous.source} lead, is not known to {socket.gethostname()}: "
        f"{error.strerror or error}. Export MASTER_ADDR, an address that every host knows, before starting."
    )
