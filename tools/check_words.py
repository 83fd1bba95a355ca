"""Counts foreign English in src/photinus, and fails when a room has more of it than LIMITS allows. It also fails when a
page has a line of code wider than CODE_WIDTH.

It counts three kinds:

    openings      docstrings that open with Whether, What, Who, How, Where or Which: write a verb, or name the thing
    messages      words like `told` or `anew` in texts for users: raise, warn, print, say, log lines, --help
    participles   bare participles as names of variables, like `told` or `wanted`: take a noun

`--list ROOM` prints each place of a room, `--list` those of all rooms. Exits 1 when a room got worse.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("openings", "messages", "participles")
# Room -> most openings, messages and participles. Lower a figure when its room gets better. "top": the files directly
# in the package.
LIMITS: dict[str, tuple[int, int, int]] = {
    "backend": (0, 0, 0),
    "cli": (0, 0, 0),
    "compat": (0, 0, 0),
    "job": (0, 0, 0),
    "parallel": (0, 0, 0),
    "run": (0, 0, 0),
    "runlog": (0, 0, 0),
    "templates": (0, 0, 0),
    "tools": (0, 0, 0),
    "top": (0, 0, 0),
    "trainer": (0, 0, 60),
}
OPENING = re.compile(r"(Whether|What|Who|Whose|How|Where|Which)\b")
# The left column of the glossary, as far as a program can tell it from good English.
FOREIGN = re.compile(
    r"\b(told|says|anew|once more|met|meets?|meeting|whoever|whatever|for want of|(so|as) many(?! as)|so long|stands"
    r"|at once|(?<!here )(is|are|was) no (?!longer|more)|of another|of no|sees? to it|takes \w+ for|asked to leave"
    r"|leave out|culprit|(had|has) left|left (with|while)|guest|strangers?|mend(ed|s)?|(is|was|are) meant|goes on"
    r"|heard)\b",
    re.IGNORECASE,
)
# Readers of the site have to scroll a wider line. A program's output is quoted as the program prints it, however wide.
CODE_WIDTH = 88
PAGES = ("*.md", "docs/**/*.md", "examples/**/*.md", "native/*.md", "benchmarks/*.md", "src/**/*.md")
PROMPT = re.compile(r"\w*\$ ")
PARTICIPLE = re.compile(
    "asked|chosen|done|given|gone|heard|held|kept|known|left|lost|made|meant|met|named|owed|put|said|seen|sent|shown|taken"
    "|told|used|wanted"
)
# Functions whose text a user reads, beside the errors.
SPEAKER = re.compile(
    ".*(Error|Warning)|_?(add_argument|add_parser|critical|debug|error|exit|fail|Flag|info|log|note|print|say|warn|warning)"
)


class Place(NamedTuple):
    """A place of one kind in a file."""

    kind: str
    line: int
    text: str


def places(tree: ast.Module) -> Iterator[Place]:
    """The places of all kinds in a file."""
    messages = {}  # by node: a text is counted once, however many speakers lie around it
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node) or ""
            if OPENING.match(text):
                yield Place("openings", node.body[0].lineno, text.splitlines()[0])
        elif (
            isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and PARTICIPLE.fullmatch(node.id.strip("_"))
        ):
            yield Place("participles", node.lineno, node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and PARTICIPLE.fullmatch(node.attr.strip("_"))
        ):
            yield Place("participles", node.lineno, f".{node.attr}")
        elif isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and _speaks(node)):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                    messages[inner] = inner.value
    for node, text in messages.items():
        for match in FOREIGN.finditer(text):
            yield Place("messages", node.lineno, f"{match[0]}: {text}")


def _speaks(call: ast.Call) -> bool:
    """Return whether a call makes an error or writes to the user."""
    function = call.func
    name = (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )
    return SPEAKER.fullmatch(name) is not None


def wide_lines(page: str) -> Iterator[tuple[int, int]]:
    """Lines of code in a page that are wider than CODE_WIDTH: (number, width)."""
    language, is_continued = None, False
    for number, line in enumerate(page.splitlines(), 1):
        if line.startswith("```"):
            language = line[3:] if language is None else None
        elif language is not None:
            is_typed = language != "console" or is_continued or PROMPT.match(line) is not None
            is_code = language != "text" and is_typed
            width = len(line) + sum(unicodedata.east_asian_width(each) in "WF" for each in line)
            if is_code and width > CODE_WIDTH:
                yield number, width
            is_continued = is_code and line.endswith("\\")


def main() -> int:
    """Print each room that got worse or better, and each wide line of a page. Return 1 when there is a fault."""
    parser = argparse.ArgumentParser(description="Count foreign English in src/photinus.")
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="the repository. default: this one")
    parser.add_argument("--list", nargs="?", const="", metavar="ROOM", help="print each place of ROOM, or of all rooms")
    options = parser.parse_args()
    package = options.root / "src" / "photinus"
    counts = {room: dict.fromkeys(KINDS, 0) for room in LIMITS}
    for path in sorted(package.rglob("*.py")):
        folder, *rest = path.relative_to(package).parts
        room = folder if rest else "top"
        for place in places(ast.parse(path.read_text(), str(path))):
            counts.setdefault(room, dict.fromkeys(KINDS, 0))[place.kind] += 1
            if options.list in ("", room):
                print(f"{path.relative_to(options.root)}:{place.line}: {place.kind}: {place.text}")
    worse = 0
    for room, count in sorted(counts.items()):
        for kind, limit in zip(KINDS, LIMITS.get(room, (0, 0, 0)), strict=True):
            if count[kind] > limit:
                worse += 1
                print(f"{room}: {count[kind]} {kind}, at most {limit}: see tools/check_words.py --list {room}")
            elif count[kind] < limit:
                print(f"{room}: {count[kind]} {kind}, {limit} before: lower LIMITS in tools/check_words.py")
    for path in sorted(path for pattern in PAGES for path in options.root.glob(pattern)):
        for number, width in wide_lines(path.read_text()):
            worse += 1
            print(f"{path.relative_to(options.root)}:{number}: a line of code is {width} wide, at most {CODE_WIDTH}")
    print(f"words: {worse} faults" if worse else "words: no room got worse")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
