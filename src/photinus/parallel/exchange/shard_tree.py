"""The tree in which the values of logical shards are added, whichever rank holds them.

Shards 0 ... V-1 are the leaves of one binary tree: the left part of n has the largest power of two below n, the right
part the rest. That is the tree of the engine (native/kernels/reduce.h) over ranks. A rank holds consecutive shards. It
adds what it has of each subtree; what remains are the roots of a few subtrees, and the tree is finished above them. So
the sum has the same bits however many ranks there are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


def own_shards(rank: int, ranks: int, shards: int) -> range:
    """The consecutive shards of a rank; numbers differ by one at most."""
    return range(rank * shards // ranks, (rank + 1) * shards // ranks)


@functools.cache
def _nodes(first: int, end: int) -> frozenset[tuple[int, int]]:
    """All nodes of the tree over these leaves, as (first, end)."""
    if end - first == 1:
        return frozenset({(first, end)})
    middle = first + (1 << (end - first - 1).bit_length() - 1)
    return _nodes(first, middle) | _nodes(middle, end) | {(first, end)}


class TreeSum(Generic[T]):
    """A sum under way: the roots of the subtrees that are complete so far.

    Args:
        shards: the number of leaves of the whole tree.
        add: makes the sum of two values, the left one and the right one.

    Attributes:
        roots: (first leaf, end, value), from left to right.
    """

    def __init__(self, shards: int, add: Callable[[T, T], T]) -> None:
        self._nodes, self._add = _nodes(0, shards), add
        self.roots: list[tuple[int, int, T]] = []

    def push(self, first: int, end: int, value: T) -> None:
        """Take the value of the next leaves, which are one node of the tree."""
        assert (first, end) in self._nodes
        while self.roots and (self.roots[-1][0], end) in self._nodes:
            first, _, before = self.roots.pop()
            value = self._add(before, value)
        self.roots.append((first, end, value))

    def complete(self) -> T:
        """The sum of all leaves."""
        ((_, _, value),) = self.roots
        return value


def tree_sum(values: Iterable[T], add: Callable[[T, T], T]) -> T:
    """The sum of the values of all shards, in their order."""
    leaves = list(values)
    total = TreeSum(len(leaves), add)
    for number, value in enumerate(leaves):
        total.push(number, number + 1, value)
    return total.complete()


@functools.cache
def roots_of(shards: int, ranks: int) -> list[list[tuple[int, int]]]:
    """By rank, the subtrees (first leaf, end) whose roots it gives away."""
    found = []
    for rank in range(ranks):
        own: TreeSum[None] = TreeSum(shards, lambda left, right: None)
        for shard in own_shards(rank, ranks, shards):
            own.push(shard, shard + 1, None)
        found.append([(first, end) for first, end, _ in own.roots])
    return found


def ranks_are_leaves(shards: int, ranks: int) -> bool:
    """Return whether each rank gives one root, and the tree above is that of the ranks: V / W is a power of two."""
    ratio, rest = divmod(shards, ranks)
    return not rest and ratio & (ratio - 1) == 0
