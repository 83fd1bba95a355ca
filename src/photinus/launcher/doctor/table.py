"""The findings on the terminal, by section, and what they come to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .finding import Finding

__all__ = ["print_findings", "terminal"]

_MARKS = {
    "good": ("✓", "green"),
    "note": ("!", "yellow"),
    "bad": ("✗", "red"),
    "unknown": ("?", "yellow"),
    "absent": ("–", "bright_black"),
}
_WIDEST = 100


def terminal() -> Console:
    """Standard output, lines of at most 100 columns."""
    console = Console(highlight=False, markup=False, emoji=False)
    console.width = min(_WIDEST, console.width)
    return console


def print_findings(findings: Sequence[Finding], console: Console | None = None) -> None:
    """Prints a table for each section, and a verdict."""
    console = console or terminal()
    for section, found in itertools.groupby(findings, key=lambda finding: finding.section):
        rows = Table.grid(padding=(0, 1, 0, 0))
        rows.add_column(width=3, justify="right")
        rows.add_column(width=16, overflow="fold")
        rows.add_column(overflow="fold")
        for each in found:
            rows.add_row(Text(*_MARKS[each.state]), each.name, each.value)
            if each.advice:
                advice = Table.grid(padding=(0, 1, 0, 0))
                advice.add_row("→", each.advice)
                rows.add_row("", "", advice)
        console.print(Text(section, "bold"))
        console.print(rows)
        console.print()
    bad, unknown = ([each.name for each in findings if each.state == state] for state in ("bad", "unknown"))
    of = f"of {len(findings)}"
    if bad:
        console.print(f"{len(bad)} {of} need{'s' * (len(bad) == 1)} attention: {', '.join(bad)}.", style="bold red")
    if unknown:
        console.print(f"{len(unknown)} {of} could not be judged: {', '.join(unknown)}.", style="bold yellow")
    if not (bad or unknown):
        console.print(f"All well: {len(findings)} looks, nothing that needs attention.", style="bold green")
