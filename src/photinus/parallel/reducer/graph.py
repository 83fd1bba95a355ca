"""Autograd graphs: leaves below outputs, nested backwards, averages that keep their graph."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction, once_differentiable

from ..exchange.collectives import Average

current_task: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward that this thread runs, larger for later ones; -1 outside of any."""


class AveragedGradient(torch.autograd.Function):
    """A local gradient with the value of the average over the ranks, for backward through gradients.

    The average's derivative is the average of the local derivatives: backward averages what comes in over the ranks
    and passes it on to the local graph; the second backward then averages the parameters' gradients as ever.
    """

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, averaged: torch.Tensor, average: Average) -> torch.Tensor:
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
