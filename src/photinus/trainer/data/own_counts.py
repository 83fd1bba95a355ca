"""Counts that an object without a length keeps itself while it is read: of its epochs, or by its random generators.

A shard begins each epoch with the object as it was given, wherever the run resumes. So what reading changed is put
back, and a line says which attributes these are: with a count of its own, the order is the same in every epoch.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

_DEPTH = 3  # of attributes of attributes
_LONGEST, _MOST = 100_000, 1000  # entries of a list, and attributes


class _Entry(NamedTuple):
    name: str  # of the attribute
    value: Any
    get: Callable[[], Any]
    put_back: Callable[[Any], object]
    is_number: bool


class OwnCounts:
    """The numbers, lists and random generators in an object's attributes, and in those of its attributes."""

    def __init__(self, value: Any) -> None:
        self._entries = [*_entries(value, "", _DEPTH, set())]
        self._changed: list[_Entry] = []
        self._numbers: list[Any] = []

    def first_sample_came(self) -> None:
        """Note what the first sample of an epoch changed."""
        self._changed = [each for each in self._entries if not _equal(each.get(), each.value)]
        self._numbers = [each.get() for each in self._changed]

    def second_sample_came(self) -> list[str]:
        """Return the attributes that count epochs or draw: a number that each sample changes counts samples."""
        pairs = zip(self._changed, self._numbers, strict=True)
        return [each.name for each, first in pairs if not each.is_number or _equal(each.get(), first)]

    def put_back(self) -> None:
        """Give all that the first sample changed the value that it had before."""
        for each in self._changed:
            each.put_back(each.value)


def _entries(value: Any, name: str, depth: int, seen: set[int]) -> Iterator[_Entry]:
    """Return what may count. Nothing is copied but lists, and states of generators."""
    if id(value) in seen:
        return
    seen.add(id(value))
    numpy: Any = sys.modules.get("numpy")
    if isinstance(value, torch.Generator):
        yield _Entry(name, value.get_state(), value.get_state, value.set_state, False)
    elif isinstance(value, random.Random):
        yield _Entry(name, value.getstate(), value.getstate, value.setstate, False)
    elif numpy and isinstance(value, numpy.random.RandomState):
        yield _Entry(name, value.get_state(), value.get_state, value.set_state, False)
    elif numpy and isinstance(value, numpy.random.Generator):
        bits: Any = value.bit_generator
        yield _Entry(name, bits.state, partial(getattr, bits, "state"), partial(setattr, bits, "state"), False)
    elif type(value) is list and len(value) <= _LONGEST:
        yield _Entry(name, [*value], partial(list, value), partial(value.__setitem__, slice(None)), False)
    elif depth and not isinstance(value, (type, torch.nn.Module)):
        attributes: Any = value if type(value) is dict else getattr(value, "__dict__", None)
        if not isinstance(attributes, dict) or len(attributes) > _MOST:
            return
        for key, item in [*attributes.items()]:
            inner = f"{name}.{key}" if name else str(key)
            if type(item) in (int, float):
                yield _Entry(inner, item, partial(attributes.get, key), partial(attributes.__setitem__, key), True)
            else:
                yield from _entries(item, inner, depth - 1, seen)


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, list) and isinstance(second, list):  # of any objects: the same ones in the same order
        return [*map(id, first)] == [*map(id, second)]
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    return repr(first) == repr(second)  # of numpy's states: with arrays inside
