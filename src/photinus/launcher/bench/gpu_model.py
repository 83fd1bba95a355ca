"""What an all_reduce through the host's memory can reach on GPUs, predicted from the bytes that it has to move.

For S bytes on each of G GPUs of one host, as backend photinus does it (docs/engine.md, CUDA tensors):

    each GPU's link    S to the host and S back, both ways at once
    host memory        (3G + 1) S: G S written by copies that come in, G S read and S written by the addition, G S read
                       by copies that go back

The counting is that of HFReduce's paper (Fire-Flyer AI-HPC, SC24, arXiv:2408.14158, section IV-D3) without a network.
Caches that keep chunks from memory, adding and latency are left out: it is what binds large tensors at most.
"""

from __future__ import annotations

from dataclasses import dataclass

from .result import COPY, HOST_COPY, Result

__all__ = ["Ceiling", "explain_gpus", "predict"]

_OTHERS = (2, 4, 8)


@dataclass(frozen=True)
class Ceiling:
    """At most so many bytes of the tensor per second, and what binds: "PCIe" or "host memory"."""

    bytes_per_s: float
    binds: str


def predict(gpus: int, link_bytes_per_s: float, memory_bytes_per_s: float) -> Ceiling:
    """For an all_reduce over so many GPUs.

    Args:
        gpus: ranks of one host, each with a GPU.
        link_bytes_per_s: of a GPU's link, each way while the other way is busy and all GPUs copy.
        memory_bytes_per_s: of the host's memory, read and written taken together.
    """
    memory = memory_bytes_per_s / (3 * gpus + 1)
    return Ceiling(link_bytes_per_s, "PCIe") if link_bytes_per_s <= memory else Ceiling(memory, "host memory")


def explain_gpus(result: Result, gpus: int) -> list[str]:
    """What `photinus bench --device cuda` says of the ceiling here, and for other numbers of such GPUs.

    Args:
        result: of the largest tensor, with what the copies took.
        gpus: how many the ranks had.
    """
    if COPY not in result.seconds or HOST_COPY not in result.seconds:
        return []
    link = result.size_bytes / result.seconds[COPY]
    memory = 2 * result.ranks * result.size_bytes / result.seconds[HOST_COPY]  # each copy reads and writes
    here = predict(result.ranks, link, memory)
    each = "link" if result.ranks <= gpus else "rank's share of a link"
    lines = [
        f"An all_reduce through the host reaches {_gb(here.bytes_per_s)} here at most, and {here.binds} binds. "
        f"(Predicted from counted bytes: each {each} carries the tensor both ways, at {_gb(link)} while all copy; host "
        f"memory carries it {3 * result.ranks + 1} times, at {_gb(memory)}.)"
    ]
    others = [number for number in _OTHERS if number != result.ranks]
    if result.ranks <= gpus:
        told = [(number, predict(number, link, memory)) for number in others]
        words = ", ".join(f"{number}: {_gb(ceiling.bytes_per_s)} ({ceiling.binds})" for number, ceiling in told)
        lines.append(f"Predicted for other numbers of such GPUs, if their links stay as fast: {words}.")
    return lines


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f} GB/s"
