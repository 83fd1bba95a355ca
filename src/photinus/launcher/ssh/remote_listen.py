"""The socket on which the first host of a job is met: bound before anybody is told of it, so nobody can take it."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

from ...errors import LaunchError
from ..workers.ports import PortTakenError, local_addresses_of
from ..workers.ports import listen as listen_on

__all__ = ["listen"]


def listen(name: str, port: int, *, or_another: bool, otherwise: str | None, alone: bool) -> socket.socket:
    """A listening socket at this host's address of that name.

    Args:
        name: name or address of this host, as the user typed it.
        port: 0 for one that is free.
        or_another: when the port is taken, one that is free is as good.
        otherwise: an address at which this host was reached, for when the name means nothing here, or only loopback
            (as in many a /etc/hosts).
        alone: no other host has to reach it, so loopback will do.

    Raises:
        LaunchError: no address of this host is meant, or the port is taken.
    """
    own: list[str] = []
    for each in (name, otherwise):
        with contextlib.suppress(OSError):  # means nothing here
            own += local_addresses_of(each) if each is not None else []
    usable = [address for address in own if alone or not ipaddress.ip_address(address.partition("%")[0]).is_loopback]
    if not usable:
        means = f"which only means {own[0]} there, and others" if own else "which is no address of it: the others"
        raise LaunchError(
            f"it cannot be met as {name}, {means} need one that they can reach. Name it by its address in the host "
            f"file, or give --master-addr."
        )
    # IPv4 first: it is what clusters are wired for.
    usable.sort(key=lambda address: ":" in address)
    try:
        return listen_on(usable[0], port)
    except PortTakenError:
        if not or_another:
            raise
        return listen_on(usable[0], 0)
