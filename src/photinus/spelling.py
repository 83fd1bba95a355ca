"""What was probably meant by a word that nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

__all__ = ["closest", "hint"]


def closest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word most like `word`, or None when none is like it by `cutoff` (difflib's ratio, 0 to 1)."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def hint(
    word: str, known: Iterable[str], otherwise: str = "", *, show: Callable[[str], str] = str, cutoff: float = 0.6
) -> str:
    """` Did you mean X?`, or `otherwise` when nothing is near. `show`: repr for names in Python, which have quotes."""
    near = closest(word, known, cutoff)
    return otherwise if near is None else f" Did you mean {show(near)}?"
