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

from .slurm import reachable_address

__all__ = [
    "interface_of",
    "interfaces",
    "is_loopback",
    "means_this_host",
    "outside_addresses",
    "own_address",
    "reaches_from",
]

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
    """The IPv4 addresses of this host on interfaces that are connected to something, without loopback."""
    return [str(address) for _, address, flags in interfaces() if flags & _RUNNING_FLAG and not flags & _LOOPBACK_FLAG]


def interface_of(address: str, root: Path = Path("/")) -> str | None:
    """The name of the network interface that has this address, None when none has it."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.version == 6:
        with contextlib.suppress(FileNotFoundError):  # no IPv6 here
            for line in (root / "proc/net/if_inet6").read_text().splitlines():
                if int(line.split()[0], 16) == int(wanted):
                    return line.split()[-1]
        return None
    for name, own, flags in interfaces():
        if wanted == own or (wanted.is_loopback and flags & _LOOPBACK_FLAG):
            return name
    return None


def is_loopback(address: str) -> bool:
    """Whether no other host can reach this address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interfaces() -> list[tuple[str, ipaddress.IPv4Address, int]]:
    """(name, first IPv4 address, flags) of each interface that has such an address."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # has no IPv4 address, or has just gone
                address = ipaddress.IPv4Address(fcntl.ioctl(asker.fileno(), _GET_ADDRESS, request)[20:24])
                (flags,) = struct.unpack("H", fcntl.ioctl(asker.fileno(), _GET_FLAGS, request)[16:18])
                found.append((name, address, flags))
    return found
