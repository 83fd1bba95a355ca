"""Find the host that leads a job on several hosts, and join it.

The host that leads is the one to which --master-addr (or --rdzv-endpoint) belongs; with --node-rank, the one of rank
0. It listens on that address only. When two launchers of one host could lead, the first to have the port does.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from ... import env
from ...errors import LaunchError, UsageError
from ...job.attempt import AttemptStore
from ...job.channel import key_of
from ...job.client import SeveralHosts
from ...job.membership import Membership
from ...job.own_address import (
    PortTakenError,
    is_loopback,
    listen,
    local_addresses_of,
    means_this_host,
    outside_addresses,
)
from ...job.restart_policy import RestartPolicy
from ...job.server import Leader, serve_in_thread
from ...job.spec import HostSpec
from .job import Job

DEFAULT_PORT = 29500
_ANY = ("0.0.0.0", "::")


@contextlib.contextmanager
def join_job(
    job: Job, *, say: Callable[[str, bool], None], store: AttemptStore, listener: socket.socket | None = None
) -> Iterator[SeveralHosts]:
    """Take part in a job of several hosts for the duration of the block; lead it, if this is the host to do so.

    `listener`: a socket that was bound for the leader, which is this host then.

    Raises:
        UsageError: nobody said who leads, or at which port.
        LaunchError: this host should lead and cannot listen there.
    """
    spec, hosts = job.spec, job.spec.hosts
    assert hosts.nnodes is not None
    (least, most), name = hosts.nnodes, hosts.leader
    if name is None:
        raise UsageError(
            f"--nnodes {least if least == most else f'{least}:{most}'} needs the leading host: give --master-addr "
            f"HOST, the same on every host (and --master-port, if {DEFAULT_PORT} is taken there)."
        )
    if (port := DEFAULT_PORT if hosts.port is None else hosts.port) == 0:
        raise UsageError("--master-port 0 works on one host only: others cannot know the port. Give a port number.")
    secret = env.JOB_SECRET.get(job.base_environ)
    key = key_of(secret or "", hosts.job_id or "")
    with contextlib.ExitStack() as stack:
        # A reader of this launcher's output that is paused (less) must not hold up signs of life.
        saying = stack.enter_context(ThreadPoolExecutor(1, "photinus-say"))

        def tell(text: str, alarm: bool) -> None:
            saying.submit(say, text, alarm)

        def lead() -> tuple[bool, str, int]:
            """Lead, if this is the host to do so; return whether it is, and where the leader is."""
            own, address = (listener, name) if listener is not None else _listener(hosts, name, port, say)
            if own is None:
                return False, address, port
            address, bound = own.getsockname()[:2]
            if secret is None and not is_loopback(address):
                say(
                    f"photinus: this host leads at {address} port {bound} without a secret: every host that reaches "
                    f"the port can join. Set {env.JOB_SECRET.name} to the same random text on every host.\n",
                    False,
                )
            if address in _ANY:
                address = "127.0.0.1" if address == "0.0.0.0" else "::1"
            policy = RestartPolicy(spec.max_restarts)
            times_s = hosts.join_timeout_s, hosts.last_call_s, hosts.heartbeat_timeout_s, spec.stop_grace_s
            rules = Membership(least, most, *times_s, spend_restart=policy.spend_restart)
            leading.enter_context(serve_in_thread(Leader(key, own, rules, policy, job_id=job.job_id, say=tell)))
            return True, address, bound

        leading = stack.enter_context(contextlib.ExitStack())  # ends after the member, which says good-bye first
        peers = SeveralHosts(
            hosts,
            job.local_world_size,
            key,
            lead=lead,
            comes_back=spec.max_restarts > 0 or least < most,
            say=tell,
            store=store,
            is_shown_elsewhere=spec.started_as is not None,
        )
        stack.callback(os.close, peers.fd)
        stack.enter_context(serve_in_thread(peers))
        try:
            yield peers
        except LaunchError as error:
            peers.leave(f"left: {error}", error.exit_code)
            raise


def _listener(
    hosts: HostSpec, leader: str, port: int, say: Callable[[str, bool], None]
) -> tuple[socket.socket | None, str]:
    """The leader's socket, None when another host (or another launcher of this one) leads; and the leader's address."""
    must = bool(hosts.leads) or hosts.node_rank == 0
    if hosts.leads is False or (hosts.node_rank is not None and hosts.node_rank > 0):
        return None, leader
    own = _own_addresses(leader, say)
    if hosts.local_address is not None and (own or must):
        own = [hosts.local_address]
    if own is None:
        return None, leader  # the member says what it waits for, and asks again
    if not own:
        if must:
            raise LaunchError(
                f"this host should lead, but --master-addr {leader} is not one of its addresses. Give one of them, or "
                f"give --local-addr, the address to listen on (0.0.0.0: all addresses).",
                exit_code=2,
            )
        return None, leader
    try:
        return listen(own[0], port), own[0]
    except PortTakenError:
        if must:
            raise
        # Perhaps by this job's leader: the member finds out, and names who it is otherwise.
        return None, leader if own[0] in _ANY else own[0]


def _own_addresses(leader: str, say: Callable[[str, bool], None]) -> list[str] | None:
    """The addresses of this host behind the leader's name, empty when it is another host's; None: nobody's, yet."""
    try:
        own = local_addresses_of(leader)
    except OSError:
        if leader != socket.gethostname():
            return None  # a cluster's name server may learn of a new host late
        own = []  # a host that does not know its own name
    if not (means_this_host(leader, own) if own else leader == socket.gethostname()):
        return own
    # Debian's /etc/hosts has a host's own name at 127.0.1.1, where no other host reaches it; which of several networks
    # the others mean by the name cannot be known here.
    outside = outside_addresses()
    if not outside:  # all launchers of this job are on this host
        return own or ["127.0.0.1"]
    where = outside[0] if len(outside) == 1 else f"all addresses ({', '.join(outside)})"
    say(
        f"photinus: {leader} resolves to {own[0] if own else 'nothing'} on this host, which other hosts cannot "
        f"reach: the job listens on {where} (to change it: --local-addr)\n",
        False,
    )
    return outside if len(outside) == 1 else ["0.0.0.0"]
