"""Who leads a job on several hosts, and this host's way into it.

The host that leads is the one to which --master-addr (or --rdzv-endpoint) belongs; with --node-rank, the one of rank
0. It listens on that address only. When two launchers of one host could lead, the first to have the port does.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ... import env
from ...errors import LaunchError
from ..flags import HostFlags
from ..usage import UsageError
from .dialling import look
from .handshake import key_of
from .leading import leading
from .meeting import Meeting
from .member import Member
from .ports import PortTakenError, listen, local_addresses_of

__all__ = ["DEFAULT_PORT", "Joined", "joining"]

DEFAULT_PORT = 29500
_ANY = ("0.0.0.0", "::")


@dataclass(frozen=True)
class Joined:
    """This host's connection to its job.

    Attributes:
        member: the other hosts, for the agent.
        leads: whether this host leads.
    """

    member: Member
    leads: bool


@contextlib.contextmanager
def joining(
    flags: HostFlags,
    *,
    job_id: str,
    max_restarts: int,
    environ: Mapping[str, str],
    say: Callable[[str, bool], None],
) -> Iterator[Joined]:
    """Takes part in the job for the duration of the block; leads it, if this is the host to do so.

    Args:
        flags: number of hosts, leader's address and port, this host's place.
        job_id: the workers' name for this run, if this host leads.
        max_restarts: attempts after the first.
        environ: where the secret is looked for (PHOTINUS_JOB_SECRET).
        say: prints words on the terminal; with True an alarm.

    Raises:
        UsageError: nobody said who leads, or the name does not resolve.
        LaunchError: this host should lead and cannot listen there.
    """
    assert flags.nnodes is not None
    if flags.leader is None:
        least, most = flags.nnodes
        raise UsageError(
            f"--nnodes {least if least == most else f'{least}:{most}'} needs the host that leads: give --master-addr "
            f"HOST, the same on every host (and --master-port, if {DEFAULT_PORT} is taken there)."
        )
    port = DEFAULT_PORT if flags.port is None else flags.port
    key = key_of(env.JOB_SECRET.get(environ) or "", flags.job_id or "")
    listener = _listener(flags, flags.leader, port, environ)
    leads = listener is not None
    with contextlib.ExitStack() as stack:
        if listener is None:
            address = flags.leader
            asyncio.run(look(address, port, key))
        else:
            address, port = listener.getsockname()[:2]
            secret = env.JOB_SECRET.get(environ)
            if secret is None and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
                say(
                    f"photinus: leads at {address} port {port} without a secret: whoever reaches that port can take "
                    f"part. Set {env.JOB_SECRET.name} to the same random words on every host.\n",
                    False,
                )
            if address in _ANY:
                address = flags.leader
            rules = Meeting(*flags.nnodes, join_timeout_s=flags.join_timeout_s, last_call_s=flags.last_call_s)
            stack.enter_context(leading(listener, key, rules, max_restarts=max_restarts, job_id=job_id))
        member = Member(address, port, key, join_timeout_s=flags.join_timeout_s, say=say)
        stack.callback(member.close)
        yield Joined(member, leads)


def _listener(flags: HostFlags, leader: str, port: int, environ: Mapping[str, str]) -> socket.socket | None:
    """The leader's socket, None when another host (or another launcher of this one) leads."""
    number = env.LISTEN_FD.get(environ)
    if number is not None:
        return socket.socket(fileno=number)
    must = flags.leads or flags.node_rank == 0
    if flags.leads is False or (flags.node_rank is not None and flags.node_rank > 0):
        return None
    try:
        own = local_addresses_of(leader)
    except OSError as error:
        if not must:
            return None  # the member goes on trying: the name may be given out soon
        raise UsageError(f"--master-addr {leader} does not resolve on this host: {error.strerror or error}.") from None
    if flags.local_address is not None and (own or must):
        own = [flags.local_address]
    if not own:
        if must:
            raise LaunchError(
                f"this host is to lead, but --master-addr {leader} is no address of it. Give its own address, or with "
                f"--local-addr what it is to listen on (0.0.0.0: all its addresses).",
                exit_code=2,
            )
        return None
    if port == 0:
        raise UsageError("--master-port 0 on several hosts: the others could not know the port. Give a number.")
    try:
        return listen(own[0], port)
    except PortTakenError:
        if must:
            raise
        return None  # perhaps by this job's leader: the member finds out, and names who it is otherwise
