"""How ranks that srun or mpirun started find each other, without a launcher of ours that would keep a store for them.

Rank 0 listens at the agreed port (see `photinus.job.rendezvous`) on the one interface that the ranks use, and starts
torch's store at a port of its own choice. Each other rank says which job and rank it is, in one line, and is told the
store's port:

    rank r -> rank 0    photinus-rank IDENTITY RANK WORLD_SIZE HOST PID
    rank 0 -> rank r    photinus-store PORT, or photinus-refused REASON

So whatever else listens at the port (another job, a web server, something that stays silent) is told from rank 0
within seconds and by name, and nothing but that line is ever read there. Torch's store by itself would hang on it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import socket
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ... import env
from ...errors import CollectiveTimeoutError, NotInitializedError, PhotinusError
from ...job.own_address import own_address
from ...job.rendezvous import Rendezvous
from ...job.slurm import reachable_address
from ...job.world import World, name_ranks
from .progress import say

_LINE_LIMIT_BYTES = 1024
_ANSWER_S = 5.0  # within which whoever accepted a connection has to answer like a rank 0, or to ask like a rank
_SAY_AFTER_S = 5.0
_SAY_EVERY_S = 30.0
_RETRY_S = 0.1
_SESSION = "photinus/session"
_sessions: set[str] = set()  # that this process was in: the store of one that ends may still answer


def open_store(world: World, rendezvous: Rendezvous, timeout_s: float) -> Store:
    """Joins all ranks of the job at one store; returns when this rank is connected (rank 0: when all are).

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
    identity = _identity(rendezvous.job)
    deadline = time.monotonic() + timeout_s
    if world.rank == 0:
        return _Host(world, rendezvous, address, identity).gather(deadline, timeout_s)
    port = _ask(world, rendezvous, address, identity, deadline)
    return _store(address, port, timeout_s)


def open_given_store(world: World, rendezvous: Rendezvous, timeout_s: float) -> Store:
    """Joins all ranks at a store of torch's at MASTER_ADDR and MASTER_PORT, which rank 0 serves.

    torch's own way waits for all ranks inside C++, where nobody says who is missing.

    Raises:
        NotInitializedError: ranks did not come in time, or one came twice; names them.
    """
    who = f"pid {os.getpid()} on {socket.gethostname()}"
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if world.rank > 0:
                _connect(world, rendezvous, rendezvous.address, deadline).close()
            left_s = round(max(_RETRY_S, deadline - time.monotonic()), 1)
            store = _store(rendezvous.address, rendezvous.port, left_s, is_master=world.rank == 0)
            _call_roll(store, world, who, left_s)
        except RuntimeError as error:
            if isinstance(error, PhotinusError):
                raise
            if world.rank == 0 or time.monotonic() >= deadline:
                raise NotInitializedError(
                    f"rank {world.rank} ({who}) and the store at {rendezvous.address}:{rendezvous.port}, which rank 0 "
                    f"serves: {str(error).splitlines()[0]}. If another program, or another rank 0, holds the port, set "
                    f"MASTER_PORT to a free one for all ranks; if rank 0 has ended, its output says why."
                ) from None  # torch's C++ frames say no more
            time.sleep(_RETRY_S)  # rank 0 is ending the session before this one
        else:
            store.set_timeout(timedelta(seconds=timeout_s))
            return store


def _call_roll(store: Store, world: World, who: str, timeout_s: float) -> None:
    """Waits until each rank has shown itself, once, in the session that rank 0 has begun."""
    from ...backend.hosts import Joining, name_came  # which needs the engine

    joining = Joining(store, world.rank, world.world_size, timeout_s=timeout_s, name="world")
    if world.rank == 0:
        store.set(_SESSION, secrets.token_hex(8))
    joining.until(
        lambda: store.check([_SESSION]) and (world.rank == 0 or store.get(_SESSION).decode() not in _sessions)
    )
    session = store.get(_SESSION).decode()
    _sessions.add(session)
    roll = PrefixStore(f"{_SESSION}/{session}", store)
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
        raise NotInitializedError(str(error)) from None


def _identity(job: str) -> str:
    # Where a user has set a secret, strangers do not get in by knowing the job's number.
    secret = env.JOB_SECRET.get() or ""
    return hmac.new(secret.encode(), job.encode(), hashlib.sha256).hexdigest()


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


@dataclass
class _Host:
    """Rank 0: listens, tells each rank the store's port once, and goes on when all have it."""

    world: World
    rendezvous: Rendezvous
    address: str
    identity: str
    present: dict[int, str] = field(default_factory=dict)  # rank -> who it is
    changed: threading.Condition = field(default_factory=threading.Condition)

    def gather(self, deadline: float, timeout_s: float) -> Store:
        """The store, when all ranks know where it is; it listens on the same address only."""
        with self._listen(self.rendezvous.port) as listener, self._listen(0) as behind:
            port: int = behind.getsockname()[1]
            store = _store(self.address, port, timeout_s, behind.detach())
            answering = threading.Thread(target=self._answer_callers, args=(listener, port), daemon=True)
            answering.start()
            try:
                self._wait_for_all(deadline)
            finally:
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
                answering.join()
        return store

    def _wait_for_all(self, deadline: float) -> None:
        where = f"{self.address}:{self.rendezvous.port}"
        begun = time.monotonic()
        say_at = begun + _SAY_AFTER_S
        with self.changed:
            while len(self.present) < self.world.world_size - 1:
                now = time.monotonic()
                if now >= deadline:
                    raise NotInitializedError(
                        f"rank 0 waited {now - begun:.0f} s at {where}, but {self._missing()} did not come. Look at "
                        f"what they printed; a firewall between the hosts has the same effect."
                    )
                if now >= say_at:
                    say(f"photinus: rank 0 waits for {self._missing()} at {where}")
                    say_at = now + _SAY_EVERY_S
                self.changed.wait(min(say_at, deadline) - now)

    def _listen(self, port: int) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        try:
            backlog = min(4096, self.world.world_size + 16)
            return socket.create_server((self.address, port), family=family, backlog=backlog)
        except OSError as error:
            raise NotInitializedError(
                f"rank 0 cannot listen at {self.address}:{port}, the port that {self.rendezvous.source} lead to: "
                f"{os.strerror(error.errno or 0)}. If another program holds it (`ss -ltnp` says which), set "
                f"MASTER_PORT to a free one for all ranks; if this is not the address of rank 0's host, set "
                f"MASTER_ADDR."
            ) from error

    def _answer_callers(self, listener: socket.socket, port: int) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if error.errno == errno.EINVAL:  # the listener is shut down
                    return
                continue  # who called has gone again
            threading.Thread(target=self._answer, args=(connection, port), daemon=True).start()

    def _answer(self, connection: socket.socket, port: int) -> None:
        with connection, contextlib.suppress(OSError):  # who has gone, or says nothing in time, is no rank of ours
            connection.settimeout(_ANSWER_S)
            line = connection.makefile("rb").readline(_LINE_LIMIT_BYTES)
            if not line.endswith(b"\n"):
                return
            with self.changed:
                refusal = self._refusal(line.decode("utf-8", "replace").split())
                answer = f"photinus-refused {refusal}" if refusal else f"photinus-store {port}"
                connection.sendall(answer.encode() + b"\n")
                self.changed.notify()

    def _refusal(self, words: list[str]) -> str:
        """Why this caller is refused; empty when it is a rank of ours."""
        if len(words) != 6 or words[0] != "photinus-rank" or not hmac.compare_digest(words[1], self.identity):
            return "this port belongs to another job"
        rank, world_size, who = words[2], words[3], f"pid {words[5]} on {words[4]}"
        if world_size != str(self.world.world_size):
            return f"rank 0 is one of {self.world.world_size}, but {who} is one of {world_size}"
        if not rank.isdigit() or not 0 < int(rank) < self.world.world_size:
            return f"{who} says that it is rank {rank} of {world_size}"
        if self.present.get(int(rank), who) != who:
            return f"rank {rank} is {self.present[int(rank)]} already, and {who} says that it is the same"
        self.present[int(rank)] = who
        return ""

    def _missing(self) -> str:
        missing = [rank for rank in range(1, self.world.world_size) if rank not in self.present]
        return f"{name_ranks(missing, 8)} of {self.world.world_size}"


def _ask(world: World, rendezvous: Rendezvous, address: str, identity: str, deadline: float) -> int:
    """The port of rank 0's store, as rank 0 tells it. Rank 0 may come later than this rank."""
    where = f"{address}:{rendezvous.port}"
    hello = f"photinus-rank {identity} {world.rank} {world.world_size} {socket.gethostname()} {os.getpid()}\n"
    with _connect(world, rendezvous, address, deadline) as connection:
        answer = _exchange(connection, hello.encode())
    word, _, rest = answer.partition(" ")
    if word == "photinus-store" and rest.isdigit():
        return int(rest)
    if word == "photinus-refused":
        raise NotInitializedError(f"rank {world.rank} was turned away at {where}: {rest}")
    raise NotInitializedError(
        f"rank {world.rank} found something else than rank 0 at {where}, the port that {rendezvous.source} lead "
        f"to: it {f'said {answer[:80]!r}' if answer else 'said nothing'}. Set MASTER_PORT to a free port for all "
        f"ranks."
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


def _exchange(connection: socket.socket, hello: bytes) -> str:
    """Sends the line and returns the answer's first line; empty when none came. What is refused later is no answer."""
    text = b""
    try:
        connection.sendall(hello)
        deadline = time.monotonic() + _ANSWER_S
        while b"\n" not in text and len(text) < _LINE_LIMIT_BYTES and time.monotonic() < deadline:
            piece = connection.recv(_LINE_LIMIT_BYTES)
            if not piece:
                break
            text += piece
    except OSError:
        pass
    return text.split(b"\n")[0].decode("utf-8", "replace").strip()


def _unknown(address: str, rendezvous: Rendezvous, error: OSError) -> str:
    return (
        f"rank 0's host {address}, to which {rendezvous.source} lead, is not known to {socket.gethostname()}: "
        f"{error.strerror or error}. Export MASTER_ADDR, an address that every host knows, before starting."
    )
