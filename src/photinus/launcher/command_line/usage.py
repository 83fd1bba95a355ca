"""Wrong use of the command line: the error, and what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["UsageError", "closest", "hint"]


class UsageError(ValueError):
    """The command line cannot be carried out as typed; the message says why and what to type instead."""


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like `word`, or None when nothing is near."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return found[0] if found else None


def hint(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """` Did you mean X?`, or `otherwise` when nothing is near."""
    near = closest(word, known)
    return f" Did you mean {near}?" if near else otherwise
