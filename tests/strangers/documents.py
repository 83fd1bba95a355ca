"""What the pages for users show: their blocks of code, and the commands that they say to type."""

from __future__ import annotations

import re
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


@dataclass(frozen=True)
class Block:
    """A fenced block: `name` is its page and first line, which tell it from all others."""

    page: str
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}: {self.text.strip().splitlines()[0]}"


def blocks(page: str) -> Iterator[Block]:
    """All fenced blocks of a page, in order."""
    for language, text in _FENCE.findall((REPOSITORY / page).read_text()):
        yield Block(page, language, text)


def commands(page: str) -> list[str]:
    """The commands of a page, in order, without what is said about them."""
    found = []
    for block in blocks(page):
        for line in block.text.splitlines():
            prompt = _PROMPT.fullmatch(line)
            if block.language == "console" and prompt:
                found.append(re.split(r"\s+#\s", prompt.group(1))[0].strip())
            elif block.language == "" and line.split(" ")[0] in _PROGRAMS:
                found.append(re.split(r"\s+#\s|\s{3,}", line)[0])
    return found
