"""What is written for a scheduler: filled into its template, and put on stdout or into a new file."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import jinja2

from ..command_line.usage import UsageError

__all__ = ["fill", "put"]

# What YAML does not take as it is, or may take as a line's end.
_INVISIBLE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")


def fill(template: str, **values: object) -> str:
    """The text of a template of this folder; `quoted` writes text, or a list of texts, in quotes."""
    files = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # these are no pages
    )
    files.filters["quoted"] = _quote
    return files.get_template(template).render(values)


def _quote(value: object) -> str:
    return _INVISIBLE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def put(text: str, target: str | None, *, start: str, executable: bool = False) -> int:
    """Puts the text on stdout, or into a new file that its owner alone can read; returns the exit code, 0.

    Args:
        text: what is written.
        target: path of the file, in a folder that exists; None: stdout.
        start: the command that starts it, given the file.
        executable: whether it is a script.

    Raises:
        UsageError: the file exists (with other content), or cannot be written.
    """
    if target is None:
        print(text, end="")
        return 0
    path = Path(target)
    try:
        if not (path.is_file() and path.read_text() == text):
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700 if executable else 0o600)
            with os.fdopen(opened, "w") as file:
                file.write(text)
    except FileExistsError:
        raise UsageError(f"--output {target}: the file exists. Remove it, or name another.") from None
    except OSError as error:
        raise UsageError(f"--output {target}: cannot be written: {error.strerror}.") from None
    print(f"photinus: wrote {path}; start it with: {start} {shlex.quote(str(path))}", file=sys.stderr)
    return 0
