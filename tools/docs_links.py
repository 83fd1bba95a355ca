"""Checks each link, picture and anchor of the built site. `make docs` runs it: python tools/docs_links.py FOLDER."""

from __future__ import annotations

import os
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The anchors of a page, and what it links to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the element's anchor and link."""
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value and tag != "base":
                self.links.append(value)


def dead_links(root: Path) -> list[str]:
    """Return a line for each link inside the site whose target is missing."""
    pages = {path: Page(path) for path in sorted(root.rglob("*.html"))}
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "404.html":  # whose links begin at the server's root
                continue
            target = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            if not target.exists() or (anchor and target in pages and anchor not in pages[target].anchors):
                dead.append(f"{path.relative_to(root)} links to {link}, which does not exist")
    return dead


if __name__ == "__main__":
    dead = dead_links(Path(sys.argv[1]))
    print(*dead, sep="\n", end="\n" if dead else "")
    sys.exit(1 if dead else 0)
