"""What the pages for users show: their blocks of code, and the commands that they say to type."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tests.fork_server import REPOSITORY

PAGES = sorted(
    str(path.relative_to(REPOSITORY))
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "native/README.md", "benchmarks/*.md", "src/**/*.md")
    for path in REPOSITORY.glob(pattern)
)
_FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PROMPT = re.compile(r"(?:\w*\$ )(.*)")
_PROGRAMS = ("python", "photinus", "torchrun", "pip", "pytest", "make")


def unwrapped(text: str) -> str:
    """The text with each command on one line: a backslash at the end of a line continues it."""
    return re.sub(r" *\\\n +", " ", text)


@dataclass(frozen=True)
class Block:
    """A fenced block: `name` is its page and first line, and its number among those that begin alike."""

    page: str
    language: str
    text: str
    number: int = 1

    @property
    def name(self) -> str:
        number = f" ({self.number})" if self.number > 1 else ""
        return f"{self.page}: {self.text.strip().splitlines()[0]}{number}"


def blocks(page: str) -> Iterator[Block]:
    """All fenced blocks of a page, in order."""
    seen: Counter[str] = Counter()
    for language, text in _FENCE.findall((REPOSITORY / page).read_text()):
        seen[text.strip().splitlines()[0]] += 1
        yield Block(page, language, text, seen[text.strip().splitlines()[0]])


def outputs(page: str) -> dict[str, list[str]]:
    """What a page shows of what programs print: the lines below a command, by it, and blocks of text, by name."""
    found = {block.name: block.text.splitlines() for block in blocks(page) if block.language == "text"}
    for block in blocks(page):
        command = block.name  # lines above the first command, if there are any
        for line in unwrapped(block.text).splitlines() if block.language == "console" else ():
            prompt = _PROMPT.fullmatch(line)
            if prompt:
                command = f"{page}: {_without_comment(prompt.group(1))}"
            else:
                found.setdefault(command, []).append(line)
    return found


def _without_comment(command: str) -> str:
    return re.split(r"\s+#\s", command)[0].strip()


def commands(page: str) -> list[str]:
    """The commands of a page, in order, without what is said about them."""
    found = []
    for block in blocks(page):
        for line in unwrapped(block.text).splitlines():
            prompt = _PROMPT.fullmatch(line)
            if block.language == "console" and prompt:
                found.append(_without_comment(prompt.group(1)))
            elif block.language == "" and line.split(" ")[0] in _PROGRAMS:
                found.append(re.split(r"\s+#\s|\s{3,}", line)[0])
    return found
