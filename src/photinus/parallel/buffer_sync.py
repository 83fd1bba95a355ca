"""The wrapped module's buffers: which ones are kept equal, and how."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules.batchnorm import _NormBase

from .broadcast import Staging

__all__ = ["BufferSync"]

BufferHook = Callable[[Any, dict[str, torch.Tensor]], Any]


class BufferSync:
    """Sets the buffers of all ranks to those of one, or calls a hook in its place.

    Args:
        module: its modules are looked up once, their buffers each time, because modules may replace theirs.
        group, device: see `photinus.parallel.broadcast.Staging`.
        ignored: names that are left alone.

    Attributes:
        hook: (state, function, whether it runs after the forward); None for the broadcast.
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

    def named(self, *, writable_statistics: bool = False) -> list[tuple[str, torch.Tensor]]:
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

    def broadcast(self, source: int) -> None:
        """Sets the buffers of every rank to those of the group's rank `source`."""
        buffers = [tensor for _, tensor in self.named(writable_statistics=True)]
        if not buffers:
            return
        if self._staging is None or not self._staging.fits(buffers):
            self._staging = Staging(buffers, self._group, self._device)
        self._staging.broadcast(buffers, source)

    @torch.no_grad()
    def run_hook(self) -> list[torch.futures.Future[Any]]:
        """Calls the hook; returns the futures to wait for at the end of the next backward."""
        assert self.hook is not None
        state, hook, _ = self.hook
        buffers = dict(self.named())
        with _unsafe_preserve_version_counter(tuple(buffers.values())):
            futures = hook(state, buffers)
        return list(futures or ())
