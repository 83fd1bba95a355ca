"""The parts of torch.autograd that a reducer has to know: backwards inside others, graphs, streams of a GPU.

Work is queued on streams. One stream's work runs in the order in which it was queued; that of two streams in any,
unless one was told to wait for the other. What the rest of this floor relies on:

- Autograd runs each node of a backward, and the hooks of a parameter, on the stream of its forward. A gradient is so
  copied into its bucket on the stream that made it.
- A collective waits for what is queued on the stream that is current when it is called, and for no other. A work's
  `wait` lets the current stream wait, not Python (gloo's blocks Python too).
- Autograd runs the callbacks of a backward's end on the streams of whoever called `backward`, after these have been
  told to wait for all streams on which gradients were made.

So while all gradients come on one stream, a bucket can be launched by the hook of the last of them. If a forward used
several (a model that runs two branches side by side), the last hook's stream need not have waited for the others':
then the rest is launched at the end of backward. Torch's own reducer launches in such a case all the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction, once_differentiable

from ..exchange.collectives import GroupAverage

current_task: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward that this thread runs, larger for later ones; -1 outside of any."""


class AveragedGradient(torch.autograd.Function):
    """A local gradient with the value of the average over the ranks, for backward through gradients.

    The average's derivative is the average of the local derivatives: backward averages what comes in over the ranks
    and passes it on to the local graph; the second backward then averages the parameters' gradients as ever.
    """

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, averaged: torch.Tensor, average: GroupAverage) -> torch.Tensor:
        """`averaged`, with the graph of `local`."""
        ctx.average = average
        return averaged.clone()  # the bucket is used again; a graph must not look into it

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The average of `gradient` over the ranks; every rank calls this at the same point."""
        gradient = gradient.contiguous().clone()
        ctx.average(gradient)
        return gradient, None, None


def leaves_below(tensors: Sequence[torch.Tensor]) -> set[torch.Tensor]:
    """The leaf tensors that `tensors` depend on."""
    leaves = {t for t in tensors if t.grad_fn is None}
    stack: list[Any] = [t.grad_fn for t in tensors if t.grad_fn is not None]
    visits: set[Any] = set(stack)
    while stack:
        node = stack.pop()
        # Only nodes that accumulate into a leaf have it. The walk is a loop, as graphs are deeper than Python's stack.
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            leaves.add(leaf)
        for below, _ in node.next_functions:
            if below is not None and below not in visits:
                visits.add(below)
                stack.append(below)
    return leaves


def inside_custom_function() -> bool:
    """Return whether this thread runs inside the backward of an autograd Function: the sign of a nested backward."""
    entry = BackwardCFunction.apply.__code__  # what autograd calls to run a Function's backward
    # torch does not say whether a backward is nested, but its Python frames do.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is entry:
            return True
        frame = frame.f_back
    return False


class StreamWatch:
    """A watch over the streams on which the gradients of one backward come.

    Args:
        current: names the stream that is current: any value, equal for equal streams.
    """

    def __init__(self, current: Callable[[], int]) -> None:
        self._current = current
        self._first: int | None = None

    def another(self) -> bool:
        """A gradient has come: whether on another stream than the first of this backward."""
        now = self._current()
        if self._first is None:
            self._first = now
        return now != self._first

    def forget(self) -> None:
        """The backward is over."""
        self._first = None


def streams_of(device: torch.device) -> StreamWatch | None:
    """The watch over a CUDA device's streams; None for the CPU, which has none."""
    if device.type != "cuda":
        return None
    index = device.index if device.index is not None else torch.cuda.current_device()
    # torch.cuda.current_stream makes an object, which for thousands of parameters is milliseconds in each step.
    current: Any = torch._C._cuda_getCurrentRawStream
    return StreamWatch(lambda: current(index))


def keep_until_read(tensor: torch.Tensor | None) -> None:
    """The current stream reads a tensor that may have been made on another: its memory is kept until that is done.

    The allocator gives freed memory to the stream that it was made on, at once, as if no other had to do with it.
    """
    if tensor is not None and tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def sent_to(device: torch.device, values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of some numbers on a device, without waiting for what is queued there."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    # From pageable memory the host would wait for the copy, and so for all that is queued before it.
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
