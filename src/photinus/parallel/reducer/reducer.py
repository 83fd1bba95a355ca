"""Averages gradients over the ranks while backward is still computing others.

One backward, seen from here:

1. Autograd adds a parameter's gradient to `param.grad` and calls the parameter's hook. The hook sees to it that the
   gradient lies in its bucket (small ones all at once when the bucket is launched): a fresh one is copied there once
   and `param.grad` becomes an alias of that place; one that lies there already (gradients zeroed in place, or
   accumulated) stays where it is.
2. When all gradients of a bucket have arrived, and all earlier buckets have been launched, its exchange starts. The
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

Buckets are cut along reverse registration order at first, and once more, after the first round, along the order in
which rank 0's gradients really came. Each element is added over the ranks by itself, in the same order wherever it
lies, so that changes no result.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from ...errors import PhotinusError
from ...process_memory import reuse_memory
from ...waiting_time import waiting_time
from ..exchange.collectives import GroupAverage, Pending, wait_all
from ..exchange.tensors import tensors_in
from ..tracing.spans import span
from .autograd import AveragedGradient, current_task, inside_custom_function, leaves_below, streams_of
from .bucket_exchange import AverageExchange
from .buckets import Bucket, BucketExchange, BucketPlan, Buckets, Slot, bring_home
from .checks import NanGuard, RankFacts, RoundErrors, StepDigests
from .options import ReducerOptions
from .sparse_gradients import average_sparse
from .timeline import Timeline
from .used_parameters import StaticGraph, UsedParameters

_COPIED_TOGETHER_BYTES = 32 * 1024
"""Smaller gradients, and on a GPU all, are copied with their bucket's others by one call. A larger one on the CPU is
copied at once, while it is in the caches."""


_NO_TASK = -2  # autograd says -1 outside of a backward


class Reducer:
    """Averages the gradients of some parameters over the ranks of a group during backward.

    Args:
        parameters: (name, parameter) pairs, all requiring grad, on one device, equal on all ranks.
        with_gradients: starts what travels beside the gradients in each round, on every rank; None where nothing does.

    Attributes:
        sync_grad: the user's switch: False, and no backward is followed by an exchange until it is True again. The same
            on every rank.
        forward_syncs: whether the backward of the last forward is to be exchanged; a wrapper sets it at each forward.
        is_due: whether the last forward whose backward is to be exchanged still waits for that backward. Forwards
            inside `no_sync` do not change it.
        rounds: backwards exchanged so far.
        timeline: when forwards, backwards and exchanges began and ended.
        post_backward_futures: waited for, once, at the end of the next backward.

    With one rank nothing is exchanged and gradients are left as autograd makes them, unless an exchange is set.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        group: dist.ProcessGroup,
        options: ReducerOptions,
        *,
        with_gradients: Callable[[], Pending | None] = lambda: None,
    ) -> None:
        self.options = options
        self.sync_grad = True
        self.forward_syncs = True
        self.is_due = False
        self.find_unused_parameters = options.find_unused_parameters
        self.rank = group.rank()
        self.world_size = group.size()
        self.device = parameters[0][1].device
        self.average = GroupAverage(group, self.device)
        self.timeline = Timeline()
        self._streams = streams_of(self.device)
        self._after_exchange: list[Callable[[Bucket], None]] = []
        self._with_gradients = with_gradients
        self.post_backward_futures: list[torch.futures.Future[Any]] = []
        self.static_graph = StaticGraph(self.rank, self.timeline) if options.static_graph else None
        self._guard = NanGuard(self.average) if options.nan_guard else None
        self.slots = [
            Slot(index, name, parameter, is_copied_with_others=self._is_copied_with_others(parameter))
            for index, (name, parameter) in enumerate(parameters)
        ]
        self._sparse_slots = [slot for slot in self.slots if slot.name in options.sparse]
        self._buckets = Buckets(
            [slot for slot in self.slots if slot.name not in options.sparse],
            self.average,
            AverageExchange(self.average, options.wire_dtype),
            options,
            self._before_launch,
        )
        checked = options.check_ranks and self.world_size > 1
        self.facts = RankFacts(self.slots, self.average, checked=checked)
        self._handles: list[Any] = []
        self._expected_unused: set[int] | None = None
        self.arrival_order: list[int] = []  # parameters as their gradients came in the first round
        self.rounds = 0
        self.usage = UsedParameters(
            self.average, len(self.slots), may_change=options.find_unused_parameters, static_graph=self.static_graph
        )
        self._errors = RoundErrors(self.rank, len(self.slots), options, self.timeline)

        self._open = False  # a round is open
        self._tasks: list[int] = []  # the graph tasks (backwards, nested ones too) of the open round
        self._task = _NO_TASK  # the graph task that the last hook ran in
        self._to_come: dict[int, Callable[[], None]] = {}  # gradients that users' hooks may change until backward's end
        self._watched_leaves: dict[int, weakref.ref[torch.Tensor]] = {}
        self._left_open = False  # a nested backward ended with the round incomplete
        self._closed_inside = False  # by a nested backward, since the last forward
        self._came_late: Slot | None = None  # brought the open round's first gradient, after that
        self._given_up = ""

        if self.world_size > 1 or options.nan_guard:
            self._start()

    # ---- what others may call

    @property
    def buckets(self) -> list[Bucket]:
        """In the order in which they are launched."""
        return self._buckets.all

    @property
    def plans(self) -> list[BucketPlan]:
        """The buckets' layout, in the order in which they are launched."""
        return [bucket.plan for bucket in self.buckets]

    @property
    def active(self) -> bool:
        """Return whether gradients pass through here."""
        return bool(self._handles)

    @property
    def has_rebuilt_buckets(self) -> bool:
        """Return whether the ranks have agreed on the order in which gradients really come."""
        return self._buckets.order is not None

    def prepare_for_backward(self, outputs: object = ()) -> None:
        """The next backward exchanges gradients, even after forwards that ran in `no_sync`.

        `outputs`, where not empty, are the forward's: parameters that they do not depend on are not waited for.
        """
        self.forward_syncs = True
        if tensors_in(outputs):
            self.filter_unused_parameters(outputs)

    def filter_unused_parameters(self, outputs: object) -> None:
        """Finds the parameters that `outputs` do not depend on, so that the next backward does not wait for them.

        Walks the graph from all tensors in `outputs` (nested lists, tuples, dicts, dataclasses). Buckets of unused
        parameters can then be launched during backward. Several forwards before one backward: a parameter counts as
        unused if none of them used it.

        With find_unused_parameters the wrapper calls it at each forward. Without, it may be called by hand between
        forward and backward, on any ranks: their missing gradients then are zeros and no MissingGradientError. (Whether
        a parameter was used by no rank at all is not asked, so its `grad` is zeros, too, and not None.)
        """
        if not self.active or self.static_graph is not None:
            return
        with torch.autograd.profiler.record_function("search_unused_parameters"):
            tensors = [t for t in tensors_in(outputs) if t.requires_grad]
            leaves = leaves_below(tensors)
            unused = {slot.index for slot in self.slots if slot.parameter not in leaves}
            self._expected_unused = unused if self._expected_unused is None else self._expected_unused & unused
        self.watch_outputs(tensors)

    def watch_outputs(self, outputs: object) -> None:
        """A backward that reaches one of `outputs` takes part in the exchange even if it reaches no parameter."""
        tensor: Any
        for tensor in tensors_in(outputs):
            # A rank on which no parameter gets a gradient runs no hook of ours; its peers wait for it all the same.
            if not tensor.requires_grad:
                continue
            if tensor.is_leaf:  # it outlives the graph, and needs one hook, not one for each forward
                key = id(tensor)
                if key in self._watched_leaves:
                    continue
                self._watched_leaves[key] = weakref.ref(tensor, partial(_forget, self._watched_leaves, key))
            tensor.register_hook(self._on_output_gradient)

    def begin_forward(self) -> None:
        """To be called before a forward: closes the round of a backward that was interrupted by an exception.

        Raises:
            MissingGradientError: the previous backward ended without an error being possible (reentrant
                checkpointing around all layers) and some gradients never came.
        """
        self._check_not_given_up()
        if self._open:
            # Otherwise the exception that interrupted the backward was seen by the user, and is not reported twice.
            missing = self._missing() if self._left_open or self.options.late_errors else []
            self._close(self._missing(), interrupted=True)
            if missing and self._came_late is not None:
                raise self._second_arrival(self._came_late)
            if missing:
                raise self._errors.missing(missing)
        self._closed_inside = False
        self._errors.raise_kept()
        self.facts.begin_forward(self.rounds, weights=self._buckets.exchange.averages)

    def use_exchange(self, exchange: BucketExchange) -> None:
        """Buckets travel by `exchange` from now on. To be called on every rank, between two backwards."""
        self._buckets.exchange = exchange
        if self.buckets:
            self._make_buckets()
        elif not self._handles:
            self._start()

    def call_after_exchange(self, act: Callable[[Bucket], None]) -> None:
        """Calls `act` with each bucket when its averages have come, in order, during backward's end."""
        self._after_exchange.append(act)

    def compare_acts(self, acts: StepDigests | None) -> None:
        """Compares from now on what each rank does around its optimizer steps."""
        self.facts.acts = acts

    def shadow_round(self) -> None:
        """Takes part with zeros in the exchanges of a backward that the other ranks run and this one does not.

        The averages become this rank's gradients, so that an optimizer whose ranks each step for a part of the
        parameters (ZeRO) can go on.
        """
        shadows = self._buckets.shadows()
        # The same collectives in the same order as in `_close`, where the other ranks are.
        works = [self._buckets.exchange.start(shadow) for shadow in shadows]
        if self.usage.due:
            self.usage.finish(self.usage.start([False] * len(self.slots)))
        sparse = average_sparse(
            [s.parameter for s in self._sparse_slots], [None for _ in self._sparse_slots], self.average
        )
        wait_all([*works, self._with_gradients()])
        for slot, average in zip(self._sparse_slots, sparse, strict=True):
            slot.parameter.grad = average
        used_somewhere = self.usage.somewhere()
        for slot in (slot for shadow in shadows for slot in shadow.slots):
            if not used_somewhere or used_somewhere[slot.index]:
                slot.parameter.grad = slot.view
        self.rounds += 1
        self.facts.compare(self.rounds - 1, silent=True)
        if self._guard is not None:
            self._guard.check(self.slots)

    def stop(self) -> None:
        """Ends the exchange for good: later backwards leave local gradients. Not needed before exit. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.facts.stop()
        self.buckets.clear()  # first: a wrapper may go while a compiler traces, when tensors may not be touched
        self._sparse_slots.clear()
        self._reset()

    def give_up(self, parameters: Collection[torch.nn.Parameter], reason: str) -> None:
        """Another reducer takes these parameters over. From now on a forward, or a backward to the rest, raises."""
        self._given_up = reason
        for slot, handle in zip(self.slots, self._handles, strict=False):
            if slot.parameter in parameters:
                handle.remove()

    def _check_not_given_up(self) -> None:
        if self._given_up:
            raise PhotinusError(f"rank {self.rank}: {self._given_up}")

    def rebuild_buckets(self) -> bool:
        """Once, after the first round: cuts the buckets anew, in rank 0's order of gradients. Every rank calls it.

        Returns whether it did so now. With a static graph it is after the second round, as in torch's class, whose
        hooks count from there.
        """
        if (
            self.rounds <= (self.static_graph is not None)
            or self._buckets.order is not None
            or self.find_unused_parameters
            or not self.active
        ):
            return False
        # Rank 0's order holds for all: ranks that launch in orders of their own would wait for each other.
        everyone = list(reversed(range(len(self.slots))))
        if self._buckets.agree_on_order([*self.arrival_order, *everyone]):  # those that never came are expected last
            self._make_buckets()
        return True

    # ---- names of torch's reducer that libraries and torch's own tools touch; nothing in this package calls them

    def _rebuild_buckets(self) -> bool:
        """Libraries ask for this before a forward of their own; the wrapper does it when all ranks are there."""
        return False

    def _ddp_graph_static(self) -> bool:
        return self.usage.always_the_same

    def _get_local_used_map(self) -> torch.Tensor:
        return self.usage.ranks

    def _check_reducer_finalized(self) -> None:
        if self._open:
            raise PhotinusError(f"rank {self.rank}: {len(self._missing())} gradients of the last backward are missing")

    # ---- memory

    def _make_buckets(self) -> None:
        self._buckets.make()
        self._reset()

    def _start(self) -> None:
        self._make_buckets()
        if self.device.type == "cpu":
            reuse_memory()
        for slot in self.slots:
            register: Any = slot.parameter.register_post_accumulate_grad_hook
            register(id).remove()  # now there is a dict of hooks
            self._handles.append(register(self._make_hook(slot)))
            slot.hook_key = self._handles[-1].id

    # ---- step 1 and 2: during backward

    def _make_hook(self, slot: Slot) -> Callable[[torch.Tensor], None]:
        """The parameter's hook. Runs once per parameter and backward: the one place here where microseconds count."""
        if slot.bucket is None:
            return lambda parameter: self._on_sparse_gradient(slot)
        views = self.options.gradients_are_views
        static = self.static_graph
        streams = self._streams
        hooks: dict[int, Any] = cast(Any, slot.parameter)._post_accumulate_grad_hooks

        def on_gradient(parameter: torch.Tensor, *, at_end: bool = False) -> None:
            if not at_end and current_task() != self._task:
                self._enter_task(slot)
            slot.touched = True
            if next(reversed(hooks)) != slot.hook_key and self._open and not at_end:
                # A hook of the user's that came after ours may change this gradient yet. From the next round on it
                # comes before ours, as with torch's class.
                self._to_come[slot.index] = partial(on_gradient, parameter, at_end=True)
                return
            if at_end:
                hooks[slot.hook_key] = hooks.pop(slot.hook_key)
            if streams is not None and self._open and streams.another():
                # A launch would order the exchange behind this stream alone; at the end of backward all have met.
                self._buckets.wait_for_end()
            if not self._open:
                # Inside no_sync the gradient stays as autograd made it, unless it is to be a view of its bucket.
                if views and parameter.grad is None:
                    slot.touched = False
                elif views:
                    bring_home([slot], as_views=True)
                return
            if parameter.grad is None:
                self._note_undefined(slot)
                return
            if static is not None:
                slot.arrivals += 1
            if slot.arrived:
                self._note_second_arrival(slot)
            is_complete = not slot.arrived and (static is None or static.completes(slot))
            if is_complete:
                slot.arrived = True
                if self.rounds == 0:
                    self.arrival_order.append(slot.index)
            self._buckets.arrived(slot, is_complete=is_complete)

        if not slot.is_copied_with_others or views or static is not None or streams is not None:
            return on_gradient

        def on_small_gradient(parameter: torch.Tensor) -> None:
            """The same, for what nearly always happens to a small gradient, in a third of the time."""
            if current_task() != self._task:
                self._enter_task(slot)
            if slot.arrived or len(hooks) > 1 or not self._open or not self.rounds or parameter.grad is None:
                on_gradient(parameter)
                return
            slot.touched = slot.arrived = True
            self._buckets.arrived(slot, is_complete=True)

        return on_small_gradient

    def _is_copied_with_others(self, parameter: torch.nn.Parameter) -> bool:
        is_small = self.device.type != "cpu" or parameter.nbytes <= _COPIED_TOGETHER_BYTES
        return is_small and not self.options.static_graph

    def _note_undefined(self, slot: Slot) -> None:
        """The hook ran, but some function in between had no gradient to pass on: the parameter counts as absent."""
        slot.touched = False
        if not slot.arrived:
            self._count_absent(slot)
            self._buckets.launch_complete()

    def _on_sparse_gradient(self, slot: Slot) -> None:
        if current_task() != self._task:
            self._enter_task()
        slot.touched = True
        if self._open and self.rounds == 0 and not slot.arrived:
            self.arrival_order.append(slot.index)
        if self._open and self.static_graph is not None:
            slot.arrivals += 1
            self.static_graph.completes(slot)
        slot.arrived = self._open  # exchanged at the end of the round, so a second arrival does no harm

    def _on_output_gradient(self, gradient: torch.Tensor) -> None:
        if current_task() != self._task:
            self._enter_task()

    def _enter_task(self, slot: Slot | None = None) -> None:
        """The first hook of a backward, or the first after a nested one: opens a round unless one is open."""
        self._check_not_given_up()
        task = current_task()
        # Autograd numbers its tasks upwards, and says nothing when a backward ends by an exception.
        if self._open and task not in self._tasks and task > self._tasks[0] and not inside_custom_function():
            # Not the enclosing backward (that would be older), not a nested one: a new one, after an exception.
            self._close(self._missing(), interrupted=True)
        # Counted in no_sync too: an optimizer step after it is a step all the same.
        self.facts.begin_backward(slot)
        if self.sync_grad and self.forward_syncs and task not in self._tasks:
            if not self._open:
                self._open = True
                if self._learns():
                    # How many gradients a parameter gets is known only after this backward.
                    self._buckets.wait_for_end()
                self._came_late = slot if self._closed_inside else None
                if waiting_time.on and self.device.type != "cpu":
                    waiting_time.lend_thread()
                self.timeline.note("backward")
                if not self.options.gradients_are_views:
                    for bucket in self.buckets:
                        bucket.make_writable()
                self._count_unused()
            # Autograd runs the callbacks of each nested backward at its own end, so each of them needs one.
            self._tasks.append(task)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._on_backward_end(task))
        self._task = task

    def _count_unused(self) -> None:
        """Counts the parameters that no forward used since the last backward, so that nobody waits for them."""
        if self.static_graph is not None and self.static_graph.learned:
            self._expected_unused = {slot.index for slot in self.slots if self.static_graph.never_used(slot)}
        for index in sorted(self._expected_unused or ()):
            self._count_absent(self.slots[index])
        self._expected_unused = None
        self._buckets.launch_complete()

    def _count_absent(self, slot: Slot) -> None:
        """Counts a parameter that gets no gradient in this round."""
        slot.arrived = slot.absent = True
        # Sparse gradients are exchanged at the end of the round, whatever came.
        if slot.bucket is not None:
            self._buckets.absent(slot)

    def _note_second_arrival(self, slot: Slot) -> None:
        """A second gradient in one round: fine as long as its bucket still waits for others."""
        if self.static_graph is not None and self.static_graph.learned:
            self.static_graph.completes(slot)  # raises: one more than there were
        # The ranks have read the bucket, so this gradient would be missing from the average.
        if slot.bucket is not None and (slot.bucket.work is not None or slot.bucket.skipped):
            raise self._second_arrival(slot)
        slot.absent = False

    def _second_arrival(self, slot: Slot) -> RuntimeError:
        return RuntimeError(
            f"rank {self.rank}: parameter {slot.name} got a gradient after its bucket was sent to the other ranks. "
            f"Either it was used inside several reentrant checkpoints (use torch.utils.checkpoint with "
            f"use_reentrant=False, or pass static_graph=True), or, with find_unused_parameters=True, outside of "
            f"the wrapped forward."
        )

    def _before_launch(self, bucket: Bucket) -> None:
        self.timeline.note("exchange")
        if self._guard is not None:
            self._guard.watch(bucket)

    # ---- step 3: the end of backward

    def _on_backward_end(self, task: int) -> None:
        if not self._open or task not in self._tasks:
            return  # a nested backward brought the last gradient and closed the round
        to_come, self._to_come = self._to_come, {}
        for take in to_come.values():
            take()
        missing = self._missing()
        learning = self._learns()
        if (missing or learning) and inside_custom_function():
            # Reentrant checkpointing: the rest may come in the enclosing backward, whose end is not told to us.
            self._left_open = True
            return
        tolerated = learning or self.find_unused_parameters
        self._closed_inside = inside_custom_function()
        self._close(missing)
        if missing and not tolerated:
            self._errors.raise_or_keep(self._errors.missing(missing))

    def _learns(self) -> bool:
        """Return whether this is the first backward of a static graph."""
        return self.static_graph is not None and not self.static_graph.learned

    def _missing(self) -> list[Slot]:
        return [slot for slot in self.slots if not slot.arrived]

    def _close(self, missing: Sequence[Slot], *, interrupted: bool = False) -> None:
        """Launches what remains, waits for everything and leaves averages in `param.grad`; the round is then over.

        Raises:
            MismatchError, ModelMismatchError, NonFiniteGradientError: on all ranks.
            Exception: what the backend raises when an exchange fails.
        """
        learning = self._learns()
        failed = interrupted or (bool(missing) and not (self.find_unused_parameters or learning))
        self.timeline.note("backward_end")
        try:
            for slot in missing:
                self._count_absent(slot)
            # Also where this rank has failed: its peers wait for every bucket, and would reach their deadline.
            self._buckets.launch_rest()
            pending = self.usage.start([s.touched for s in self.slots]) if self.usage.due else None
            if self._guard is not None:
                self._guard.watch_sparse(self._sparse_slots)
            sparse = average_sparse(
                [slot.parameter for slot in self._sparse_slots],
                [slot.parameter.grad for slot in self._sparse_slots],
                self.average,
            )
            # `_after_exchange` may step optimizers. So it runs early only where all gradients are known to be averages:
            # an absent parameter has none before `_deliver`, and one with a graph has its local one.
            late = self._guard is not None or bool(self._buckets.with_graph) or any(s.absent for s in self.slots)
            early = bool(self._after_exchange) and not failed and pending is None and not late
            began = waiting_time.begin() if waiting_time.on else 0
            with span("wait for averages"):
                self._buckets.wait(self._with_gradients(), self._run_after_exchange if early else None)
                futures, self.post_backward_futures = self.post_backward_futures, []
                for future in futures:
                    future.wait()
                if pending is not None:
                    self.usage.finish(pending)
            if began:
                waiting_time.end(began)
            self.timeline.note("exchange_end")
            self.timeline.buckets_exchanged = sum(not bucket.skipped for bucket in self.buckets)
            if not failed:
                self._deliver(sparse)
                if self.facts.acts is not None:
                    self.facts.acts.note_averaged()
                if learning and self.static_graph is not None:
                    self.static_graph.learn(self.slots)
            self.facts.compare(self.rounds)
            if self._guard is not None:
                self._guard.check(self.slots)
            if not failed and not early:
                self._run_after_exchange()
        finally:
            # Also after an error: the other ranks count this round, and some rounds have an exchange of facts.
            self.usage.note_unused(slot.index for slot in self.slots if slot.absent)
            self.rounds += 1
            self.is_due = False
            self._reset()

    def _run_after_exchange(self, index: int | None = None) -> None:
        for act in self._after_exchange:
            for bucket in self.buckets if index is None else self.buckets[index : index + 1]:
                act(bucket)

    def _deliver(self, sparse: Sequence[torch.Tensor | None]) -> None:
        """Puts the averages into `param.grad` where they are not there already."""
        for slot, average in zip(self._sparse_slots, sparse, strict=True):
            slot.parameter.grad = average
        for slot, local in self._buckets.with_graph:
            assert slot.view is not None
            with torch.enable_grad():
                slot.parameter.grad = AveragedGradient.apply(  # type: ignore[no-untyped-call]
                    local, slot.view, self.average
                )
        # Absent here and used on another rank: the optimizer has to step here as it does there.
        absent = [slot for slot in self.slots if slot.absent]
        used_somewhere = self.usage.somewhere() if absent else []
        for slot in absent:
            if slot.view is not None and (not used_somewhere or used_somewhere[slot.index]):
                slot.parameter.grad = slot.view if self.options.gradients_are_views else slot.view.data

    def _reset(self) -> None:
        self._open = False
        self._left_open = False
        self._tasks.clear()
        self._to_come.clear()
        self._task = _NO_TASK
        if self._streams is not None:
            self._streams.forget()
        self._buckets.reset()
        for slot in self.slots:
            slot.arrived = slot.touched = slot.absent = False
            slot.arrivals = 0


def _forget(leaves: dict[int, weakref.ref[torch.Tensor]], key: int, _: object) -> None:
    leaves.pop(key, None)
