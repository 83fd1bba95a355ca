"""Which of this host's addresses ranks of other hosts reach this process at."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from .. import env
from ..errors import HostError
from ..job.own_address import addresses_of_interfaces, is_loopback, outside_addresses, reaches_from

LOOPBACK = "127.0.0.1"

_chosen: list[str] = []  # by this process's first group over several hosts; it has one listener for all


@dataclass(frozen=True)
class Member:
    """A rank of the group: where it is, and how it is reached.

    Attributes:
        host_id: equal for ranks that share memory.
        host_name, pid: for messages, and for those who share its host.
        network: equal for ranks that reach each other over loopback, whether they share memory or not.
        address: the one from which it reaches the store; None where that is no server.
        links: where ranks of other hosts reach it, "ip:port"; empty while that is not known, or there are none.
        cards: the network interfaces of these.
    """

    host_id: str
    host_name: str
    pid: int
    network: str = ""
    address: str | None = None
    links: tuple[str, ...] = ()
    cards: tuple[str, ...] = ()


def choose_addresses(members: Sequence[Member], rank: int) -> list[str]:
    """The addresses, in digits, on which a rank is to listen for the ranks of the other hosts.

    Those of the cards that PHOTINUS_INTERFACE names; loopback where the "hosts" lie on one network stack (one machine,
    told apart by PHOTINUS_HOST_ID or by user); those that GLOO_SOCKET_IFNAME names, as `photinus run` does; else the
    one with the way to the store or, for ranks beside it, to the other hosts; else the first that there is.

    Raises:
        ValueError: a card that is named is not there, or has no address.
        HostError: this host has no address but loopback.
    """
    one_network = all(member.network == members[rank].network for member in members)
    if not _chosen or (not one_network and all(map(is_loopback, _chosen))):
        _chosen[:] = _choose(members, rank, one_network=one_network)
    return list(_chosen)


def _choose(members: Sequence[Member], rank: int, *, one_network: bool) -> list[str]:
    if names := env.INTERFACE.get():
        return addresses_of_interfaces(names)
    if one_network:
        return [LOOPBACK]
    if names := tuple(name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name):
        return addresses_of_interfaces(names)
    me = members[rank]
    # The store's own host may reach it on loopback (127.0.1.1); there it is the address that reaches another host.
    for member in (me, *(member for member in members if member.host_id != me.host_id)):
        if member.address is not None and not is_loopback(member.address):
            with contextlib.suppress(OSError):
                return [reaches_from(member.address)]
    if outside := outside_addresses():
        return outside[:1]
    raise HostError(
        f"host {me.host_name} has no network card that is connected and has an address, so the ranks of other hosts "
        f"cannot reach it; PHOTINUS_INTERFACE names one all the same"
    )
