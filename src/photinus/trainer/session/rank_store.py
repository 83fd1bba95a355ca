"""The rendezvous of ranks that srun or mpirun started, without a launcher of ours that would serve a store.

Rank 0 starts torch's store at a port of its own choice, on the one interface that the ranks use, and listens at the
agreed port (see `photinus.job.rendezvous`). There each other rank proves that it belongs to the job, and learns the
store's port; rank 0 proves the same to it (`photinus.job.channel`). So a rank tells whatever else listens at the port
(another job, a web server, something silent) from rank 0 within seconds, and says what it is. Torch's store by itself
would hang on it.

In the store all ranks call a roll, as those do whose MASTER_ADDR and MASTER_PORT were given: who has come, who has not.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ... import env
from ...errors import CollectiveTimeoutError, NotInitializedError, PhotinusError
from ...job import channel
from ...job.own_address import own_address
from ...job.rendezvous import Rendezvous
from ...job.server import serve_in_thread
from ...job.slurm import reachable_address
from ...job.store_port import StorePort, ask_port
from ...job.world import World
from .progress import say

_ANSWER_S = 5.0  # within which both ends of a connection have to prove themselves
_SAY_AFTER_S = 5.0
_SAY_EVERY_S = 30.0
_RETRY_S = 0.1
_SESSION = "photinus/session"
_sessions: set[str] = set()  # that this process was in: the store of one that ends may still answer


def open_store(world: World, rendezvous: Rendezvous, timeout_s: float) -> Store:
    """Join all ranks of the job at one store; return when all are connected.

    Args:
        timeout_s: how long ranks may be apart in coming, in seconds; the store's own timeout, too.

    Raises:
        NotInitializedError: the port is taken or somebody else's, rank 0's host cannot be found, or ranks did not come
            in time; names port, host and ranks.
    """
    address = reachable_address(rendezvous.address)
    if world.host_rank == 0:
        try:
            address = own_address(address, rendezvous.hosts[1:2])
        except OSError as error:
            raise NotInitializedError(_unknown(address, rendezvous, error)) from error
    key = channel.key_of(env.JOB_SECRET.get() or "", rendezvous.job)
    purpose = f"store of {world.world_size} ranks"
    deadline = time.monotonic() + timeout_s
    with ExitStack() as stack:
        if world.rank == 0:
            listener = stack.enter_context(_listen(world, rendezvous, address, rendezvous.port))
            behind = stack.enter_context(_listen(world, rendezvous, address, 0))
            port: int = behind.getsockname()[1]
            store = _store(address, port, timeout_s, behind.detach())
            stack.enter_context(serve_in_thread(StorePort(key, purpose, port, timeout_s=_ANSWER_S), listener))
        else:
            port = _ask(world, rendezvous, address, key, purpose, deadline)
            store = _store(address, port, timeout_s)
        where, left_s = f"{address}:{rendezvous.port}", max(_RETRY_S, deadline - time.monotonic())
        try:
            _call_roll(store, world, where, left_s, is_new=True)
        except RuntimeError as error:
            if isinstance(error, PhotinusError):
                raise
            raise _lost(world, where, error) from None
    return store


def _listen(world: World, rendezvous: Rendezvous, address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=min(4096, world.world_size + 16))
    except OSError as error:
        raise NotInitializedError(
            f"rank 0 cannot listen at {address}:{port}, the port that {rendezvous.source} lead to: "
            f"{os.strerror(error.errno or 0)}. If another program holds it (`ss -ltnp` shows it), set MASTER_PORT to "
            f"a free one for all ranks; if this is not the address of rank 0's host, set MASTER_ADDR."
        ) from error


def _ask(world: World, rendezvous: Rendezvous, address: str, key: bytes, purpose: str, deadline: float) -> int:
    """The port of rank 0's store, as rank 0 says. Rank 0 may come later than this rank."""
    where = f"{address}:{rendezvous.port}"

    with _connect(world, rendezvous, address, deadline) as connection, ThreadPoolExecutor(1) as thread:
        try:
            # In a thread, because a script may run an asyncio loop of its own here.
            return thread.submit(asyncio.run, ask_port(connection, key, purpose, timeout_s=_ANSWER_S)).result()
        except channel.RefusedError as error:
            raise NotInitializedError(f"rank {world.rank} was turned away at {where}: {error}.") from None
        except (channel.HandshakeError, channel.MessageError, OSError, EOFError, asyncio.TimeoutError) as error:
            raise NotInitializedError(
                f"rank {world.rank} found something else than rank 0 at {where}, the port that {rendezvous.source} "
                f"lead to: {error}. Set MASTER_PORT to a free port for all ranks."
            ) from None


def _own_name() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"


def open_given_store(world: World, rendezvous: Rendezvous, timeout_s: float) -> Store:
    """Joins all ranks at a store of torch's at MASTER_ADDR and MASTER_PORT, which rank 0 serves.

    torch's own way waits for all ranks inside C++, where nobody says who is missing.

    Raises:
        NotInitializedError: ranks did not come in time, or one came twice; names them.
    """
    where = f"{rendezvous.address}:{rendezvous.port}"
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if world.rank > 0:
                _connect(world, rendezvous, rendezvous.address, deadline).close()
            left_s = round(max(_RETRY_S, deadline - time.monotonic()), 1)
            store = _store(rendezvous.address, rendezvous.port, left_s, is_master=world.rank == 0)
            _call_roll(store, world, where, left_s, is_new=False)
        except RuntimeError as error:
            if isinstance(error, PhotinusError):
                raise
            if world.rank == 0 or time.monotonic() >= deadline:
                raise _lost(world, where, error) from None
            time.sleep(_RETRY_S)  # rank 0 is ending the session before this one
        else:
            store.set_timeout(timedelta(seconds=timeout_s))
            return store


def _lost(world: World, where: str, error: RuntimeError) -> NotInitializedError:
    return NotInitializedError(
        f"rank {world.rank} ({_own_name()}) and the store at {where}, which rank 0 serves: "
        f"{str(error).splitlines()[0]}. If another program, or another rank 0, holds the port, set MASTER_PORT to a "
        f"free one for all ranks; if rank 0 has ended, see its output."  # torch's C++ frames say no more
    )


def _call_roll(store: Store, world: World, where: str, timeout_s: float, *, is_new: bool) -> None:
    """Waits until each rank has shown itself, once; in a store that is not new, in the session that rank 0 has begun.

    Raises:
        NotInitializedError: ranks did not come in time, or one came twice; names them.
    """
    from ...backend.hosts import Joining, name_came  # which needs the engine

    joining = Joining(store, world.rank, world.world_size, timeout_s=timeout_s, name="world")
    session = ""
    if not is_new:
        if world.rank == 0:
            store.set(_SESSION, secrets.token_hex(8))
        joining.until(
            lambda: store.check([_SESSION]) and (world.rank == 0 or store.get(_SESSION).decode() not in _sessions)
        )
        session = store.get(_SESSION).decode()
        _sessions.add(session)
    roll = PrefixStore(f"{_SESSION}/{session}", store)
    who = _own_name()
    own = f"{who}#{secrets.token_hex(8)}"  # two containers may have one host name, and both this pid
    if (first := roll.compare_set(str(world.rank), "", own).decode()) == own:
        roll.add("count", 1)
    else:
        taken = f"rank {world.rank} is {first.partition('#')[0]}, and {who} says that it is the same"
        roll.set("refused", f"{taken}. Each process needs a RANK of its own.")
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
        joining.until(all_here, missing, lambda: name_came(here))
    except CollectiveTimeoutError as error:
        if world.rank == 0:  # with which the store goes
            roll.set("refused", str(error))
            time.sleep(5 * _RETRY_S)
        raise NotInitializedError(
            f"{error} Rank 0 is at {where}. Look at what the missing ranks printed. A firewall between the hosts has "
            f"the same effect."
        ) from None


def _store(address: str, port: int, timeout_s: float, listener: int | None = None, *, is_master: bool = False) -> Store:
    """A client of the store at this address or the store itself, perhaps with a listening socket (descriptor)."""
    return TCPStore(
        address,
        port,
        is_master=is_master or listener is not None,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener,
        multi_tenant=is_master,
    )


def _connect(world: World, rendezvous: Rendezvous, address: str, deadline: float) -> socket.socket:
    """A connection to rank 0, which may come later than this rank."""
    begun = time.monotonic()
    say_at = begun + _SAY_AFTER_S
    where = f"{address}:{rendezvous.port}"
    while True:
        try:
            return socket.create_connection((address, rendezvous.port), timeout=_ANSWER_S)
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


def _unknown(address: str, rendezvous: Rendezvous, error: OSError) -> str:
    return (
        f"rank 0's host {address}, to which {rendezvous.source} lead, is not known to {socket.gethostname()}: "
        f"{error.strerror or error}. Export MASTER_ADDR, an address that every host knows, before starting."
    )
