"""A loss: the check that backward can begin at it, and backward for people who own their loop and their loader."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..data.loader import running_weight
from .session import require_session


def backward(loss: Tensor, *, weight: float | None = None) -> None:
    """Run backward of a scalar loss, in a loop of your own.

    Args:
        loss: mean over this rank's samples of the batch; a tensor with one element.
        weight: `batch.weight` of the loader's batch, which makes the mean over ranks that over the global batch.
            Default: the weight of the last batch of a running `photinus.loader`, else 1.

    Raises:
        NotInitializedError: a launcher started several processes, and `photinus.init()` was not called.
        TypeError: the loss is not a tensor.
        ValueError: the loss does not have exactly one element, or nothing in it requires a gradient.
    """
    require_session("photinus.backward")
    check_loss(loss)
    weight = running_weight() if weight is None else weight
    (loss if weight == 1.0 else loss * weight).backward()  # type: ignore[no-untyped-call]


def check_loss(loss: Any) -> None:
    """Raises TypeError or ValueError unless backward can begin at it: one number that requires a gradient."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss is a {type(loss).__name__}, but a tensor is needed")
    if loss.numel() != 1:
        raise ValueError(f"loss has shape {list(loss.shape)}, but backward needs one number: take its mean")
    if not loss.requires_grad:
        raise ValueError("nothing in the loss requires a gradient: was it computed under torch.no_grad() or detached?")
