"""A hook of MkDocs: fills the reference pages from what the program itself says, and checks links into the source.

In a page, `{{ commands }}` becomes the help of every command, `{{ variables }}` the table of environment variables and
`{{ errors }}` the tree of errors with what each means. The pages of benchmarks/ are part of the site. A link to another
file outside of docs/ becomes its path: the site has no copy of the source. A path that does not exist ends the build.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from html import escape, unescape
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from photinus import env, errors
from photinus.cli.main import COMMANDS

_PROSE = 40  # characters of a cell
_TABLE = re.compile(r"<table\b.*?</table>", re.DOTALL)
_CODE = re.compile(r"<code>[^<]*</code>")
_LINK = re.compile(r"\[([^\]]*)\]\((?![a-z]+:)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, *, config: Any, **_: Any) -> Files:
    """Add the pages of benchmarks/."""
    root = Path(config["config_file_path"]).parent
    for path in sorted((root / "benchmarks").rglob("*.md")):
        place = path.relative_to(root).as_posix()
        files.append(File(place, str(root), config["site_dir"], config["use_directory_urls"]))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return the page's text as it is built."""
    for name, make in {"commands": commands, "variables": variables, "errors": error_list}.items():
        if f"{{{{ {name} }}}}" in markdown:
            markdown = markdown.replace(f"{{{{ {name} }}}}", make())
    root, source = Path(config["config_file_path"]).parent, Path(page.file.abs_src_path)

    def shown(link: re.Match[str]) -> str:
        text, target = link[1], Path(os.path.normpath(source.parent / link[2]))
        if not target.exists():
            raise PluginError(f"{source.relative_to(root)} links to {link[2]}, which does not exist")
        path = target.relative_to(root)
        if path.parts[0] == "docs" or (path.parts[0] == "benchmarks" and path.suffix == ".md"):
            place = path.relative_to("docs") if path.parts[0] == "docs" else path
            here = os.path.dirname(page.file.src_uri)
            return f"[{text}]({os.path.relpath(place, here or '.')}{link[3] or ''})"
        return f"`{path}`" if text.strip("`") in str(path) else f"{text} (`{path}`)"

    return _LINK.sub(shown, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Prepare tables for narrow screens: where code may break, and the names of columns for stylesheets/tables.css."""
    return _TABLE.sub(_prepared, html)


def _prepared(table: re.Match[str]) -> str:
    labels = [escape(_text(head), quote=True) for head in re.findall(r"<th\b[^>]*>(.*?)</th>", table[0], re.DOTALL)]
    cells = map(_text, re.findall(r"<td\b[^>]*>(.*?)</td>", table[0], re.DOTALL))
    html = re.sub(r"(<td\b[^>]*>)\s+</td>", r"\1</td>", table[0])
    html = _CODE.sub(lambda code: re.sub(r"(?<=\w)[/(.](?=\w{3})", r"\g<0><wbr>", code[0]), html)
    rows = []
    for row in re.split(r"(?=<tr\b)", html):
        start, *columns = row.split("<td")
        named = zip_longest(labels[: len(columns)], columns, fillvalue="")
        rows.append(start + "".join(f'<td data-label="{label}"{column}' for label, column in named))
    # Rows of prose become blocks there; rows of numbers stay rows.
    is_prose = max(map(len, cells), default=0) > _PROSE
    return "".join(rows).replace("<table", "<table data-prose", int(is_prose))


def _text(html: str) -> str:
    return unescape(re.sub(r"<[^>]*>", "", html)).strip()


def commands() -> str:
    """Return a section for each command, with its help."""
    sections = []
    for name, (module, meaning) in COMMANDS.items():
        text = importlib.import_module(module).parser().format_help().strip()
        sections.append(f"## photinus {name}\n\n{meaning[:1].upper()}{meaning[1:]}.\n\n```text\n{text}\n```")
    return "\n\n".join(sections)


def variables() -> str:
    """Return a table of the variables that Photinus reads."""
    rows = [
        f"| `{each.name}` | {'' if each.default in (None, ()) else f'`{each.default}`'} | {each.meaning} |"
        for each in sorted(env.ALL, key=lambda each: each.name)
    ]
    return "\n".join(["| variable | default | meaning |", "|---|---|---|", *rows])


def error_list() -> str:
    """Return the tree of errors, and a line on each."""
    tree, _, rest = (inspect.getdoc(errors) or "").partition("Wrong arguments")
    return f"```text\n{tree.strip()}\n```\n\nWrong arguments{rest}"
