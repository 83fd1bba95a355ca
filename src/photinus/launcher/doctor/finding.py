"""What one look at the machine found, and the table of all findings."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Finding", "as_json", "exit_code", "painted", "table"]

_MARKS = {"good": ("✓", "32"), "note": ("!", "33"), "bad": ("✗", "31"), "unknown": ("?", "33"), "absent": ("–", "90")}
_NAME_WIDTH = 16


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    Attributes:
        section: heading that it stands under.
        name: what was looked at.
        state: "good"; "note", works, but worth knowing; "bad", will not work or will be slow; "unknown", could
            not be told; "absent", not here and not missed.
        value: what was found.
        advice: what to do about it; given for each "bad" and "unknown".
        facts: the figures behind it, for --json.
    """

    section: str
    name: str
    state: str
    value: str
    advice: str = ""
    facts: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        assert self.state in _MARKS, self.state
        assert self.state not in ("bad", "unknown") or self.advice, f"{self.name} is {self.state}: nothing is advised"


def table(findings: Sequence[Finding], *, width: int, colour: bool) -> str:
    """The findings as text for a terminal of so many columns."""
    lines: list[str] = []
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines += ["", painted(section, "1", colour)] if lines else [painted(section, "1", colour)]
        mark, number = _MARKS[finding.state]
        indent = " " * (_NAME_WIDTH + 5)
        body = textwrap.wrap(finding.value, width - len(indent), break_long_words=True) or [""]
        head = f"{finding.name:<{_NAME_WIDTH}}"
        if len(finding.name) > _NAME_WIDTH:
            head, body = finding.name, ["", *body]
        lines.append(f"  {painted(mark, number, colour)} {head} {body[0]}".rstrip())
        lines += [indent + more for more in body[1:]]
        if finding.advice:
            advice = textwrap.wrap(finding.advice, width - len(indent) - 2, break_on_hyphens=False)
            lines += [indent + ("→ " if number == 0 else "  ") + text for number, text in enumerate(advice)]
    return "\n".join([*lines, "", *_verdict(findings, width, colour)])


def _verdict(findings: Sequence[Finding], width: int, colour: bool) -> list[str]:
    bad, unknown = ([each.name for each in findings if each.state == state] for state in ("bad", "unknown"))
    verdict = []
    if bad:
        told = f"{len(bad)} of {len(findings)} need{'s' * (len(bad) == 1)} attention: {', '.join(bad)}."
        verdict.append((told, "1;31"))
    if unknown:
        told = f"{len(unknown)} of {len(findings)} could not be judged: {', '.join(unknown)}."
        verdict.append((told, "1;33"))
    if not verdict:
        verdict.append((f"All well: {len(findings)} looks, nothing that needs attention.", "1;32"))
    return [painted(line, number, colour) for told, number in verdict for line in textwrap.wrap(told, width)]


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings as JSON: {"well": ..., "findings": [...]}."""
    return {"well": exit_code(findings) == 0, "findings": [asdict(finding) for finding in findings]}


def exit_code(findings: Sequence[Finding]) -> int:
    """0 when nothing is bad and all could be told, else 1."""
    return int(any(finding.state in ("bad", "unknown") for finding in findings))


def painted(text: str, number: str, colour: bool) -> str:
    """Text in a terminal's colour of that number, where colours are wanted."""
    return f"\x1b[{number}m{text}\x1b[0m" if colour else text
