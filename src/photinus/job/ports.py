"""Listening on one address of this host."""

from __future__ import annotations

import contextlib
import errno
import socket

from ..errors import LaunchError
from .own_address import is_loopback, is_own

_BACKLOG = 4096


class PortTakenError(LaunchError):
    """Another process listens on the port."""


def listen(address: str, port: int) -> socket.socket:
    """A listening socket on this address only; port 0: one that is free.

    Raises:
        PortTakenError: another process has the port.
        LaunchError: the address is none of this host, or the port needs rights that this user has not.
    """
    family, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0::4]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the last job's connections may linger
        listener.bind(where)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTakenError(
                f"port {port} of {address} is taken by another process (`ss -ltnp 'sport = :{port}'` shows it). Give "
                f"another with --master-port (the same on every host), or end that process.",
            ) from None
        raise LaunchError(f"cannot listen on {address} port {port}: {error.strerror}") from None
    return listener


def local_addresses_of(host: str) -> list[str]:
    """The addresses of the name that belong to this host, best first; empty for another host.

    Raises:
        OSError: the name does not resolve.
    """
    found = [str(where[0]) for *_, where in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)]
    return list(filter(is_own, found))


def listen_as(name: str, port: int, *, or_another: bool, otherwise: str | None, alone: bool) -> socket.socket:
    """A listening socket at this host's address of that name: bound before anybody is told of it, so nobody takes it.

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
    usable = [address for address in own if alone or not is_loopback(address)]
    if not usable:
        means = f"{own[0]} there" if own else "not one of its addresses"
        raise LaunchError(
            f"other hosts cannot reach {name}: it resolves to {means}. Write the host's address into the host file, or "
            f"give --master-addr."
        )
    # IPv4 first: it is what clusters are wired for.
    usable.sort(key=lambda address: ":" in address)
    try:
        return listen(usable[0], port)
    except PortTakenError:
        if not or_another:
            raise
        return listen(usable[0], 0)
