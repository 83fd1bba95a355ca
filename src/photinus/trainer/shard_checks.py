"""The checks of the bodies of logical shards: all but a step's last one only compute gradients, and leave them alone.

On another number of ranks another shard is the last one of a rank. So what a body does to weights, gradients or rates
must not depend on whether it is: it belongs under `if loop.step_due`, where all ranks do it once in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import MissingGradientError, PhotinusError
from ..parallel import DistributedDataParallel
from ..parallel.exchange.verify_models import digest_of
from ..parallel.reducer.checks import missing_text

_BODIES_DIGESTED = 16  # in which values are compared: writes by `.data` are not counted


class ShardChecks:
    """The checks of the running body.

    Args:
        wrapped: the models.
        optimizers: of the loop.
    """

    def __init__(self, wrapped: Sequence[DistributedDataParallel], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._wrapped, self._optimizers = wrapped, optimizers
        self._slots = [slot for model in wrapped for slot in model.reducer.slots]
        self._is_last = True
        self._digested = 0
        self._before: dict[str, Any] = {}
        self._gradients: list[Any] | None = None  # after the body's last backward
        self._reached: list[bool] | None = None  # the models that the step's first shard has gradients of

    def body_began(self, *, is_first: bool, is_last: bool) -> None:
        """A body begins, perhaps the rank's first or last in a step."""
        self._is_last, self._gradients = is_last, None
        if is_first:
            self._reached = None
        if not is_last:
            self._before = self._look(digests=self._digested < _BODIES_DIGESTED)

    def gradients_came(self) -> None:
        """A backward of the loop is over."""
        if not self._is_last:
            self._gradients = self._versions()

    def body_ended(self) -> None:
        """A body that is not the step's last one is over.

        Raises:
            PhotinusError: it changed weights, gradients or options of optimizers.
        """
        digests = "values" in self._before
        self._digested += digests
        now = self._look(digests=digests)
        changed = [name for name, before in self._before.items() if now[name] != before]
        if self._gradients is not None and self._gradients != self._versions():
            changed.append("gradients")
        if changed:
            what = "weights" if changed[0] == "values" else changed[0]
            raise PhotinusError(
                f"the body changed {what} before the last batch of the step. With logical_shards, another number of "
                f"ranks has other batches before the last one, and would compute something else. Write clipping, "
                f"steps of optimizers and schedulers, zero_grad() and all changes under `if loop.step_due`"
            )

    def shard_ended(self, *, is_last: bool) -> None:
        """The gradients of a shard are complete.

        Raises:
            MissingGradientError: a parameter has none, and find_unused_parameters=True was not given.
            PhotinusError: another shard has gradients of other models.
        """
        reached = [
            model.shard_sums.is_exchanged
            if is_last and model.shard_sums is not None
            else any(slot.parameter.grad is not None for slot in model.reducer.slots)
            for model in self._wrapped
        ]
        for model, is_reached in zip(self._wrapped, reached, strict=True):
            missing = [slot for slot in model.reducer.slots if slot.parameter.grad is None]
            if is_reached and missing and not (is_last or model.find_unused_parameters):
                raise MissingGradientError(  # as in the last shard, of which the reducer sees it
                    missing_text(model.reducer.rank, missing, len(model.reducer.slots), type(model.module).__name__)
                )
        self._reached = self._reached or reached
        if reached != self._reached or not any(reached):
            raise PhotinusError(
                "a body had no backward, or one to other models than the bodies before it: with logical_shards, each "
                "body of a step needs a loop.backward(loss) to the same models. To leave a sample out, multiply its "
                "loss by 0"
            )

    def _versions(self) -> list[Any]:
        gradients = [slot.parameter.grad for slot in self._slots]
        return [None if each is None else (id(each), each._version) for each in gradients]

    def _look(self, *, digests: bool) -> dict[str, Any]:
        options = [
            {name: _fixed(value) for name, value in group.items() if name != "params"}
            for optimizer in self._optimizers
            for group in optimizer.param_groups
        ]
        found = {"options of the optimizers": options, "weights": [slot.parameter._version for slot in self._slots]}
        if digests:
            found["values"] = [int(digest_of(slot.parameter)) for slot in self._slots]
        return found


def _fixed(value: Any) -> Any:
    """Return something that tells whether a value has changed, without a wait for a GPU."""
    return (id(value), value._version) if isinstance(value, torch.Tensor) else value
