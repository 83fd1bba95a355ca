"""Start operations of the engine for a group, and end the group."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import typing_extensions
from torch import Tensor
from torch._C._distributed_c10d import Store

from .. import engine, env
from ..engine import Call, Work
from ..errors import AbortedError, CollectiveError
from ..waiting_time import waiting_time
from . import torch_tools
from .arguments import UNSET, Memory, Wires
from .process_group import GroupParts, InnerGloo, Limit, ProcessGroup
from .torch_tools import begin_call, end_event, outside_dynamo
from .updates import Updates
from .work import Completer, CudaWork, EngineWork

Part = engine.Part

_RECENT_WORKS, _RECENT_BYTES = 256, 64 * 1024
# To a work that only the recent ones and a loop over a copy of them refer to. Python 3.14 counts fewer than 3.13.
_OWN_REFERENCES = 1 + max(sys.getrefcount(work) for work in [object()])


def _libraries() -> list[str]:
    """Return the code between the user's line and the engine: torch, and the wrappers around its functions."""
    wrappers = [contextlib.__file__, typing_extensions.__file__, warnings.__file__]
    return [os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, *wrappers]


# Errors name the line of the user, which lies outside of these.
engine.pass_over_frames_of(_libraries())


@outside_dynamo
class EngineGroup(ProcessGroup):
    """See the module; the collectives are in the classes above this one."""

    def __init__(
        self,
        communicator: engine.Communicator,
        gloo: InnerGloo,
        store: Store,
        limit: Limit,
        label: str,
        devices: Sequence[torch.device],
        parts: GroupParts,
        wires: Wires,
    ) -> None:
        super().__init__(gloo, store, limit, label, devices, parts)
        self._wires = wires
        self._communicator: engine.Communicator | None = communicator
        self._submit: Callable[..., Work] = communicator.submit
        self._do: Callable[[Call], None] = communicator.run
        # For `_do_and_look`, which takes the place of `_do` once there are works.
        self._run_now = communicator.run
        self._message: Callable[..., Work] = communicator.message  # send and recv; see EngineMoves
        self._completer = Completer(label)
        self._updates = Updates()
        # C++ may hold a work whose Python half nobody else holds (DDP's join does), and would then wait for ever in the
        # base class. Small ones only: what keeps a work keeps its tensors' storages, and their graphs.
        self._recent: deque[EngineWork] = deque(maxlen=_RECENT_WORKS)

    def _do_and_look(self, call: Call) -> None:
        if self._completer.pending:
            self.wait_for_callbacks()
        self._run_now(call)
        self._raise_lost()

    def _raise_lost(self) -> None:
        """Raises the error of a small work that nobody but this group has. (The engine does it for all others.)"""
        if self._communicator is None or not self._communicator.raise_lost():
            return
        # A work that somebody else holds may still be waited for, and raises there.
        dropped = [work._handle for work in [*self._recent] if sys.getrefcount(work) <= _OWN_REFERENCES]
        failed = [handle for handle in dropped if handle.error(sees=False) is not None and not handle.see()]
        if failed and (error := failed[0].error()) is not None:
            raise error

    @property
    def communicator(self) -> engine.Communicator | None:
        """The engine's; None when the group was destroyed."""
        return self._communicator

    def watch_updates(self, parameters: Iterable[Tensor] = ()) -> Callable[[], None]:
        """Compares from now on, at calls of backwards and of FSDP, how often the ranks update parameters.

        Args:
            parameters: whose updates are to be counted here, by the steps of their optimizers.

        Returns:
            A function that counts one update of other parameters.
        """
        return self._updates.watch(parameters)

    def under_way_s(self) -> dict[int, float]:
        """By rank of another host with which this one has a link: for how many seconds bytes were under way on it."""
        return self._communicator.under_way_s() if self._communicator else {}

    def _run(
        self, options: Any, operation: int, memory: Memory, outputs: Sequence[Tensor], **fields: Any
    ) -> EngineWork | None:
        """Starts a collective, or does it here if its caller waits for it anyway.

        Args:
            options: torch's options: timeout, and whether the call is asynchronous.
            operation: from engine.OPERATIONS.
            memory: of the call; kept until the exchange has ended.
            outputs: the caller's tensors, which the work gives as its result.
            fields: the rest of engine.Call.

        Returns:
            The work; None for what is done, which is how torch's backends answer a call that is not asynchronous.
        """
        limit_s = self._timeout_s(options)
        updates = self._updates.step_number()
        if memory.device is None:
            call = Call(operation, timeout_s=limit_s, asynchronous=options.asyncOp, updates=updates, **fields)
            return self._start(call, memory, outputs, memory)
        call = Call(operation, timeout_s=limit_s, updates=updates, **fields, **self._place(memory))
        work = self._start(call, memory, outputs, memory, CudaWork)
        if options.asyncOp or work is None:
            return work
        work.wait()
        return None

    def _start(
        self,
        call: Call,
        keep: object,
        outputs: Sequence[Tensor],
        finish: Memory | None,
        kind: type[EngineWork] = EngineWork,
    ) -> EngineWork | None:
        """The same for a call that is made; `finish` is what is to be done when the exchange has ended."""
        # Callbacks may start collectives, and all ranks must start those before this one (see `completer`).
        if self._completer.pending:
            self.wait_for_callbacks()
        event = begin_call(call)
        if not call.asynchronous:
            began = waiting_time.begin() if waiting_time.on else 0
            try:
                self._do(call)
            finally:
                end_event(event)
            if began:
                waiting_time.end(began)
            if finish:
                finish()
            return None
        try:
            # The event must end in any case, or the profiler books all that follows under it.
            handle = self._submit(call, keep)
        except BaseException:
            end_event(event)
            raise
        work = kind(handle, outputs, self._completer.submit, finish)
        if event is not None:
            work.end_event_when_done(event)
        # Large ones would hold memory that the caller believes to be free.
        if sum(map(_kept_bytes, outputs)) <= _RECENT_BYTES:
            self._recent.append(work)
        self._do = self._do_and_look
        self._raise_lost()
        return work

    def wait_for_callbacks(self) -> None:
        """Waits until the callbacks of earlier collectives have run, unless this is one of them."""
        # Less than the timeout, since the callbacks may wait for this very thread.
        self._completer.wait_for_callbacks(min(self._limit.timeout_s, env.WAITING_S.get()))

    def _place(self, memory: Memory) -> dict[str, Any]:
        """Return which GPU a call is on, and what it begins behind. Raises HostError where CUDA can't be used."""
        if memory.device is None:
            return {}
        torch_tools.check_build()
        return {"device": engine.cuda_device(memory.device.index), "stream": torch_tools.streams.current(memory.device)}

    def _timeout_s(self, options: Any) -> float:
        limit = options.timeout
        return self._limit.timeout_s if limit == UNSET else limit.total_seconds()

    # --- the end ---------------------------------------------------------------------------------------------------

    def fail(self, reason: str) -> None:
        """Tells the peers that this rank will not come any more, and why ("rank 1 (pid, host) ... <reason>")."""
        if self._communicator is not None:
            self._communicator.set_reason(reason)
            self._communicator.abort(reason)

    def set_reason(self, text: str) -> None:
        """Leaves a text that peers read if they miss this rank later; an empty text takes it back."""
        if self._communicator is not None:
            self._communicator.set_reason(text)

    def abort(self) -> None:
        """Ends what is in flight here and on the peers with AbortedError and refuses everything later."""
        if self._communicator is not None:
            self._communicator.abort(f"rank {self._rank} of group {self._label} aborted the group")
        super().abort()

    def shutdown(self) -> None:
        """Leaves the group in order; `destroy_process_group` calls it. Idempotent."""
        # First, so that a second call (at exit, or from a handler) finds nothing to do.
        communicator, self._communicator = self._communicator, None
        try:
            if communicator is not None:
                communicator.close()
        except CollectiveError:
            with contextlib.suppress(ValueError):  # not torch's, or it has forgotten it
                dist.destroy_process_group(self)  # which the error would leave half done
            raise
        finally:
            self._completer.close()
            self._recent.clear()
            super().shutdown()

    def _end(self, reason: str) -> None:
        def refuse(*_: object) -> NoReturn:
            raise AbortedError(reason)

        # Replaced, so that no call of a group that works has to ask whether it has ended.
        self._submit = self._do = self._message = refuse
        super()._end(reason)


def _kept_bytes(tensor: Tensor) -> float:
    """Return how much memory a reference to the tensor keeps; infinite where that is not known, as of a graph."""
    if tensor.layout is not torch.strided or tensor.grad_fn is not None:
        return math.inf
    return tensor.untyped_storage().nbytes()


def whole(source: Tensor, target: Tensor) -> dict[str, int]:
    """Return a call's buffers, and the number of elements per rank (a complex one counts as two)."""
    return {
        "send": source.data_ptr(),
        "recv": target.data_ptr(),
        "elems": min(source.numel(), target.numel()),  # the other may have those of all ranks
    }


def one_shape(tensors: Sequence[Tensor]) -> torch.Size | None:
    """The shape that all of them have, for ranks to compare; None where they differ."""
    shape = tensors[0].shape
    return shape if all(tensor.shape == shape for tensor in tensors) else None


def check_same_dtype(operation: str, tensors: Sequence[Tensor]) -> None:
    """Raises ValueError unless the tensors have one dtype."""
    if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
        raise ValueError(
            f"{operation} needs tensors of one dtype, got "
            f"{', '.join(sorted({str(tensor.dtype) for tensor in tensors}))}"
        )


def check_elems(operation: str, what: str, got: int, needed: int, of: Tensor) -> None:
    """Raises ValueError unless a tensor has as many elements as it needs."""
    if got != needed:
        raise ValueError(
            f"{operation} needs {needed} elements in {what} for a tensor of shape {tuple(of.shape)} per rank, got {got}"
        )
