"""Checks of users' arguments that several files of the trainer share."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any


def check_all(*checks: Callable[[], Any]) -> None:
    """Makes all the checks, and raises their TypeErrors and ValueErrors as one, a line for each."""
    errors: list[TypeError | ValueError] = []
    for check in checks:
        try:
            check()
        except (TypeError, ValueError) as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise (TypeError if isinstance(errors[0], TypeError) else ValueError)("\n".join(map(str, errors)))


def refuse_if(wrong: Any, error: Exception) -> None:
    """Raises the error where something is wrong: a check for `check_all`."""
    if wrong:
        raise error


def whole_number(name: str, value: Any, *, least: int = 0) -> int:
    """`value` as an int; any integer type is taken (numpy's too), but neither bool nor float."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} needs a whole number, not {value!r} ({type(value).__name__})")
    number = operator.index(value)
    if number < least:
        raise ValueError(f"{name}={number} is too small: it needs to be at least {least}")
    return number


def place(rank: Any, world_size: Any) -> tuple[int, int]:
    """(rank, world_size), checked: 0 <= rank < world_size. Raises TypeError, ValueError."""
    world_size = whole_number("world_size", world_size, least=1)
    rank = whole_number("rank", rank)
    if rank >= world_size:
        raise ValueError(f"rank={rank} does not exist in a world of {world_size}: ranks go from 0 to {world_size - 1}")
    return rank, world_size
