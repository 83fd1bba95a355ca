"""Parameters that no rank used in a backward: FSDP2 gives them zeros, by which momentum and weight decay move them.

DDP leaves them without a gradient. So each rank notes which parameters its backward reached, and after the backward, in
one exchange of 4 bytes per parameter, all ranks take the zeros away that nobody added to.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.utils.weak import WeakIdKeyDictionary

_KEPT = "photinus_kept"  # on a gradient that some rank made: later backwards add to it


class UnusedParameters:
    """Watches a model that FSDP2 has split, with `set_reduce_scatter_unused_params(True)`."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self._model, self._group, self._parameters = model, group, list(model.parameters())
        self._own = {(part, name): p for part in model.modules() for name, p in part._parameters.items()}
        self._watched: Any = WeakIdKeyDictionary()  # gathered parameters
        self._used: set[nn.Parameter] = set()  # since they last got a gradient from all ranks
        self._task = -1
        for unit in model.modules():
            if hasattr(unit, "set_requires_gradient_sync"):  # this hook runs after FSDP's own, which gathers
                unit.register_forward_pre_hook(_disable_dynamo(partial(self._watch)))

    def _watch(self, unit: nn.Module, _: Any) -> None:
        for part in unit.modules():
            for name, gathered in part._parameters.items():
                own: Any = self._own.get((part, name))
                if gathered is not own and gathered is not None and gathered not in self._watched:
                    self._watched[gathered] = gathered.requires_grad
                    if gathered.requires_grad:
                        note: Any = gathered.register_post_accumulate_grad_hook
                        note(partial(self._note, own))

    def _note(self, own: nn.Parameter, _: torch.Tensor) -> None:
        self._used.add(own)
        task = torch._C._current_graph_task_id()
        if task != self._task and not vars(self._model).get("inside_no_sync"):
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end)  # after FSDP's, which came first

    def _end(self) -> None:
        used = torch.tensor([p in self._used for p in self._parameters], dtype=torch.int32)
        used = used.to(self._parameters[0].device)
        dist.all_reduce(used, dist.ReduceOp.MAX, self._group)
        for parameter, by_any in zip(self._parameters, used.tolist(), strict=True):
            gradient = parameter.grad
            if gradient is None:
                continue
            self._used.discard(parameter)
            if by_any:
                vars(gradient)[_KEPT] = True
            elif _KEPT not in vars(gradient):
                parameter.grad = None
