"""Optimizers that step during the end of backward, bucket by bucket, while later buckets are still under way.

Two interfaces of torch lead here: `_apply_optimizer_in_backward`, which hangs optimizers on parameters before they are
wrapped, and the wrapper's `_register_fused_optim`, which is a communication hook (see torch's `_optimizer_overlap`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..reducer.gradient_memory import Bucket, Slot

_ATTRIBUTE = "_in_backward_optimizers"


class OptimizersInBackward:
    """Steps the optimizers that hang on parameters when the parameters' averages have come; their grads become None.

    Use `take_over` to make one.
    """

    @staticmethod
    def take_over(slots: Sequence[Slot]) -> OptimizersInBackward | None:
        """Removes the hooks by which torch would step before the average; None if no parameter has an optimizer.

        Raises:
            ValueError: a parameter with sparse gradients has one; those are averaged after all buckets.
        """
        owners = [slot.parameter for slot in slots if hasattr(slot.parameter, _ATTRIBUTE)]
        if not owners:
            return None
        sparse = [slot.name for slot in slots if slot.bucket is None and hasattr(slot.parameter, _ATTRIBUTE)]
        if sparse:
            raise ValueError(
                f"parameter {sparse[0]} has sparse gradients and an optimizer that steps in backward; give it an "
                f"ordinary optimizer"
            )
        from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

        handles: Any = param_to_optim_hook_handle_map
        for parameter in owners:
            for handle in handles.get(parameter, []):
                handle.remove()
        return OptimizersInBackward()

    def __call__(self, bucket: Bucket) -> None:
        """Steps for the parameters of one bucket."""
        for slot in bucket.slots:
            if hasattr(slot.parameter, _ATTRIBUTE) and slot.parameter.grad is not None:
                for optimizer in getattr(slot.parameter, _ATTRIBUTE):
                    optimizer.step()
                slot.parameter.grad = None
