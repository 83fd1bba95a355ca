"""Tables of rows as take_turns yields them, the same text for the terminal and for Markdown."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import bars
import harness
from bars import Bar
from harness import size_name

FAST_BYTES = 64 << 10
"""From here on GB/s say more than a time."""


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are aligned in plain text too."""
    widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]

    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    return "\n".join([row(head), rule, *(row(line) for line in lines)])


def figure(seconds: float | None, size_bytes: int) -> str:
    """A time with a sensible unit, and S/t from 64 KiB up."""
    if seconds is None:
        return "–"
    time = f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
    return f"{time} {size_bytes / seconds / 1e9:6.2f} GB/s" if size_bytes >= FAST_BYTES else time


def absolute(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """Times and S/t of everybody."""
    lines = [
        [size_name(row["bytes"]), *(figure(row["seconds"].get(column), row["bytes"]) for column in columns)]
        for row in rows
    ]
    return table(["size", *columns], lines)


def ratios(rows: Sequence[dict[str, Any]], ours: Sequence[str], theirs: Sequence[str]) -> str:
    """Their time divided by ours: more than 1 means that ours is faster. One cell holds one number for each of ours."""
    lines = []
    for row in rows:
        seconds = row["seconds"]
        cells = [size_name(row["bytes"])]
        for their in theirs:
            known = their in seconds
            parts = [f"{seconds[their] / seconds[our]:.2f}" if known and our in seconds else "–" for our in ours]
            cells.append(" / ".join(parts) if known else "–")
        lines.append(cells)
    return table(["size", *theirs], lines)


def facts(kept: dict[str, Any]) -> str:
    """Where, when and with what, and who is absent and why."""
    lines = [f"{kept['date']}, `{kept['command']}`", ""]
    lines += [f"- {name}: {value}" for name, value in kept["machine"].items()]
    lines.append(f"- used by others during the run: {max(row['foreign'] for row in kept['rows']):.0%} at worst")
    lines += [f"- {name}: {version}" for name, version in kept["versions"].items()]
    lines += [f"- **{name} is absent**: {reason}" for name, reason in kept["absent"].items()]
    return "\n".join(lines)


def by_kind(rows: Sequence[dict[str, Any]]) -> list[tuple[int, str, list[dict[str, Any]]]]:
    """The rows for each number of ranks and element type, in order of appearance."""
    kinds: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault((row["ranks"], row["dtype"]), []).append(row)
    return [(ranks, dtype, rows_of) for (ranks, dtype), rows_of in kinds.items()]


def progress(row: dict[str, Any]) -> str:
    """One line while it runs."""
    cells = [f"{name} {seconds * 1e6:.1f}" for name, seconds in row["seconds"].items()]
    return f"{row['ranks']} ranks {row['dtype']} {size_name(row['bytes'])} (us): {', '.join(cells)}"


def finish(
    arguments: argparse.Namespace, kept: dict[str, Any], tables: Callable[[dict[str, Any]], str], wanted: Sequence[Bar]
) -> None:
    """Prints the report and the bars, writes them where --out says, and obeys --check."""
    cleared, verdict = bars.report(wanted, kept["rows"])
    text = f"{tables(kept)}\n{verdict}\n"
    print("\n" + text)
    if arguments.out:
        harness.write(arguments.out, kept, text)
    if arguments.check and not cleared:
        sys.exit(1)
