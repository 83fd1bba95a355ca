"""The addresses by which the other hosts of a job know this one, their interfaces, and listening on one of them.

A host's own name is no way to find them: Debian has it at 127.0.1.1 in /etc/hosts, and elsewhere it may mean nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from typing import TypeAlias

from ..errors import LaunchError
from .slurm import reachable_address

Address: TypeAlias = "ipaddress.IPv4Address | ipaddress.IPv6Address"

_ANY_PORT = 9
_BACKLOG = 4096
_ELSEWHERE = "198.51.100.1"  # an address for examples, which no host has: asks for the way out
_GET_FLAGS = 0x8913  # SIOCGIFFLAGS
_GET_ADDRESSES, _REQUEST_DUMP, _ERROR, _DONE = 22, 0x301, 2, 3  # RTM_GETADDR, NLM_F_..., NLMSG_ERROR, NLMSG_DONE
_ADDRESS, _LOCAL = 1, 2  # IFA_..., of a point to point link the other end's and the own
_LOOPBACK_FLAG, _RUNNING_FLAG = 0x8, 0x40


class PortTakenError(LaunchError):
    """Another process listens on the port."""


def own_address(name: str, others: Sequence[str] = ()) -> str:
    """The IP address of this host behind its name, as other hosts see it.

    Where the name means only loopback, or nothing and is this host's own, it is the address from which this host would
    speak to another one of the job; or else to the world, or the first that it has.

    Args:
        name: of this host; another host's simply resolves. An address, or localhost, is meant as it stands.
        others: names of other hosts of the job.

    Raises:
        OSError: the name does not resolve.
    """
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        if name != socket.gethostname():
            raise
        found = []
    addresses = [address for address in found if not is_loopback(address)]
    if addresses or (found and not means_this_host(name, found)):
        return (addresses or found)[0]
    for other in (*others, _ELSEWHERE):
        with contextlib.suppress(OSError):
            address = reaches_from(reachable_address(other))
            if not is_loopback(address):
                return address
    return [*outside_addresses(), *found, "127.0.0.1"][0]


def means_this_host(name: str, found: Sequence[str]) -> bool:
    """Return whether a name with these addresses is the host's own, with only loopback behind it."""
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return name != "localhost" and all(map(is_loopback, found))
    return False


def reaches_from(target: str) -> str:
    """The address with which this host would call another.

    Raises:
        OSError: there is no way there.
    """
    family, where = socket.getaddrinfo(target, _ANY_PORT, type=socket.SOCK_DGRAM)[0][0::4]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # a datagram socket: asks the kernel for its route
        return str(probe.getsockname()[0])


def outside_addresses() -> list[str]:
    """The addresses of this host on interfaces that are connected to something, without loopback.

    IPv4; of a host that has none, IPv6.
    """
    found = [address for _, address, flags in interfaces() if flags & _RUNNING_FLAG and not flags & _LOOPBACK_FLAG]
    return [str(address) for address in found if address.version == found[0].version]


def addresses_of_interfaces(names: Sequence[str]) -> list[str]:
    """The address by which other hosts reach each of these interfaces: IPv4; of one that has none, IPv6.

    Raises:
        ValueError: there is no such interface, or it has no address; lists those that have one.
    """
    addresses: dict[str, str] = {}
    for name, address, _ in interfaces():
        addresses.setdefault(name, str(address))
    for name in names:
        if name not in addresses:
            there = name in [other for _, other in socket.if_nameindex()]
            raise ValueError(
                f"network card {name} of host {socket.gethostname()} "
                f"{'has no address that other hosts can reach' if there else 'does not exist'}; cards with one: "
                f"{', '.join(f'{other} ({address})' for other, address in addresses.items()) or 'none'}"
            )
    return [addresses[name] for name in names]


def interface_of(address: str) -> str | None:
    """The name of the network interface that has this address, None when none has it."""
    if "%" in address:
        return address.partition("%")[2]
    ip = _parse(address)
    for name, own, flags in interfaces():
        if ip == own or (ip.is_loopback and flags & _LOOPBACK_FLAG):
            return name
    return None


def is_loopback(address: str) -> bool:
    """Return whether no other host can reach this address."""
    return _parse(address).is_loopback


def is_own(address: str) -> bool:
    """Return whether this host has the address. (A bind proves nothing: net.ipv4.ip_nonlocal_bind allows all.)"""
    ip = _parse(address)
    return ip.is_loopback or ip.is_unspecified or any(ip == own for _, own, _ in _all_addresses())


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
    """Return a listening socket at this host's address of that name. It is bound first, so no other program takes it.

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


def interfaces() -> list[tuple[str, Address, int]]:
    """(name, address, flags) of each address of each interface, IPv4 first.

    Without those of IPv6 that mean something on one cable only (fe80::...).
    """
    found = [each for each in _all_addresses() if each[1].version == 4 or not each[1].is_link_local]
    return sorted(found, key=lambda each: each[1].version)


def _all_addresses() -> list[tuple[str, Address, int]]:
    """Read the kernel's list over netlink (rtnetlink(7)): a dump of RTM_NEWADDR, with attributes behind each."""
    found: list[tuple[str, Address, int]] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW) as kernel, socket.socket() as asker:
        kernel.sendall(struct.pack("=IHHIIB3x", 20, _GET_ADDRESSES, _REQUEST_DUMP, 0, 0, socket.AF_UNSPEC))
        while True:
            data = kernel.recv(1 << 16)
            while data:
                length, kind = struct.unpack_from("=IH", data)
                if kind in (_ERROR, _DONE):
                    return found
                (index,) = struct.unpack_from("=I", data, 20)
                place, attributes = 24, dict[int, bytes]()
                while place < length:
                    size, number = struct.unpack_from("=HH", data, place)
                    attributes[number] = data[place + 4 : place + size]
                    place += (size + 3) & ~3
                with contextlib.suppress(OSError, ValueError):  # it has just gone, or has no address of the internet's
                    name = socket.if_indextoname(index)
                    request = fcntl.ioctl(asker.fileno(), _GET_FLAGS, struct.pack("256s", name.encode()[:15]))
                    own = ipaddress.ip_address(attributes.get(_LOCAL) or attributes[_ADDRESS])
                    found.append((name, own, *struct.unpack("H", request[16:18])))
                data = data[(length + 3) & ~3 :]


def _parse(address: str) -> Address:
    """The address without a scope; ::ffff:10.0.0.1, as a socket of both families calls it, is IPv4's 10.0.0.1."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return getattr(parsed, "ipv4_mapped", None) or parsed
