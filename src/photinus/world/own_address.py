"""The address by which the other hosts of a job know this one."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence

from .slurm import reachable_address

__all__ = ["own_address"]

_ANY_PORT = 9


def own_address(name: str, others: Sequence[str] = ()) -> str:
    """The IP address of this host behind its name, as other hosts see it.

    A host's own /etc/hosts often has its name at 127.0.1.1, where no other host would reach it. Then the address counts
    from which this host would speak to another one of the job.

    Args:
        name: of this host.
        others: names of other hosts of the job.

    Raises:
        OSError: the name does not resolve.
    """
    found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    outside = [address for address in found if not _loopback(address)]
    if outside:
        return outside[0]
    for other in others:
        with contextlib.suppress(OSError):
            family, _, _, _, target = socket.getaddrinfo(reachable_address(other), _ANY_PORT, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)  # sends nothing: asks the kernel for its route
                return str(probe.getsockname()[0])
    return found[0]


def _loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
