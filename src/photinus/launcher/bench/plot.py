"""A picture of the results: bandwidth over size, a line for each backend and operation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...errors import LaunchError
from .options import size_name
from .result import COPY, Result

__all__ = ["check_plot", "plot"]


def check_plot() -> None:
    """Raises LaunchError, before anything is measured, when pictures cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise LaunchError("--plot draws with matplotlib, which is not installed: pip install matplotlib") from None


def plot(results: Sequence[Result], backends: Sequence[str], title: str, path: Path) -> None:
    """Writes the picture to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), constrained_layout=True)
    operations = list(dict.fromkeys(each.operation for each in results))
    styles = ("-", "--", ":", "-.", (0, (1, 3)))
    for number, backend in enumerate(backends):
        for operation, style in zip(operations, styles, strict=False):
            chosen = [each for each in results if each.operation == operation and backend in each.seconds]
            label = backend if len(operations) == 1 else f"{backend}, {operation}"
            sizes, speeds = [each.size_bytes for each in chosen], [each.algbw(backend) for each in chosen]
            axes.plot(sizes, speeds, linestyle=style, color=f"C{number}", marker="o", markersize=4, label=label)
    copied = [each for each in results if each.operation == operations[0] and COPY in each.seconds]
    speeds = [each.algbw(COPY) for each in copied]
    axes.plot([each.size_bytes for each in copied], speeds, color="0.6", label="all ranks copy memory")
    sizes = sorted({each.size_bytes for each in results})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [size_name(size) for size in sizes], rotation=30)
    axes.minorticks_off()
    axes.set_xlabel("tensor")
    axes.set_ylabel("GB/s (tensor's bytes / time)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
