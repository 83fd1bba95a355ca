"""Counts the updates of parameters that train over a group (torch's DDP, FSDP2), to find ranks out of step.

A rank that leaves out one exchange of gradients (`no_sync` on this rank only), or makes one more, averages gradients of
different steps from then on, and each of its calls looks like the others'. But it has made another number of optimizer
steps since the call before. So every call of the group carries that number, and the engine compares it where DDP calls.

An alarm in a script that is right would be worse than none. Therefore:
- counted are steps of optimizers that hold a parameter of a DDP of this group, or one that strategies "zero2" and
  "zero3" have split over it: rank 0 may train a network of its own. Photinus' DDP says by itself what is a step;
- on the thread that made the DDP, outside of backward: what callbacks update meanwhile is ordered by nobody;
- with a learning rate: torch.distributed.checkpoint makes steps with none to fill an optimizer's state;
- compared are DDP's and FSDP's own calls, with the call before them. Between a rank's other calls it may update as
  often as it likes: local SGD, `Join`, a rank that updates for all.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from types import FrameType

import torch
from torch import Tensor
from torch.nn.parallel import distributed as torch_ddp
from torch.optim import Optimizer

from ..optimizer_steps import StepWatcher, watch_steps

_graph_task = torch._C._current_graph_task_id  # -1 outside of backward
_thread = threading.get_ident
_torch_ddp_file = torch_ddp.__file__
_FRAMES_TO_CALLER = 3  # torch.distributed's call, and what logs it
_CALLERS = ("_fsdp_collectives.py", "parallel/reducer/buckets.py")  # the latter agrees on an order of buckets
_own_folder = __file__.rpartition("/")[0]


def parameters_of_new_ddp() -> list[Tensor]:
    """The parameters of the DDP that calls to compare their shapes, as it is being made; else none."""
    frame = _caller()
    if frame.f_code.co_name != "_verify_param_shape_across_processes":
        return []
    return list(frame.f_locals.get("tensors", ()))


def _caller() -> FrameType:
    """The innermost frame outside of the backend."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_own_folder):
        frame = frame.f_back
    return frame


def _is_of_training(frame: FrameType | None) -> bool:
    found = frame is not None and frame.f_code.co_filename == _torch_ddp_file
    for _ in range(_FRAMES_TO_CALLER):
        frame = frame and frame.f_back
        found = found or (frame is not None and frame.f_code.co_filename.endswith(_CALLERS))
    return found


class Updates(StepWatcher):
    """The count of one group. It begins with the first DDP or split model that is made over the group."""

    def __init__(self) -> None:
        self._parameters: dict[int, weakref.ref[Tensor]] = {}  # by id: a tensor's == is elementwise
        self._training_thread = 0
        self._steps = 0

    def watch(self, parameters: Iterable[Tensor] = ()) -> Callable[[], None]:
        """Counts the updates of these parameters too from now on. What it returns counts one of others."""
        if not self._training_thread:
            watch_steps(self)
            self._training_thread = _thread()
        refs = self._parameters
        for parameter in parameters:
            key = id(parameter)
            # The reference takes its key along when it ends, before a new tensor can get the same id.
            refs[key] = weakref.ref(parameter, lambda _, key=key: refs.pop(key, None))  # type: ignore[misc]
        return self._count

    def step_number(self) -> int:
        """Return the number that a call now sends to the other ranks (see engine.Communicator.submit)."""
        if not self._training_thread:  # there is no DDP
            return 0
        step = self._steps + 1
        if _graph_task() != -1:  # for GPUs on a thread of autograd's
            return step
        if _thread() != self._training_thread:
            return 0
        # The sign says whether the engine is to compare it: only where training calls.
        return step if _is_of_training(_caller()) else -step

    def step_ended(self, optimizer: Optimizer) -> None:
        """Counts a step of an optimizer."""
        refs = self._parameters
        if any(id(parameter) in refs for group in optimizer.param_groups for parameter in group["params"]) and any(
            _is_not_zero(group.get("lr", 1)) for group in optimizer.param_groups
        ):
            self._count()

    def _count(self) -> None:
        if _thread() == self._training_thread and _graph_task() == -1:
            self._steps += 1


def _is_not_zero(lr: float | Tensor) -> bool:
    """Return whether a step with this learning rate may change weights. On a GPU it is not read, since that waits."""
    return (isinstance(lr, Tensor) and lr.device.type != "cpu") or bool(lr != 0)
