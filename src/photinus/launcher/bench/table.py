"""The table of all measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .options import size_name
from .result import COPY, Result

__all__ = ["print_table", "table"]


def print_table(results: Sequence[Result], backends: Sequence[str]) -> None:
    """Prints it: two backends fit 80 columns, and more go beyond rather than lose figures."""
    console = Console(highlight=False)
    console.width = max(console.width, 31 + 25 * len(backends))
    console.print(table(results, backends))


def table(results: Sequence[Result], backends: Sequence[str]) -> Table:
    """The results for a terminal, three columns for each backend; two backends fit 80 columns."""
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
    return made
