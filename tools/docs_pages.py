"""A hook of MkDocs: fills the reference pages from what the program says, and brings linked sources into the site.

In a page, `{{ commands }}` becomes the help of every command, `{{ variables }}` the table of environment variables,
`{{ errors }}` the tree of errors with what each means, and `{{ change }}` the section of README.md with the diff.

Beside docs/, the site has benchmarks/ and what its pages link to: Markdown as it is, a page with the text of any other
file, and a page with all files of a folder without a README. A path that does not exist ends the build.
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

from markdown.extensions.toc import slugify
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from photinus import env, errors
from photinus.cli.main import COMMANDS

_OF_THE_PROJECT = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "examples/README.md")
_PROSE = 40  # characters of a cell
_TABLE = re.compile(r"<table\b.*?</table>", re.DOTALL)
_CODE = re.compile(r"<code>[^<]*</code>")
_LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml"}
_LINK = re.compile(r"\[([^\]]*)\]\((?![a-z]+:)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, *, config: Any, **_: Any) -> Files:
    """Add the pages of benchmarks/, and what pages link to outside of docs/."""
    root = Path(config["config_file_path"]).parent
    pages = [Path(str(file.abs_src_path)) for file in files.documentation_pages()]
    pages += [*sorted((root / "benchmarks").rglob("*.md")), *(root / name for name in _OF_THE_PROJECT)]
    pages += [each for each in targets(change(root), root, root) if each not in pages]
    for page in pages:  # grows
        if not page.is_relative_to(root / "docs"):
            place = place_of(page.relative_to(root)).as_posix()
            if page.suffix == ".md":
                file = File(place, str(root), config["site_dir"], config["use_directory_urls"])
            else:
                file = File.generated(config, place, content=source_page(page, root))
            files.append(file)
        found = targets(page.read_text(), page.parent, root) if page.suffix == ".md" else []
        pages += [each for each in dict.fromkeys(found) if each not in pages]
    return files


def targets(markdown: str, folder: Path, root: Path) -> list[Path]:
    """Return what a text in this folder links to, outside of docs/."""
    found = [target_of(link, folder) for _, link, _ in _LINK.findall(markdown)]
    outside = [each for each in found if not each.is_relative_to(root / "docs") and each != root / "README.md"]
    return [each for each in outside if each.exists()]


def target_of(link: str, folder: Path) -> Path:
    """Return the file or folder of a link; of a folder its README, if it has one."""
    target = Path(os.path.normpath(folder / link))
    return target / "README.md" if (target / "README.md").exists() else target


def place_of(path: Path) -> Path:
    """Return the place in the site of a path of the repository."""
    if path == Path("README.md"):
        return Path("index.md")
    if path.parts[0] == "docs":
        return path.relative_to("docs")
    return path if path.suffix == ".md" else Path(f"{path}.md")


def source_page(path: Path, root: Path) -> str:
    """Return a page with the text of a file, or of all files of a folder."""
    texts = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())
    sections = [f"# {path.relative_to(root)}"]
    for each in texts:
        sections += [f"## {each.name}"] * path.is_dir()
        sections.append(f"````{_LANGUAGES.get(each.suffix, 'text')}\n{each.read_text().rstrip()}\n````")
    return "\n\n".join(sections) + "\n"


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return the page's text as it is built."""
    root = Path(config["config_file_path"]).parent
    if page.file.generated_by:  # the text of a file
        return markdown
    for name, make in {"commands": commands, "variables": variables, "errors": error_list}.items():
        if f"{{{{ {name} }}}}" in markdown:
            markdown = markdown.replace(f"{{{{ {name} }}}}", make())
    here = os.path.dirname(page.file.src_uri)
    markdown = linked(markdown, Path(page.file.abs_src_path), here, root)
    if "{{ change }}" in markdown:
        markdown = markdown.replace("{{ change }}", linked(change(root), root / "README.md", here, root))
    return markdown


def linked(markdown: str, source: Path, here: str, root: Path) -> str:
    """Return the text of a file with its links as seen from the folder `here` of the site."""

    def shown(link: re.Match[str]) -> str:
        text, target = link[1], target_of(link[2], source.parent)
        if not target.exists():
            raise PluginError(f"{source.relative_to(root)} links to {link[2]}, which does not exist")
        place = place_of(target.relative_to(root))
        return f"[{text}]({os.path.relpath(place, here or '.')}{link[3] or ''})"

    return _LINK.sub(shown, markdown)


def change(root: Path) -> str:
    """Return the section of README.md that has the diff."""
    sections = re.split(r"(?m)^(?=## )", (root / "README.md").read_text())
    return next(section for section in sections if "```diff" in section).strip()


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
    """Return the tree of errors, and a section on each with what to do about it."""
    text, _, rest = (inspect.getdoc(errors) or "").partition("Wrong arguments")
    tree = "\n".join(re.findall(r"(?m)^[\s│├└─]*\w+Error\b", text))
    sections = [f"```text\n{inspect.cleandoc(tree)}\n```", f"Wrong arguments{rest}"]
    for name in re.findall(r"\w+Error\b", tree):
        kind = getattr(errors, name)
        is_own = {base.__name__: base.__module__ == errors.__name__ for base in kind.__bases__}
        kinds = [f"[{base}](#{base.lower()})" if own else f"`{base}`" for base, own in is_own.items()]
        text = (inspect.getdoc(kind) or "").partition("\n\n")[0]
        sections += [f"## {name}", text, f"A subclass of {' and '.join(kinds)}. What to do: {advice_on(name)}."]
    return "\n\n".join(sections)


def advice_on(error: str) -> str:
    """Return a link to the section of the troubleshooting that names an error, first of all in its title."""
    page = (Path(errors.__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    sections = [section.partition("\n") for section in re.split(r"(?m)^##+ ", page)[1:]]
    found = [title for title, _, _ in sections if error in title]
    found += [title for title, _, body in sections if error in body]
    if not found:
        return "[Troubleshooting](../troubleshooting.md)"
    return f"[{found[0].partition(':')[0]}](../troubleshooting.md#{slugify(found[0], '-')})"
