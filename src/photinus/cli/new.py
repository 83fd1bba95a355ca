"""`photinus new DIR`: a project that trains as it is, to be changed file by file.

Its files lie in `photinus/templates`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from ..errors import UsageError
from .parser import Parser

_HOME = Path(__file__).resolve().parent.parent / "templates"
_OTHER_NAMES = {"gitignore": ".gitignore"}  # as a .gitignore it would have its say in the source tree
_NOT_COPIED = frozenset({"ruff.toml"})
_TITLE = "# PROJECT"
_ABOUT = "a convolutional network on handwritten digits, with the Trainer or a loop of your own"
_NEEDS = (("torch", "torch"), ("sklearn", "scikit-learn"), ("pytest", "pytest"))  # to import, to install
_MEANINGS = {  # in the order in which one reads them
    "train.py": "the training",
    "model.py": "the network",
    "data.py": "the data sets",
    "config.ini": "defaults of the command-line options",
    "options.py": "the command-line options",
    "test_train.py": "tests: it learns, resumes exactly, same losses on one process",
    "README.md": "how to use and change it",
}


def parser() -> Parser:
    """The command line."""
    parser = Parser(
        "new",
        "DIR",
        about="Create a project in the folder DIR: a script, its options, a config file, a test\n"
        "and a README. It trains without changes, on one process or many.",
        more="example:\n  photinus new digits",
    )
    parser.add("folder", "a new or empty folder", metavar="DIR")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Create the project, print what to do next, and return 0."""
    folder = Path(parser().parse(arguments).folder)
    _check_empty(folder)
    print(_summary(folder, _write(folder)))
    return 0


def _check_empty(folder: Path) -> None:
    """Refuse to write over what is the user's: the folder is new, or empty but for a repository."""
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file; give a folder that is new or empty.")
    if there := sorted(set(os.listdir(folder)) - {".git"}):
        names = ", ".join(there[:5]) + (f" and {len(there) - 5} more" if len(there) > 5 else "")
        raise UsageError(
            f"{folder} is not empty: {names} {'is' if len(there) == 1 else 'are'} in it. Give a new folder."
        )


def _write(folder: Path) -> list[str]:
    """Write the project's files and return their names; leave nothing of them when that fails."""
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    names: list[str] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source in sorted(_HOME.iterdir()):
            if source.is_file() and source.suffix != ".pyc" and source.name not in _NOT_COPIED:
                names.append(_OTHER_NAMES.get(source.name, source.name))
                text = source.read_text(encoding="utf-8").replace(_TITLE, f"# {folder.resolve().name}", 1)
                (folder / names[-1]).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        with contextlib.suppress(OSError):
            for name in names:
                (folder / name).unlink(missing_ok=True)
            for each in new:
                each.rmdir()
        raise UsageError(f"{folder} cannot be written: {error.strerror} ({error.filename}).") from error
    return [name for name in _MEANINGS if name in names] + sorted(set(names) - _MEANINGS.keys())


def _summary(folder: Path, files: Sequence[str]) -> str:
    missing = [package for module, package in _NEEDS if importlib.util.find_spec(module) is None]
    steps = {
        **({f"pip install {' '.join(missing)}": "not here yet"} if missing else {}),
        "photinus run train.py": "one process per GPU, or per core",
        "python train.py": "one process",
        "pytest": "runs the tests; 30 seconds on a CPU",
    }
    return "\n".join(
        [
            f"created {folder}: {_ABOUT}",
            "",
            *(f"  {file:<16}{_MEANINGS.get(file, '')}".rstrip() for file in files),
            "",
            "next:",
            *([f"  cd {shlex.quote(str(folder))}"] if folder.resolve() != Path.cwd() else []),
            *(f"  {command:<28}{meaning}" for command, meaning in steps.items()),
        ]
    )
