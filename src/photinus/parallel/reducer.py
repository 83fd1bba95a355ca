"""Averages gradients over the ranks while backward is still computing others.

One backward, seen from here:

1. Autograd adds a parameter's gradient to `param.grad` and calls the parameter's hook. The hook sees to it that the
   gradient lies in its bucket: a fresh one is copied there once and `param.grad` becomes the view; one that is the
   view already (gradients zeroed in place, or accumulated) stays where it is.
2. When all gradients of a bucket have arrived, and all earlier buckets have been launched, its all-reduce starts. The
   order of launches is therefore the same on all ranks, whatever the order of arrival.
3. The first hook of a backward queues a callback that autograd runs when the whole backward is over. It deals with
   gradients that did not come, waits for the exchanges, and leaves the averages in `param.grad`.

Notes for readers:

A *round* is steps 2 and 3 of one backward. It is opened by the first hook and closed by the callback. An exception in
backward leaves it open: autograd drops the callback. Whoever comes next (the next forward, or a hook of the next
backward) closes it by launching what remains, so that the sequence of collectives stays the same on all ranks.

Reentrant activation checkpointing runs backwards inside a backward. Each has its own graph task and runs its own
callbacks when it ends, so a callback may find the round incomplete because the enclosing backward still has
gradients to bring; it then leaves the round to the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..errors import MissingGradientError
from .buckets import BucketPlan, ParameterSpec, assign_buckets
from .exchange import Average, Pending, allocate
from .graph import AveragedGradient, current_task, inside_custom_function, leaves_below
from .sparse import average_sparse
from .tensors import dense_strides, tensors_in

__all__ = ["Reducer"]

_NO_TASK = -2  # autograd says -1 outside of a backward
_NAMES_SHOWN = 40


@dataclass(eq=False)
class _Bucket:
    """Gradients that are reduced together; `flat` is theirs and, in the last bucket, the ranks' status."""

    plan: BucketPlan
    flat: torch.Tensor
    slots: list[_Slot]
    pending: int = 0  # gradients that this round still waits for
    work: Pending | None = None  # set from launch until the round is closed


@dataclass(eq=False)
class _Slot:
    """One parameter's place: `view` is the part of its bucket that becomes `param.grad`."""

    index: int
    name: str
    parameter: torch.nn.Parameter
    bucket: _Bucket | None  # None for a parameter with sparse gradients
    view: torch.Tensor | None
    arrived: bool = False  # counted in this round


class Reducer:
    """Averages the gradients of some parameters over the ranks of a group during backward.

    Args:
        parameters: (name, parameter) pairs, all requiring grad, on one device, equal on all ranks.
        group: the ranks.
        bucket_cap_bytes, first_bucket_bytes: see `photinus.parallel.buckets`.
        find_unused_parameters: a parameter without gradient counts as zero, or stays without when it got none on
            any rank. Otherwise it is an error.
        sparse: names of the parameters whose gradients are expected to be sparse.
        overlap: launch during backward. When False, everything is launched at its end: for models whose ranks use
            different parameters and exchange other things in backward (SyncBatchNorm) over the same group.

    Attributes:
        sync_grad: whether backwards are followed by an exchange. A wrapper sets it at each forward.

    With one rank nothing is exchanged and gradients are left as autograd makes them.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        group: dist.ProcessGroup,
        *,
        bucket_cap_bytes: int,
        first_bucket_bytes: int,
        find_unused_parameters: bool = False,
        sparse: frozenset[str] = frozenset(),
        overlap: bool = True,
    ) -> None:
        self.sync_grad = True
        self.find_unused_parameters = find_unused_parameters
        self.rank = group.rank()
        self.world_size = group.size()
        self.device = parameters[0][1].device
        self._average = Average(group, self.device)
        self._overlap = overlap
        self._slots = [_Slot(i, name, param, None, None) for i, (name, param) in enumerate(parameters)]
        self._sparse_slots = [slot for slot in self._slots if slot.name in sparse]
        self._buckets: list[_Bucket] = []
        self._status: torch.Tensor | None = None
        self._handles: list[Any] = []
        self._expected_unused: set[int] | None = None

        self._open = False  # a round is open
        self._tasks: list[int] = []  # the graph tasks (backwards, nested ones too) of the open round
        self._task = _NO_TASK  # the graph task that the last hook ran in
        self._launched = 0
        self._absent: list[_Slot] = []  # counted in this round without a gradient
        self._with_graph: list[tuple[_Slot, torch.Tensor]] = []  # local gradients that carry a graph (create_graph)
        self._left_open = False  # a nested backward ended with the round incomplete

        if self.world_size > 1:
            self._make_buckets(bucket_cap_bytes, first_bucket_bytes)
            for slot in self._slots:
                register: Any = slot.parameter.register_post_accumulate_grad_hook
                self._handles.append(register(self._make_hook(slot)))

    # ---- what others may call

    @property
    def plans(self) -> list[BucketPlan]:
        """The buckets' layout, in the order in which they are launched."""
        return [bucket.plan for bucket in self._buckets]

    def prepare_for_backward(self, outputs: object = ()) -> None:
        """The next backward exchanges gradients, even after forwards that ran in `no_sync`.

        `outputs`, where not empty, are the forward's: parameters that they do not depend on are not waited for.
        """
        self.sync_grad = True
        if self.find_unused_parameters and tensors_in(outputs):
            self.filter_unused_parameters(outputs)

    def filter_unused_parameters(self, outputs: object) -> None:
        """Finds the parameters that `outputs` do not depend on, so that the next backward does not wait for them.

        Walks the graph from all tensors in `outputs` (nested lists, tuples, dicts, dataclasses). Buckets of unused
        parameters can then be launched during backward; without this they are launched at its end, to the same
        result. Several forwards before one backward: a parameter counts as unused if none of them used it.
        """
        if not self.find_unused_parameters or self.world_size == 1:
            return
        tensors = [t for t in tensors_in(outputs) if t.requires_grad]
        used = leaves_below(tensors)
        unused = {slot.index for slot in self._slots if slot.parameter not in used}
        self._expected_unused = unused if self._expected_unused is None else self._expected_unused & unused
        tensor: Any
        for tensor in tensors:
            # A rank on which no parameter gets a gradient runs no hook of ours; its peers wait for it all the same.
            tensor.register_hook(self._on_output_gradient)

    def begin_forward(self) -> None:
        """To be called before a forward: closes the round of a backward that was interrupted by an exception.

        Raises:
            MissingGradientError: the previous backward ended without an error being possible (reentrant
                checkpointing around all layers) and some gradients never came.
        """
        if self._open:
            missing = self._missing() if self._left_open else []
            self._close(self._missing(), interrupted=True)
            if missing:
                raise MissingGradientError(self._missing_text(missing))

    def stop(self) -> None:
        """Ends the exchange for good: later backwards leave local gradients. Not needed before exit. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._reset()
        self._buckets.clear()
        self._sparse_slots.clear()
        self._status = None

    def _rebuild_buckets(self) -> bool:
        """Some libraries ask for this before each forward; buckets are right from the start, so never rebuilt."""
        return False

    # ---- memory

    def _make_buckets(self, cap_bytes: int, first_bytes: int) -> None:
        sparse = {slot.index for slot in self._sparse_slots}
        dense = [slot for slot in self._slots if slot.index not in sparse]
        specs = [ParameterSpec(slot.name, slot.parameter.numel(), slot.parameter.dtype) for slot in dense]
        plans = assign_buckets(specs, cap_bytes=cap_bytes, first_cap_bytes=first_bytes)
        for number, plan in enumerate(plans):
            # The last bucket carries one element per rank: not zero where that rank's backward went wrong. All ranks
            # so fail together, at no extra exchange. On a GPU reading it would make the host wait for the device.
            carries_status = number == len(plans) - 1 and self.device.type == "cpu" and not self.find_unused_parameters
            elems = plan.elems + (self.world_size if carries_status else 0)
            flat = allocate(self._average.group, elems, plan.dtype, self.device)
            bucket = _Bucket(plan, flat, [dense[i] for i in plan.parameters])
            for slot, offset in zip(bucket.slots, plan.offsets, strict=True):
                slot.bucket = bucket
                shape, strides = slot.parameter.shape, dense_strides(slot.parameter)
                # .data: no autograd view of the bucket, so that code which calls grad.detach_() goes on working.
                slot.view = flat.as_strided(shape, strides, flat.storage_offset() + offset).data
            if carries_status:
                status = flat[plan.elems :]
                self._status = status.real if status.is_complex() else status
            self._buckets.append(bucket)
        self._reset()

    # ---- step 1 and 2: during backward

    def _make_hook(self, slot: _Slot) -> Callable[[torch.Tensor], None]:
        """The parameter's hook. Runs once per parameter and backward: the one place here where microseconds count."""
        bucket, view = slot.bucket, slot.view
        if bucket is None or view is None:
            return lambda parameter: self._on_sparse_gradient(slot)

        def on_gradient(parameter: torch.Tensor) -> None:
            if current_task() != self._task:
                self._enter_task()
            if slot.arrived:
                self._arrived_again(slot)
            gradient = parameter.grad
            if gradient is not view:
                assert gradient is not None
                if gradient.requires_grad or gradient.is_sparse:
                    self._take_special(slot, gradient)
                else:
                    view.copy_(gradient)
                    parameter.grad = view
            if self._open and not slot.arrived:
                slot.arrived = True
                bucket.pending -= 1
                if bucket.pending == 0:
                    self._launch_complete()

        return on_gradient

    def _on_sparse_gradient(self, slot: _Slot) -> None:
        if current_task() != self._task:
            self._enter_task()
        slot.arrived = self._open  # exchanged at the end of the round, so a second arrival does no harm

    def _on_output_gradient(self, gradient: torch.Tensor) -> None:
        if current_task() != self._task:
            self._enter_task()

    def _enter_task(self) -> None:
        """The first hook of a backward, or the first after a nested one: opens a round unless one is open."""
        task = current_task()
        if self._open and task not in self._tasks and task > self._tasks[0] and not inside_custom_function():
            # Not the enclosing backward (that would be older), not a nested one: a new one, after an exception.
            self._close(self._missing(), interrupted=True)
        if self.sync_grad and task not in self._tasks:
            if not self._open:
                self._open = True
                self._count_unused()
            self._tasks.append(task)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._on_backward_end(task))
        self._task = task

    def _count_unused(self) -> None:
        """Counts the parameters that no forward used since the last backward, so that nobody waits for them."""
        for index in sorted(self._expected_unused or ()):
            slot = self._slots[index]
            self._count_absent(slot)
        self._expected_unused = None
        self._launch_complete()

    def _count_absent(self, slot: _Slot) -> None:
        """Counts a parameter that gets no gradient in this round: what it has accumulated before, or zero."""
        slot.arrived = True
        self._absent.append(slot)
        if slot.bucket is None or slot.view is None:
            return
        gradient = slot.parameter.grad
        if gradient is None:
            slot.view.zero_()
        elif gradient is not slot.view:
            with torch.no_grad():
                slot.view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        slot.bucket.pending -= 1

    def _arrived_again(self, slot: _Slot) -> None:
        """A second gradient in one round: fine as long as its bucket still waits for others."""
        if slot.bucket is not None and slot.bucket.work is not None:
            raise RuntimeError(
                f"rank {self.rank}: parameter {slot.name} got a gradient after its bucket was sent to the other ranks. "
                f"Either it was used inside several reentrant checkpoints (use torch.utils.checkpoint with "
                f"use_reentrant=False), or, with find_unused_parameters=True, outside of the wrapped forward."
            )
        if slot in self._absent:
            self._absent.remove(slot)

    def _take_special(self, slot: _Slot, gradient: torch.Tensor) -> None:
        """A gradient that is not a plain dense tensor of its own."""
        assert slot.view is not None
        with torch.no_grad():
            slot.view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        if gradient.requires_grad:  # backward(create_graph=True): the graph is put back around the average at the end
            if self._open:
                self._with_graph.append((slot, gradient))
        else:
            slot.parameter.grad = slot.view

    def _launch_complete(self) -> None:
        """Starts the exchange of complete buckets, in the fixed order."""
        if self._overlap:
            while self._launched < len(self._buckets) and self._buckets[self._launched].pending == 0:
                self._launch_next()

    def _launch_next(self) -> None:
        bucket = self._buckets[self._launched]
        bucket.work = self._average.start(bucket.flat)
        self._launched += 1

    # ---- step 3: the end of backward

    def _on_backward_end(self, task: int) -> None:
        if not self._open or task not in self._tasks:
            return  # a nested backward brought the last gradient and closed the round
        missing = self._missing()
        if missing and inside_custom_function():
            self._left_open = True
            return
        self._close(missing)
        if missing and not self.find_unused_parameters:
            raise MissingGradientError(self._missing_text(missing))

    def _missing(self) -> list[_Slot]:
        return [slot for slot in self._slots if not slot.arrived]

    def _close(self, missing: Sequence[_Slot], *, interrupted: bool = False) -> None:
        """Launches what remains, waits for everything and leaves averages in `param.grad`; the round is then over.

        Raises:
            MissingGradientError: another rank's backward went wrong.
            Exception: what the backend raises when an exchange fails.
        """
        failed = interrupted or (bool(missing) and not self.find_unused_parameters)
        try:
            for slot in missing:
                self._count_absent(slot)
            if failed and self._status is not None:
                self._status[self.rank] = 1
            while self._launched < len(self._buckets):
                self._launch_next()
            used = self._start_used_exchange() if self.find_unused_parameters else None
            sparse = average_sparse(
                [slot.parameter for slot in self._sparse_slots],
                [slot.parameter.grad for slot in self._sparse_slots],
                self._average,
            )
            _wait_all([bucket.work for bucket in self._buckets])
            if not failed:
                self._deliver(sparse, used)
                self._check_status()
        finally:
            self._reset()

    def _start_used_exchange(self) -> tuple[torch.Tensor, Pending]:
        """Which parameters have a gradient on some rank: uint8 [parameters], 1 where one has."""
        has = [slot.parameter.grad is not None for slot in self._slots]
        used = torch.tensor(has, dtype=torch.uint8, device=self.device)
        work = dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._average.group, async_op=True)
        return used, work

    def _deliver(self, sparse: Sequence[torch.Tensor | None], used: tuple[torch.Tensor, Pending] | None) -> None:
        """Puts the averages into `param.grad` where they are not there already."""
        for slot, average in zip(self._sparse_slots, sparse, strict=True):
            slot.parameter.grad = average
        for slot, local in self._with_graph:
            assert slot.view is not None
            with torch.enable_grad():
                slot.parameter.grad = AveragedGradient.apply(  # type: ignore[no-untyped-call]
                    local, slot.view, self._average
                )
        if used is None:
            return
        flags, work = used
        work.wait()
        if not self._absent:
            return
        used_somewhere = flags.tolist()
        for slot in self._absent:
            if slot.view is not None and used_somewhere[slot.index]:
                slot.parameter.grad = slot.view

    def _check_status(self) -> None:
        if self._status is not None and bool(self._status.any()):
            ranks = self._status.nonzero().flatten().tolist()
            raise MissingGradientError(
                f"rank {self.rank}: the backward of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} "
                f"went wrong (parameters without gradient, or an exception; the error there says more), so this "
                f"backward's gradients are not the average over all ranks."
            )

    def _reset(self) -> None:
        self._open = False
        self._left_open = False
        self._tasks.clear()
        self._task = _NO_TASK
        self._launched = 0
        self._absent.clear()
        self._with_graph.clear()
        for bucket in self._buckets:
            bucket.pending = len(bucket.slots)
            bucket.work = None
        for slot in self._slots:
            slot.arrived = False
        if self._status is not None:
            self._status.zero_()

    def _missing_text(self, missing: Sequence[_Slot]) -> str:
        shown = [
            f"  {slot.name} {list(slot.parameter.shape)}" + ("" if slot.parameter.requires_grad else " (frozen since)")
            for slot in missing[:_NAMES_SHOWN]
        ]
        if len(missing) > _NAMES_SHOWN:
            shown.append(f"  and {len(missing) - _NAMES_SHOWN} more")
        names = "\n".join(shown)
        return (
            f"rank {self.rank}: {len(missing)} of {len(self._slots)} parameters got no gradient in this backward:\n"
            f"{names}\n"
            f"All parameters of a wrapped model are averaged over the ranks, so each needs a gradient. What to do: see "
            f"that every output that depends on them enters the loss, and call backward once per forward (earlier ones "
            f"inside no_sync()); freeze them (requires_grad_(False)) before wrapping if they are not trained; or pass "
            f"find_unused_parameters=True if it changes from step to step which ones are used."
        )


def _wait_all(works: Sequence[Pending | None]) -> None:
    """Waits for the exchanges in the order of their launch; raises the first error after it has let go of the rest."""
    first: BaseException | None = None
    for work in works:
        if work is None:
            continue
        try:
            if first is None or work.is_completed():
                work.wait()
        except Exception as error:  # noqa: BLE001 - raised below, when the others have been looked at
            first = first or error
    if first is not None:
        raise first
