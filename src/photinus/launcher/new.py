"""`photinus new DIR`: a project that trains as it is, to be changed file by file.

A project is made of the files in `photinus/templates`: those that every project has, and those of its template.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..spelling import hint
from .command_line.parser import Parser
from .command_line.usage import UsageError

_HOME = Path(__file__).resolve().parent.parent / "templates"
_OTHER_NAMES = {"gitignore": ".gitignore"}  # as a .gitignore it would have its say in the source tree
_ALLOWED_THERE = frozenset({".git"})
_TITLE = "# PROJECT"


@dataclass(frozen=True)
class Template:
    """One kind of project.

    Attributes:
        meaning: what it trains, in a few words.
        parts: folders in `photinus/templates` whose files it gets.
        needs: packages beside Photinus, (name to import, name to install).
    """

    meaning: str
    parts: tuple[str, ...]
    needs: tuple[tuple[str, str], ...]


_TORCH, _SKLEARN, _PYTEST = ("torch", "torch"), ("sklearn", "scikit-learn"), ("pytest", "pytest")
TEMPLATES = {
    "cnn": Template(
        "a convolutional network on handwritten digits, with the Trainer",
        ("every", "digits", "cnn"),
        (_TORCH, _SKLEARN, _PYTEST),
    ),
    "gpt": Template(
        "a small GPT on text, word by word, with the Trainer",
        ("every", "gpt"),
        (_TORCH, _PYTEST),
    ),
    "loop": Template(
        "the network of cnn, with a training loop of your own",
        ("every", "digits", "loop"),
        (_TORCH, _SKLEARN, _PYTEST),
    ),
}
_DEFAULT = "cnn"


def parser() -> Parser:
    """The command line."""
    templates = (
        f"  {name:<6}{template.meaning}{' (default)' * (name == _DEFAULT)}" for name, template in TEMPLATES.items()
    )
    made = Parser(
        "new",
        "DIR [--template NAME]",
        about="Makes a project in the folder DIR that trains as it is, on one process or many:\n"
        "a script, its options, a config file, a test and a README.",
        more="\n".join(
            ["templates:", *templates, "", "examples:", "  photinus new digits", "  photinus new writer --template gpt"]
        ),
    )
    made.add("folders", metavar="DIR", nargs="*", help="a folder that is new or empty")
    made.add("--template", also=("-t",), metavar="|".join(TEMPLATES), default=_DEFAULT, help=f"default: {_DEFAULT}")
    made.offered["--template"] = tuple(TEMPLATES)
    return made


def main(arguments: Sequence[str]) -> int:
    """Makes the project that the words after `photinus new` describe, says what to do next, and returns 0."""
    values = parser().parse(arguments)
    folders, name = values.folders, values.template
    if not folders or not folders[0]:
        raise UsageError("which folder? Usage: photinus new DIR [--template NAME]; `photinus new --help` lists them.")
    if len(folders) > 1:
        raise UsageError(f"one folder is needed, but {len(folders)} are named: {' '.join(map(shlex.quote, folders))}.")
    if name not in TEMPLATES:
        *most, last = TEMPLATES
        raise UsageError(f"there is no template {name}, but {', '.join(most)} and {last}.{hint(name, TEMPLATES)}")
    folder, template = Path(folders[0]), TEMPLATES[name]
    _check_empty(folder)
    print(_summary(folder, template, _write(folder, template)))
    return 0


def _check_empty(folder: Path) -> None:
    """Nothing of the user's is written over: the folder is new, or empty but for a repository."""
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file; give a folder that is new or empty.")
    if there := sorted(set(os.listdir(folder)) - _ALLOWED_THERE):
        shown = ", ".join(there[:5]) + (f" and {len(there) - 5} more" if len(there) > 5 else "")
        raise UsageError(
            f"{folder} is not empty: {shown} {'is' if len(there) == 1 else 'are'} in it. Give a new folder."
        )


def _write(folder: Path, template: Template) -> list[str]:
    """Writes the project's files and returns their names; leaves nothing of them when that fails."""
    sources = {
        _OTHER_NAMES.get(file.name, file.name): file
        for part in template.parts
        for file in sorted((_HOME / part).iterdir())
        if file.is_file() and file.suffix != ".pyc"
    }
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, source in sources.items():
            text = source.read_text(encoding="utf-8")
            if name == "README.md":
                text = text.replace(_TITLE, f"# {folder.resolve().name}", 1)
            written.append(folder / name)
            written[-1].write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        for path in written:
            with contextlib.suppress(OSError):
                path.unlink()
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise UsageError(f"{folder} cannot be written: {error.strerror} ({error.filename}).") from error
    return [name for name in _MEANINGS if name in sources] + sorted(sources.keys() - _MEANINGS)


_MEANINGS = {  # in the order in which one reads them
    "train.py": "the training",
    "model.py": "the network",
    "data.py": "where the data comes from",
    "config.ini": "what is done when the command line does not say otherwise",
    "options.py": "the command line",
    "test_train.py": "learns, resumes exactly, same losses on one process",
    "README.md": "how to go on",
}


def _summary(folder: Path, template: Template, files: Sequence[str]) -> str:
    missing = [package for module, package in template.needs if importlib.util.find_spec(module) is None]
    lines = [f"made {folder}: {template.meaning}", ""]
    lines += [f"  {file:<16}{_MEANINGS.get(file, '')}".rstrip() for file in files]
    lines += ["", "next:"]
    if folder.resolve() != Path.cwd():
        lines.append(f"  cd {shlex.quote(str(folder))}")
    if missing:
        lines.append(f"  {'pip install ' + ' '.join(missing):<28}not here yet")
    lines += [
        f"  {'photinus run train.py':<28}one process per GPU, or per core",
        f"  {'python train.py':<28}one process",
        f"  {'pytest':<28}is it still right? half a minute on a CPU",
    ]
    return "\n".join(lines)
