"""What one look at the machine found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["STATES", "Finding", "as_json", "exit_code"]

STATES = ("good", "note", "bad", "unknown", "absent")


@dataclass(frozen=True)
class Finding:
    """One line of what the user sees.

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
        assert self.state in STATES, self.state
        assert self.state not in ("bad", "unknown") or self.advice, f"{self.name} is {self.state}: nothing is advised"


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings as JSON: {"well": ..., "findings": [...]}."""
    return {"well": exit_code(findings) == 0, "findings": [asdict(finding) for finding in findings]}


def exit_code(findings: Sequence[Finding]) -> int:
    """0 when nothing is bad and all could be told, else 1."""
    return int(any(finding.state in ("bad", "unknown") for finding in findings))
