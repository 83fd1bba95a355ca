"""What a checkpoint of a Loop holds, and how it is put back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import CheckpointError
from .states import load_into, state_of

__all__ = ["Trained", "check_is_snapshot"]

_NEEDED = frozenset({"model", "optimizer", "position", "run", "rng"})


def check_is_snapshot(content: Mapping[str, Any], path: Path) -> None:
    """Raises CheckpointError unless a checkpoint's content is that of a Loop."""
    missing = _NEEDED - set(content)
    if missing:
        raise CheckpointError(f"{path} is no checkpoint of a Loop: it lacks {', '.join(sorted(missing))}")


@dataclass(frozen=True)
class Trained:
    """The objects whose state training changes; some of them may be split over the ranks.

    The model's state has plain, unprefixed names, so that it loads in any strategy and in plain torch.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any  # with state_dict and load_state_dict, or None
    others: Mapping[str, Any]  # the user's own, by name

    def contents(self) -> dict[str, Any]:
        """Their whole states, for a checkpoint, on rank 0. Called by all ranks."""
        return {
            "model": state_of(self.model),
            "optimizer": state_of(self.optimizer),
            "scheduler": None if self.scheduler is None else state_of(self.scheduler),
            "others": {name: state_of(item) for name, item in self.others.items()},
        }

    def put_back(self, content: Mapping[str, Any], path: Path) -> None:
        """Gives the objects the states that `contents` took.

        Raises:
            CheckpointError: they do not fit: another model or optimizer, a scheduler too many or too few.
        """
        scheduler, others = content.get("scheduler"), content.get("others", {})
        if (self.scheduler is None) != (scheduler is None):
            held = "no scheduler" if scheduler is None else "the state of a scheduler"
            given = "none" if self.scheduler is None else "one"
            raise CheckpointError(f"{path} holds {held}, but the loop was given {given}")
        if set(others) != set(self.others):
            raise CheckpointError(
                f"{path} holds the states of {sorted(others) or 'no other objects'}, but the loop was given "
                f"state={sorted(self.others) or None}"
            )
        try:
            load_into(self.model, content["model"])
            load_into(self.optimizer, content["optimizer"])
            if self.scheduler is not None:
                load_into(self.scheduler, scheduler)
            for name, item in self.others.items():
                load_into(item, others[name])
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(f"{path} does not fit what is trained here: {error}") from error
