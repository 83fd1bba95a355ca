"""Plain data as YAML text for people to read and edit: dicts, lists, text, whole numbers, truth values.

YAML has many ways to write a thing; this uses few, so that it needs no library: blocks for dicts and lists (short lists
of words on one line), and text without quotes only where nothing in it could mean anything else. The quotes are JSON's,
which YAML understands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

__all__ = ["Plain", "yaml_text"]

Plain = None | bool | int | str | Sequence["Plain"] | Mapping[str, "Plain"]

_SHORT = 100
_UNQUOTED = re.compile(r"(?:--?)?[A-Za-z_/][A-Za-z0-9_./-]*(?::[A-Za-z0-9_./-]+)*")
# What YAML does not take as it is, or may take as a line's end.
_INVISIBLE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
# What YAML 1.1 or 1.2 reads as something else than text.
_OTHERWISE = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "~", "nan", "inf"})


def yaml_text(documents: Sequence[Plain]) -> str:
    """The documents, one after the other."""
    return "---\n".join("\n".join(_lines(document)) + "\n" for document in documents)


def _lines(value: Plain) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _entry(f"{_scalar(key)}:", inner, indent="  ")
    elif isinstance(value, Sequence) and not isinstance(value, str) and value:
        for inner in value:
            # The first line of what is inside stands behind the dash.
            first, *rest = _lines(inner)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
    else:
        yield _scalar(value)


def _entry(head: str, inner: Plain, indent: str) -> Iterator[str]:
    if isinstance(inner, Sequence) and not isinstance(inner, str):
        line = f"{head} [{', '.join(map(_scalar, inner))}]"
        if inner and len(line) <= _SHORT and all(isinstance(item, str | int) or item is None for item in inner):
            yield line
            return
    nested = isinstance(inner, Mapping | Sequence) and not isinstance(inner, str) and len(inner) > 0
    if not nested:
        yield f"{head} {_scalar(inner)}"
        return
    yield head
    indent = "" if isinstance(inner, Sequence) else indent  # a list's dashes stand out enough
    yield from (f"{indent}{line}" for line in _lines(inner))


def _scalar(value: Plain) -> str:
    if isinstance(value, str) and _UNQUOTED.fullmatch(value) and value.lower() not in _OTHERWISE:
        return value
    # Also {} and [], null, true and numbers.
    return _INVISIBLE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))
