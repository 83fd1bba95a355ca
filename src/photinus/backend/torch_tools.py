"""Use torch's own tools: CUDA's streams, the profiler's events, and Dynamo, which has to leave a group alone.

Work is queued on streams; the host runs ahead. The engine begins a call after all that is in the caller's stream then,
and its `Work.wait` returns when the copies back to the GPU are queued, from when on any stream can be ordered behind
them. No stream waits for the host or for another rank. `streams` is what the backend asks. Tests put their own in its
place, over a driver that is none.

torch.profiler sees each call as an event ("photinus:all_reduce" and so on), from the call to the exchange's end.
torch.compile sees nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.futures import Future

from .. import engine
from ..errors import HostError
from .name import NAME

ROCM: str | None = torch.version.hip
"""The version for which torch is built where its CUDA tensors lie on AMD's GPUs."""


def check_build() -> None:
    """Raises HostError where what torch calls CUDA is none."""
    # torch calls AMD's tensors CUDA tensors, too, but the engine copies by NVIDIA's driver.
    if ROCM is not None:
        raise HostError(
            f"this build of torch is for AMD's GPUs (ROCm {ROCM}), but backend photinus takes CUDA tensors of NVIDIA's "
            f"GPUs only. Exchange CPU tensors, or use the nccl backend, which is RCCL there."
        )


class Streams:
    """Those of torch. Nothing of CUDA is touched before the first call."""

    def __init__(self) -> None:
        self._beside: dict[torch.device, Any] = {}
        # Two threads that each made a stream would put copies on two, with no order between them.
        self._making = threading.Lock()

    def current(self, device: torch.device) -> int:
        """The handle (CUstream) of the stream that is current for a device on this thread."""
        # torch.cuda.current_stream makes an object, and every call would pay for it.
        handle: int = torch._C._cuda_getCurrentRawStream(device.index)
        return handle

    @contextmanager
    def beside(self, device: torch.device) -> Iterator[int]:
        """Makes a stream of ours current: what is put there waits for none of the caller's. Gives its handle."""
        with self._making:
            stream = self._beside.get(device)
            if stream is None:
                stream = self._beside[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            yield stream.cuda_stream

    def record(self, device: torch.device) -> Any:
        """An event at the end of what is in the device's current stream now."""
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    def follow(self, event: Any, device: torch.device) -> None:
        """Run later work of the device's current stream after the event. The host does not wait."""
        event.wait(torch.cuda.current_stream(device))

    def keep_for(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        """Keep the tensors' memory, once it is freed, from reuse until the current stream has passed this point."""
        # torch reuses freed memory on the stream that it was made on, and knows of no reader on another.
        stream = torch.cuda.current_stream(device)
        with torch.inference_mode():
            for tensor in tensors:
                tensor.record_stream(stream)

    def future(self, devices: Sequence[torch.device]) -> Future[Any]:
        """A future of tensors on these devices: who waits for it is ordered behind the streams that completed it.

        It looks for tensors in its value, and takes only the streams of devices on which it finds one.
        """
        # Without devices the future would order nobody behind the streams.
        return Future(devices=list(devices))


streams = Streams()

Class = TypeVar("Class", bound=type)

_OPERATION_NAMES = {code: name for name, code in engine.OPERATIONS.items()}
profiler_is_on = torch._C._autograd._profiler_enabled
"""True while a profiler is on."""
_record_function: Any = profiler.record_function


def outside_dynamo(cls: Class) -> Class:
    """Keeps torch.compile out of all methods that the class itself defines: they hand addresses to native code.

    Dynamo traces into a process group's Python methods when a compiled region calls `dist.*` directly, and fails on the
    objects it meets there. `torch.compiler.disable` prevents that but imports Dynamo (a second or more) and wraps every
    call. The two marks that it leaves work alone: an attribute for calls that Dynamo would inline, and a skip in the
    frame evaluator for frames that run while it listens, the frames below included.
    """
    # Own methods only: a base class marks its own.
    for name, method in list(vars(cls).items()):
        if isinstance(method, FunctionType) and name != "__init__":
            setattr(cls, name, _mark(method))
    return cls


def _mark(method: FunctionType) -> Any:
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:  # a torch without them: the wrapper it is
        return torch._disable_dynamo(method)  # type: ignore[attr-defined]
    # Twice: for this frame, and for those that it calls.
    set_code_exec_strategy(method.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    method._torchdynamo_disable = True  # type: ignore[attr-defined]
    method._torchdynamo_disable_msg = "a collective of backend photinus"  # type: ignore[attr-defined]
    return method


def begin_event(operation: str) -> Any:
    """Starts an event and returns it, or returns None when no profiler is on (which costs 0.1 microseconds)."""
    return _record_function(f"{NAME}:{operation}").__enter__() if profiler_is_on() else None


def begin_call(call: engine.Call) -> Any:
    """The same for a collective."""
    return begin_event(_OPERATION_NAMES[call.operation]) if profiler_is_on() else None


def end_event(event: Any) -> None:
    """Ends what `begin_event` returned."""
    if event is not None:
        event.__exit__(None, None, None)
