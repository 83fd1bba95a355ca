"""Findings of looks at the machine, and how they are shown: by section, with a verdict at the end."""

from __future__ import annotations

import itertools
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_MARKS = {"good": ("✓", "green"), "note": ("!", "yellow"), "bad": ("✗", "red"), "absent": ("–", "bright_black")}
_WIDEST = 100
_BELOW = " " * 21  # values begin behind it
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
    """Return a finding that is good unless there is advice: `bad` or `note` is what to do about it."""
    return Finding(section, name, "bad" if bad else "note" if note else "good", value, bad or note, facts)


def terminal() -> Console:
    """Return standard output, with lines of at most 100 columns."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    console.width = min(_WIDEST, console.width)
    return console


def report(findings: Sequence[Finding], *, as_json: bool = False, **more: Any) -> int:
    """Print the findings and a verdict (in JSON with more). Return the exit code: 1 if something is bad."""
    from rich.text import Text

    bad, noted = ([each.name for each in findings if each.state == state] for state in ("bad", "note"))
    if as_json:
        report = {"well": not bad, "findings": [asdict(each) for each in findings], **more}
        print(json.dumps(report, indent=1))
        return int(bool(bad))
    console = terminal()
    for section, found in itertools.groupby(findings, key=lambda each: each.section):
        console.print(Text(section, "bold"))
        for each in found:
            mark, colour = _MARKS[each.state]
            # rich would begin a wrapped line at the left edge, under the marks.
            fill = partial(textwrap.fill, width=console.width, break_on_hyphens=False)
            text = Text(fill(f"  {mark} {each.name:<16} {each.value}", subsequent_indent=_BELOW))
            text.stylize(colour, 0, 3)
            console.print(text)
            if each.advice:
                console.print(fill(f"{_BELOW}→ {each.advice}", subsequent_indent=_BELOW + "  "))
        console.print()
    if bad:
        need = f"{len(bad)} of {len(findings)} need{'s' * (len(bad) == 1)} attention"
        console.print(f"{need}: {', '.join(bad)}.", style="bold red")
    else:
        rest = f"worth knowing: {', '.join(noted)}" if noted else "nothing that needs attention"
        console.print(f"All well: {len(findings)} check{'s' * (len(findings) != 1)}, {rest}.", style="bold green")
    return int(bool(bad))
