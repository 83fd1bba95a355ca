"""What one look at the machine found, and all of it on the terminal: by section, and what it comes to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_MARKS = {
    "good": ("✓", "green"),
    "note": ("!", "yellow"),
    "bad": ("✗", "red"),
    "absent": ("–", "bright_black"),
}
_WIDEST = 100
LATE = "no answer within {:g} s (on a busy machine, give more with --timeout)"


@dataclass(frozen=True)
class Finding:
    """One line of what the user sees.

    `state`: "good"; "note", works, but worth knowing; "bad", will not work or will be slow; "absent",
    not here and not missed. `advice`: what to do about each "bad". `facts`: for --json.
    """

    section: str
    name: str
    state: str
    value: str
    advice: str = ""
    facts: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        assert self.state in _MARKS, self.state
        assert self.state != "bad" or self.advice, f"{self.name} is {self.state}: nothing is advised"


def assess(
    section: str, name: str, value: str, *, bad: str = "", note: str = "", facts: dict[str, Any] | None = None
) -> Finding:
    """A finding that is good unless there is advice: `bad` or `note` is what to do about it."""
    return Finding(section, name, "bad" if bad else "note" if note else "good", value, bad or note, facts)


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings as JSON: {"well": ..., "findings": [...]}."""
    return {"well": exit_code(findings) == 0, "findings": [asdict(finding) for finding in findings]}


def exit_code(findings: Sequence[Finding]) -> int:
    """0 when nothing is bad, else 1."""
    return int(any(finding.state == "bad" for finding in findings))


def terminal() -> Console:
    """Standard output, lines of at most 100 columns."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    console.width = min(_WIDEST, console.width)
    return console


def print_findings(findings: Sequence[Finding], console: Console | None = None) -> None:
    """Prints a table for each section, and a verdict."""
    from rich.table import Table
    from rich.text import Text

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
    bad = [each.name for each in findings if each.state == "bad"]
    if bad:
        need = f"{len(bad)} of {len(findings)} need{'s' * (len(bad) == 1)} attention"
        console.print(f"{need}: {', '.join(bad)}.", style="bold red")
    else:
        noted = [each.name for each in findings if each.state == "note"]
        rest = f"worth knowing: {', '.join(noted)}" if noted else "nothing that needs attention"
        console.print(f"All well: {len(findings)} looks, {rest}.", style="bold green")
