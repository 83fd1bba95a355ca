"""A backend under which PyTorch's suite takes the branches that it keeps for another backend.

The suite asks `BACKEND == "gloo"` and `BACKEND in {"nccl", "gloo"}` to decide what to run. A name that equals two
strings answers these questions as wanted, while `init_process_group(backend=BACKEND)` still gets the true name: nothing
in torch.distributed is changed, and a test that says "gloo" itself gets gloo.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d


class TwoNames(str):
    """The string `name` that also equals, and is found in sets and dicts as, `other`."""

    __slots__ = ("other",)

    def __new__(cls, name: str, other: str) -> TwoNames:
        self = super().__new__(cls, name)
        self.other = other
        return self

    def __eq__(self, value: object) -> bool:
        return str.__eq__(self, value) is True or self.other == value

    def __ne__(self, value: object) -> bool:
        return not self == value

    def __hash__(self) -> int:
        return hash(self.other)  # sets and dicts hold the other name


def answer_as(backend: str, other: str) -> None:
    """From now on `get_backend` of a group of `backend` says `other`, in this process and those forked from it."""
    true = c10d.get_backend

    def get_backend(group: Any = None) -> str:
        name = true(group)
        return dist.Backend(other) if name == backend else name

    c10d.get_backend = dist.get_backend = get_backend
