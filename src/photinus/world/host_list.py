"""Slurm's short way to write many host names: "node[01-03,7],gpu-a" is node01, node02, node03, node7 and gpu-a."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

_MOST_HOSTS = 100_000
_RANGE = re.compile(r"(\d+)(?:-(\d+))?\Z")


def expand_hosts(text: str) -> tuple[str, ...]:
    """The host names that a Slurm node list stands for, in its order.

    Any number of bracketed parts in a name are understood, the last one running fastest: "r[1-2]n[1-2]" is r1n1, r1n2,
    r2n1, r2n2. The width of a range's first number is kept: [08-10] is 08, 09, 10.

    Raises:
        ValueError: the text is no such list, or stands for more than 100,000 hosts.
    """
    names: list[str] = []
    for item in _items(text):
        parts = [
            _choices(part, text) if part.startswith("[") else [part] for part in re.findall(r"\[[^]]*\]|[^[]+", item)
        ]
        if len(names) + math.prod(map(len, parts)) > _MOST_HOSTS:
            raise ValueError(f"host list {_short(text)} stands for more than {_MOST_HOSTS} hosts")
        names += ["".join(pieces) for pieces in itertools.product(*parts)]
    return tuple(names)


def _items(text: str) -> Iterator[str]:
    """The parts between commas that stand outside of brackets."""
    start, inside = 0, False
    for position, letter in enumerate(text + ","):
        if letter in "[]":
            if inside == (letter == "["):
                raise ValueError(f"host list {_short(text)}: {letter!r} at character {position + 1} has no partner")
            inside = not inside
        elif letter == "," and (not inside or position == len(text)):
            item = text[start:position].strip()
            if inside or not item:
                what = "a bracket is not closed" if inside else f"a name is missing before character {position + 1}"
                raise ValueError(f"host list {_short(text)}: {what}")
            yield item
            start = position + 1


def _choices(bracket: str, text: str) -> list[str]:
    found: list[str] = []
    for word in bracket[1:-1].split(","):
        match = _RANGE.match(word.strip())
        if match is None:
            raise ValueError(f"host list {_short(text)}: {word!r} in brackets is neither a number nor a range like 1-4")
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low) or int(high) - int(low) >= _MOST_HOSTS:
            raise ValueError(f"host list {_short(text)}: the range {word.strip()} is empty or too long")
        found += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return found


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
