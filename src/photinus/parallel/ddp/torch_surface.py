"""What torch's own tools, and libraries written for torch's class, ask of a wrapper beside its public interface."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from ...errors import UnsuitableModelError
from ..exchange.broadcast import broadcast_tensors
from ..reducer.buckets import FIRST_BUCKET_BYTES
from .checks import sparse_parameters

if TYPE_CHECKING:
    from ..reducer.reducer import Reducer
    from .buffer_sync import BufferSync

TorchDDP = nn.parallel.DistributedDataParallel


@dataclass(frozen=True)
class _CompilerHints:
    """What the compiler reads of the wrapper whose forward runs. It fails for caps below that of a first bucket."""

    bucket_bytes_cap: int


class TorchSurface:
    """Names that exist for others; nothing in this package calls them. A base of DistributedDataParallel."""

    if TYPE_CHECKING:
        module: nn.Module
        reducer: Reducer
        process_group: dist.ProcessGroup
        _buffers_in_sync: BufferSync
        parameters_to_ignore: set[str]
        device: torch.device
        bucket_bytes_cap: int

    _active_ddp_module: ClassVar[Any] = None
    """Set while a wrapper's forward runs: torch.compile then cuts its graphs where buckets end, so overlap stays."""

    logger = None
    broadcast_bucket_size = 250 * 1024 * 1024
    _ddp_sink_clone = True
    _authoritative_rank: int = -1
    """The rank whose model all took at the end of the last `join`."""

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        return cls._active_ddp_module

    @contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        # The compiler asks torch's class, whatever the name is bound to; nested wrappers restore the outer one.
        owners: tuple[Any, ...] = (TorchDDP, nn.parallel.DistributedDataParallel, TorchSurface)
        before = [owner._active_ddp_module for owner in owners]
        for owner in owners:
            owner._active_ddp_module = _CompilerHints(max(self.bucket_bytes_cap, FIRST_BUCKET_BYTES))
        try:
            yield
        finally:
            for owner, module in zip(owners, before, strict=True):
                owner._active_ddp_module = module

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self.reducer.has_rebuilt_buckets

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Collection[str]
    ) -> None:
        """To be called before wrapping: the wrapper will leave these parameters and buffers (by full name) alone."""
        marked: Any = module
        marked._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore
        tensor: Any
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in params_and_buffers_to_ignore:
                tensor._ddp_ignored = True

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        named = [(n, p) for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore]
        trained = [(n, p) for n, p in named if p.requires_grad]
        sparse = sparse_parameters(self.module)
        return [p for _, p in trained], [n in sparse for n, _ in trained]

    def _build_debug_param_to_name_mapping(self, parameters: Sequence[nn.Parameter]) -> dict[int, str]:
        index_of = {parameter: index for index, parameter in enumerate(parameters)}
        names: dict[int, str] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if name in self.parameters_to_ignore or not parameter.requires_grad:
                continue
            if parameter not in index_of:
                raise UnsuitableModelError(
                    f"Param with name {name} found in module parameters, but not among those given"
                )
            names[index_of[parameter]] = name
        if len(names) != len(index_of):
            raise UnsuitableModelError(
                f"Expected param to name mapping to cover all parameters: {len(index_of)} were given, {len(names)} are "
                f"in the module"
            )
        return names

    @torch.no_grad()
    def _default_broadcast_coalesced(
        self, bufs: Sequence[torch.Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        """What buffer hooks call to have the broadcast that they replace."""
        if bufs is None:
            self._buffers_in_sync.broadcast(authoritative_rank)
        else:
            piece = self.broadcast_bucket_size if bucket_size is None else bucket_size
            broadcast_tensors(bufs, self.process_group, self.device, piece_bytes=piece, source=authoritative_rank)

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Outputs are never cloned here: hooks, not functions of the graph, watch them. Kept for callers."""
        self._ddp_sink_clone = val

    def _remove_autograd_hooks(self) -> None:
        self.reducer.stop()

    def _check_reducer_finalized(self) -> None:
        self.reducer._check_reducer_finalized()
