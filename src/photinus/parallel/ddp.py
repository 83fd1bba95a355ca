"""DistributedDataParallel: one model, a copy on every rank, gradients averaged while backward runs.

    model = photinus.DistributedDataParallel(model)
    loss_fn(model(x), y).backward()        # each rank its own part of the batch
    optimizer.step()                       # the same step on every rank

It takes the place of `torch.nn.parallel.DistributedDataParallel`, speaks plain torch.distributed, and so runs over
any backend; over "photinus" the gradients lie in the engine's arena and are reduced where they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from ..errors import NotInitializedError, PhotinusError
from .broadcast import Staging, broadcast_tensors
from .buckets import DEFAULT_BUCKET_CAP_MB, FIRST_BUCKET_BYTES
from .exchange import resolve_group
from .graph import current_task
from .reducer import Reducer
from .sync_batch_norm import SyncBatchNorm
from .tensors import map_tensors
from .verify import describe, verify_same_model

__all__ = ["DistributedDataParallel"]

_MIB = 1024 * 1024


class DistributedDataParallel(nn.Module):
    """Wraps a module whose gradients are averaged over the ranks of a process group, overlapped with backward.

    Every rank makes it at the same point with the same model. Construction checks that the models are the same and
    copies parameters and buffers of the group's rank 0 to all. `param.grad` holds, after `backward()`, the average
    over the ranks; it is a view of a bucket that the next backward writes to again, so clone it to keep it.

    Args:
        module: the model; at least one parameter requires grad; all parameters on one device. Names in its attribute
            `_ddp_params_and_buffers_to_ignore` are left alone.
        device_ids: None, or one GPU, that of the parameters: tensors among the inputs are then moved there.
        output_device: None or that same GPU.
        dim: dimension of the batch; kept for callers of torch's class, one device per process never splits.
        broadcast_buffers: before each forward with grad enabled (outside `no_sync`), buffers are set to rank 0's.
        init_sync: check and copy at construction. Without it the caller answers for equal models.
        process_group: default: the default group.
        bucket_cap_mb: cap of a bucket in MiB; None means the default. Results do not depend on it.
        find_unused_parameters: some parameters may get no gradient, other ones on each rank. They count as zero; one
            that got a gradient on no rank keeps `grad` as it was (None). Costs a walk through the graph per forward.

    Attributes:
        module: the model.
        reducer: exchanges the gradients; has `sync_grad`, `filter_unused_parameters(outputs)`, `stop()`.
        require_backward_grad_sync: False inside `no_sync`.
        require_forward_param_sync: whether the next forward broadcasts buffers (if broadcast_buffers).

    Raises:
        NotInitializedError: there is no process group.
        ModelMismatchError: (a ValueError, on every rank) models or options differ between ranks.
        ValueError: the model or the devices do not fit; the message says why.
    """

    module: nn.Module
    reducer: Reducer

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = DEFAULT_BUCKET_CAP_MB,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"DistributedDataParallel wraps a torch.nn.Module, got {type(module).__name__}")
        self.process_group = resolve_group(process_group)
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.module = module
        self.dim = dim
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        bucket_cap_mb = DEFAULT_BUCKET_CAP_MB if bucket_cap_mb is None else bucket_cap_mb
        self.bucket_bytes_cap = max(1, int(bucket_cap_mb * _MIB))
        named = [(n, p) for n, p in module.named_parameters() if n not in self.parameters_to_ignore]
        refusal: ValueError | None = None
        try:
            if not bucket_cap_mb > 0:
                raise ValueError(f"bucket_cap_mb={bucket_cap_mb}: a bucket needs a size above 0 MiB")
            self.device = _one_device(named, module)
            self.device_ids = _check_device_ids(device_ids, output_device, self.device)
            self.output_device = self.device_ids[0] if self.device_ids else None
        except ValueError as error:
            refusal = error  # told to the other ranks first: what one refuses, all refuse
        exchanging = init_sync and self.process_group.size() > 1
        if exchanging:
            verify_same_model(self._describe(named) if refusal is None else [str(refusal)], self.process_group)
        if refusal is not None:
            raise refusal
        if exchanging:
            tensors = [*(p.detach() for _, p in named), *(b for _, b in self._named_buffers())]
            broadcast_tensors(tensors, self.process_group, self.device)
        self._build()

    def _describe(self, named: Sequence[tuple[str, nn.Parameter]]) -> list[str]:
        """Everything that has to be equal on all ranks, in lines."""
        sparse = _sparse_parameters(self.module)
        lines = [
            f"options: bucket_cap_bytes={self.bucket_bytes_cap} broadcast_buffers={self.broadcast_buffers} "
            f"find_unused_parameters={self.find_unused_parameters}"
        ]
        lines += [describe("parameter", name, p) + (", sparse gradient" if name in sparse else "") for name, p in named]
        lines += [describe("buffer", name, b) for name, b in self._named_buffers()]
        return lines

    def _build(self) -> None:
        """Makes what belongs to this process and is never saved: the reducer, and the list of modules with buffers."""
        named = [(n, p) for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore]
        self._frozen = [(n, p) for n, p in named if not p.requires_grad]
        # With SyncBatchNorm, ranks that use different parameters would launch buckets and statistics in different
        # orders over one group. Launching at the end of backward keeps them apart.
        statistics_in_backward = any(isinstance(m, (SyncBatchNorm, nn.SyncBatchNorm)) for m in self.module.modules())
        self.reducer = Reducer(
            [(n, p) for n, p in named if p.requires_grad],
            self.process_group,
            bucket_cap_bytes=self.bucket_bytes_cap,
            first_bucket_bytes=FIRST_BUCKET_BYTES,
            find_unused_parameters=self.find_unused_parameters,
            sparse=_sparse_parameters(self.module),
            overlap=not (self.find_unused_parameters and statistics_in_backward),
        )
        self._buffer_staging: Staging | None = None
        self._modules_once = [(name, m) for name, m in self.module.named_modules()]
        # The parameters' hooks hold the reducer. They go when this wrapper goes, so the model can be wrapped anew.
        self._ending = weakref.finalize(self, self.reducer.stop)
        self._ending.atexit = False

    # ---- forward and backward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward; see the class for what is exchanged before and after."""
        # A forward inside a backward is one that activation checkpointing repeats: all is exchanged already.
        exchanging = self.reducer.world_size > 1 and torch.is_grad_enabled() and current_task() == -1
        if exchanging:
            self._before_forward()
        if self.device_ids:
            inputs, kwargs = map_tensors((inputs, kwargs), lambda tensor: tensor.to(self.device, non_blocking=True))
        output = self.module(*inputs, **kwargs)
        if exchanging and self.find_unused_parameters and self.require_backward_grad_sync:
            self.reducer.filter_unused_parameters(output)
        return output

    def _before_forward(self) -> None:
        self.reducer.begin_forward()
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ValueError(
                    f"rank {self.reducer.rank}: parameter {name} was frozen when the model was wrapped and requires "
                    f"grad now, so its gradient would not be averaged. Wrap the model again after unfreezing."
                )
        # As in torch's class, a backward is exchanged or not by where its forward ran: inside no_sync or outside.
        self.reducer.sync_grad = self.require_backward_grad_sync
        self.require_forward_param_sync = self.require_backward_grad_sync
        if self.broadcast_buffers and self.require_forward_param_sync:
            self._broadcast_buffers()

    def _broadcast_buffers(self) -> None:
        buffers = [tensor for _, tensor in self._named_buffers(writable_statistics=True)]
        if not buffers:
            return
        if self._buffer_staging is None or not self._buffer_staging.fits(buffers):
            self._buffer_staging = Staging(buffers, self.process_group, self.device)
        self._buffer_staging.broadcast(buffers)

    def _named_buffers(self, *, writable_statistics: bool = False) -> list[tuple[str, torch.Tensor]]:
        """The buffers that are kept equal, each once; looked up anew because modules may replace theirs.

        With `writable_statistics`, running statistics of batch norms in training come as aliases whose writes autograd
        does not count: a backward does not read them, and of several forwards before one backward each writes them.
        """
        modules = getattr(self, "_modules_once", None) or list(self.module.named_modules())
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for prefix, module in modules:
            for key, buffer in module._buffers.items():
                name = f"{prefix}.{key}" if prefix else key
                if buffer is None or name in self.parameters_to_ignore or id(buffer) in found:
                    continue
                unread = writable_statistics and isinstance(module, _NormBase) and module.training
                found[id(buffer)] = (name, buffer.data if unread else buffer)
        return list(found.values())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, neither gradients nor buffers are exchanged: gradients accumulate on each rank.

        The next backward outside averages the sums. The forward has to be inside too, as with torch's class. What was
        in force before is restored on exit, exceptions included.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # ---- being a module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and not name.startswith("__") and hasattr(module, name):
                raise AttributeError(
                    f"DistributedDataParallel has no attribute {name!r}; the wrapped {type(module).__name__} has: "
                    f"write .module.{name}"
                ) from None
            raise

    def _apply(self, fn: Any, recurse: bool = True) -> DistributedDataParallel:
        """Behind .to(), .half(), .cuda(), ...: buckets follow when parameters change dtype or device."""
        before = [(p.dtype, p.device) for p in self.module.parameters()]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if [(p.dtype, p.device) for p in self.module.parameters()] != before:
            named = [(n, p) for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore]
            self.device = _one_device(named, self.module)
            self._ending()
            self._build()
        return self

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not dist.group.WORLD:
            raise PhotinusError(
                "a DistributedDataParallel over a process group of its own cannot be pickled or copied, because the "
                "group cannot be named elsewhere. Pickle or copy `.module`, or save its state_dict()."
            )
        state = self.__dict__.copy()
        for key in ("process_group", "reducer", "_ending", "_buffer_staging", "_modules_once", "_frozen"):
            del state[key]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Joins the default group of this process. Nothing is exchanged: every rank loads, and loads the same."""
        if not dist.is_initialized():
            raise NotInitializedError(
                "a pickled DistributedDataParallel needs the default process group; enter `with photinus.init():` first"
            )
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.process_group = resolve_group(None)
        self._build()


def _one_device(named: Sequence[tuple[str, nn.Parameter]], module: nn.Module) -> torch.device:
    """The device of all parameters. Refuses models that cannot be wrapped (see the class's `Raises`)."""
    everything: list[tuple[str, torch.Tensor]] = [*named, *module.named_buffers()]
    lazy = [n for n, t in everything if is_lazy(t)]
    if lazy:
        raise ValueError(
            f"{_few(lazy)} not initialised yet (lazy modules). Run one forward on sample data before wrapping."
        )
    if not any(p.requires_grad for _, p in named):
        raise ValueError(
            f"{type(module).__name__} has no parameter that requires grad ({len(named)} parameters), so there is "
            f"nothing to average. Use it unwrapped, or unfreeze what is to be trained."
        )
    devices: dict[torch.device, str] = {}
    for name, parameter in named:
        devices.setdefault(parameter.device, name)
    if len(devices) > 1:
        told = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(f"all parameters must be on one device, but {told}. Move the model with .to(device) first.")
    device = next(iter(devices))
    if device.type == "meta":
        raise ValueError(
            "the parameters are on the meta device and hold nothing; materialise the model before wrapping"
        )
    return device


def _check_device_ids(
    device_ids: Sequence[int | str | torch.device] | None,
    output_device: int | str | torch.device | None,
    device: torch.device,
) -> list[torch.device] | None:
    if not device_ids:
        if output_device is not None:
            raise ValueError(f"output_device={output_device} needs device_ids to name the same device; leave both out")
        return None
    if len(device_ids) > 1:
        raise ValueError(
            f"device_ids={list(device_ids)}: one process drives one device. Start a process per device "
            f"(`photinus run --nproc-per-node {len(device_ids)} …`) and give each one id, or None."
        )
    if device.type == "cpu":
        raise ValueError(f"device_ids={list(device_ids)}, but the model is on the CPU; leave device_ids out there")
    wanted = [
        torch.device(device.type, d) if isinstance(d, int) else torch.device(d)
        for d in (device_ids[0], device_ids[0] if output_device is None else output_device)
    ]
    for name, given in zip(("device_ids", "output_device"), wanted, strict=True):
        if given.type != device.type or given.index not in (None, device.index):
            raise ValueError(f"{name} says {given}, but the model is on {device}; they must be the same device")
    return [device]


def _sparse_parameters(module: nn.Module) -> frozenset[str]:
    """Names of the parameters whose gradients will be sparse."""
    makers = {id(m.weight) for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse}
    return frozenset(name for name, parameter in module.named_parameters() if id(parameter) in makers)


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"{shown} {'is' if len(names) == 1 else 'are'}"


# Code that asks isinstance(model, torch.nn.parallel.DistributedDataParallel), to unwrap it or to strip "module." from
# names as torch.distributed.checkpoint does, is answered yes.
nn.parallel.DistributedDataParallel.register(DistributedDataParallel)
