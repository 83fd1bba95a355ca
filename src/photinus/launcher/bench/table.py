"""All measurements as a table, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .options import size_name
from .result import COPY, Result


def print_table(results: Sequence[Result], backends: Sequence[str]) -> None:
    """Prints three columns for each backend: two fit 80 columns, and more go beyond rather than lose figures."""
    made = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    made.add_column("size", justify="right")
    made.add_column("operation")
    for name in backends:
        for head in (f"{name}\nµs", "\nalgbw", "\nbusbw"):
            made.add_column(head, justify="right", min_width=7, no_wrap=True)
    made.add_column("copy\nGB/s", justify="right")
    for result in results:
        cells = []
        for name in backends:
            time = result.seconds.get(name, math.nan) * 1e6
            known = [f"{time:.1f}" if time < 1000 else f"{time:.0f}"]
            known += [f"{speed(name):.2f}" for speed in (result.algbw, result.busbw) if name in result.seconds]
            cells += known if name in result.seconds else ["–"] * 3
        copy = f"{result.algbw(COPY):.1f}" if COPY in result.seconds else "–"
        made.add_row(size_name(result.size_bytes), result.operation, *cells, copy)
    console = Console(highlight=False)
    console.width = max(console.width, 31 + 25 * len(backends))
    console.print(made)


def plot(results: Sequence[Result], backends: Sequence[str], title: str, path: Path) -> None:
    """Draws bandwidth over size, a line for each backend and operation."""
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
