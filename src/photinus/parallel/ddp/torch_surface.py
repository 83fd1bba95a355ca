"""The private methods that torch's own tools, and libraries written for torch's class, call on a wrapper.

`join` and its hook are here too: torch's `Join` calls them by the names of its class `Joinable`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import DebugLevel, get_debug_level
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ...errors import PhotinusError, UnsuitableModelError
from ..exchange.broadcast import broadcast_tensors
from ..exchange.collectives import backend_name, control_device, resolve_group
from ..reducer.bucket_exchange import CommHook, builtin_hook
from ..reducer.buckets import FIRST_BUCKET_BYTES, Bucket, Slot
from .checks import sparse_parameters
from .sync_batch_norm import SyncBatchNorm

if TYPE_CHECKING:
    from ..reducer.reducer import Reducer
    from .buffer_sync import BufferSync

TorchDDP = nn.parallel.DistributedDataParallel

_DTYPE_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
_IN_BACKWARD = "_in_backward_optimizers"  # torch's attribute of parameters
_GLOO_THREADS = 2  # of each gloo group that torch makes


class TorchSurface(Joinable):
    """Names that exist for others; nothing in this package calls them. The base of DistributedDataParallel.

    It also declares the attributes of DistributedDataParallel that the other files of this folder read and set. They
    cannot import the class, which imports them.
    """

    if TYPE_CHECKING:
        module: nn.Module
        reducer: Reducer
        process_group: dist.ProcessGroup
        device: torch.device
        device_ids: list[torch.device] | None
        output_device: torch.device | None
        bucket_bytes_cap: int
        find_unused_parameters: bool
        gradient_as_bucket_view: bool
        forward_sync_buffers: bool
        nan_guard: bool
        static_graph: bool
        parameters_to_ignore: set[str]
        require_forward_param_sync: bool
        _buffers_in_sync: BufferSync
        _logical_shards: int
        _comm_hook: tuple[object, CommHook, str] | None
        _join_config: Any

        @property
        def syncs(self) -> bool:
            """Return whether backward of a forward now would exchange."""

        def _sync_buffers(self, *, joined: bool = False) -> None: ...
        def _sync_module_states(self, source: int, *, buffers: bool) -> None: ...
        def _rebuild(self) -> None: ...
        def _set_hook(self, state: object, hook: CommHook, name: str) -> None: ...

    _active_ddp_module: ClassVar[Any] = None
    """Set while a wrapper's forward runs: torch.compile then cuts its graphs where buckets end, so overlap stays."""

    logger = None
    broadcast_bucket_size = 250 * 1024 * 1024
    _ddp_sink_clone = True
    _divide_by_initial_world_size = True
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
        # It reads the size of buckets there, and fails for one below that of a first bucket.
        hints = SimpleNamespace(bucket_bytes_cap=max(self.bucket_bytes_cap, FIRST_BUCKET_BYTES))
        for owner in owners:
            owner._active_ddp_module = hints
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
        parameters = [(n, p) for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore]
        trained = [(n, p) for n, p in parameters if p.requires_grad]
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
        """Run the broadcast that buffer hooks replace; the hooks call this."""
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

    @property
    def broadcast_buffers(self) -> bool:
        """Return `forward_sync_buffers`, of which this is the older name."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def _set_static_graph(self) -> None:
        """As if made with static_graph=True; to be called before the first forward, on every rank."""
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        if self.reducer.rounds:
            self.reducer.timeline.error = "_set_static_graph() should be called before training loop starts"
            raise PhotinusError(f"{self.reducer.timeline.error}: {self.reducer.rounds} backwards were exchanged before")
        self.static_graph = True
        self._rebuild()

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Goes on over another group; every rank of it calls this between two steps."""
        self.process_group = resolve_group(new_process_group)
        self._rebuild()

    # ---- hooks and logging

    def _register_builtin_comm_hook(self, comm_hook_type: object) -> None:
        self._set_hook(self.process_group, builtin_hook(comm_hook_type), str(comm_hook_type))

    def _register_buffer_comm_hook(
        self, state: object, hook: Callable[..., Any], comm_hook_location: Any = None
    ) -> None:
        """`hook(state, named_buffers)` takes the place of the broadcast of buffers, before or after the forward."""
        from torch.nn.parallel.distributed import _BufferCommHookLocation

        location = _BufferCommHookLocation.POST_FORWARD if comm_hook_location is None else comm_hook_location
        self._buffers_in_sync.set_hook(state, hook, location)

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """Lets an optimizer of class `optim`, made with these arguments, step bucket by bucket as averages come.

        Raises:
            RuntimeError: torch has no functional form of this optimizer, there is a communication hook, or nan_guard,
                which looks when the optimizer has stepped.
        """
        if self.nan_guard:
            raise PhotinusError(f"{optim.__name__} would step before nan_guard has looked: use only one of the two")
        from torch.distributed.algorithms._optimizer_overlap.optimizer_overlap import _as_overlapped_optim

        try:
            _as_overlapped_optim(optim, optim_params, *args, **kwargs).register_ddp(self)
        except (NotImplementedError, ValueError) as error:
            raise PhotinusError(f"{optim.__name__} cannot step inside backward: {error}") from error

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        """Return how the wrapper was made and where its time goes, in nanoseconds, by the names of torch's class."""
        reducer, timeline = self.reducer, self.reducer.timeline
        backend = backend_name(self.process_group, self.device)
        parameters = [slot.parameter for slot in reducer.slots]
        total_bytes = sum(p.nbytes for p in parameters)
        # Without padding. One rank has no buckets.
        bucket_bytes = [sum(slot.parameter.nbytes for slot in bucket.slots) for bucket in reducer.buckets]
        sizes = ", ".join(map(str, bucket_bytes or [total_bytes]))
        data: dict[str, str | int] = {
            "world_size": reducer.world_size,
            "rank": reducer.rank,
            "module_name": type(self.module).__name__,
            "device_ids": "" if not self.device_ids else ", ".join(str(d.index) for d in self.device_ids),
            "output_device": -1 if self.output_device is None else int(self.output_device.index or 0),
            "broadcast_buffers": int(self.forward_sync_buffers),
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "can_set_static_graph": int(reducer.usage.always_the_same),
            "backend_name": backend,
            "has_sync_bn": int(any(isinstance(m, nn.SyncBatchNorm) for m in self.module.modules())),
            "iteration": timeline.iteration,
            "dtypes": ", ".join(sorted({_DTYPE_NAMES.get(p.dtype, str(p.dtype)) for p in parameters})),
            "total_parameter_size_bytes": total_bytes,
            "num_parameter_tensors": len(parameters),
            "bucket_sizes": sizes,
            "initial_bucket_size_limits": str(self.bucket_bytes_cap),
            "num_buckets_reduced": timeline.buckets_exchanged,
            "has_rebuilt_buckets": int(reducer.has_rebuilt_buckets),
            "join_uneven_inputs": int(self._join_config.enable),
            "torch_distributed_debug": os.environ.get("TORCH_DISTRIBUTED_DEBUG", "N/A"),
            "master_addr": os.environ.get("MASTER_ADDR", "N/A"),
            "master_port": os.environ.get("MASTER_PORT", "N/A"),
            "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES", "N/A"),
            "prev_iteration_grad_ready_order_indices": ", ".join(map(str, reducer.arrival_order)),
        }
        if self.device.type == "cpu":  # of a GPU the host's clock knows when things were queued only
            data |= {**timeline.last, **timeline.averages}
        if reducer.has_rebuilt_buckets:
            data["rebuilt_bucket_sizes"] = sizes
            data["rebuilt_per_bucket_param_indices"] = ", ".join(
                " ".join(str(slot.index) for slot in bucket.slots) for bucket in reducer.buckets
            )
        if backend == "gloo":
            data["gloo_socket_ifname"] = os.environ.get("GLOO_SOCKET_IFNAME", "N/A")
            data["gloo_device_transport"] = os.environ.get("GLOO_DEVICE_TRANSPORT", "N/A")
            data["gloo_num_threads"] = _GLOO_THREADS
        if self._comm_hook is not None:
            data["comm_hook"] = self._comm_hook[2]
        if timeline.error:
            data["has_error"] = 1
            data["error"] = timeline.error
        if get_debug_level() != DebugLevel.OFF:
            data["unused_parameter_size"] = 0
        return data

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            raise ValueError(f"sample_rate={sample_rate}: one in N iterations is kept, so N must be 1 or more")
        self.reducer.timeline.sample_rate = sample_rate

    # ---- uneven inputs

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """A context for loops that have other numbers of batches on each rank: the others' go on with zeros.

        At its end every rank has the model of the last one to finish. Momentum and the like are not carried over: to
        train on after it, use an optimizer without, or ZeroRedundancyOptimizer, in `Join([model, optimizer])`.

        Args:
            divide_by_initial_world_size: averages are over all ranks; False: over those that still have batches.
            enable: False does nothing, at no cost.
            throw_on_early_termination: raise RuntimeError on every rank as soon as one runs out of batches.
        """
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> DDPJoinHook:
        """Return what `torch.distributed.algorithms.join.Join` calls on ranks without input.

        Raises:
            PhotinusError: gradients are added in logical shards, which every rank has in each step.
        """
        if self._logical_shards:
            raise PhotinusError(
                "join() lets ranks run out of batches, but with logical_shards each has its own to the end"
            )
        divide = kwargs.get("divide_by_initial_world_size", True)
        return DDPJoinHook(self, divide_by_initial_world_size=divide)

    @property
    def join_device(self) -> torch.device:
        """The device of the messages of `Join`."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group over which `Join` sends them."""
        return self.process_group


class DDPJoinHook(JoinHook):
    """The work of a rank without input while others train, and when all are done. See `torch.distributed…join.Join`."""

    def __init__(self, ddp: TorchSurface, *, divide_by_initial_world_size: bool) -> None:
        self._ddp = ddp
        ddp._divide_by_initial_world_size = divide_by_initial_world_size
        self._own_gradients: list[torch.Tensor | None] | None = None
        super().__init__()

    def main_hook(self) -> None:
        """Shadows one forward and backward of the others, in the order in which they exchange."""
        ddp = self._ddp
        syncs, contributors = tell_ranks(ddp, joined=True)
        ddp.require_forward_param_sync = syncs
        if not syncs:
            return
        if not ddp._divide_by_initial_world_size:
            ddp.reducer.average.contributors = contributors
        if self._own_gradients is None:
            self._own_gradients = [slot.parameter.grad for slot in ddp.reducer.slots]
        ddp.reducer.rebuild_buckets()
        ddp._sync_buffers(joined=True)
        ddp.reducer.shadow_round()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Sets the model of all ranks to that of the last one to finish; gradients become this rank's own again."""
        ddp = self._ddp
        if self._own_gradients is not None:
            for slot, gradient in zip(ddp.reducer.slots, self._own_gradients, strict=True):
                slot.parameter.grad = gradient
            self._own_gradients = None
        ddp.reducer.average.contributors = ddp.reducer.world_size
        ddp._authoritative_rank = common_rank(ddp, candidate=is_last_joiner)
        ddp._sync_module_states(ddp._authoritative_rank, buffers=ddp.forward_sync_buffers)
        ddp.reducer.facts.restart()
        ddp._join_config = ddp._join_config._replace(enable=False)  # torch leaves it on: later forwards would exchange


def tell_ranks(ddp: TorchSurface, *, joined: bool) -> tuple[bool, int]:
    """Tells the other ranks what this one does in this iteration; every rank calls it once in each.

    Returns:
        Whether the backward is followed by an exchange, and how many ranks have input.

    Raises:
        UnsuitableModelError: on every rank, when one has no input and SyncBatchNorm layers need it.
    """
    syncs = not joined and ddp.syncs
    flags = torch.tensor([float(syncs), float(not joined)], device=control_device(ddp.process_group))
    dist.all_reduce(flags, group=ddp.process_group)
    someone_syncs, present = flags.tolist()
    if present < ddp.process_group.size():
        for name, layer in ddp.module.named_modules():
            if isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm)) and layer.training:
                raise UnsuitableModelError(
                    f"layer {name} is a SyncBatchNorm, which exchanges inside the forward, and only {int(present)} of "
                    f"{ddp.process_group.size()} ranks have input left: join cannot take part in that. Give all ranks "
                    f"the same number of batches, or use join(throw_on_early_termination=True)."
                )
    return someone_syncs > 0, int(present)


def common_rank(ddp: TorchSurface, *, candidate: bool) -> int:
    """The highest rank that is a candidate, of which there is always one; every rank calls it."""
    rank = torch.tensor([ddp.process_group.rank() if candidate else -1], device=ddp.device)
    dist.all_reduce(rank, op=dist.ReduceOp.MAX, group=ddp.process_group)
    return int(rank.item())


class OptimizersInBackward:
    """Steps the optimizers that hang on parameters when the parameters' averages have come; their grads become None.

    They step during the end of backward, bucket by bucket, while later buckets are still under way. Two interfaces of
    torch lead here: `_apply_optimizer_in_backward`, which hangs optimizers on parameters before they are wrapped, and
    the wrapper's `_register_fused_optim`, which is a communication hook (see torch's `_optimizer_overlap`).

    Use `take_over` to make one.
    """

    @staticmethod
    def take_over(slots: Sequence[Slot]) -> OptimizersInBackward | None:
        """Removes the hooks by which torch would step before the average; None if no parameter has an optimizer.

        Raises:
            ValueError: a parameter with sparse gradients has one; those are averaged after all buckets.
        """
        owners = [slot.parameter for slot in slots if hasattr(slot.parameter, _IN_BACKWARD)]
        if not owners:
            return None
        sparse = [slot.name for slot in slots if slot.bucket is None and hasattr(slot.parameter, _IN_BACKWARD)]
        if sparse:
            raise ValueError(
                f"parameter {sparse[0]} has sparse gradients and an optimizer that steps in backward; give it an "
                f"ordinary optimizer"
            )
        from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

        handles: Any = param_to_optim_hook_handle_map
        for parameter in owners:
            for handle in handles.get(parameter, []):
                handle.remove()
        return OptimizersInBackward()

    def __call__(self, bucket: Bucket) -> None:
        """Steps for the parameters of one bucket."""
        for slot in bucket.slots:
            if hasattr(slot.parameter, _IN_BACKWARD) and slot.parameter.grad is not None:
                for optimizer in getattr(slot.parameter, _IN_BACKWARD):
                    optimizer.step()
                slot.parameter.grad = None
