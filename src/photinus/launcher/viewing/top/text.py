"""Lines made of styled pieces: how wide they are on a terminal, cut to a width, with colours or without."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Line", "Piece", "columns", "cut", "line", "painted", "printable"]

_ELLIPSIS = "…"


@dataclass(frozen=True)
class Piece:
    """Text in one style.

    Attributes:
        text: without control characters.
        style: parameters of ANSI's "select graphic rendition" such as "1" (bold) or "31" (red); "" for none.
    """

    text: str
    style: str = ""


Line = Sequence[Piece]


def line(*pieces: Piece | str) -> Line:
    """A line of pieces; plain text has no style."""
    return [piece if isinstance(piece, Piece) else Piece(piece) for piece in pieces]


def printable(text: str) -> str:
    """Text on one line without control characters: those of a file's name or an error would move the cursor."""
    return "".join(character if character.isprintable() else " " for character in text)


def columns(text: str) -> int:
    """How many columns text takes on a terminal: East Asian wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(_columns_of(character) for character in text)


def cut(pieces: Line, width: int) -> Line:
    """The line, cut to so many columns; what was left out is marked by an ellipsis."""
    if sum(columns(piece.text) for piece in pieces) <= width:
        return pieces
    kept: list[Piece] = []
    left = width - 1
    for piece in pieces:
        text = ""
        for character in piece.text:
            left -= _columns_of(character)
            if left < 0:
                return [*kept, Piece(text, piece.style), Piece(_ELLIPSIS)] if width > 0 else []
            text += character
        kept.append(piece)
    return kept


def painted(lines: Iterable[Line], *, width: int, colour: bool) -> list[str]:
    """The lines as text of at most `width` columns, without blanks at their ends."""
    drawn = []
    for each in lines:
        text = ""
        pieces = list(cut(each, width))
        for piece in pieces:
            text += f"\x1b[{piece.style}m{piece.text}\x1b[0m" if colour and piece.style and piece.text else piece.text
        drawn.append(text.rstrip(" "))
    return drawn


def _columns_of(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
