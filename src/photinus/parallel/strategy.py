"""What every way of spreading a model over ranks has in common: a small set of verbs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import nn

__all__ = ["Strategy"]


class Strategy(ABC):
    """One way of spreading a model over the ranks, with verbs that trainers and loops call.

    A strategy holds options, not models: one object can wrap several models. Each lives in a file of its own and is
    entered in `photinus.parallel.STRATEGIES`.

    Args:
        options: passed on to what the strategy wraps with; an unknown one is refused there, by name.
    """

    name: ClassVar[str]

    def __init__(self, **options: Any) -> None:
        self.options = options

    @abstractmethod
    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The module to train instead of `model`, which is on `device` already. Called on every rank."""

    @abstractmethod
    def unwrap(self, wrapped: nn.Module) -> nn.Module:
        """The model inside, whose state_dict has plain names."""

    @abstractmethod
    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """A context in which forward and backward accumulate gradients without an exchange."""
