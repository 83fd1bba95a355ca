"""The gloo backend inside each photinus group: what the engine does not do, and what torch asks a group's backend.

torch's `Backend` cannot be subclassed in Python, `ProcessGroupGloo` can; so the questions that torch puts to
`group._get_backend(device)` (timeout, memory for FSDP2's buffers) are answered here for the whole group.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from ..world.own_address import outside_addresses
from .tensors import allocate

__all__ = ["InnerGloo", "Limit"]


class Limit:
    """The timeout in seconds of operations for which the caller gave none; shared by a group and its inner gloo."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s


class InnerGloo(dist.ProcessGroupGloo):
    """gloo over the loopback interface for ranks of one host, otherwise over the one that reaches the other hosts.

    Args:
        store: with a prefix that no earlier group used, since gloo takes any address that it finds there.
        rank, size: of the group.
        limit: the group's timeout.
        one_host: whether all ranks run on this host.
        address: of this rank's host, at which the other hosts reach it, where that is known.
    """

    def __init__(
        self, store: Store, rank: int, size: int, limit: Limit, *, one_host: bool, address: str | None = None
    ) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [_loopback()] if one_host else _devices(address)
        options._threads = 2
        options._timeout = timedelta(seconds=limit.timeout_s)
        super().__init__(store, rank, size, options)
        self._limit = limit

    if TYPE_CHECKING:  # torch's stubs leave the collectives of a backend out

        def __getattr__(self, name: str) -> Callable[..., dist.Work]: ...

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of later operations, gloo's and the engine's."""
        super()._set_default_timeout(timeout)
        self._limit.timeout_s = timeout.total_seconds()

    def _set_default_timeout(self, timeout: timedelta) -> None:  # dist.distributed_c10d._set_pg_timeout
        super()._set_default_timeout(timeout)
        self._limit.timeout_s = timeout.total_seconds()

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether `allocate_tensor` works for the device."""
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """An uninitialised tensor of `size` elements in the arena; FSDP2 takes its buffers from here when told to."""
        return allocate(size, dtype)


def _loopback() -> dist.ProcessGroupGloo.Device:
    try:
        return dist.ProcessGroupGloo.create_device(interface="lo")
    except RuntimeError:  # an interface of another name
        return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")


def _devices(address: str | None) -> list[dist.ProcessGroupGloo.Device]:
    """What GLOO_SOCKET_IFNAME names, as in torch; else the interface with the address, or the first that there is.

    (gloo's own choice is the address of the host's name, which is often 127.0.1.1, or none.)
    """
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if names:
        return [dist.ProcessGroupGloo.create_device(interface=name) for name in names]
    for known in (address, *outside_addresses()):
        if known is not None:
            return [dist.ProcessGroupGloo.create_device(hostname=known)]
    return [dist.ProcessGroupGloo.create_default_device()]
