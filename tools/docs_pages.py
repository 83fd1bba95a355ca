"""A hook of MkDocs: fills the reference pages from what the program itself says, and checks links into the source.

In a page, `{{ commands }}` becomes the help of every command, `{{ variables }}` the table of environment variables and
`{{ errors }}` the tree of errors with what each means. A link to a file outside of docs/ becomes its path: the site has
no copy of the source, and a path that does not exist ends the build.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from typing import Any

from mkdocs.exceptions import PluginError

from photinus import env, errors
from photinus.launcher.cli import COMMANDS

_OUTSIDE = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return the page's text as it is built."""
    for name, make in {"commands": commands, "variables": variables, "errors": error_list}.items():
        if f"{{{{ {name} }}}}" in markdown:
            markdown = markdown.replace(f"{{{{ {name} }}}}", make())
    root, folder = os.path.dirname(config["config_file_path"]), os.path.dirname(page.file.abs_src_path)

    def shown(link: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(folder, link[2]))
        if target.startswith(os.path.join(root, "docs", "")):
            return link[0]
        if not os.path.exists(target):
            raise PluginError(f"{page.file.src_uri} links to {link[2]}, which does not exist")
        path = os.path.relpath(target, root)
        text = link[1].strip("`")
        return f"`{path}`" if text in path else f"{link[1]} (`{path}`)"

    return _OUTSIDE.sub(shown, markdown)


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
