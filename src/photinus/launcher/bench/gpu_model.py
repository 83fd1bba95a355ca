"""What an all_reduce through the host's memory can reach on GPUs, predicted from the bytes that it has to move.

docs/how-to/gpus.md counts them, as HFReduce's paper does (arXiv:2408.14158, section IV-D3) without a network. Caches
that keep chunks from memory, adding and latency are left out: it is what binds large tensors at most.
"""

from __future__ import annotations

from ...runlog.units import bandwidth
from .result import COPY, HOST_COPY, Result

_OTHERS = (2, 4, 8)


def predict(gpus: int, link: float, memory: float) -> tuple[float, str]:
    """Bytes of the tensor per second that an all_reduce reaches at most, and what binds: "PCIe" or "host memory".

    Args:
        gpus: ranks of one host, each with a GPU.
        link: bytes per second of a GPU's link, each way while the other way is busy and all GPUs copy.
        memory: bytes per second of the host's memory, read and written taken together.
    """
    return min((link, "PCIe"), (memory / (3 * gpus + 1), "host memory"))


def explain_gpus(result: Result, gpus: int) -> list[str]:
    """The ceiling here, and for other numbers of such GPUs, from the largest tensor's result on so many GPUs."""
    if COPY not in result.seconds or HOST_COPY not in result.seconds:
        return []
    link = result.size_bytes / result.seconds[COPY]
    memory = 2 * result.ranks * result.size_bytes / result.seconds[HOST_COPY]  # each copy reads and writes
    here, binds = predict(result.ranks, link, memory)
    each = "link" if result.ranks <= gpus else "rank's share of a link"
    lines = [
        f"An all_reduce through the host reaches {bandwidth(here)} here at most, and {binds} binds. "
        f"(Predicted from counted bytes: each {each} carries the tensor both ways, at {bandwidth(link)} while all "
        f"copy; host memory carries it {3 * result.ranks + 1} times, at {bandwidth(memory)}.)"
    ]
    if result.ranks <= gpus:
        others = {number: predict(number, link, memory) for number in _OTHERS if number != result.ranks}
        words = ", ".join(f"{number}: {bandwidth(ceiling)} ({what})" for number, (ceiling, what) in others.items())
        lines.append(f"Predicted for other numbers of such GPUs, if their links stay as fast: {words}.")
    return lines
