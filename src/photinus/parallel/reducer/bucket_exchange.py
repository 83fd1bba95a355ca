"""The exchange of one bucket: averaged, by a communication hook, or in another precision.

The interface of hooks is that of torch's class, so that its hooks (compression to half precision, PowerSGD, post-local
SGD, …) run as they are: `hook(state, bucket)` returns a future whose value is what the bucket is to hold.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BuiltinCommHookType
from torch._C._distributed_c10d import GradBucket as TorchGradBucket

from ..exchange.collectives import GroupAverage, Pending, wait_for_callbacks
from ..tracing.spans import future_of
from .autograd import keep_until_read
from .buckets import Bucket

CommHook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


class AverageExchange:
    """The average over the ranks.

    Args:
        wire_dtype: the type in which it travels between hosts, see `GroupAverage.start`; None: its own.
        dtype: in which floating gradients are averaged and sent; None: their own, in place.
    """

    averages = True

    def __init__(
        self, average: GroupAverage, wire_dtype: torch.dtype | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self._average = average
        self._wire_dtype = wire_dtype
        self._dtype = dtype

    def start(self, bucket: Bucket) -> Pending:
        """See `BucketExchange`."""
        if self._dtype in (None, bucket.flat.dtype) or not bucket.flat.is_floating_point():
            # Integers are exact only in their own type.
            return self._average.start(bucket.flat, self._wire_dtype)
        # A copy, because gradients are aliases of the bucket and keep its type.
        copy = bucket.flat.to(self._dtype)
        return _CopyBack(self._average.start(copy, self._wire_dtype), copy, bucket.flat)


class _CopyBack:
    """A work that brings its result home when it is waited for."""

    def __init__(self, work: Pending, result: torch.Tensor, home: torch.Tensor) -> None:
        self._work = work
        self._result = result
        self._home = home

    def wait(self) -> object:
        self._work.wait()
        keep_until_read(self._result)  # made in a hook, on the stream of the gradients
        return self._home.copy_(self._result)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def get_future(self) -> Any:
        """That of the exchange, which a profiler shows."""
        return future_of(self._work)


class GradBucket:
    """One bucket as a hook sees it: the methods of `torch.distributed.GradBucket`, which Python cannot make."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._buffer = bucket.flat

    def index(self) -> int:
        """Position of the bucket in the order of launches; the same one in each step, but for the first."""
        return self._bucket.index

    def buffer(self) -> torch.Tensor:
        """The flat gradients, one dimension; not divided by anything."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """The buffer's parts, each in its parameter's shape."""
        # The bucket's own views have the strides of the parameters; in another buffer nothing but the shape is known.
        if self._buffer is self._bucket.flat:
            return [slot.view for slot in self._bucket.slots if slot.view is not None]
        return [
            self._buffer[offset : offset + slot.parameter.numel()].view(slot.parameter.shape)
            for slot, offset in zip(self._bucket.slots, self._bucket.plan.offsets, strict=True)
        ]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of `gradients()`."""
        return [slot.parameter for slot in self._bucket.slots]

    def is_last(self) -> bool:
        """Return whether no other bucket follows in this backward."""
        return self._bucket.is_last

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Puts another tensor in the buffer's place, for hooks that call hooks.

        One dimension, any dtype; its first elements are the gradients, others may follow.
        """
        self._buffer = tensor


class HookExchange:
    """Buckets travel by a hook. Nothing is divided: what the hook's future holds is what the gradients become."""

    averages = False

    def __init__(self, state: object, hook: CommHook, group: dist.ProcessGroup) -> None:
        self._state = state
        self._group = group
        self._hook = hook

    def start(self, bucket: Bucket) -> Pending:
        """See `BucketExchange`.

        Raises:
            TypeError: the hook did not return a future.
        """
        # Hooks share memory between buckets, and count on the end of what they have put off.
        wait_for_callbacks(self._group)
        future = self._hook(self._state, GradBucket(bucket))
        # `Work.get_future()` gives the C++ class, which is no subclass of Python's.
        if not isinstance(future, (torch.futures.Future, torch._C.Future)):
            raise TypeError(
                f"a communication hook returns a torch.futures.Future of the bucket's new contents; "
                f"{_name(self._hook)} returned {type(future).__name__}"
            )
        return _HookWork(future, bucket, self._hook)


class _HookWork:
    def __init__(self, future: Any, bucket: Bucket, hook: CommHook) -> None:
        self._future = future
        self._bucket = bucket
        self._hook = hook

    def get_future(self) -> Any:
        """The hook's, which a profiler shows."""
        return self._future

    @torch.no_grad()
    def wait(self) -> object:
        """Brings the result home.

        Raises:
            ValueError: it is shorter than the bucket.
        """
        value = self._future.wait()
        # The future of an all_reduce holds a list of one tensor, and many hooks return just that.
        result = value[0] if isinstance(value, (list, tuple)) else value
        home, elems = self._bucket.flat, self._bucket.plan.elems
        if home.numel() != elems:  # resized by the hook
            home.resize_(elems)
        if result.numel() < elems:
            raise ValueError(
                f"the communication hook {_name(self._hook)} gave {result.numel()} elements for bucket "
                f"{self._bucket.index}, which has {elems}; its future must "
                f"hold at least that number (further elements are ignored)"
            )
        # Most hooks reduce in place, and there is nothing to copy.
        if result.data_ptr() != home.data_ptr():
            home.copy_(result.reshape(-1)[:elems])
        return home

    def is_completed(self) -> bool:
        return bool(self._future.done())


def check_hook(hook: object) -> None:
    """Refuses what cannot be a hook."""
    # The refusals are those of torch's class: a hook works under both or under none.
    if not callable(hook):
        raise TypeError(f"Communication hook must be callable, got {type(hook).__name__}")
    signature = inspect.signature(hook)
    if "bucket" not in signature.parameters:
        raise ValueError(f"Communication hook: {_name(hook)}{signature} needs a parameter named `bucket`")
    # With `from __future__ import annotations` it is text, and is compared as such.
    annotation = signature.parameters["bucket"].annotation
    if annotation not in (inspect.Parameter.empty, TorchGradBucket, GradBucket, "dist.GradBucket", "GradBucket"):
        raise ValueError(f"Communication hook: bucket annotation should be dist.GradBucket, not {annotation}.")
    returned = signature.return_annotation
    future = torch.futures.Future[torch.Tensor]
    if returned not in (inspect.Signature.empty, future) and not isinstance(returned, str):
        raise ValueError(
            f"Communication hook: return annotation should be torch.futures.Future[torch.Tensor], not {returned}."
        )


def builtin_hook(kind: object) -> CommHook:
    """The hook for a `torch.distributed.BuiltinCommHookType`; its state is the process group.

    Raises:
        ValueError: another kind.
    """
    # Imported when asked for, as most programs use no hook.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if kind == BuiltinCommHookType.ALLREDUCE:
        return default_hooks.allreduce_hook
    if kind == BuiltinCommHookType.FP16_COMPRESS:
        return default_hooks.fp16_compress_hook
    raise ValueError(f"{kind!r} is not a torch.distributed.BuiltinCommHookType")


def _name(hook: object) -> str:
    return str(getattr(hook, "__qualname__", hook))
