"""The addresses by which the other hosts of a job know this one, and their interfaces. Nothing here sends anything.

A host's own name is no way to find them: Debian has it at 127.0.1.1 in /etc/hosts, and elsewhere it may mean nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from .slurm import reachable_address

Address: TypeAlias = "ipaddress.IPv4Address | ipaddress.IPv6Address"

_IPV6_INTERFACES = Path("/proc/net/if_inet6")
_ANY_PORT = 9
_ELSEWHERE = "198.51.100.1"  # an address for examples, which no host has: asks for the way out
_GET_FLAGS, _GET_ADDRESS = 0x8913, 0x8915  # SIOCGIFFLAGS, SIOCGIFADDR
_LOOPBACK_FLAG, _RUNNING_FLAG = 0x8, 0x40


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
    named = [address for address in found if not is_loopback(address)]
    if named or (found and not means_this_host(name, found)):
        return (named or found)[0]
    for other in (*others, _ELSEWHERE):
        with contextlib.suppress(OSError):
            address = reaches_from(reachable_address(other))
            if not is_loopback(address):
                return address
    return [*outside_addresses(), *found, "127.0.0.1"][0]


def means_this_host(name: str, found: Sequence[str]) -> bool:
    """Whether a name that resolves to these addresses is a host's own with nothing but loopback behind it."""
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
    known: dict[str, str] = {}
    for name, address, _ in interfaces():
        known.setdefault(name, str(address))
    for name in names:
        if name not in known:
            there = name in [other for _, other in socket.if_nameindex()]
            raise ValueError(
                f"network card {name} of host {socket.gethostname()} "
                f"{'has no address that other hosts could reach' if there else 'does not exist'}; those with one: "
                f"{', '.join(f'{other} ({address})' for other, address in known.items()) or 'none'}"
            )
    return [known[name] for name in names]


def interface_of(address: str) -> str | None:
    """The name of the network interface that has this address, None when none has it."""
    digits, _, scope = address.partition("%")
    if scope:
        return scope
    wanted = ipaddress.ip_address(digits)
    for name, own, flags in interfaces():
        if wanted == own or (wanted.is_loopback and flags & _LOOPBACK_FLAG):
            return name
    return None


def is_loopback(address: str) -> bool:
    """Whether no other host can reach this address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interfaces() -> list[tuple[str, Address, int]]:
    """(name, address, flags) of each interface's first IPv4 address, and then of the IPv6 ones.

    Without those of IPv6 that mean something on one cable only (fe80::...).
    """
    found: list[tuple[str, Address, int]] = []
    flags: dict[str, int] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # has no IPv4 address, or has just gone
                (flags[name],) = struct.unpack("H", fcntl.ioctl(asker.fileno(), _GET_FLAGS, request)[16:18])
                address = ipaddress.IPv4Address(fcntl.ioctl(asker.fileno(), _GET_ADDRESS, request)[20:24])
                found.append((name, address, flags[name]))
    with contextlib.suppress(FileNotFoundError):  # no IPv6 here
        for line in _IPV6_INTERFACES.read_text().splitlines():
            digits, *_, name = line.split()
            own = ipaddress.IPv6Address(int(digits, 16))
            if name in flags and not own.is_link_local:
                found.append((name, own, flags[name]))
    return found
