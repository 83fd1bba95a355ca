"""Listening on one address, and naming the process that holds a port which is taken."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from pathlib import Path

from ...errors import LaunchError
from ...world.own_address import is_loopback
from .cgroup import text_of

_BACKLOG = 4096
_LISTENS = "0A"  # TCP_LISTEN, as /proc/net/tcp writes it


class PortTakenError(LaunchError):
    """Another process listens on the port; the message names it."""


def listen(address: str, port: int) -> socket.socket:
    """A listening socket on this address only; port 0: one that is free.

    Raises:
        PortTakenError: another process has the port; names it where that can be found out.
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
                f"port {port} of {address} is taken by {holder_of(port)}. Give another with --master-port (the same on "
                f"every host), or end that process.",
            ) from None
        raise LaunchError(f"cannot listen on {address} port {port}: {error.strerror}") from None
    return listener


def local_addresses_of(host: str) -> list[str]:
    """The addresses of the name that belong to this host, best first; empty for another host.

    Raises:
        OSError: the name does not resolve.
    """
    own = []
    for family, _, _, _, where in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        with socket.socket(family, socket.SOCK_STREAM) as attempt:
            try:
                attempt.bind((where[0], 0, *where[2:]))
            except OSError:
                continue
            own.append(str(where[0]))
    return own


def holder_of(port: int, root: Path = Path("/")) -> str:
    """Who listens on the port: "python train.py (pid 12, user ann)", or what can be said when /proc shows no more."""
    inodes, uids = set(), set()
    for name in ("tcp", "tcp6"):
        for line in text_of(root / "proc/net" / name).splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                uids.add(int(fields[7]))
                inodes.add(fields[9])
    for folder in sorted((root / "proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        if _has_socket(folder, inodes):
            return f"{_command(folder)} (pid {folder.name}, user {_user(folder.stat().st_uid)})"
    if uids:
        return f"a process of user {_user(min(uids))}, which this user may not look into"
    return "something that /proc does not show (another container of this network, or a connection from that port?)"


def _has_socket(folder: Path, inodes: set[str]) -> bool:
    try:
        with os.scandir(folder / "fd") as files:
            return any(os.readlink(file.path).removeprefix("socket:[").rstrip("]") in inodes for file in files)
    except OSError:  # another user's, or it has just ended
        return False


def _command(folder: Path) -> str:
    try:
        words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        words = ""
    return (words[:117] + "..." if len(words) > 120 else words) or "a process without a command line"


def _user(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


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
        means = f"which only means {own[0]} there, and others" if own else "which is no address of it: the others"
        raise LaunchError(
            f"it cannot be met as {name}, {means} need one that they can reach. Name it by its address in the host "
            f"file, or give --master-addr."
        )
    # IPv4 first: it is what clusters are wired for.
    usable.sort(key=lambda address: ":" in address)
    try:
        return listen(usable[0], port)
    except PortTakenError:
        if not or_another:
            raise
        return listen(usable[0], 0)
