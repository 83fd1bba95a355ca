"""The gloo backend inside each photinus group: what torch asks a group's backend, and C++ past the group's methods.

torch's `Backend` cannot be subclassed in Python, `ProcessGroupGloo` can; so the questions that torch puts to
`group._get_backend(device)` (timeout, memory for FSDP2's buffers) are answered here for the whole group.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from ..errors import HostError
from .tensors import allocate


class Limit:
    """The timeout in seconds of operations for which the caller gave none; shared by a group and its inner gloo."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s


class InnerGloo(dist.ProcessGroupGloo):
    """gloo whose ranks connect when they first exchange something, which few programs ever make them do.

    Args:
        store: with a prefix that no earlier group used, since gloo takes any address that it finds there.
        address: of this rank's host, in digits, at which the others reach it. (gloo's own choice is that of the host's
            name, which is often 127.0.1.1, or none.)
    """

    def __init__(self, store: Store, rank: int, size: int, limit: Limit, address: str) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        try:
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=True)]
        except RuntimeError as error:
            raise HostError(
                f"no network interface of this host has the address {address}, on which a process group listens: "
                f"{error}. `ip addr` shows them; `ip link set lo up` brings 127.0.0.1 back."
            ) from None
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

    _set_default_timeout = set_timeout  # which dist.distributed_c10d._set_pg_timeout calls

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether `allocate_tensor` works for the device."""
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """An uninitialised tensor of `size` elements in the arena; FSDP2 takes its buffers from here when told to."""
        return allocate(size, dtype)
