"""The wrapped module's buffers (BatchNorm's running statistics, …): which ones are kept equal, and how.

They travel with the gradients: at the end of each backward that is exchanged, every rank gets rank 0's. So code that
looks between a backward and the next forward, to evaluate or to save, sees the same on all ranks, and a forward without
a backward (evaluation, on one rank only too) exchanges nothing. torch's class sets them before the next forward. The
difference shows where code changes buffers between a backward and the next forward: that forward then uses each rank's
own. After `no_sync`, each rank has its own, as there.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules.batchnorm import _NormBase

from ..exchange.broadcast import Staging, copy_each
from ..exchange.collectives import Pending

BufferHook = Callable[[Any, dict[str, torch.Tensor]], Any]


class BufferSync:
    """Sets the buffers of all ranks to those of one, or calls a hook in its place.

    Args:
        module: its modules are looked up once, their buffers each time, because modules may replace theirs.

    Attributes:
        hook: (state, function, whether it runs after the forward); None for the broadcast.
        source: the rank of the group whose buffers all ranks get at the end of the next exchanged backward; None: no
            buffers travel.
    """

    def __init__(
        self, module: nn.Module, group: dist.ProcessGroup, device: torch.device, ignored: Collection[str]
    ) -> None:
        self._group = group
        self._device = device
        self._ignored = ignored
        self._modules = list(module.named_modules())
        self._staging: Staging | None = None
        self.hook: tuple[Any, BufferHook, bool] | None = None
        self.source: int | None = None

    def named_buffers(self, *, writable_statistics: bool = False) -> list[tuple[str, torch.Tensor]]:
        """The buffers that are kept equal, each once.

        With `writable_statistics`, running statistics of batch norms in training come as aliases whose writes autograd
        does not count: a backward does not read them, and of several forwards before one backward each writes them.
        """
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for prefix, module in self._modules:
            for key, buffer in module._buffers.items():
                name = f"{prefix}.{key}" if prefix else key
                if buffer is None or name in self._ignored or id(buffer) in found:
                    continue
                unread = writable_statistics and isinstance(module, _NormBase) and module.training
                found[id(buffer)] = (name, buffer.data if unread else buffer)
        return list(found.values())

    def set_hook(self, state: object, hook: BufferHook, location: object) -> None:
        """Takes `hook(state, named_buffers)`, run where torch's `_BufferCommHookLocation` says.

        Raises:
            TypeError: not callable, or not a location.
        """
        if not callable(hook) or not isinstance(location, enum.Enum):
            raise TypeError(f"a buffer hook is a callable with a location, got {hook!r} and {location!r}")
        self.hook = (state, hook, location.name == "POST_FORWARD")

    def start(self) -> Pending | None:
        """Sends the buffers of rank `source`, once; they are in place when the work has been waited for."""
        source, self.source = self.source, None
        buffers = self.named_buffers(writable_statistics=True)
        if source is None or not buffers:
            return None
        return _Arrival(self._staging_for([b for _, b in buffers]), [b for _, b in buffers], source)

    def broadcast(self, source: int) -> None:
        """Sets the buffers of every rank to those of the group's rank `source`, now."""
        buffers = [tensor for _, tensor in self.named_buffers(writable_statistics=True)]
        if buffers:
            self._staging_for(buffers).broadcast(buffers, source)

    def _staging_for(self, buffers: list[torch.Tensor]) -> Staging:
        if self._staging is None or not self._staging.fits(buffers):
            self._staging = Staging(buffers, self._group, self._device)
        return self._staging

    @torch.no_grad()
    def run_hook(self) -> list[torch.futures.Future[Any]]:
        """Calls the hook; returns the futures to wait for at the end of the next backward."""
        assert self.hook is not None
        state, hook, _ = self.hook
        buffers = dict(self.named_buffers())
        with _unsafe_preserve_version_counter(tuple(buffers.values())):
            futures = hook(state, buffers)
        return list(futures or ())


class _Arrival:
    """Buffers under way.

    On the CPU, a buffer that arrives with the values that it has is not written: a graph that is kept may hold it. On a
    GPU the host would wait for each comparison, and so for the whole backward: a step of ResNet-50 on an H200 took
    41 ms, and with torch's class 23. There all buffers are written, and autograd is not informed, as in torch's class.
    """

    def __init__(self, staging: Staging, buffers: list[torch.Tensor], source: int) -> None:
        self._places = staging.places
        self._buffers = [] if staging.group.rank() == source else buffers
        self._work = staging.start(buffers, source)

    def wait(self) -> object:
        self._work.wait()
        with torch.no_grad():
            if any(buffer.is_cuda for buffer in self._buffers):
                with _unsafe_preserve_version_counter(tuple(self._buffers)):
                    copy_each(self._buffers, self._places)
                return None
            for buffer, place in zip(self._buffers, self._places, strict=False):
                if not torch.equal(buffer, place.to(buffer.device)):
                    buffer.copy_(place)
        return None

    def is_completed(self) -> bool:
        return self._work.is_completed()
