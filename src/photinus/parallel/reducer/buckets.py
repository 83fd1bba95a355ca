"""The buckets of a reducer: which gradients lie together, in which memory, and when each exchange starts.

Gradients that are reduced together lie in one flat bucket, so that a model of thousands of small parameters costs
dozens of collectives. Which lie where is plain data (`assign_buckets`), equal on all ranks because it depends on the
order, sizes and dtypes of the parameters alone. The result does not depend on it: every element is averaged over the
ranks by itself. A bucket is launched as soon as it is complete, always in the same order on all ranks.

A gradient that was reduced stays in its bucket and `param.grad` is an alias of that place, so nothing is copied back.
Code may keep a gradient, though, drop it from the parameter (`zero_grad`), and go on to the next backward. Unless
gradients are declared to be views of buckets, such a gradient survives: before a bucket is written again, the
references to its memory are counted. If other code holds one, the bucket takes new memory and leaves the old memory to
that code. The usual loop holds none, and pays for one count per bucket.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..exchange.collectives import GroupAverage, Pending, allocate, wait_all
from ..exchange.tensors import dense_strides
from ..tracing.spans import until_done
from .autograd import keep_until_read
from .options import ReducerOptions

DEFAULT_BUCKET_CAP_BYTES = 25 * 1024 * 1024
"""Cap of a bucket: large enough that bandwidth counts and not latency, small enough to overlap with backward."""

FIRST_BUCKET_BYTES = 1024 * 1024
"""Cap of the first bucket of each dtype: small, so that the exchange begins as soon as backward has begun."""

DEFAULT_BUCKET_S = 0.03
"""What a bucket may take from host to host: a slow card that waits for 25 MiB is idle meanwhile, and busy with them for
long after backward has ended. At 1 Gbit/s, steps whose exchange is as long as backward take 0.92 of the time."""

ALIGNMENT_BYTES = 64
"""Every gradient begins on a cache line: vector instructions and ranks that share memory do not meet inside one."""


@dataclass(frozen=True)
class BucketPlan:
    """One bucket.

    Attributes:
        dtype: of all its parameters.
        parameters: indices into the sequence that `assign_buckets` was given, in the order in which they lie.
        offsets: where each begins, in elements; a multiple of ALIGNMENT_BYTES.
        elems: length of the bucket, padding included.
    """

    dtype: torch.dtype
    parameters: tuple[int, ...]
    offsets: tuple[int, ...]
    elems: int

    @property
    def bytes(self) -> int:
        """Length of the bucket in bytes."""
        return self.elems * self.dtype.itemsize


@dataclass
class _OpenBucket:
    """A bucket that still takes parameters."""

    parameters: list[int]
    offsets: list[int]
    elems: int
    last_position: int


def default_cap_bytes(bytes_per_s: float) -> int:
    """Cap of a bucket where hosts exchange at this rate; 0: there is one host, or nobody has measured."""
    if not bytes_per_s:
        return DEFAULT_BUCKET_CAP_BYTES
    return min(max(int(bytes_per_s * DEFAULT_BUCKET_S), FIRST_BUCKET_BYTES), DEFAULT_BUCKET_CAP_BYTES)


def assign_buckets(
    parameters: Sequence[torch.Tensor],
    *,
    cap_bytes: int,
    first_cap_bytes: int = FIRST_BUCKET_BYTES,
    caps_bytes: Sequence[int] = (),
    order: Sequence[int] | None = None,
    alignment_bytes: int = ALIGNMENT_BYTES,
) -> list[BucketPlan]:
    """Assigns each parameter to one bucket; returns the buckets in the order in which they will be complete.

    Parameters are walked in the order in which their gradients are expected. A bucket holds one dtype and is closed
    before the parameter that would lift it over its cap; a parameter above the cap has a bucket for itself. Buckets
    are sorted by their last parameter, the one that completes them.

    Args:
        parameters: in registration order; only their element counts and dtypes are used.
        cap_bytes: cap of a bucket.
        first_cap_bytes: cap of the first bucket of each dtype.
        caps_bytes: caps of the first, second, … bucket of each dtype in place of the two above; the last one goes on.
        order: indices in the order in which gradients are expected; default: reverse registration order.
        alignment_bytes: where a gradient may begin; 1 packs them without gaps.

    Raises:
        ValueError: a cap below 1 byte, or an order that is not a permutation of the parameters.
    """
    if min(cap_bytes, first_cap_bytes, *caps_bytes) < 1:
        raise ValueError(
            f"a bucket needs room for at least 1 byte: cap_bytes={cap_bytes}, first_cap_bytes={first_cap_bytes}"
            + (f", caps_bytes={list(caps_bytes)}" if caps_bytes else "")
        )
    walk = list(reversed(range(len(parameters)))) if order is None else list(order)
    # A parameter that is left out would keep its local gradient, and nothing would show it.
    if sorted(walk) != list(range(len(parameters))):
        raise ValueError(f"order must name each of the {len(parameters)} parameters once, got {walk}")

    # Buckets of several dtypes fill at the same time, because one collective adds one type.
    filling: dict[torch.dtype, _OpenBucket] = {}
    buckets_closed: dict[torch.dtype, int] = {}
    closed: list[tuple[int, BucketPlan]] = []

    def cap_of(dtype: torch.dtype) -> int:
        number = buckets_closed.get(dtype, 0)
        if caps_bytes:
            return caps_bytes[min(number, len(caps_bytes) - 1)]
        return cap_bytes if number else min(first_cap_bytes, cap_bytes)

    def close(dtype: torch.dtype) -> None:
        bucket = filling.pop(dtype)
        plan = BucketPlan(dtype, tuple(bucket.parameters), tuple(bucket.offsets), bucket.elems)
        closed.append((bucket.last_position, plan))
        buckets_closed[dtype] = buckets_closed.get(dtype, 0) + 1

    for position, index in enumerate(walk):
        dtype = parameters[index].dtype
        # Rounded up, so that the gradient behind it begins on a cache line too.
        multiple = max(1, alignment_bytes // dtype.itemsize)
        room_elems = -(-parameters[index].numel() // multiple) * multiple
        bucket = filling.get(dtype)
        if bucket is not None and (bucket.elems + room_elems) * dtype.itemsize > cap_of(dtype):
            close(dtype)
            bucket = None
        if bucket is None:
            bucket = filling[dtype] = _OpenBucket([], [], 0, position)
        bucket.parameters.append(index)
        bucket.offsets.append(bucket.elems)
        bucket.elems += room_elems
        bucket.last_position = position
    for dtype in list(filling):
        close(dtype)
    # Launched in this order on all ranks, so it should be that in which they are complete.
    return [plan for _, plan in sorted(closed, key=lambda entry: entry[0])]


# ---- memory

Allocate = Callable[[int, torch.dtype], torch.Tensor]
"""Makes zeros: (element count, dtype) -> tensor of one dimension."""


@dataclass(eq=False, slots=True)
class Slot:
    """One parameter's place: `view` is the part of its bucket that `param.grad` becomes an alias of.

    Only the reducer writes what is true of one round: arrived, absent, arrivals, touched.
    """

    index: int
    name: str
    parameter: torch.nn.Parameter
    bucket: Bucket | None = None  # None for a parameter with sparse gradients
    view: torch.Tensor | None = None
    address: int = 0  # of the view
    arrived: bool = False  # counted in this round
    absent: bool = False  # counted without a gradient
    arrivals: int = 0  # gradients that came in this round; several where reentrant checkpoints share the parameter
    touched: bool = False  # got a gradient since the last exchange, in no_sync or in this round
    hook_key: int = 0  # of our hook among those of the parameter
    is_copied_with_others: bool = False  # with the bucket's, by one call


@dataclass(eq=False)
class Bucket:
    """Gradients that are reduced together.

    Attributes:
        index: position in the order of launches.
        plan: which gradients lie where.
        slots: their places, in the order in which they lie.
        room_elems: elements of memory behind the gradients, for hooks that resize what they are given.
        flat: the gradients, what is exchanged.
        pending: gradients that this round still waits for.
        is_last: whether it is the last in the order of launches.
        arriving: small gradients that have come and do not lie here yet.
        work: set from launch until the round is closed.
    """

    index: int
    plan: BucketPlan
    slots: list[Slot]
    allocate: Allocate
    room_elems: int = 0
    is_last: bool = False
    flat: torch.Tensor = field(init=False)
    pending: int = 0
    arriving: list[Slot] = field(default_factory=list)
    work: Pending | None = None
    skipped: bool = False
    _storage: torch.UntypedStorage = field(init=False)
    _own_references: int = field(init=False)

    def __post_init__(self) -> None:
        self._take_memory()

    def make_writable(self) -> bool:
        """Takes fresh memory if others than the parameters hold some of it; returns whether it did.

        Gradients that still lie here, because they are being accumulated, move along.
        """
        references = torch._C._storage_Use_Count(self._storage._cdata)
        if references == self._own_references:
            return False
        # The parameters' own gradients hold references too; only those of others count.
        lying = [slot for slot in self.slots if aliases(slot.parameter.grad, slot.view)]
        if references == self._own_references + len(lying):
            return False
        before = [slot.view for slot in lying]
        self._take_memory()
        for slot, old in zip(lying, before, strict=True):
            assert slot.view is not None
            assert old is not None
            slot.view.copy_(old)
            slot.parameter.grad = slot.view.data
        return True

    def _take_memory(self) -> None:
        elems = self.plan.elems
        self.flat = self.allocate(elems + self.room_elems, self.plan.dtype)[:elems]
        for slot, offset in zip(self.slots, self.plan.offsets, strict=True):
            slot.bucket = self
            shape, strides = slot.parameter.shape, dense_strides(slot.parameter)
            # .data: no autograd view of the bucket, so that code which calls grad.detach_() goes on working.
            slot.view = self.flat.as_strided(shape, strides, self.flat.storage_offset() + offset).data
            slot.address = slot.view.data_ptr()
        self._storage = self.flat.untyped_storage()
        self._own_references = torch._C._storage_Use_Count(self._storage._cdata)


def aliases(gradient: torch.Tensor | None, view: torch.Tensor | None) -> bool:
    """Return whether a gradient lies at the place `view`."""
    if gradient is None or view is None or gradient.layout != torch.strided or gradient.requires_grad:
        return gradient is view and view is not None
    return gradient is view or gradient.data_ptr() == view.data_ptr()


@torch.no_grad()
def bring_home(slots: Sequence[Slot], *, as_views: bool) -> list[tuple[Slot, torch.Tensor]]:
    """Copies gradients to their places in the buckets, and makes `param.grad` an alias of the place.

    Args:
        slots: their parameters have dense or sparse gradients, anywhere; some may come twice.
        as_views: `param.grad` becomes the very tensor `slot.view`.

    Returns:
        The gradients that carry a graph (create_graph), with their slots. Their values are copied; they stay in
        `param.grad`.
    """
    fresh: list[Slot] = []
    gradients: list[torch.Tensor] = []
    carrying_graphs: list[tuple[Slot, torch.Tensor]] = []
    for slot in slots:  # some thousands in each step: what is read of a tensor here counts
        gradient: Any = slot.parameter.grad
        view: Any = slot.view
        if gradient is view:
            continue
        if gradient is None:  # it came, and some hook took it away again
            view.zero_()
        elif gradient.requires_grad:
            view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            carrying_graphs.append((slot, gradient))
        elif gradient.is_sparse:
            view.copy_(gradient.to_dense())
            slot.parameter.grad = view if as_views else view.data
        elif gradient.data_ptr() != slot.address:
            fresh.append(slot)
            gradients.append(gradient)
    views: list[Any] = [slot.view for slot in fresh]
    if len(fresh) == 1:
        views[0].copy_(gradients[0])
    elif fresh:
        # One call: with thousands of small gradients the calls would take longer than the copies.
        torch._foreach_copy_(views, gradients)
    for slot, view in zip(fresh, views, strict=True):
        slot.parameter.grad = view if as_views else view.data
    return carrying_graphs


# ---- order of launches


class BucketExchange(Protocol):
    """Replaces the contents of a bucket by what the ranks make of theirs.

    Attributes:
        averages: whether the ranks then hold averages. If not, their weights may differ, and buckets hold gradients
            without gaps: what compresses them must not meet padding.
    """

    averages: bool

    def start(self, bucket: Bucket) -> Pending:
        """Starts it. When the returned work has been waited for, the bucket holds the result."""


class Buckets:
    """The buckets of some parameters, and which of them are under way in this round.

    Args:
        slots: of the parameters with dense gradients.
        exchange: how buckets travel.
        before_launch: called with each bucket, complete, before it leaves.

    Attributes:
        all: in the order in which they are launched.
        order: indices of parameters in the order in which gradients are expected; None: reverse registration order.
        with_graph: the gradients of this round that carry a graph (create_graph), which goes around the average.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        average: GroupAverage,
        exchange: BucketExchange,
        options: ReducerOptions,
        before_launch: Callable[[Bucket], None],
    ) -> None:
        self.exchange = exchange
        self.all: list[Bucket] = []
        self.order: list[int] | None = None
        self.with_graph: list[tuple[Slot, torch.Tensor]] = []
        self._slots = slots
        self._average = average
        self._options = options
        self._before_launch = before_launch
        self._launched = 0
        self._waits_for_end = False

    # ---- making

    def agree_on_order(self, indices: Sequence[int]) -> bool:
        """Takes the order in which rank 0 saw gradients; every rank calls it. Returns whether the buckets change.

        Args:
            indices: of parameters; where one comes twice, the first counts.
        """
        self.order = list(dict.fromkeys(indices))
        # Ranks may have seen other orders: by branches of the model, or by the timing of autograd's threads.
        if self._average.world_size > 1:
            agreed = torch.tensor(self.order, dtype=torch.int64, device=self._average.device)
            dist.broadcast(agreed, group=self._average.group, group_src=0)
            self.order = agreed.tolist()
        return [plan.parameters for plan in self._plans()] != [bucket.plan.parameters for bucket in self.all]

    def _plans(self) -> list[BucketPlan]:
        """The layout in the present order; its indices are those of `slots`."""
        position = {slot.index: i for i, slot in enumerate(self._slots)}
        return assign_buckets(
            [slot.parameter for slot in self._slots],
            cap_bytes=self._options.bucket_cap_bytes,
            caps_bytes=self._options.caps_bytes,
            order=None if self.order is None else [position[i] for i in self.order if i in position],
            alignment_bytes=ALIGNMENT_BYTES if self.exchange.averages else 1,
        )

    def make(self) -> None:
        """Makes the buckets, in the group's memory where it offers some; `reset` comes next."""
        plans = self._plans()
        self.all = []
        for number, plan in enumerate(plans):
            slots = [self._slots[i] for i in plan.parameters]
            # Batched PowerSGD lets a bucket grow to a square. Memory that a group offers cannot grow.
            room = 0 if self.exchange.averages else math.ceil(math.sqrt(plan.elems)) ** 2 - plan.elems
            self.all.append(Bucket(number, plan, slots, self._allocate, room, is_last=number == len(plans) - 1))

    def shadows(self) -> list[Bucket]:
        """Buckets like these that are all zeros and no parameter's."""
        # New slots, since making a bucket ties its slots to it, and the real ones belong to the real bucket.
        slots = [[Slot(slot.index, slot.name, slot.parameter) for slot in bucket.slots] for bucket in self.all]
        return [
            Bucket(bucket.index, bucket.plan, new, self._allocate, bucket.room_elems, bucket.is_last)
            for bucket, new in zip(self.all, slots, strict=True)
        ]

    def _allocate(self, elems: int, dtype: torch.dtype) -> torch.Tensor:
        return allocate(self._average.group, elems, dtype, self._average.device)

    # ---- a round

    def arrived(self, slot: Slot, *, is_complete: bool) -> None:
        """A gradient of this round has come. When it is the last of its bucket, what is complete is launched.

        Args:
            is_complete: no further gradient of this parameter is waited for, and none was complete before.
        """
        bucket = slot.bucket
        assert bucket is not None
        if slot.is_copied_with_others:
            bucket.arriving.append(slot)  # one call copies them when the bucket is complete
        else:
            self._bring_home([slot])
        if is_complete:
            bucket.pending -= 1
            if bucket.pending == 0:
                self.launch_complete()

    @torch.no_grad()
    def absent(self, slot: Slot) -> None:
        """No gradient comes in this round: what was accumulated before is exchanged, or zero. Launches nothing."""
        assert slot.bucket is not None
        assert slot.view is not None
        gradient = slot.parameter.grad
        if gradient is None:
            slot.view.zero_()
        elif not aliases(gradient, slot.view):
            slot.view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        slot.bucket.pending -= 1

    def _bring_home(self, slots: Sequence[Slot]) -> None:
        if self._waits_for_end:  # by another stream than made them
            for slot in slots:
                keep_until_read(slot.parameter.grad)
        self.with_graph += bring_home(slots, as_views=self._options.gradients_are_views)

    def wait_for_end(self) -> None:
        """Nothing more of this round is launched before the end of backward."""
        self._waits_for_end = True

    def launch_complete(self) -> None:
        """Starts complete buckets, up to the first that is not."""
        if self._options.overlap and not self._waits_for_end:
            # In order only: a later bucket that is complete first would be matched with an earlier one of another rank.
            while self._launched < len(self.all) and self.all[self._launched].pending == 0:
                self._launch_next()

    def launch_rest(self) -> None:
        """Starts all that remain."""
        while self._launched < len(self.all):
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self.all[self._launched]
        self._launched += 1
        # A gradient from `no_sync` waits for its average, whether this backward has added to it or not.
        waiting = any(slot.touched or not slot.absent for slot in bucket.slots)
        bucket.skipped = self._options.skip_unused and not waiting
        if bucket.skipped:
            return
        if bucket.arriving:
            self._bring_home(bucket.arriving)
            bucket.arriving.clear()
        self._before_launch(bucket)
        name = f"bucket {bucket.index} ({bucket.flat.nbytes} bytes)"
        bucket.work = until_done(name, lambda: self.exchange.start(bucket))

    def wait(self, beside: Pending | None, after: Callable[[int], None] | None) -> None:
        """Waits for the averages, and for what travels beside them.

        Args:
            after: called with the index of each bucket whose averages have come, in order.
        """
        wait_all([*(bucket.work for bucket in self.all), beside], after)

    def reset(self) -> None:
        """For the next round."""
        self._launched = 0
        self._waits_for_end = False
        self.with_graph.clear()
        for bucket in self.all:
            # All gradients count, those that never come too: `absent` takes them off.
            bucket.pending = len(bucket.slots)
            bucket.work, bucket.skipped = None, False
            bucket.arriving.clear()
