"""DistributedDataParallel: one model, a copy on every rank, gradients averaged while backward runs.

    model = photinus.DistributedDataParallel(model)
    loss_fn(model(x), y).backward()        # each rank its own part of the batch
    optimizer.step()                       # the same step on every rank

It takes the place of `torch.nn.parallel.DistributedDataParallel`, speaks plain torch.distributed, and so runs over
any backend; over "photinus" the gradients lie in the engine's arena and are reduced where they are.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed.algorithms.join import Join

from ...errors import ModelMismatchError, NotInitializedError, PhotinusError
from ..exchange.broadcast import broadcast_tensors
from ..exchange.collectives import backend_name, rate_between_hosts, resolve_group
from ..exchange.tensors import move_tensors
from ..exchange.verify_models import describe, gpu_identity, verify_same_model
from ..reducer.autograd import current_task
from ..reducer.bucket_exchange import AverageExchange, CommHook, HookExchange, check_hook
from ..reducer.buckets import default_cap_bytes
from ..reducer.checks import StepDigests
from ..reducer.options import ReducerOptions
from ..reducer.reducer import Reducer
from ..reducer.shard_sums import ShardSums
from ..tracing import spans
from .buffer_sync import BufferSync
from .checks import (
    buffer_sync_options,
    capacities,
    check_device_ids,
    check_wire_dtype,
    device_to_move_to,
    group_of,
    one_device,
    sparse_parameters,
)
from .held_parameters import HeldParameters, take_over_parameters
from .mixed_precision import MixedPrecision, MixedPrecisionConfig
from .sync_batch_norm import SyncBatchNorm
from .torch_surface import OptimizersInBackward, TorchSurface, common_rank, tell_ranks


class DistributedDataParallel(TorchSurface, nn.Module):
    """Wrap a module and average its gradients over the ranks of a process group while backward runs.

    All ranks create it at the same point, with the same model. The constructor checks that the models are the same, and
    copies the parameters and buffers of the group's rank 0 to all ranks. After `backward()`, `param.grad` holds the
    average over the ranks. `isinstance(model, torch.nn.parallel.DistributedDataParallel)` is True.

    Args:
        module: the model. At least one parameter requires a gradient; all parameters are on one device. Names in its
            attribute `_ddp_params_and_buffers_to_ignore` are ignored.
        device_ids: None, or a list of one GPU. Tensors among the inputs move there, and so does a model on the CPU.
        output_device: None or the same GPU.
        dim: dimension of the batch, as in torch's class. It has no effect: one device per process never splits a batch.
        broadcast_buffers: older name of `forward_sync_buffers`. False also leaves buffers alone in the constructor.
        init_sync: check and copy in the constructor. If False, you must ensure that the models are equal.
        process_group: default: the default group.
        bucket_cap_mb: largest size of a bucket in MiB. Default: 25. Between hosts on backend photinus, the default is
            what they exchange in 30 ms if that is less (1 Gbit/s: 3.4), but at least 1. Results do not depend on it.
        find_unused_parameters: let parameters have no gradient, different ones on each rank. These count as zero. If a
            parameter has none on any rank, its `grad` stays as it was (None). Each forward walks through the graph.
        check_reduction: no effect, as in torch's class.
        gradient_as_bucket_view: gradients are views of buckets, and the next backward overwrites them, even if you kept
            one. If False, a gradient that you kept stays valid: the bucket then gets other memory. Neither copies
            gradients back after the exchange.
        static_graph: every step uses the same parameters in the same way. The first step shows which are unused.
        delay_all_reduce_named_params, param_to_hook_all_reduce: no effect: a gradient is exchanged when its bucket is
            complete, and is the average when backward returns.
        mixed_precision: torch's `_MixedPrecision`, or an object with its attributes; see
            `photinus.parallel.ddp.mixed_precision`. It does not work with activation checkpoints inside the model.
        device_mesh: a mesh of one dimension, whose group is used instead of process_group.
        skip_all_reduce_unused_params: with find_unused_parameters, do not exchange buckets without a used parameter.
            The same parameters must be unused on every rank.
        bucket_cap_mb_list: largest sizes of the first, second, ... bucket, instead of bucket_cap_mb.
        batched_grad_copy: no effect: gradients are always copied once.
        forward_sync_buffers: set the buffers of all ranks to rank 0's at the end of each backward that is exchanged, so
            that all ranks evaluate and save the same model. Forwards exchange no buffers. (See
            `photinus.parallel.ddp.buffer_sync`.)
        nan_guard: if a gradient is not finite, raise on every rank at the end of backward. The error names the first
            rank and parameter. Costs one read of the gradients, and a small exchange.
        check_ranks: check that all ranks have made the same number of optimizer steps and hold the same parameters.
            The check runs after the second exchange and every 64th from there on; with communication hooks it compares
            the steps alone. Over backend photinus, ranks out of step raise at the next exchange. Only torch.optim
            optimizers are seen. False: weights may differ.
        wire_dtype: type of the gradients between hosts, on backend photinus. bfloat16 or float16: float32 gradients
            take half the bytes; they are added in float32, and all ranks get the same bits. (A sum over the ranks
            beyond 65,504 becomes infinite in float16.) float32: 16-bit gradients are not rounded on the way. No effect
            within a host. Not with communication hooks.

    Attributes:
        module: the model.
        reducer: exchanges the gradients; has `sync_grad`, `filter_unused_parameters(outputs)`, `stop()`.
        require_backward_grad_sync: False inside `no_sync`.
        require_forward_param_sync: True if the next backward broadcasts buffers (with forward_sync_buffers).
        late_gradient_errors: (of the class) True: a missing gradient raises at the next forward, as in torch's class,
            after a step with gradients that are not averages.

    On CPUs, malloc then keeps what a step frees, unless you set malloc's variables (see `photinus.process_memory`).

    Raises:
        NotInitializedError: there is no process group.
        ModelMismatchError: (a ValueError, on every rank) models or options (in backward: weights) differ between ranks.
        MismatchError: (in backward, on every rank) the ranks are out of step; see check_ranks.
        DeviceError: two ranks have their models on one GPU, and PHOTINUS_RANKS_PER_GPU does not allow it.
        UnsuitableModelError: (a ValueError) the model or an argument does not fit; the message says why. Also in
            forward, if parameters were added or removed after wrapping.
    """

    late_gradient_errors: ClassVar[bool] = False

    module: nn.Module
    reducer: Reducer

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: MixedPrecisionConfig | None = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        nan_guard: bool = False,
        check_ranks: bool = True,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"DistributedDataParallel wraps a torch.nn.Module, got {type(module).__name__}")
        self.process_group = group_of(process_group, device_mesh, module)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.module = module
        self.dim = dim
        self.forward_sync_buffers, init_sync_buffers = buffer_sync_options(broadcast_buffers, forward_sync_buffers)
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.static_graph = static_graph
        self.mixed_precision = mixed_precision
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.nan_guard = nan_guard
        self.check_ranks = check_ranks
        self.wire_dtype = wire_dtype
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._comm_hook: tuple[object, CommHook, str] | None = None
        self._optimizers_taken_over = False
        self._acts: StepDigests | None = None
        self._logical_shards = 0
        self.shard_sums: ShardSums | None = None
        if check_reduction:
            warnings.warn(
                "`check_reduction` has no effect, here and in torch; leave it out", FutureWarning, stacklevel=2
            )
        pairs = self._named_parameters()
        refusal: ValueError | None = None
        try:
            self.bucket_bytes_cap, self.bucket_bytes_cap_list = capacities(bucket_cap_mb, bucket_cap_mb_list)
            self.bucket_bytes_cap_default = bucket_cap_mb is None and not bucket_cap_mb_list
            moved_to = device_to_move_to(device_ids, module, torch.cuda.device_count())
            if moved_to is not None:
                module.to(moved_to)
            self.device = one_device(pairs, module)
            self._buffers_in_sync = BufferSync(module, self.process_group, self.device, self.parameters_to_ignore)
            if self.bucket_bytes_cap_default:
                self.bucket_bytes_cap = default_cap_bytes(rate_between_hosts(self.process_group, self.device))
            self.device_type = self.device.type
            self.device_ids = check_device_ids(device_ids, output_device, self.device)
            self.output_device = self.device_ids[0] if self.device_ids else None
        except ValueError as error:
            refusal = error  # raised when all ranks know of it: what one rank refuses, all refuse
        exchanging = init_sync and self.process_group.size() > 1
        if exchanging:
            lines, gpu = (self._describe(pairs), gpu_identity(self.device)) if refusal is None else ([str(refusal)], "")
            try:
                # Small messages over nccl lie on the current GPU: the first one, where a script has set none.
                with torch.cuda.device(next((p.device.index for _, p in pairs if p.is_cuda), -1)):
                    verify_same_model(lines, self.process_group, gpu)
            except ModelMismatchError:
                if refusal is None:
                    raise  # it names the rank that refuses
        if refusal is not None:
            raise refusal
        if exchanging:
            self._sync_module_states(0, buffers=init_sync_buffers)
        self._low_precision: MixedPrecision | None = None
        if mixed_precision is not None:
            self._low_precision = MixedPrecision(mixed_precision, module, self.parameters_to_ignore)
        self._build()

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore]

    def _describe(self, pairs: Sequence[tuple[str, nn.Parameter]]) -> list[str]:
        """Everything that has to be equal on all ranks, in lines."""
        sparse = sparse_parameters(self.module)
        lines = [
            f"options: bucket_cap_bytes={self.bucket_bytes_cap_list or self.bucket_bytes_cap} "
            f"forward_sync_buffers={self.forward_sync_buffers} find_unused_parameters={self.find_unused_parameters} "
            f"static_graph={self.static_graph} skip_all_reduce_unused_params={self.skip_all_reduce_unused_params} "
            f"mixed_precision={self.mixed_precision} nan_guard={self.nan_guard} "
            f"check_ranks={self.check_ranks} wire_dtype={self.wire_dtype}"
        ]
        lines += [describe("parameter", name, p) + (", sparse gradient" if name in sparse else "") for name, p in pairs]
        return lines + [describe("buffer", name, b) for name, b in self._buffers_in_sync.named_buffers()]

    def _build(self) -> None:
        """Makes what belongs to this process and is never saved: the reducer, and the synchroniser of buffers."""
        check_wire_dtype(self.wire_dtype, backend_name(self.process_group, self.device))
        pairs = self._named_parameters()
        self._outer: weakref.ref[nn.Module] | None = None  # a wrapper around this one, which averages for it
        self._held_parameters = HeldParameters(self.module, self.parameters_to_ignore)
        take_over_parameters(self, self._held_parameters.names)
        self._frozen = [(n, p) for n, p in pairs if not p.requires_grad]
        # With SyncBatchNorm, ranks that use different parameters would launch buckets and statistics in different
        # orders over one group. Launching at the end of backward keeps them apart.
        statistics_in_backward = any(isinstance(m, (SyncBatchNorm, nn.SyncBatchNorm)) for m in self.module.modules())
        self._buffers_in_sync = BufferSync(self.module, self.process_group, self.device, self.parameters_to_ignore)
        self.reducer = Reducer(
            [(n, p) for n, p in pairs if p.requires_grad],
            self.process_group,
            ReducerOptions(
                bucket_cap_bytes=self.bucket_bytes_cap,
                caps_bytes=tuple(self.bucket_bytes_cap_list),
                find_unused_parameters=self.find_unused_parameters and not self.static_graph,
                skip_unused=self.skip_all_reduce_unused_params and self.find_unused_parameters,
                sparse=sparse_parameters(self.module),
                overlap=not (self.find_unused_parameters and statistics_in_backward),
                static_graph=self.static_graph,
                gradients_are_views=self.gradient_as_bucket_view,
                late_errors=self.late_gradient_errors,
                nan_guard=self.nan_guard,
                check_ranks=self.check_ranks,
                wire_dtype=self.wire_dtype,
                path=type(self.module).__name__,
            ),
            with_gradients=self._buffers_in_sync.start,
        )
        self.reducer.compare_acts(self._acts)
        if self._logical_shards:
            self.shard_sums = ShardSums(self.reducer.average, self._logical_shards)
            self.reducer.use_exchange(self.shard_sums)
        if self._low_precision is not None and self._low_precision.reduce_dtype is not None and self.reducer.active:
            self.reducer.use_exchange(
                AverageExchange(self.reducer.average, self.wire_dtype, self._low_precision.reduce_dtype)
            )
        if self._comm_hook is not None:
            self.reducer.use_exchange(HookExchange(*self._comm_hook[:2], self.process_group))
        # The parameters' hooks hold the reducer. They go when this wrapper goes, so the model can be wrapped anew.
        self._ending = weakref.finalize(self, self.reducer.stop)
        self._ending.atexit = False

    # ---- forward and backward

    # The compiler leaves this frame alone and compiles the module that it calls, cut where buckets end.
    @_disable_dynamo(recursive=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward. The class says what is exchanged before and after."""
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            with self._inside_ddp_forward():
                if self._low_precision is not None:
                    output = self._low_precision(self.module, inputs, kwargs)
                else:
                    output = self.module(*inputs, **kwargs)
            return self._post_forward(output)

    # `_pre_forward` and `_post_forward` are the names of torch's class; torch's `replicate` calls them.

    @_disable_dynamo
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._exchanges():
            with torch._C._DisableFuncTorch():  # what is exchanged is no part of what torch.func.jvp differentiates
                self._begin_forward()
        if self.device_ids:
            inputs, kwargs = move_tensors((inputs, kwargs), self.device)
        return inputs, kwargs

    @_disable_dynamo
    def _post_forward(self, output: Any) -> Any:
        if self.require_backward_grad_sync and self._exchanges():
            self._end_forward(output)
        return output

    def _exchanges(self) -> bool:
        # A forward inside a backward is one that activation checkpointing repeats: all is exchanged already.
        training = torch.is_grad_enabled() and current_task() == -1
        return training and (self._outer is None or self._outer() is None)

    def _begin_forward(self) -> None:
        self._held_parameters.check(self.reducer.rank)
        if not self._optimizers_taken_over:
            # torch's class may have been put around this one, or beside it, since it was made.
            take_over_parameters(self, self._held_parameters.names)
            self._take_over_optimizers()
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ValueError(
                    f"rank {self.reducer.rank}: parameter {name} was frozen when the model was wrapped and requires "
                    f"grad now, so its gradient would not be averaged. Wrap the model again after unfreezing."
                )
        if self.reducer.active:
            self.reducer.begin_forward()
        if self._join_config.enable:
            Join.notify_join_context(self)
            _, contributors = tell_ranks(self, joined=False)
            if not self._divide_by_initial_world_size:
                self.reducer.average.contributors = contributors
        # As in torch's class, a backward is exchanged or not by where its forward ran: inside no_sync or outside. Of
        # several forwards before it, one outside is enough (a teacher's forward in no_sync has no backward).
        reducer = self.reducer
        reducer.is_due = reducer.forward_syncs = self.require_backward_grad_sync or (
            reducer.is_due and reducer.forward_syncs
        )
        self.require_forward_param_sync = self.syncs
        if self.syncs:
            self.reducer.timeline.forward_began()
            spans.forward_began()
            self.reducer.rebuild_buckets()
            self._sync_buffers()

    def _end_forward(self, output: object) -> None:
        spans.forward_ended(output)
        if not self.reducer.active:
            return
        if self.static_graph:
            self.reducer.watch_outputs(output)
        elif self.find_unused_parameters:
            self.reducer.filter_unused_parameters(output)
        hook = self._buffers_in_sync.hook
        if hook is not None and hook[2] and self.will_sync_module_buffers():
            self.reducer.post_backward_futures += self._buffers_in_sync.run_hook()

    def _sync_buffers(self, *, joined: bool = False) -> None:
        """Before a forward: decides whose buffers all get with its gradients, or runs the hook.

        With `joined`, this rank has no input.
        """
        hook = self._buffers_in_sync.hook
        if not self.will_sync_module_buffers() or self.reducer.world_size == 1 or (hook is not None and hook[2]):
            return
        if hook is not None:
            self.reducer.post_backward_futures += self._buffers_in_sync.run_hook()
            return
        # Rank 0 may have run out of input, and its buffers then are old.
        source = common_rank(self, candidate=not joined) if self._join_config.enable else 0
        self._buffers_in_sync.source = source

    @property
    def syncs(self) -> bool:
        """Return whether backward of a forward now would exchange: outside `no_sync`, with `reducer.sync_grad`."""
        return self.require_backward_grad_sync and self.reducer.sync_grad

    def will_sync_module_buffers(self) -> bool:
        """Return whether backward of a forward now would synchronize buffers."""
        return (
            self.require_forward_param_sync
            and self.forward_sync_buffers
            and bool(self._buffers_in_sync.named_buffers())
        )

    def _sync_module_states(self, source: int, *, buffers: bool) -> None:
        tensors = [p.detach() for _, p in self._named_parameters()]
        if buffers:
            tensors += [b for _, b in self._buffers_in_sync.named_buffers()]
        broadcast_tensors(tensors, self.process_group, self.device, source=source)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Exchange neither gradients nor buffers inside `with`: gradients accumulate on each rank.

        The next backward outside averages the sums. The forward must be inside too, as with torch's class. On exit,
        also by an exception, the setting from before is restored.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # ---- hooks and optimizers

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let `hook(state, bucket)` replace the average. Call it once, before the first backward.

        Args:
            state: first argument of the hook; hooks keep their memory in it.
            hook: function of (state, bucket). `bucket` is like a `torch.distributed.GradBucket`; its buffer holds this
                rank's gradients, undivided. It returns a `torch.futures.Future` of the reduced buffer. All hooks of
                `torch.distributed.algorithms.ddp_comm_hooks` work.

        Raises:
            TypeError, ValueError: not such a function.
            PhotinusError: there is a hook already, or mixed_precision or wire_dtype is in use.
        """
        try:
            check_hook(hook)
        except (TypeError, ValueError) as error:
            self.reducer.timeline.error = str(error)
            raise
        self._set_hook(state, hook, getattr(hook, "__qualname__", type(hook).__name__))

    def _set_hook(self, state: object, hook: CommHook, name: str) -> None:
        options = [
            *([self._comm_hook[2]] if self._comm_hook is not None else []),
            *(["mixed_precision"] if self._low_precision is not None else []),
            *(["wire_dtype"] if self.wire_dtype is not None else []),
            *(["logical_shards"] if self._logical_shards else []),
        ]
        if options:
            raise PhotinusError(
                f"register_comm_hook or register_builtin_comm_hook can only be called once, and not with "
                f"mixed_precision, wire_dtype or logical_shards: {options[0]} is in force. A hook that calls another "
                f"hook combines two."
            )
        self._comm_hook = (state, hook, name)
        self.reducer.use_exchange(HookExchange(state, hook, self.process_group))

    def _take_over_optimizers(self) -> None:
        self._optimizers_taken_over = True
        if not self.reducer.active:
            return  # nothing is averaged, so torch's own hooks step at the right moment
        optimizers = OptimizersInBackward.take_over(self.reducer.slots)
        if optimizers is not None:
            self.reducer.call_after_exchange(optimizers)

    def compare_acts(self, acts: StepDigests) -> None:
        """Compares from now on what each rank does around its optimizer steps; for strategies that split these."""
        self._acts = acts
        self.reducer.compare_acts(acts)

    def add_in_shards(self, shards: int) -> None:
        """Add gradients from now on as those of N logical shards (see `ShardSums`). A Loop makes the shards.

        Buffers are not broadcast: the Loop keeps them equal.
        """
        self._logical_shards, self.forward_sync_buffers = shards, False
        self.shard_sums = ShardSums(self.reducer.average, shards)
        self.reducer.use_exchange(self.shard_sums)

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
            self.device = one_device(self._named_parameters(), self.module)
            self._rebuild()
        return self

    def _rebuild(self) -> None:
        hook = self._buffers_in_sync.hook
        self._ending()
        self._build()
        self._buffers_in_sync.hook = hook
        self._optimizers_taken_over = False

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not dist.group.WORLD:
            raise PhotinusError(
                "a DistributedDataParallel over a process group of its own cannot be pickled or copied, because the "
                "group cannot be named elsewhere. Pickle or copy `.module`, or save its state_dict()."
            )
        state = self.__dict__.copy()
        for key in ("process_group", "reducer", "_ending", "_held_parameters", "_outer", "_buffers_in_sync", "_frozen"):
            del state[key]
        # Their states belong to this process, as with torch's class.
        state["_comm_hook"] = state["_acts"] = state["shard_sums"] = None
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


# Code that asks isinstance(model, torch.nn.parallel.DistributedDataParallel), to unwrap it or to strip "module." from
# names as torch.distributed.checkpoint does, is answered yes. Its metaclass has `register` for this; a real subclass
# would inherit methods that look for the C++ reducer.
nn.parallel.DistributedDataParallel.register(DistributedDataParallel)
