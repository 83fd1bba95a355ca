"""The memory of gradients while they are reduced: flat buckets, and each parameter's place in them.

A gradient that was reduced stays in its bucket and `param.grad` is an alias of that place, so nothing is copied back.
Code may keep a gradient, though, drop it from the parameter (`zero_grad`), and go on to the next backward. Unless
gradients are declared to be views of buckets, such a gradient survives: before a bucket is written to anew, the
references to its memory are counted, and if somebody else holds one, the bucket takes fresh memory and leaves the old
to its holder. The usual loop, in which nobody does, pays for a count per bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ..exchange.collectives import Pending
from ..exchange.tensors import dense_strides
from .buckets import BucketPlan

Allocate = Callable[[int, torch.dtype], torch.Tensor]
"""Makes zeros: (element count, dtype) -> tensor of one dimension."""


@dataclass(eq=False)
class Slot:
    """One parameter's place: `view` is the part of its bucket that `param.grad` becomes an alias of."""

    index: int
    name: str
    parameter: torch.nn.Parameter
    bucket: Bucket | None = None  # None for a parameter with sparse gradients
    view: torch.Tensor | None = None
    arrived: bool = False  # counted in this round
    absent: bool = False  # counted without a gradient
    arrivals: int = 0  # gradients that came in this round; several where reentrant checkpoints share the parameter
    touched: bool = False  # got a gradient since the last exchange, in no_sync or in this round
    hook_key: int = 0  # of our hook among those of the parameter


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
        self._storage = self.flat.untyped_storage()
        self._own_references = torch._C._storage_Use_Count(self._storage._cdata)


def aliases(gradient: torch.Tensor | None, view: torch.Tensor | None) -> bool:
    """Return whether a gradient lies at the place `view`."""
    if gradient is None or view is None or gradient.layout != torch.strided or gradient.requires_grad:
        return gradient is view and view is not None
    return gradient is view or gradient.data_ptr() == view.data_ptr()


@torch.no_grad()
def bring_home(slots: Sequence[Slot], *, as_views: bool) -> list[tuple[Slot, torch.Tensor]]:
    """Sees to it that gradients lie in their places, and that `param.grad` is an alias of the place.

    Args:
        slots: their parameters have dense or sparse gradients, anywhere; some may come twice.
        as_views: `param.grad` becomes the very tensor `slot.view`.

    Returns:
        The gradients that carry a graph (create_graph), with their slots. Their values are copied; they stay in
        `param.grad`.
    """
    fresh: list[Slot] = []
    gradients: list[torch.Tensor] = []
    views: list[torch.Tensor] = []
    carrying_graphs: list[tuple[Slot, torch.Tensor]] = []
    for slot in slots:
        gradient, view = slot.parameter.grad, slot.view
        assert view is not None
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
        elif gradient.data_ptr() != view.data_ptr():
            fresh.append(slot)
            gradients.append(gradient)
            views.append(view)
    if len(fresh) == 1:
        views[0].copy_(gradients[0])
    elif fresh:
        # One call: with thousands of small gradients the calls would take longer than the copies.
        torch._foreach_copy_(views, gradients)
    for slot, view in zip(fresh, views, strict=True):
        slot.parameter.grad = view if as_views else view.data
    return carrying_graphs
