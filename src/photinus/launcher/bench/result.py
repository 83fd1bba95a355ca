"""One measurement, the bandwidths that follow from it, and the table of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .options import size_name

__all__ = ["COPY", "Result", "bus_factor", "table"]

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


def table(results: Sequence[Result], backends: Sequence[str]) -> str:
    """The results as text, a block of columns for each backend."""
    wide = max(len(each.operation) for each in results)  # two backends fit 80 columns
    blocks = "".join(f"  {name:^24}" for name in backends)
    heads = "".join(f"  {'µs':>8}{'algbw':>8}{'busbw':>8}" for _ in backends)
    lines = [f"{'':>8} {'':<{wide}}{blocks}  {'copy':>6}", f"{'size':>8} {'operation':<{wide}}{heads}  {'GB/s':>6}"]
    for result in results:
        cells = ""
        for name in backends:
            if name not in result.seconds:
                cells += f"  {'–':>8}{'–':>8}{'–':>8}"
                continue
            time = result.seconds[name] * 1e6
            shown = f"{time:.1f}" if time < 1000 else f"{time:.0f}"
            cells += f"  {shown:>8}{result.algbw(name):>8.2f}{result.busbw(name):>8.2f}"
        copy = f"{result.algbw(COPY):>6.1f}" if COPY in result.seconds else f"{'–':>6}"
        lines.append(f"{size_name(result.size_bytes):>8} {result.operation:<{wide}}{cells}  {copy}")
    return "\n".join(lines)
