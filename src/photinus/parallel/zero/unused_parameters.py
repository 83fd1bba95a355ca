"""Parameters that no rank used in a backward: FSDP2 gives them zeros, and an optimizer would step them by those.

Weight decay and momentum move a parameter whose gradient is zero, and leave alone one that has none. DDP gives none
where no rank used a parameter, so each rank here notes which ones its backward reached, and after the backward, in one
exchange of 4 bytes per parameter, all ranks take the zeros away that nobody added to.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.utils.weak import WeakIdKeyDictionary

_KEPT = "photinus_kept"  # on a gradient that some rank made: later backwards add to it


class UnusedParameters:
    """Watches a model that FSDP2 has split, with `set_reduce_scatter_unused_params(True)`.

    Args:
        units: its parts that gather their parameters, the model among them.
        group: of the ranks.
        accumulates: whether a backward adds up gradients without an exchange.
    """

    def __init__(
        self, units: Sequence[nn.Module], model: nn.Module, group: dist.ProcessGroup, accumulates: Callable[[], bool]
    ) -> None:
        self._parameters, self._group, self._accumulates = list(model.parameters()), group, accumulates
        self._watched: MutableMapping[torch.Tensor, bool] = WeakIdKeyDictionary()  # gathered parameters
        self._used: set[nn.Parameter] = set()  # since they last got a gradient from all ranks
        self._task = -1
        for unit in units:
            places = [
                (part, name, p) for part in unit.modules() for name, p in part._parameters.items() if p is not None
            ]
            unit.register_forward_pre_hook(_disable_dynamo(partial(self._watch, places)))  # after FSDP's own

    def _watch(self, places: Sequence[tuple[nn.Module, str, Any]], *_: Any) -> None:
        for part, name, parameter in places:
            gathered = part._parameters.get(name)
            if gathered is not None and gathered is not parameter and gathered not in self._watched:
                self._watched[gathered] = True
                if gathered.requires_grad:
                    gathered.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                        partial(self._note, parameter)
                    )

    def _note(self, parameter: nn.Parameter, _: torch.Tensor) -> None:
        self._used.add(parameter)
        task = torch._C._current_graph_task_id()
        if task != self._task and not self._accumulates():
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
