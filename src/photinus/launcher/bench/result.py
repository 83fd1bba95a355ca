"""One measurement, and the bandwidths that follow from it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COPY", "Result", "bus_factor"]

COPY = "copy"


def bus_factor(operation: str, ranks: int) -> float:
    """What busbw is of algbw (the formulas of nccl-tests, doc/PERFORMANCE.md)."""
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return 1.0 if operation in ("broadcast", COPY) else (ranks - 1) / ranks


@dataclass(frozen=True)
class Result:
    """Mean times of one operation and size: {backend: seconds}; COPY is what copying as much takes, by all at once."""

    operation: str
    size_bytes: int
    elems: int
    dtype: str
    ranks: int
    seconds: dict[str, float]

    def algbw(self, backend: str) -> float:
        """Bytes of the tensor per second, in GB/s."""
        return self.size_bytes / self.seconds[backend] / 1e9

    def busbw(self, backend: str) -> float:
        """What each rank has to move for it, per second, in GB/s."""
        return self.algbw(backend) * bus_factor(self.operation, self.ranks)
